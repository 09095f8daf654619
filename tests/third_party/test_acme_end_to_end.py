"""A plugin written against `roll_core.spec` alone brings platform, both strategies, pipeline and reward, and trains."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from roll_testing.errors import mentions
from shared_tests import forked


@pytest.fixture
def config(tmp_path: Path) -> Path:
    rows = "".join(json.dumps({"id": i, "prompt": letter}) + "\n" for i, letter in enumerate("abcd"))
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8")
    path = tmp_path / "bandit.yaml"
    role = {
        "model_args": {"dtype": "fp32", "random_init": {"model_type": "bigram"}},
        "device_mapping": [0],
    }
    path.write_text(
        yaml.safe_dump(
            {
                "pipeline": "acme_bandit",
                "platform": "acme_board",
                "output_dir": str(tmp_path / "output"),
                "prompt_length": 4,
                "response_length": 8,
                "max_steps": 30,
                "save_steps": 0,
                "track_with": [],
                "tokenizer": {"kind": "char", "alphabet": "abcd"},
                "policy": role
                | {
                    "strategy_args": {"strategy_name": "acme_train", "strategy_config": {"vocabulary": 6}},
                    "training_args": {"learning_rate": 0.3, "per_device_train_batch_size": 32},
                    "data_args": {"file_name": str(tmp_path / "rows.jsonl")},
                },
                "sampler": role
                | {"strategy_args": {"strategy_name": "acme_infer", "strategy_config": {"vocabulary": 6}}},
                "rewards": {"share": {"reward": "acme_share", "letter": "c"}},
                "shunned": "d",
            }
        ),
        encoding="utf-8",
    )
    return path


def roll_core(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run(["roll_core", *arguments], env=os.environ | {"PYTHONPATH": str(installed)}, timeout=240)


@pytest.mark.parametrize("executor", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def test_the_plugins_own_parts_train_together(installed, config, executor):
    done = roll_core(installed, "run", str(config), f"executor={executor}")
    assert done.returncode == 0, done.stdout
    run = config.parent / "output" / "roll" / "latest"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    scores = [line["score/mean"] for line in lines]
    assert len(scores) == 30
    # Random letters earn 1/4 at most (the table has tokens that are no letters, too); the rewarded one takes over.
    assert scores[0] < 0.45
    assert scores[-1] > 0.8
    # The pipeline's own term, with its own weights: a letter of 1/6 at first.
    assert 0.1 < lines[0]["policy/unlikelihood"] < 0.25
    assert lines[-1]["policy/unlikelihood"] < 0.05
    for line in lines:
        assert line["policy/loss"] == pytest.approx(line["policy/policy_loss"] + line["policy/unlikelihood"], abs=1e-6)
    record = json.loads((run / "run.json").read_text("utf-8"))
    assert record["platform"] == "acme_board"
    assert record["executor"] == executor
    assert {"roll-core", "roll-acme"} <= {plugin["package"] for plugin in record["plugins"]}
    assert (run / "acme.txt").read_text("utf-8") == "fine"


def test_the_plugins_estimator_trains_as_grpo_does(installed, config):
    written = yaml.safe_load(config.read_text("utf-8"))
    rows = "".join(json.dumps({"id": i, "prompt": letter * 2}) + "\n" for i, letter in enumerate("abcd" * 2))
    (config.parent / "rows.jsonl").write_text(rows, encoding="utf-8")
    kept = {key: written[key] for key in ("platform", "output_dir", "tokenizer", "prompt_length", "response_length")}
    written["policy"]["training_args"]["per_device_train_batch_size"] = 8
    rlvr = kept | {
        "pipeline": "rlvr",
        "max_steps": 5,
        "save_steps": 0,
        "eval_steps": 0,
        "track_with": [],
        "rollout_batch_size": 4,
        "num_return_sequences_in_group": 4,
        "actor_train": written["policy"],
        "actor_infer": written["sampler"],
        "rewards": written["rewards"],
    }
    config.write_text(yaml.safe_dump(rlvr), encoding="utf-8")
    found = {}
    for estimator in ("grpo", "acme_relative"):
        done = roll_core(installed, "run", str(config), f"adv_estimator={estimator}")
        run = config.parent / "output" / "roll" / "latest"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
        assert len(lines) == 5, done.stdout
        names = ("score/mean", "advantage/max", "advantage/min", "actor/loss", "actor/grad_norm")
        found[estimator] = [[line[name] for name in names] for line in lines]
    assert found["acme_relative"] == found["grpo"]
    assert any(line[1] > 0.5 for line in found["grpo"])


def test_sft_works_with_a_strategy_without_argmax_tokens(installed, config):
    written = yaml.safe_load(config.read_text("utf-8"))
    rows = [{"id": i, "prompt": letter, "response": letter * 3} for i, letter in enumerate("abcd")]
    data = config.parent / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    kept = {key: written[key] for key in ("platform", "output_dir", "tokenizer", "prompt_length", "response_length")}
    policy = written["policy"]
    policy["training_args"]["per_device_train_batch_size"] = 2
    sft = kept | {
        "pipeline": "sft",
        "max_steps": 2,
        "save_steps": 0,
        "eval_steps": 2,
        "track_with": [],
        "sft_train": policy,
        "validation": {"data_args": {"file_name": str(data)}},
    }
    config.write_text(yaml.safe_dump(sft), encoding="utf-8")
    done = roll_core(installed, "run", str(config))
    assert mentions(done.stdout, "BigramTrainStrategy")  # and gets that far
    run = config.parent / "output" / "roll" / "latest"
    last = json.loads((run / "metrics.jsonl").read_text("utf-8").splitlines()[-1])
    assert {"train/loss", "val/loss"} <= set(last)
    assert not [name for name in last if "token_accuracy" in name]


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_publishes_by_the_plugins_own_transport(installed, config):
    done = roll_core(installed, "run", str(config), "weight_transport=acme", "max_steps=6")
    assert done.returncode == 0, done.stdout
    run = config.parent / "output" / "roll" / "latest"
    record = json.loads((run / "run.json").read_text("utf-8"))
    assert record["weight_transports"] == {"policy -> sampler": "acme"}
    assert record["executor"] == "ray"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [line["weight_sync/version"] for line in lines] == list(range(6))
    assert all(line["weight_sync/copied_bytes"] == 6 * 6 * 4 for line in lines)


def test_the_plugins_transport_is_refused_within_one_process(installed, config):
    done = roll_core(installed, "run", str(config), "weight_transport=acme", "executor=local")
    assert done.returncode != 0
    assert "acme: the workers are in one process" in done.stdout


def test_error_in_plugin_keys_is_located_like_any_other(installed, config):
    done = roll_core(installed, "check", str(config), "policy.strategy_args.strategy_config.vocabullary=3")
    assert done.returncode == 2
    assert "vocabullary" in done.stdout
    assert "vocabulary" in done.stdout


def test_strategy_on_an_unlisted_platform_is_refused(installed, config):
    done = roll_core(installed, "run", str(config), "platform=cpu")
    assert done.returncode == 2
    assert mentions(done.stdout, "acme_train", "acme_board")


def test_run_without_the_plugin_names_the_missing_part(config):
    done = roll_core(Path("nowhere"), "check", str(config))
    assert done.returncode == 2
    assert "acme_bandit" in done.stdout
