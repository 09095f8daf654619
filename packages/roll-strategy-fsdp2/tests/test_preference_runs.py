"""Preference training and reward models on two FSDP2 ranks: the numbers of one rank of `hf_train`."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_testing.runs import Runs

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

REFERENCE = {"model_args": {"dtype": "fp32"}, "strategy_args": {"strategy_name": "hf_infer"}, "device_mapping": [0]}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.chdir(tmp_path)
    return Runs(tmp_path, "local")


@pytest.mark.parametrize(
    ("pipeline", "given", "replicas", "keys"),
    [
        ("dpo", {"reference": REFERENCE, "loss_type": ["sigmoid", "sft"]}, 2, {}),
        ("dpo", {"reference": REFERENCE, "loss_type": "kto"}, 1, {"ring_size": 2}),
        ("reward_model", {"margin": "margin"}, 2, {}),
    ],
)
def test_ranks_equal_hf_train(runs, pipeline, given, replicas, keys):
    config = runs.preference(pipeline, **given)
    expected = runs.learnt(runs.ok(config))
    found = runs.learnt(runs.ok(runs.on_ranks(config, "fsdp2", 2, replicas=replicas, **keys)))
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
