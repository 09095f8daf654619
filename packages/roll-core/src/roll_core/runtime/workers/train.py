"""Worker of one rank of a training or scoring role: a train strategy and its microbatches."""

from __future__ import annotations

import math
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.data.modelscope import with_local_files
from roll_core.data.module_rows import checked_loss, checked_program, module_batches, output_rows
from roll_core.data.pack import pack, pack_evenly
from roll_core.errors import UnsupportedError
from roll_core.runtime.cluster.concurrency import in_daemon_thread
from roll_core.runtime.cluster.memory_use import MemoryUse, MemoryWatch
from roll_core.runtime.weights.plan import device_facts
from roll_core.runtime.weights.transfer import SendingWorker, WeightSender
from roll_core.runtime.workers.strategy import make_strategy, mesh_info
from roll_core.spec.pipeline import ScoredSequences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from roll_core.runtime.cluster.executors.base import Peers, Place
    from roll_core.spec.model import ModelSpec
    from roll_core.spec.module_program import ModuleLoss, ModuleProgram, ModuleRow
    from roll_core.spec.providers import TrainProvider
    from roll_core.spec.train import (
        LossFn,
        LossMetrics,
        MicroBatch,
        StateKind,
        StepStats,
        TrainingSpec,
        TrainStrategy,
        WantedOutputs,
    )
    from roll_core.spec.transport import DeviceFacts
    from roll_core.types import DataRank, Totals, TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits of microbatches: a number of sequences, or a number of tokens if a token budget is given."""

    train_sequences: int
    infer_sequences: int
    train_tokens: int | None = None
    infer_tokens: int | None = None


OUTPUTS = {
    "logprobs": ("logprobs", "logprobs_T"),
    "entropy": ("entropy", "entropy_T"),
    "values": ("values", "values_T"),
    "topk_logprobs": ("topk", "topk_logprobs_TK"),
    "topk_ids": ("topk", "topk_ids_TK"),
    "gathered_logprobs": ("gathered", "gathered_logprobs_TK"),
    "hidden": ("hidden", "hidden_TH"),
}
"""Fields of `ScoredSequences`: the field of `WantedOutputs` that selects each, and the field of `TokenOutputs` with its
values."""


class DeterministicPasses:
    """Requests deterministic kernels while at least one worker of this process computes.

    torch has one switch for all threads of a process. An engine or a reward model may share the process; only operators
    of training roles may be refused for lack of a deterministic kernel.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_running = 0
        self._usual = False

    @contextmanager
    def of(self, role: str) -> Iterator[None]:
        """Compute passes of `role`. Raises `UnsupportedError` for an operator without a deterministic kernel."""
        import torch

        with self._lock:
            if self._num_running == 0:
                self._usual = torch.are_deterministic_algorithms_enabled()
                torch.use_deterministic_algorithms(True)
                # Filling new memory guards against uninitialised reads, at a cost. No code here reads such memory.
                torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            self._num_running += 1
        try:
            yield
        except RuntimeError as error:
            if "does not have a deterministic implementation" not in str(error):
                raise
            raise UnsupportedError(
                f"{role}: {str(error).splitlines()[0].split(', but you set')[0]}; set `deterministic: false`, after"
                " which a resumed run may differ from an uninterrupted one"
            ) from error
        finally:
            with self._lock:
                self._num_running -= 1
                if self._num_running == 0:
                    torch.use_deterministic_algorithms(self._usual)


