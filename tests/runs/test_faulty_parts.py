"""Runs with parts of a plugin that are wrong: they end, and say whose part it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll_core.errors import ContractError, InvalidCompletionError, PluginError, PluginLoadError
from roll_core.plugins.registry import load_registry
from roll_testing.errors import mentions

PLUGIN = Path(__file__).parent / "faulty.py"
REWARD = Path(__file__).parent / "faulty_reward.py"


@pytest.fixture
def faulty(install):
    """Makes configs of runs that know the plugin."""
    install(PLUGIN)
    return with_plugins


@pytest.fixture
def faulty_reward(install):
    """Makes configs of runs that know the plugin of a reward."""
    install(REWARD)
    return with_plugins


def with_plugins(runs, **given):
    runs.registry = load_registry()
    return runs.rlvr(**given)


def with_engine(config, fault):
    config["actor_infer"]["strategy_args"] = {"strategy_name": "faulty_engine", "strategy_config": {"fault": fault}}
    return config


@pytest.mark.parametrize("fault", ["few", "list", "nan"])
def test_invalid_completion_names_role_engine_and_package(faulty, local_runs, fault):
    result = local_runs.run(with_engine(faulty(local_runs), fault))
    assert isinstance(result.error, InvalidCompletionError)
    assert "actor_infer rank 0 on " in str(result.error)
    assert mentions(str(result.error), "'faulty_engine'", "roll-faulty", "1")


def test_a_completion_that_is_invalid_ends_a_run_on_ray_too(faulty, ray_runs):
    result = ray_runs.run(with_engine(faulty(ray_runs, num_gpus_per_node=2), "list"))
    assert isinstance(result.error, InvalidCompletionError)
    assert mentions(str(result.error), "'faulty_engine'", "roll-faulty", "1")


def with_reward(config, fault, folder, **given):
    reward = {"reward": "faulty_reward", "fault": fault, "mark": str(folder / "hung"), "processes": 2} | given
    return config | {"rewards": {"digits": reward}}


@pytest.mark.parametrize("retries", [0, 1])
def test_hanging_plugin_reward_costs_at_most_one_sample(faulty_reward, local_runs, retries):
    config = with_reward(faulty_reward(local_runs), "hang", local_runs.folder, timeout_s=4.0, max_retries=retries)
    result = local_runs.ok(config)
    assert (local_runs.folder / "hung").exists()
    lines = local_runs.metrics(result)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert sum(line.get("reward/failures", 0) for line in lines) == (0 if retries else 1)
    assert lines[0].get("reward/retries", 0) == retries


def test_reward_that_deletes_the_directory_does_not_stop_the_end(local_runs, tmp_path_factory, monkeypatch):
    here = tmp_path_factory.mktemp("here")
    (here / "deleting_rewards.py").write_text(
        "import os, shutil\n\ndef score(prompt, response):\n    shutil.rmtree(HERE, True)\n"
        "    return len(response) % 2\n"
        f"\nHERE = {str(here)!r}\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(here)
    rewards = {"digits": {"reward": "function", "function": "deleting_rewards:score", "processes": 1}}
    result = local_runs.ok(local_runs.rlvr(rewards=rewards))
    assert not here.exists()
    assert result.outcome == "finished"
    assert str(result.run_dir.path / "report.html") in local_runs.screen.getvalue()


SECRET = "sk-0123456789abcdefghij"


def test_secrets_in_reward_failures_are_never_written_or_printed(local_runs, monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_API_KEY", "word-known-by-its-key-only")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaking_rewards.py").write_text(
        "import os\n\ndef score(prompt, response):\n"
        f"    secret = '{SECRET} ' + os.environ['JUDGE_API_KEY']\n"
        "    if len(response) % 2:\n        return {'value': 1.0, 'why': secret}\n"
        "    raise RuntimeError('401 for ' + secret)\n",
        encoding="utf-8",
    )
    guards = {"reward_failures": {"threshold": 0.0}}
    rewards = {"digits": {"reward": "function", "function": "leaking_rewards:score", "max_retries": 0}}
    results = [
        local_runs.run(local_runs.rlvr(rewards=rewards, max_steps=2, guards=guards | {"reward_failures": action}))
        for action in ("warn", {"threshold": 0.0})
    ]
    failures = 0
    for result in results:
        for file in result.run_dir.path.rglob("*"):
            if file.is_file():
                text = file.read_text(encoding="utf-8", errors="replace")
                assert SECRET not in text, file
                assert "word-known-by-its-key-only" not in text, file
        if result.run_dir.samples.exists():
            failures += result.run_dir.samples.read_text(encoding="utf-8").count("401 for <redacted>")
    assert failures
    assert "401 for <redacted>" in local_runs.screen.getvalue()
    assert SECRET not in local_runs.screen.getvalue()


def with_train(config):
    config["actor_train"]["strategy_args"] = {"strategy_name": "faulty_train"}
    return config


RAISING = {
    "infer strategy 'faulty_engine'": lambda config: with_engine(config, "raise"),
    "train strategy 'faulty_train'": with_train,
    "pipeline 'faulty_pipeline'": lambda config: config | {"pipeline": "faulty_pipeline"},
    "tracker 'faulty_tracker'": lambda config: config | {"track_with": ["faulty_tracker"]},
    "platform 'faulty'": lambda config: config | {"platform": "faulty"},
    "advantage estimator 'faulty_estimator'": lambda config: config | {"adv_estimator": "faulty_estimator"},
    "policy loss 'faulty_loss'": lambda config: config | {"pg_variant": "faulty_loss"},
    "hook roll_run_started": lambda config: config | {"exp_name": "faulty_hook"},
}


@pytest.mark.parametrize("part", RAISING)
def test_plugin_exception_names_part_and_package_and_is_logged(faulty, local_runs, part):
    result = local_runs.run(RAISING[part](faulty(local_runs)))
    assert result.error is not None
    advice = json.loads((result.run_dir.path / "run.json").read_text(encoding="utf-8"))["error"]["advice"]
    assert f"{part} of roll-faulty 1 (roll_faulty.py:" in advice
    screen, log = local_runs.screen.getvalue(), result.run_dir.log.read_text(encoding="utf-8")
    assert "boom" in screen
    assert "roll-faulty 1" in screen
    assert "Traceback" not in screen
    assert 'raise KeyError("boom")' in log


def test_a_reward_that_cannot_start_names_itself_and_its_package(faulty_reward, local_runs):
    result = local_runs.run(with_reward(faulty_reward(local_runs), "start", local_runs.folder))
    assert isinstance(result.error, PluginLoadError)
    assert "reward 'faulty_reward' of roll-faulty_reward 1: " in str(result.error)
    assert 'raise KeyError("boom")' in result.run_dir.log.read_text(encoding="utf-8")


def test_pipeline_without_its_reward_roles_is_refused_by_name(faulty, local_runs):
    result = local_runs.run(faulty(local_runs) | {"pipeline": "forgetful_pipeline"})
    assert isinstance(result.error, PluginError)
    assert "pipeline 'forgetful_pipeline' of roll-faulty 1: " in str(result.error)
    assert "rewards.digits" in str(result.error)


def test_evaluation_that_logs_and_returns_none_is_complete(faulty, local_runs):
    result = local_runs.ok(faulty(local_runs, max_steps=2, eval_steps=1) | {"pipeline": "logging_pipeline"})
    assert [line["val/odd"] for line in local_runs.metrics(result)] == [1.0, 2.0, 3.0]
    assert (result.run_dir.export / "config.json").is_file()


@pytest.mark.parametrize(("pipeline", "found"), [("uncounted_pipeline", "NoneType"), ("numpy_pipeline", "float32")])
def test_a_pipeline_that_returns_what_it_must_not_is_named(faulty, local_runs, pipeline, found):
    result = local_runs.run(faulty(local_runs, max_steps=1, save_steps=1) | {"pipeline": pipeline})
    assert isinstance(result.error, ContractError)
    assert mentions(str(result.error), f"'{pipeline}'", "roll-faulty", found)


def test_an_engine_without_a_receipt_is_named(faulty, local_runs):
    result = local_runs.run(with_engine(faulty(local_runs), "receipt"))
    assert isinstance(result.error, ContractError)
    assert mentions(str(result.error), "actor_infer rank 0", "roll_faulty:FaultyEngine", "WeightReceipt")
