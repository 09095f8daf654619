"""What DeepSpeed does without each work-around. A test that fails here says that the one it names can go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from deepspeed_programs import (
    engine_without_guard,
    operators_without,
    state_without_listing,
    steps_counted_at_start,
    warnings_without,
)

from roll_testing.bench import Step
from roll_testing.losses import LOSSES, SpoiltGradient
from roll_testing.models import make_batch

BATCH = make_batch(61)
STEP = Step(sequences=BATCH, loss=LOSSES["sft"])


def test_collectives_by_deprecated_names_still_warn(ranks, case):
    zero = {"zero_optimization": {"stage": 3}}
    assert any("is deprecated" in each for each in ranks(warnings_without, case.with_(strategy_config=zero), STEP)[0])


def test_deepspeed_still_builds_an_operator_at_start_on_a_cpu(ranks, case):
    probed, built = ranks(operators_without, case)[0]
    assert probed > 0
    assert built


def test_moments_are_still_unknown_before_the_first_step(ranks, case):
    zero = {"zero_optimization": {"stage": 1}}
    assert ranks(state_without_listing, case.with_(strategy_config=zero))[0] != "found"


@pytest.mark.parametrize("spoilt", [False, True])
def test_stage_0_in_float32_still_neither_measures_nor_skips(ranks, case, spoilt):
    """`add_norm_and_clipping`."""
    loss = SpoiltGradient(sequence=BATCH[4].id) if spoilt else LOSSES["sft"]
    norm, applied, finite = ranks(engine_without_guard, case, Step(sequences=BATCH, loss=loss))[0]
    assert norm is None
    assert applied
    assert finite is not spoilt


def test_deepspeed_takes_a_step_at_start(ranks, case):
    """At stage 0 in bf16."""
    case = case.with_(model=replace(case.model, dtype="bf16"))
    assert ranks(steps_counted_at_start, case)[0] == (1.0, 0.0)
