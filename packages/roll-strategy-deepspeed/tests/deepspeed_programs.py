"""What ranks do in the tests, beside what the conformance kit has them do."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from roll_core.spec.train import ParameterState, StateKind, StepStats, WantedOutputs
from roll_core.types import TrainSequence
from roll_modeling import pieces
from roll_modeling.offload import num_bytes
from roll_strategy_deepspeed import optimizer_state, ranks, workarounds
from roll_strategy_deepspeed.strategy import DeepSpeedStrategy
from roll_testing.bench import Arrays, Case, Step, accumulate, built, outputs, take_step, weights
from roll_testing.programs import Raised, Trained, observe, raised

get_checkpoint_conversion_mapping("qwen3")  # a thousand regular expressions, which transformers keeps


@dataclass(frozen=True, kw_only=True)
class Told:
    """Of one optimizer step."""

    stats: StepStats
    scale: dict[str, float]
    """Of the loss, afterwards."""
    weights: Arrays
    moved: float
    """The furthest that a weight went."""


def step_and_tell(rank: int, case: Case, steps: Sequence[Step], folder: str = "", save_after: int = -1) -> list[Told]:
    """Steps, overflows among them, and a save after so many."""
    with built(case, rank) as strategy:
        first = _tell(strategy, steps[:save_after] if folder else steps)
        if not folder:
            return first
        strategy.save(Path(folder))
        return first + _tell(strategy, steps[save_after:])


def export_both_ways(rank: int, case: Case, steps: Sequence[Step]) -> tuple[Arrays, Arrays, Arrays]:
    """The weights before the steps, which merge adapters that change nothing yet; afterwards, and adapters alone."""
    with built(case, rank) as strategy:
        before = weights(strategy)
        for step in steps:
            take_step(strategy, step)
        alone = {name: each.float().numpy().copy() for name, each in strategy.export_adapters()}
        return before, weights(strategy), alone


def load_and_tell(rank: int, case: Case, steps: Sequence[Step], folder: str) -> list[Told]:
    """From what was saved on."""
    with built(case, rank) as strategy:
        strategy.load(Path(folder))
        return _tell(strategy, steps)


def _tell(strategy: DeepSpeedStrategy, steps: Sequence[Step]) -> list[Told]:
    told, before = [], weights(strategy)
    for step in steps:
        accumulate(strategy, step)
        stats, after = strategy.optimizer_step(), weights(strategy)
        moved = max(float(np.abs(after[name] - each).max()) for name, each in before.items())
        told.append(Told(stats=stats, scale=strategy.loss_scale.state(), weights=after, moved=moved))
        before = after
    return told


# -- without a work-around ---------------------------------------------------------------------------------------------


def warnings_without(rank: int, case: Case, step: Step) -> list[str]:
    """What torch says of a step, where nothing keeps it quiet."""
    with patch.object(ranks, "quiet_collectives"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with built(case, rank) as strategy:
            take_step(strategy, step)
    return [str(each.message) for each in said if each.category is FutureWarning]


def operators_without(rank: int, case: Case) -> tuple[int, bool]:
    """How many operators DeepSpeed tries whether it could build when a role starts, and whether it then builds one."""
    from deepspeed.ops.op_builder import builder
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    with (
        patch.object(ranks, "build_nothing_at_start"),
        patch.object(builder, "probe_is_compatible", return_value=True) as probe,
        patch.object(ShareMemCommBuilder, "load") as load,
        built(case, rank),
    ):
        return probe.call_count, load.called


def state_without_listing(rank: int, case: Case) -> str:
    """What comes of reading moments before the first step."""
    with patch.object(optimizer_state, "make_moments_known"), built(case, rank) as strategy:
        try:
            found = [dict(strategy.optimizer.read(name)) for name in strategy.optimizer.parameters]
        except Exception as error:  # whatever DeepSpeed does then
            return type(error).__name__
        return "found" if all(each is not None for kinds in found for each in kinds.values()) else "none"


def steps_counted_at_start(rank: int, case: Case) -> tuple[float, float]:
    """Adam's step count before the first step, without and with `undo_first_step`."""
    found = []
    for undo in (lambda *_: None, workarounds.undo_first_step):
        with patch.object(optimizer_state, "undo_first_step", undo), built(case, rank) as strategy:
            found.append(max(float(each["step"]) for each in strategy.optimizer.torch_optimizer.state.values()))
    return found[0], found[1]


