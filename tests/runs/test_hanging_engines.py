"""Runs whose engine hangs during a response: it times out and is replaced, and no response is lost."""

import json
import re
import threading
from pathlib import Path

import pytest

from roll_core.errors import WorkerHungError
from roll_core.plugins.registry import load_registry
from roll_testing.errors import mentions

PLUGIN = Path(__file__).parent / "hanging.py"


@pytest.fixture
def hanging(tmp_path, install):
    """A config whose engine is the hanging one, installed."""
    install(PLUGIN)

    def config(runs, how, rank, **given):
        runs.registry = load_registry()
        made = runs.rlvr(**{"max_steps": 6, "response_length": 40} | given)
        strategy_config = {"how": how, "rank": rank, "mark": str(tmp_path / "hung")}
        made["actor_infer"]["strategy_args"] = {"strategy_name": "hanging_engine", "strategy_config": strategy_config}
        return made

    return config


def recorded(result):
    """A file for each step."""
    files = sorted((result.run_dir.path / "rollouts").glob("step-*.jsonl"))
    assert len(files) == 6
    return files


@pytest.mark.parametrize("replicas", [1, 2])
def test_hung_replica_is_replaced_and_every_output_counts_once(hanging, ray_runs, replicas):
    last = replicas - 1
    config = hanging(ray_runs, "engine", last, num_gpus_per_node=3, replica_timeout=25.0, record_rollouts=True)
    config["actor_infer"]["device_mapping"] = [1, 2][:replicas]
    result = ray_runs.ok(config)
    assert (ray_runs.folder / "hung").exists()
    lines = ray_runs.metrics(result)
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert lines[-1]["rollout/lost_replicas"] == 1
    groups = [json.loads(line) for file in recorded(result) for line in file.read_text("utf-8").splitlines()[1:]]
    assert sorted(group["position"] for group in groups) == list(range(6 * 4))
    assert len({group["id"] for group in groups}) == 6 * 4
    assert all(len(group["samples"]) == 4 for group in groups)
    log = result.run_dir.log.read_text(encoding="utf-8")
    assert f"actor_infer rank {last} on" in log
    assert mentions(log, "train/")
    assert "s for a token, replica_timeout allows 25 s" in log
    assert "in _work" in log
    assert re.search(rf"actor_infer rank {last}: .*\(pid \d+\)", log)


def test_run_whose_only_engine_hangs_fails_with_role_and_key(hanging, local_runs):
    others = set(threading.enumerate())
    result = local_runs.run(hanging(local_runs, "engine", 0, replica_timeout=4.0))
    assert isinstance(result.error, WorkerHungError)
    assert "actor_infer rank 0 on" in str(result.error)
    assert "s for a token, replica_timeout allows 4 s" in str(result.error)
    assert "in _work" in result.error.trace  # where the thread of the engine is
    (hung,) = [each for each in threading.enumerate() if each.name == "roll-engine" and each not in others]
    assert hung.daemon  # the process can end without it
    (local_runs.folder / "hung").unlink()


def test_replica_that_hangs_during_a_publish_is_replaced(hanging, ray_runs):
    """Ahead of training a publish may meet a replica that hangs before its silence is noticed."""
    config = hanging(
        ray_runs, "process", 1, num_gpus_per_node=3, async_generation_ratio=1.0, max_steps=8, model_update_timeout=30.0
    )
    config["actor_infer"]["device_mapping"] = [1, 2]
    result = ray_runs.ok(config)
    assert (ray_runs.folder / "hung").exists()
    lines = ray_runs.metrics(result)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["rollout/lost_replicas"] == 1
    assert max(line["rollout/staleness/max"] for line in lines) <= 1
    log = result.run_dir.log.read_text(encoding="utf-8")
    assert mentions(log, "actor_infer rank 1")
    assert re.search(r"actor_infer rank 1: .*\(pid \d+\)", log)


@pytest.mark.parametrize("shared", [True, False])
def test_an_engine_stopped_between_steps_is_replaced(hanging, ray_runs, shared):
    """An engine with shared slots must wake for the next publish; one with its own slots must receive it."""
    config = hanging(ray_runs, "idle", 0, num_gpus_per_node=2, replica_timeout=20.0, model_update_timeout=20.0)
    config["max_steps"] = 4
    config["actor_infer"]["device_mapping"] = [0 if shared else 1]
    result = ray_runs.ok(config)
    assert (ray_runs.folder / "hung").exists()
    lines = ray_runs.metrics(result)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["rollout/lost_replicas"] == 1
    log = result.run_dir.log.read_text(encoding="utf-8")
    assert re.search(r"actor_infer rank 0: .*\(pid \d+\)", log)