_deterministic_passes = DeterministicPasses()


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
        self.role, self.place, self.limits, self.model = role, place, limits, with_local_files(model)
        self.deterministic = deterministic
        self.strategy: TrainStrategy = make_strategy(provider, strategy_config, training, owner=owner)
        self.mesh = mesh_info(role, place, peers, backend=backend, timeout_s=timeout_s)
        self.sender = WeightSender(self.strategy, role=role, rank=place.rank, device=place.device)
        self._unwritten: Callable[[], None] | None = None
        self._profiler: Any = None

    def start(self) -> DataRank:
        """Build the model. Collective over the role's ranks."""
        self.watch = MemoryWatch(self.place.device)
        self.strategy.build(self.model, self.mesh)
        return self.strategy.data_rank

    def score(self, sequences: Sequence[TrainSequence], want: WantedOutputs) -> ScoredSequences:
        """Run forward passes over this rank's share."""
        import torch

        micros = self._micros(sequences, self.limits.infer_sequences, self.limits.infer_tokens)
        selected = {name: output for name, (selector, output) in OUTPUTS.items() if getattr(want, selector)}
        copies: list[tuple[str, MicroBatch, Tensor]] = []
        with self._passes():
            for micro, outputs in zip(micros, self.strategy.forward_all(micros, want), strict=True):
                for name, output in selected.items():
                    if (tensor_T := getattr(outputs, output)) is not None:
                        # One number per token is copied while the device computes the next microbatch.
                        copy = tensor_T.detach().to("cpu", non_blocking=tensor_T.ndim == 1)
                        copies.append((name, micro, copy))
        if torch.device(self.mesh.device).type != "cpu":
            torch.accelerator.synchronize(self.mesh.device)
        rows: dict[str, dict[str, Any]] = {name: {} for name in selected}
        for name, micro, copy in copies:
            rows[name].update(zip(micro.ids, np.split(copy.numpy(), np.cumsum(micro.lengths)[:-1]), strict=True))
        return ScoredSequences(
            **{name: [rows_by_id[sequence.id] for sequence in sequences] for name, rows_by_id in rows.items()}
        )

    def update(self, sequences: Sequence[TrainSequence], loss: LossFn, totals: Totals) -> tuple[LossMetrics, StepStats]:
        """Take one optimizer step. Collective over the role's ranks: a rank without sequences takes part too."""
        micros = self._micros(sequences, self.limits.train_sequences, self.limits.train_tokens, totals)
        with self._passes():
            metrics = combine(self.strategy.forward_backward(micros, loss))
            return metrics, self.strategy.optimizer_step()

    def run_program(self, rows: Sequence[ModuleRow], program: ModuleProgram) -> list[Mapping[str, NDArray[np.generic]]]:
        """Run a program over this rank's share; returns the outputs of each row."""
        batches = module_batches(rows, max_rows=self.limits.infer_sequences)
        outputs_by_row: dict[int, Mapping[str, NDArray[np.generic]]] = {}
        with self._passes():
            outputs = self.strategy.run_module([batch for _, batch in batches], checked_program(program))
            for (indices, _), batch_outputs in zip(batches, outputs, strict=True):
                outputs_by_row.update(zip(indices, output_rows(batch_outputs, len(indices)), strict=True))
        return [outputs_by_row[index] for index in range(len(rows))]

    def update_program(
        self, rows: Sequence[ModuleRow], loss: ModuleLoss, total_rows: int, epoch: int = 0
    ) -> tuple[LossMetrics, StepStats]:
        """Take one optimizer step, like `update`."""
        batches = module_batches(rows, max_rows=self.limits.train_sequences, total_rows=total_rows, epoch=epoch)
        with self._passes():
            metrics = combine(
                self.strategy.forward_backward_module([batch for _, batch in batches], checked_loss(loss))
            )
            return metrics, self.strategy.optimizer_step()

    def _passes(self) -> AbstractContextManager[None]:
        """Context of forward and backward passes and optimizer steps."""
        return _deterministic_passes.of(self.role) if self.deterministic else nullcontext()

    def move_averages(self) -> None:
        """Move the moving average after the last optimizer step of a batch. Collective over the role's ranks."""
        self.strategy.move_averages()

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
        Path(path).mkdir(parents=True, exist_ok=True)
        self.strategy.save_portable(Path(path))

    def load_portable(self, path: str) -> None:
        """Load the state that `save_portable` of any strategy wrote."""
        self.strategy.load_portable(Path(path))

    def export(self, path: str) -> None:
        """Write a model directory that transformers can load."""
        Path(path).mkdir(parents=True, exist_ok=True)
        self.strategy.export_model(Path(path))

    def export_head(self, path: str) -> None:
        """Write the output layer to a file."""
        self.strategy.export_head(Path(path))

    def start_profile(self, memory: bool) -> None:
        """Start torch's profiler for this thread, which runs all passes, and for the device."""
        from torch.profiler import profile

        self._profiler = profile(record_shapes=True, profile_memory=memory)
        self._profiler.start()

    def stop_profile(self, name: str) -> None:
        """Stop the profiler and write `<name>-rank-<rank>.json.gz`."""
        assert self._profiler is not None  # noqa: S101 - the loop has started it
        self._profiler.stop()
        self._profiler.export_chrome_trace(f"{name}-rank-{self.place.rank}.json.gz")
        self._profiler = None

    def memory_use(self) -> MemoryUse | None:
        """Memory of this process since `start`."""
        return self.watch.use()

    def close(self) -> None:
        """Release all resources."""
        self.sender.close()
        self.strategy.close()


def combine(shares: Sequence[LossMetrics]) -> LossMetrics:
    """Combine the metrics of several microbatches or ranks, see `LossMetrics`. NaN remains NaN."""
    total: LossMetrics = {}
    for share in shares:
        for name, value in share.items():
            if (name.endswith("/max") and value == -math.inf) or (name.endswith("/min") and value == math.inf):
                continue
            if name not in total:
                total[name] = value
            elif name.endswith("/max"):
                total[name] = float(np.maximum(total[name], value))
            elif name.endswith("/min"):
                total[name] = float(np.minimum(total[name], value))
            else:
                total[name] += value
    return total
