"""Builds a train strategy on one rank from its record and calls it in the order of a run."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.data.module_rows import balance_rows, module_batches
from roll_core.data.pack import balance, count_totals, pack
from roll_core.plugins.requirements import check_requirements
from roll_core.plugins.targets import load_target, schema_of
from roll_core.spec.config import StrategyConfig
from roll_core.spec.model import MeshInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.model import ModelSpec
    from roll_core.spec.module_program import ModuleBatch, ModuleLoss, ModuleProgram, ModuleRow
    from roll_core.spec.platform import Platform
    from roll_core.spec.providers import TrainProvider
    from roll_core.spec.train import (
        LossFn,
        LossMetrics,
        MicroBatch,
        StepStats,
        TokenOutputs,
        TrainingSpec,
        TrainStrategy,
        WantedOutputs,
    )
    from roll_core.types import Floats, TrainSequence

ROLE = "actor_train"
"""Role of the strategy under test, shown in its error messages."""

MOST_OVERFLOWS = 64
"""Maximum number of steps that may overflow while the loss scale is halved. Each halving may need two steps, and
float16 has 2**40 between its largest and smallest numbers."""

Arrays = dict[str, "Floats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything that a rank needs to build the strategy. Picklable, so that all ranks build the same."""

    provider: TrainProvider
    strategy_config: Mapping[str, Any]
    config_alone: Mapping[str, Any] = field(default_factory=dict)
    """Replaces `strategy_config` on one rank if that configuration needs several ranks."""
    model: ModelSpec
    training: TrainingSpec | None
    world_size: int = 1
    backend: str = "gloo"
    devices: tuple[str, ...] = ("cpu",)
    """Torch device of each rank."""
    master_port: int = 0
    platform_target: str = "roll_core.builtin.cpu:CpuPlatform"
    timeout_s: float = 60.0
    """Timeout of collectives in seconds."""

    def platform(self) -> Platform:
        """Return the platform, created in the calling process."""
        made: Platform = load_target(self.platform_target, owner="the platform of the tests")()
        return made

    def with_(self, **changes: Any) -> Case:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a batch is split into microbatches: by sequences, by tokens, or not at all."""

    max_sequences: int | None = None
    max_tokens: int | None = None


WHOLE = Split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step: the whole batch over all ranks, and its loss."""

    sequences: Sequence[TrainSequence]
    loss: LossFn
    split: Split = field(default=WHOLE)
    calls: int = 1
    """Number of `forward_backward` calls over which the microbatches are spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleStep:
    """One optimizer step of a module program: the rows of all ranks, and the loss."""

    rows: Sequence[ModuleRow]
    loss: ModuleLoss
    max_rows: int = 100
    """Maximum number of rows per batch."""
    calls: int = 1
    """Number of `forward_backward_module` calls over which the batches are spread."""


def make(case: Case) -> TrainStrategy:
    """Construct the strategy without building it."""
    owner = f"train strategy {case.provider.name}"
    check_requirements(case.provider, owner=owner)
    config = schema_of(case.provider, StrategyConfig, owner=owner).model_validate(dict(case.strategy_config))
    strategy: TrainStrategy = load_target(case.provider.target, owner=owner)(config, case.training)
    return strategy


def mesh_of(case: Case, rank: int) -> MeshInfo:
    """Return the `MeshInfo` of a rank."""
    return MeshInfo(
        role=ROLE,
        rank=rank,
        world_size=case.world_size,
        local_rank=rank,
        device=case.devices[rank],
        backend=case.backend,
        master_port=case.master_port,
        num_threads=1,
        timeout_s=case.timeout_s,
    )


@contextmanager
def built(case: Case, rank: int) -> Iterator[TrainStrategy]:
    """Build the strategy with deterministic algorithms enabled, and close it at the end of the block."""
    import torch

    settings: Any = torch.utils.deterministic
    usual = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    strategy = make(case)
    try:
        strategy.build(case.model, mesh_of(case, rank))
        yield strategy
    finally:
        strategy.close()
        torch.use_deterministic_algorithms(usual[0])
        settings.fill_uninitialized_memory = usual[1]


def share(strategy: TrainStrategy, sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Return this rank's share of a batch."""
    place = strategy.data_rank
    return [sequences[i] for i in balance(sequences, place.size)[place.index]]


def micros(mine: Sequence[TrainSequence], batch: Sequence[TrainSequence], split: Split) -> list[MicroBatch]:
    """Pack this rank's sequences into microbatches, with the loss denominators of the whole batch."""
    denominators = count_totals(batch, max_length=max(len(sequence) for sequence in batch))
    return pack(mine, totals=denominators, max_sequences=split.max_sequences, max_tokens=split.max_tokens)


