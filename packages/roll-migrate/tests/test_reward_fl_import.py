"""Import of ROLL's Reward-FL: its steps with gradients, its constants, and its strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from roll_core.plugins.registry import load_registry
from roll_migrate.roll import import_roll

FILE = Path(__file__).parent / "roll" / "reward_fl.yaml"


def imported(tmp_path, **keys):
    options = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    options["actor_train"]["model_args"]["model_config_kwargs"] |= keys
    path = tmp_path / "reward_fl.yaml"
    path.write_text(yaml.safe_dump(options), encoding="utf-8")
    return import_roll(path, load_registry())


def test_steps_with_gradients_become_options_of_refl(tmp_path):
    result = imported(tmp_path)
    assert result.config["pipeline"] == "reward_flow"
    assert result.config["objective"] == "refl"
    assert (result.config["num_inference_steps"], result.config["shift"]) == (10, 5.0)
    assert result.config["objective_options"] == {
        "grad_steps": 3,  # steps 5, 6 and 7
        "stop": "uniform",
        "stop_range": [7, 8],
        "predict": "sample",
        "reward_scale": 0.625,
        "reward_offset": 0.54,
        "kl_coef": 1.0,
    }
    assert result.config["actor_train"]["strategy_args"]["strategy_name"] == "deepspeed_train"
    assert "model_config_kwargs" not in result.config["actor_train"]["model_args"]
    assert {entry.status for entry in result.keys} <= {"kept", "renamed", "changed", "not needed", "added"}


def test_stop_at_the_last_step_needs_no_range(tmp_path):
    options = imported(tmp_path, final_timestep=9).config["objective_options"]
    assert options["grad_steps"] == 5
    assert "stop_range" not in options


@pytest.mark.parametrize(
    "keys", [{"trainable_models": "dit2"}, {"extra_inputs": "input_image"}, {"mid_timestep": 8}, {"final_timestep": 10}]
)
def test_unsupported_keys_stay_for_check_to_reject(tmp_path, keys):
    (name,) = keys
    result = imported(tmp_path, **keys)
    assert "unsupported" in {entry.status for entry in result.keys if entry.key.endswith(name)}
    assert result.config["actor_train"]["model_args"]["model_config_kwargs"][name] == keys[name]