def engine_without_guard(rank: int, case: Case, step: Step) -> tuple[float | None, bool, bool]:
    """What DeepSpeed says of a step: its norm, whether it was taken, and whether weights are finite after it."""
    with patch.object(workarounds, "add_norm_and_clipping"), built(case, rank) as strategy:
        accumulate(strategy, step)
        strategy.engine.step()
        finite = all(bool(np.isfinite(each).all()) for each in weights(strategy).values())
        return strategy.engine.get_global_grad_norm(), strategy.engine.was_step_applied(), finite


# -- memory ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes."""

    said: int
    """By `memory()`, of the parts that are moved."""
    said_away: int
    before: int
    """Behind all tensors of the process, copies on the host not counted."""
    away: int
    back: int


def hold(rank: int, case: Case, step: Step) -> dict[str, int]:
    """What `memory()` says once a step was taken and there are gradients again."""
    with built(case, rank) as strategy:
        take_step(strategy, step)
        accumulate(strategy, step)
        return dict(strategy.memory())


def move_and_count(rank: int, case: Case, step: Step, parts: Sequence[StateKind]) -> Held:
    """The same, with `parts` moved away and back."""
    with built(case, rank) as strategy:
        take_step(strategy, step)
        accumulate(strategy, step)
        said, before = _said(strategy, parts), _count(strategy)
        strategy.offload(parts)
        said_away, away = _said(strategy, parts), _count(strategy)
        strategy.onload(parts)
        return Held(said=said, said_away=said_away, before=before, away=away, back=_count(strategy))


def forward_while_away(rank: int, case: Case, batch: Sequence[TrainSequence]) -> Raised | None:
    """What scoring raises."""
    with built(case, rank) as strategy:
        strategy.offload(["weights"])
        return raised(lambda: outputs(strategy, batch, WantedOutputs(logprobs=True)))


def _said(strategy: DeepSpeedStrategy, parts: Sequence[StateKind]) -> int:
    return sum(strategy.memory()[part] for part in parts)


def _count(strategy: DeepSpeedStrategy) -> int:
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.device.type == "cpu"]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    copies = [block for blocks in strategy.offloader._arenas.values() for block in blocks]
    return num_bytes(tensors) - num_bytes(copies)


def raise_and_go_on(rank: int, case: Case, spoilt: Step, steps: Sequence[Step]) -> tuple[Raised | None, Trained]:
    """What a loss that is not finite on one rank raises on each, and good steps after it."""
    with built(case, rank) as strategy:
        return raised(lambda: accumulate(strategy, spoilt)), observe(strategy, steps)


# -- the state that all strategies read --------------------------------------------------------------------------------


def hand_over(rank: int, case: Case, to: Case, steps: Sequence[Step], later: Sequence[Step]) -> tuple[Trained, Trained]:
    """`steps`, then `later`, by the strategy that began and by `to`, which spoils its own state before."""
    with built(case, rank) as first, built(to, rank) as second:
        for step in steps:
            take_step(first, step)
        take_step(second, later[0])
        accumulate(second, later[0])
        state = first.export_state()
        kept = {name: _copied(state.read(name)) for name in state.shapes}
        second.import_state(replace(state, read=kept.__getitem__))
        return observe(first, later), observe(second, later)


def _copied(state: ParameterState) -> ParameterState:
    return ParameterState(**{each.name: getattr(state, each.name).clone() for each in fields(state)})


def export_in_pieces(rank: int, case: Case, folder: str, piece_bytes: int) -> tuple[Arrays, int]:
    """Exported weights, and the bytes that a writer ever held."""
    most = 0
    with patch.object(pieces, "PIECE_BYTES", piece_bytes), built(case, rank) as strategy:
        add = pieces.PieceWriter.add

        def count(writer: pieces.PieceWriter, name: str, tensor: torch.Tensor) -> None:
            nonlocal most
            add(writer, name, tensor)
            most = max(most, writer.pieces.pending_bytes)

        with patch.object(pieces.PieceWriter, "add", count):
            strategy.export_model(Path(folder))
        return weights(strategy), most
