"""Runs with parts of a plugin that are wrong: they end, and say whose part it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_core.errors import InvalidCompletionError
from roll_core.plugins.registry import load_registry

PLUGIN = Path(__file__).parent / "faulty.py"


@pytest.fixture
def faulty(install):
    """Makes configs of runs that know the plugin."""
    install(PLUGIN)

    def config(runs, **given):
        runs.registry = load_registry()
        return runs.rlvr(**given)

    return config


def with_engine(config, fault):
    config["actor_infer"]["strategy_args"] = {"strategy_name": "faulty_engine", "strategy_config": {"fault": fault}}
    return config


@pytest.mark.parametrize("fault", ["few", "list", "nan"])
def test_a_completion_that_is_invalid_ends_the_run_and_names_role_engine_and_package(faulty, local_runs, fault):
    result = local_runs.run(with_engine(faulty(local_runs), fault))
    assert isinstance(result.error, InvalidCompletionError)
    assert "actor_infer rank 0 on " in str(result.error)
    assert "infer strategy 'faulty_engine' of roll-faulty 1: " in str(result.error)


def test_a_completion_that_is_invalid_ends_a_run_on_ray_too(faulty, ray_runs):
    result = ray_runs.run(with_engine(faulty(ray_runs, num_gpus_per_node=2), "list"))
    assert isinstance(result.error, InvalidCompletionError)
    assert "infer strategy 'faulty_engine' of roll-faulty 1: " in str(result.error)


def with_reward(config, fault, folder, **given):
    reward = {"reward": "faulty_reward", "fault": fault, "mark": str(folder / "hung"), "processes": 2} | given
    return config | {"rewards": {"digits": reward}}


@pytest.mark.parametrize("retries", [0, 1])
def test_a_plugins_reward_that_hangs_costs_one_sample_at_most_and_the_run_goes_on(faulty, local_runs, retries):
    config = with_reward(faulty(local_runs), "hang", local_runs.folder, timeout_s=4.0, max_retries=retries)
    result = local_runs.ok(config)
    assert (local_runs.folder / "hung").exists()
    lines = local_runs.metrics(result)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert sum(line.get("reward/failures", 0) for line in lines) == (0 if retries else 1)
    assert lines[0].get("reward/retries", 0) == retries
