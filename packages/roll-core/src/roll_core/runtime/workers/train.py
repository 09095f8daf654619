"""Worker of one rank of a training or scoring role: a train strategy and its microbatches."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.data.pack import pack, pack_evenly
from roll_core.plugins.requirements import check_requirements
from roll_core.plugins.targets import load_target, schema_of
from roll_core.runtime.cluster.concurrency import in_daemon_thread
from roll_core.runtime.cluster.memory_use import MemoryUse, MemoryWatch
from roll_core.runtime.records.portable_state import opened_portable_state, write_portable_state
from roll_core.runtime.weights.plan import SendingWorker, device_facts
from roll_core.runtime.weights.sender import WeightSender
from roll_core.runtime.workers.mesh import mesh_info
from roll_core.spec.config import StrategyConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from roll_core.runtime.cluster.executors.base import Peers, Place
    from roll_core.runtime.weights.plan import SendHandle, SendOutcome, SyncPlan
    from roll_core.spec.model import ModelSpec
    from roll_core.spec.providers import TrainProvider
    from roll_core.spec.train import (
        LossFn,
        LossMetrics,
        MicroBatch,
        StateKind,
        StepStats,
        TokenOutputs,
        TrainingSpec,
        TrainStrategy,
        WantedOutputs,
    )
    from roll_core.spec.transport import DeviceFacts
    from roll_core.types import DataRank, Floats, TokenIds, Totals, TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits of microbatches: a number of sequences, or a number of tokens if a token budget is given."""

    train_sequences: int
    infer_sequences: int
    train_tokens: int | None = None
    infer_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredShare:
    """Outputs of one rank's share of the sequences, one array per sequence; see `ScoredSequences`."""

    logprobs: list[Floats] | None
    entropy: list[Floats] | None
    values: list[Floats] | None
    topk_logprobs: list[Floats] | None = None
    topk_ids: list[TokenIds] | None = None
    gathered_logprobs: list[Floats] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateShare:
    """Result of one optimizer step on one rank."""

    metrics: LossMetrics
    stats: StepStats


