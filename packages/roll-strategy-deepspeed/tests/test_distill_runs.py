"""Distillation on two DeepSpeed ranks: the numbers of one rank of `hf_train`."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_testing.runs import Runs

pytestmark = [pytest.mark.engine("deepspeed"), pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

DATASET = {"distill_data": "dataset", "max_steps": 2}
WHOLE = {"kd_support": "full", "kd_temperature": 2.0, "kd_objective": "js_divergence"}
TOPK = {"kd_support": "student_topk", "logits_topk": 4}
EMA = {"self_teacher": "ema", "ema_decay": 0.5, "nll_coef": 0.1, "kd_support": "teacher_topk", "logits_topk": 4}
LORA = {"lora_target": ["q_proj", "v_proj"], "lora_rank": 4, "lora_alpha": 8}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.chdir(tmp_path)
    return Runs(tmp_path, "local")


@pytest.mark.parametrize(
    ("given", "lora", "stage"),
    [
        pytest.param(DATASET | WHOLE, {}, 3, id="the whole vocabulary"),
        pytest.param(DATASET | WHOLE, {}, 2, id="whole parameters"),
        pytest.param(DATASET | WHOLE, LORA, 3, id="adapters"),
        pytest.param(DATASET | EMA, {}, 3, id="moving average"),
        pytest.param({"max_steps": 2} | TOPK, {}, 2, id="rollouts, K tokens"),
    ],
)
def test_ranks_equal_hf_train(runs, given, lora, stage):
    config = runs.distill(**given)
    config["actor_train"]["model_args"] |= lora
    expected = runs.learnt(runs.ok(config))
    sharded = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    found = runs.learnt(runs.ok(runs.on_ranks(config, "deepspeed", 2, replicas=2, zero_optimization=sharded)))
    assert len(found) == len(expected) == 2
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