def take_step(strategy: TrainStrategy, step: Step | ModuleStep) -> tuple[StepStats, dict[str, float]]:
    """Run one optimizer step.

    Return its statistics and this rank's summed metrics. Repeats the step while it overflows during the search for a
    loss scale. Raises `AssertionError` if every attempt overflows.
    """
    for _ in range(MOST_OVERFLOWS + 1):
        metrics = accumulate(strategy, step)
        stats = strategy.optimizer_step()
        if not stats.overflow:
            return stats, metrics
    raise AssertionError(f"after {MOST_OVERFLOWS} skipped steps the scale of the loss is still too large")


def accumulate(strategy: TrainStrategy, step: Step | ModuleStep) -> dict[str, float]:
    """Accumulate gradients of this rank's share and return its summed metrics."""
    metrics: dict[str, float] = {}
    for part in range(step.calls):
        for micro_metrics in _backward(strategy, step, part):
            for name, value in micro_metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value
    return metrics


def _backward(strategy: TrainStrategy, step: Step | ModuleStep, part: int) -> list[LossMetrics]:
    if isinstance(step, ModuleStep):
        batches = module_share(strategy, step.rows, step.max_rows, len(step.rows))
        return strategy.forward_backward_module(batches[part :: step.calls], step.loss)
    mine = micros(share(strategy, step.sequences), step.sequences, step.split)
    return strategy.forward_backward(mine[part :: step.calls], step.loss)


def module_share(
    strategy: TrainStrategy, rows: Sequence[ModuleRow], max_rows: int, total_rows: int = 1
) -> list[ModuleBatch]:
    """Return the batches of this rank's share of the rows."""
    place = strategy.data_rank
    mine = [rows[i] for i in balance_rows(rows, place.size)[place.index]]
    return [batch for _, batch in module_batches(mine, max_rows=max_rows, total_rows=total_rows)]


def module_outputs(
    strategy: TrainStrategy, rows: Sequence[ModuleRow], program: ModuleProgram, max_rows: int
) -> dict[str, dict[str, Floats]]:
    """Return outputs of a program for this rank's share, by output name and then by row id.

    Empty on ranks that are not leaders.
    """
    by_name: dict[str, dict[str, Floats]] = {}
    batches = module_share(strategy, rows, max_rows)
    for batch, answer in zip(batches, strategy.run_module(batches, program), strict=True):
        for name, tensor in answer.items():
            assert not tensor.requires_grad, f"output {name} of run_module has gradients"
            by_name.setdefault(name, {}).update(zip(batch.ids, as_array(tensor), strict=True))
    return by_name if strategy.data_rank.leader else {}


def weights(strategy: TrainStrategy) -> Arrays:
    """Return the exported weights as float32; empty on ranks that are not leaders."""
    leads = strategy.data_rank.leader
    return {name: as_array(tensor) for name, tensor in strategy.export_weights() if leads}


def outputs(
    strategy: TrainStrategy, sequences: Sequence[TrainSequence], want: WantedOutputs, split: Split = WHOLE
) -> dict[str, dict[str, Floats]]:
    """Return outputs of this rank's share, by output name and then by sequence id.

    Empty on ranks that are not leaders.
    """
    by_name: dict[str, dict[str, Floats]] = {}
    mine = micros(share(strategy, sequences), sequences, split)
    for micro, answer in zip(mine, strategy.forward_all(mine, want), strict=True):
        for name, tensor in present(answer).items():
            rows = as_array(tensor)
            bounds = np.cumsum((0, *micro.lengths))
            for index, sequence_id in enumerate(micro.ids):
                by_name.setdefault(name, {})[sequence_id] = rows[bounds[index] : bounds[index + 1]]
    return by_name if strategy.data_rank.leader else {}


def present(token_outputs: TokenOutputs) -> dict[str, Tensor]:
    """Return the outputs that are not None, by name."""
    named = {
        "logprobs": token_outputs.logprobs_T,
        "entropy": token_outputs.entropy_T,
        "values": token_outputs.values_T,
        "topk_logprobs": token_outputs.topk_logprobs_TK,
        "topk_ids": token_outputs.topk_ids_TK,
        "gathered_logprobs": token_outputs.gathered_logprobs_TK,
        "hidden": token_outputs.hidden_TH,
        "compared": token_outputs.compared_T,
        "routing_disagreement": token_outputs.routing_disagreement_T,
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def as_array(tensor: Tensor) -> Floats:
    """Return a float32 copy on the host."""
    array: Floats = tensor.detach().float().cpu().numpy().copy()
    return array
