"""float16: the scale of the loss is searched for, and a step that it spoils is skipped, counted and made up for."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import takewhile

import numpy as np
import pytest
from deepspeed_programs import load_and_tell, step_and_tell

from roll_core.spec.train import WantedOutputs
from roll_testing.bench import Step
from roll_testing.bounds import BOUNDS, check_near, check_rows, check_same
from roll_testing.errors import mentions
from roll_testing.losses import GRADIENT, LOSSES, MAGNIFIED, SPLITS, TRAINING, SpoiltGradient
from roll_testing.models import make_batch
from roll_testing.programs import fail_to_build, score, train
from roll_testing.reference import Reference, TransformersModel
from shared_tests.module_programs import check_low_precision

BATCH = make_batch(61)
STEP = Step(sequences=BATCH, loss=LOSSES["sft"], split=SPLITS["three at a time"])
STAGES = pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
"""DeepSpeed has one optimizer for stages 1 and 2."""


@pytest.fixture
def half(case):
    """The case in float16, with keys of `fp16`."""

    def made(stage, **keys):
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        return case.with_(
            model=replace(case.model, dtype="fp16"), strategy_config={"zero_optimization": zero, "fp16": keys}
        )

    return made


@STAGES
def test_outputs_and_gradients_stay_near_the_reference(half, ranks_in_float16, stage):
    case = half(stage)
    reference, want = Reference(TransformersModel(case.model), "causal_lm"), WantedOutputs(logprobs=True, entropy=True)
    found, expected = ranks_in_float16(score, case, BATCH, want, STEP.split)[0], reference.by_sequence(BATCH, want)
    for name in ("logprobs", "entropy"):
        check_rows(name, found[name], expected[name], BOUNDS["fp16"].outputs)
    done = ranks_in_float16(train, case.with_(training=GRADIENT), [STEP])[0]
    gradient = {name: (before - done.after[name]) / MAGNIFIED for name, before in done.before.items()}
    check_near("gradient", gradient, reference.gradient(BATCH, STEP.loss), BOUNDS["fp16"].gradient)


def test_programs_stay_near_float32(half, ranks_in_float16):
    check_low_precision(ranks_in_float16, half(3, initial_scale_power=8), "fp16", 0.01)


@STAGES
def test_steps_on_two_ranks_stay_near_the_reference(half, ranks_in_float16, stage):
    steps = [replace(STEP, sequences=make_batch(61, seed=seed)) for seed in range(4)]
    case = half(stage, initial_scale_power=18, hysteresis=1).with_(world_size=2)
    found, other = ranks_in_float16(train, case, steps)
    assert found.stats == other.stats
    reference = Reference(TransformersModel(case.model), "causal_lm")
    start = reference.weights()
    for stats, expected in zip(found.stats, reference.train(TRAINING, steps), strict=True):
        assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=BOUNDS["fp16"].steps)
    went = {name: found.after[name] - start[name] for name in start}
    expected_way = {name: each - start[name] for name, each in reference.weights().items()}
    check_near("way", went, expected_way, BOUNDS["fp16"].steps)


@STAGES
def test_overflowing_step_changes_nothing_and_lowers_the_scale(half, ranks_in_float16, stage):
    told = ranks_in_float16(step_and_tell, half(stage, initial_scale_power=24, hysteresis=1), [STEP] * 18)[0]
    overflows = list(takewhile(lambda each: each.stats.overflow, told))
    assert 5 < len(overflows) < 18
    for number, each in enumerate(overflows, 1):
        assert each.stats.skipped
        assert math.isinf(each.stats.grad_norm)
        assert each.scale["cur_scale"] == 2.0 ** (24 - number)
        assert each.moved == 0.0
    assert not told[len(overflows)].stats.skipped
    assert told[len(overflows)].moved > 0.0


def test_hysteresis_counts_overflows_before_the_scale_falls(half, ranks_in_float16):
    told = ranks_in_float16(step_and_tell, half(2, initial_scale_power=30, hysteresis=3), [STEP] * 3)[0]
    assert [each.scale["cur_scale"] for each in told] == [2.0**30, 2.0**30, 2.0**29]


def test_the_scale_rises_after_a_window_without_overflow(half, ranks_in_float16):
    told = ranks_in_float16(step_and_tell, half(1, initial_scale_power=4, loss_scale_window=2), [STEP] * 6)[0]
    assert not any(each.stats.skipped for each in told)
    scales = [each.scale["cur_scale"] for each in told]
    assert scales == sorted(scales)
    assert scales[-1] == 2.0**6


@pytest.mark.parametrize("keys", [{"initial_scale_power": 3, "min_loss_scale": 8}, {"loss_scale": 8.0}])
def test_a_gradient_that_no_scale_mends_is_no_overflow(half, ranks_in_float16, keys):
    spoilt = replace(STEP, loss=SpoiltGradient(sequence=BATCH[4].id))
    first, second = ranks_in_float16(step_and_tell, half(2, **keys), [spoilt, STEP])[0]
    assert first.stats.skipped
    assert not first.stats.overflow
    assert first.scale["cur_scale"] == 8.0
    assert not second.stats.skipped


@STAGES
def test_saved_state_resumes_with_its_loss_scale(half, ranks_in_float16, stage, tmp_path):
    case = half(stage, initial_scale_power=22, hysteresis=2)
    straight = ranks_in_float16(step_and_tell, case, [STEP] * 24, str(tmp_path), 6)[0]
    assert any(each.stats.skipped for each in straight[:6])
    resumed = ranks_in_float16(load_and_tell, case, [STEP] * 18, str(tmp_path))[0]
    assert [(each.stats, each.scale) for each in resumed] == [(each.stats, each.scale) for each in straight[6:]]
    check_same("weights", resumed[-1].weights, straight[-1].weights)


def test_stage_0_cannot_train_in_float16(half, ranks_in_float16):
    refused, _ = ranks_in_float16(fail_to_build, half(0))[0]
    assert refused is not None
    assert mentions(refused.message, "zero_optimization.stage", "0", "fp16")
    scored = ranks_in_float16(score, half(0).with_(training=None), BATCH, WantedOutputs(logprobs=True), STEP.split)[0]
    assert all(np.isfinite(row).all() for row in scored["logprobs"].values())


def test_a_device_without_float16_is_refused(half, ranks):
    refused, closed = ranks(fail_to_build, half(1))[0]
    if refused is None:
        pytest.skip("this processor has instructions for float16")
    assert refused.kinds[0] == "UnsupportedError"
    assert "bf16 or fp32" in refused.message
    assert closed is None
