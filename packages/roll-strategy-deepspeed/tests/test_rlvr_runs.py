"""GRPO with DeepSpeed: one worker for each role."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll_testing.runs import REWARDS, Runs

pytestmark = [pytest.mark.engine("deepspeed"), pytest.mark.ray, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("transport", ["shm", pytest.param("disk", marks=pytest.mark.slow)])
def test_weights_reach_an_engine_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """No key asks for two processes: DeepSpeed's weights do not travel within one."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "rollrewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    runs, near = Runs(tmp_path, "auto"), {"action": "error", "threshold": 1e-4}
    config = runs.rlvr(max_steps=2, guards={"logprob_probe": {"every": 1, **near}, "logprob_gap": near})
    config["actor_train"]["strategy_args"] = {"strategy_name": "deepspeed_train"}
    if transport == "disk":
        config["model_update_dir"] = str(tmp_path / "weights")
    result = runs.ok(config)
    record = json.loads((result.run_dir.path / "run.json").read_text(encoding="utf-8"))
    assert record["executor"] == "ray"
    assert record["weight_transports"] == {"actor_train -> actor_infer": transport}
    steps = runs.metrics(result)
    assert [line["actor/grad_norm"] > 0 for line in steps] == [True, True]
    assert [line["weight_sync/version"] for line in steps if "weight_sync/version" in line][-1] > 0
    assert list((tmp_path / "weights").iterdir()) == []
