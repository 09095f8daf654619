"""Distillation on two FSDP2 ranks: the numbers of one rank of `hf_train`."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_testing.runs import Runs

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

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
    ("given", "lora", "replicas", "keys"),
    [
        pytest.param(DATASET | WHOLE, {}, 2, {}, id="the whole vocabulary"),
        pytest.param(DATASET | WHOLE, {}, 1, {"ring_size": 2}, id="ranks share sequences"),
        pytest.param(DATASET | WHOLE, LORA, 2, {}, id="adapters"),
        pytest.param(DATASET | EMA, {}, 2, {}, id="moving average"),
        pytest.param({"max_steps": 2} | TOPK, {}, 2, {}, id="rollouts, K tokens"),
    ],
)
def test_ranks_equal_hf_train(runs, given, lora, replicas, keys):
    config = runs.distill(**given)
    config["actor_train"]["model_args"] |= lora
    expected = runs.learnt(runs.ok(config))
    found = runs.learnt(runs.ok(runs.on_ranks(config, "fsdp2", 2, replicas=replicas, **keys)))
    assert len(found) == len(expected) == 2
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