class TrainWorker(SendingWorker):
    """Worker of one rank.

    The executor constructs it in the worker's process; sync methods run on the worker's own thread.
    """

    def __init__(
        self,
        *,
        place: Place,
        peers: Peers,
        role: str,
        provider: TrainProvider,
        strategy_config: Mapping[str, Any],
        training: TrainingSpec | None,
        model: ModelSpec,
        limits: BatchLimits,
        backend: str,
        timeout_s: float,
        deterministic: bool,
        owner: str,
    ) -> None:
        """`owner` names the strategy and its package in errors."""
        check_requirements(provider, owner=owner)
        schema = schema_of(provider, StrategyConfig, owner=owner)
        strategy_class = load_target(provider.target, owner=owner)
        self.role, self.place, self.limits, self.model = role, place, limits, model
        self.deterministic = deterministic
        self.strategy: TrainStrategy = strategy_class(schema.model_validate(dict(strategy_config)), training)
        self.mesh = mesh_info(role, place, peers, backend=backend, timeout_s=timeout_s)
        self.sender = WeightSender(self.strategy, role=role, rank=place.rank, device=place.device)
        self._unwritten: Callable[[], None] | None = None

    def start(self) -> DataRank:
        """Build the model. Collective over the role's ranks."""
        import torch

        torch.use_deterministic_algorithms(self.deterministic)
        self.watch = MemoryWatch(self.place.device)
        # Filling new memory guards against uninitialised reads, at a cost. No code here reads uninitialised memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.strategy.build(self.model, self.mesh)
        return self.strategy.data_rank

    def score(self, sequences: Sequence[TrainSequence], want: WantedOutputs) -> ScoredShare:
        """Run forward passes over this rank's share."""
        micros = self._micros(sequences, self.limits.infer_sequences, self.limits.infer_tokens)
        found: dict[str, dict[str, Any]] = {each.name: {} for each in fields(ScoredShare)}
        for micro, outputs in zip(micros, self.strategy.forward_all(micros, want), strict=True):
            for name, tensor_T in _outputs(outputs).items():
                rows = tensor_T.detach().cpu().numpy()
                bounds = np.cumsum((0, *micro.lengths))
                for at, sequence_id in enumerate(micro.ids):
                    found[name][sequence_id] = rows[bounds[at] : bounds[at + 1]]

        def in_order(name: str, wanted: bool) -> list[Any] | None:
            return [found[name][sequence.id] for sequence in sequences] if wanted else None

        return ScoredShare(
            logprobs=in_order("logprobs", want.logprobs),
            entropy=in_order("entropy", want.entropy),
            values=in_order("values", want.values),
            topk_logprobs=in_order("topk_logprobs", want.topk > 0),
            topk_ids=in_order("topk_ids", want.topk > 0),
            gathered_logprobs=in_order("gathered_logprobs", want.gathered),
        )

    def update(self, sequences: Sequence[TrainSequence], loss: LossFn, totals: Totals) -> UpdateShare:
        """Take one optimizer step. Collective over the role's ranks: a rank without sequences takes part too."""
        micros = self._micros(sequences, self.limits.train_sequences, self.limits.train_tokens, totals)
        metrics = combine(self.strategy.forward_backward(micros, loss))
        return UpdateShare(metrics=metrics, stats=self.strategy.optimizer_step())

    def _micros(
        self, sequences: Sequence[TrainSequence], most: int, budget: int | None, totals: Totals | None = None
    ) -> list[MicroBatch]:
        """Microbatches of at most `most` sequences, or of at most `budget` tokens if a budget is given."""
        if budget is None:
            return pack(sequences, max_sequences=most, totals=totals)
        return pack_evenly(sequences, max_tokens=budget, multiple=self.strategy.microbatch_multiple, totals=totals)

    def device_facts(self) -> DeviceFacts:
        """Device, backend and data-parallel rank of this worker."""
        return device_facts(self.mesh.device, self.mesh.backend, self.strategy.data_rank)

    def prepare_send(self, plan: SyncPlan) -> SendHandle | None:
        """First half of a weight sync: this rank's manifest and address. None if this rank does not send."""
        return self.sender.prepare(plan)

    def send_weights(self, plan: SyncPlan) -> SendOutcome | None:
        """Second half of a weight sync: send the weights while the receivers load them.

        None if this rank does not send.
        """
        return self.sender.send(plan)

    def offload(self, parts: Sequence[StateKind]) -> None:
        """Offload parts of the state to the host."""
        self.strategy.offload(parts)

    def onload(self, parts: Sequence[StateKind]) -> None:
        """Onload parts of the state to the device."""
        self.strategy.onload(parts)

    def save(self, path: str) -> bool:
        """Write this rank's share of the state into `path`.

        Returns True if `finish_save` must write the rest.
        """
        Path(path).mkdir(parents=True, exist_ok=True)
        self._unwritten = self.strategy.save(Path(path))
        return self._unwritten is not None

    async def finish_save(self) -> None:
        """Write the remaining part of the last `save`, in parallel with calls on the worker's own thread."""
        write, self._unwritten = self._unwritten, None
        if write is not None:
            await in_daemon_thread(write, name=f"{self.role}[{self.place.rank}] writes")

    def load(self, path: str) -> None:
        """Load the state that `save` wrote."""
        self.strategy.load(Path(path))

    def save_portable(self, path: str) -> None:
        """Write the state into `path` in the format that every strategy can load."""
        leads = self.place.rank == 0
        if leads:
            Path(path).mkdir(parents=True, exist_ok=True)
        write_portable_state(self.strategy.export_state(), self.model, Path(path), leads=leads)

    def load_portable(self, path: str) -> None:
        """Load the state that `save_portable` of any strategy wrote."""
        with opened_portable_state(Path(path)) as state:
            self.strategy.import_state(state)

    def export(self, path: str) -> None:
        """Write a model directory that transformers can load."""
        Path(path).mkdir(parents=True, exist_ok=True)
        self.strategy.export_model(Path(path))

    def memory_use(self) -> MemoryUse | None:
        """Memory of this process since `start`."""
        return self.watch.use()

    def close(self) -> None:
        """Release all resources."""
        self.sender.close()
        self.strategy.close()


def combine(shares: Sequence[LossMetrics]) -> LossMetrics:
    """Combine the metrics of several microbatches or ranks: sums, except for `/max` and `/min`."""
    total: LossMetrics = {}
    for share in shares:
        for name, value in share.items():
            if name not in total:
                total[name] = value
            elif name.endswith("/max"):
                total[name] = max(total[name], value)
            elif name.endswith("/min"):
                total[name] = min(total[name], value)
            else:
                total[name] += value
    return total


def _outputs(outputs: TokenOutputs) -> dict[str, Tensor]:
    named = {
        "logprobs": outputs.logprobs_T,
        "entropy": outputs.entropy_T,
        "values": outputs.values_T,
        "topk_logprobs": outputs.topk_logprobs_TK,
        "topk_ids": outputs.topk_ids_TK,
        "gathered_logprobs": outputs.gathered_logprobs_TK,
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}
