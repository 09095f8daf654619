"""What ranks do in the tests, beside what the conformance kit has them do."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
from deepspeed.ops.op_builder import builder
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from roll_core.spec.train import StepStats
from roll_core.testing.bench import Arrays, Case, Step, accumulate, built, take_step, weights
from roll_strategy_deepspeed import held_state, ranks, whole_optimizer
from roll_strategy_deepspeed.strategy import DeepSpeedStrategy

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
    with (
        patch.object(ranks, "build_nothing_at_start"),
        patch.object(builder, "probe_is_compatible", return_value=True) as probe,
        patch.object(ShareMemCommBuilder, "load") as load,
        built(case, rank),
    ):
        return probe.call_count, load.called


def state_without_listing(rank: int, case: Case) -> str:
    """What comes of reading moments before the first step."""
    with patch.object(held_state, "make_moments_known"), built(case, rank) as strategy:
        try:
            found = [dict(strategy.held.read(name)) for name in strategy.held.parameters]
        except Exception as error:  # whatever DeepSpeed does then
            return type(error).__name__
        return "found" if all(each is not None for kinds in found for each in kinds.values()) else "none"


def engine_without_guard(rank: int, case: Case, step: Step) -> tuple[float | None, bool, bool]:
    """What DeepSpeed says of a step: its norm, whether it was taken, and whether weights are finite after it."""
    with patch.object(whole_optimizer, "guard"), built(case, rank) as strategy:
        accumulate(strategy, step)
        strategy.engine.step()
        finite = all(bool(np.isfinite(each).all()) for each in weights(strategy).values())
        return strategy.engine.get_global_grad_norm(), strategy.engine.was_step_applied(), finite
