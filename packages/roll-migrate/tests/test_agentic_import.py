"""Configs of ROLL's agentic pipeline, in the shape of its examples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_core.cli.main import main
from roll_core.config import load
from roll_core.config.compose import compose
from roll_core.plugins.registry import load_registry
from roll_migrate.roll import import_roll

FRAGMENT = """\
max_tokens_per_step: 64
max_actions_per_traj: 10
env_manager_cls: roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager
custom_env:
  SimpleSokoban:
    env_type: sokoban
    max_steps: ${max_actions_per_traj}
    max_tokens_per_step: ${max_tokens_per_step}
    env_manager_cls: ${env_manager_cls}
    use_thread_lock: true
    agent_system_template: You are a helpful assistant.
    env_config:
      action_pattern: "<answer>(.*?)</answer>"
      max_steps: ${max_actions_per_traj}
      dim_room: [6, 8]
      num_boxes: 2
      search_depth: 10
  FrozenLake:
    env_type: frozen_lake
    max_steps: 5
    env_manager_cls: ${env_manager_cls}
    env_config: {size: 5, p: 0.7, is_slippery: true}
"""
THEIRS = """\
defaults:
  - config/traj_envs@_here_
exp_name: agentic-lake
seed: 42
track_with: stdout
num_gpus_per_node: 2
max_steps: 1024
save_steps: 10000
eval_steps: 10
rollout_batch_size: 32
val_batch_size: 32
sequence_length: 2048
pretrain: Qwen/Qwen2.5-0.5B-Instruct
reward_normalization: {grouping: traj_group_id, method: mean_std}
adv_estimator: ADV
batch_adjust_mode: copy
async_generation_ratio: 1
add_token_level_kl: false
actor_train:
  model_args: {dtype: bf16}
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 2, gradient_accumulation_steps: 16}
  data_args: {template: qwen2_5}
  strategy_args: {strategy_name: hf_train}
  device_mapping: [0]
actor_infer:
  model_args: {dtype: bf16}
  generating_args: {max_new_tokens: "${max_tokens_per_step}", top_p: 0.99, top_k: 100, temperature: 0.99}
  strategy_args: {strategy_name: hf_infer}
  device_mapping: [1]
reward_norm: null
train_env_manager:
  format_penalty: -0.15
  max_env_num_per_worker: 16
  num_env_groups: 8
  group_size: 4
  tags: [FrozenLake]
  num_groups_partition: [8]
val_env_manager:
  max_env_num_per_worker: 32
  num_env_groups: 32
  group_size: 1
  tags: [SimpleSokoban, FrozenLake]
  num_groups_partition: [16, 16]
custom_envs:
  SimpleSokoban: ${custom_env.SimpleSokoban}
  FrozenLake: ${custom_env.FrozenLake}
"""


def imported(folder: Path, text: str) -> tuple[dict[str, Any], Any]:
    (folder / "config").mkdir(parents=True, exist_ok=True)
    (folder / "config" / "traj_envs.yaml").write_text(FRAGMENT, encoding="utf-8")
    file, out = folder / "theirs.yaml", folder / "ours.yaml"
    file.write_text(text, encoding="utf-8")
    assert main(["import", "roll", str(file), "-o", str(out)]) == 0
    registry = load_registry()
    return {entry.key or entry.to[0]: entry for entry in import_roll(file, registry).keys}, load(
        out, (), registry
    ).config


def test_rolls_example_becomes_a_config_of_agentic(tmp_path: Path) -> None:
    entries, config = imported(tmp_path, THEIRS.replace("ADV", "grpo"))
    assert config.pipeline == "agentic"
    assert (config.adv_estimator, config.num_groups, config.group_size) == ("grpo", 8, 4)
    assert (config.max_actions_per_traj, config.max_tokens_per_step) == (10, 64)
    train, val = config.train_env_manager, config.val_env_manager
    assert (train.tags, train.num_env_groups, train.format_penalty) == (["FrozenLake"], 8, -0.15)
    assert (val.num_groups_partition, val.group_size) == ([16, 16], 1)
    assert (val.generating_args.temperature, val.generating_args.top_k) == (0.95, 50)
    sokoban, lake = config.custom_envs["SimpleSokoban"], config.custom_envs["FrozenLake"]
    assert (sokoban.environment, dict(sokoban.env_config)) == ("sokoban", {"rows": 6, "columns": 8, "boxes": 2})
    assert (sokoban.max_steps, sokoban.max_tokens_per_step) == (10, 64)
    assert dict(lake.env_config) == {"size": 5, "holes": 0.3, "slippery": 0.666667}
    assert config.response_length == 2048 - config.prompt_length
    assert not config.correction.enabled
    assert entries["custom_envs.SimpleSokoban.agent_system_template"].status == "differs"
    assert entries["train_env_manager.max_env_num_per_worker"].status == "not needed"
    assert entries["custom_envs.FrozenLake.env_type"].to == ("custom_envs.FrozenLake.environment",)


@pytest.mark.parametrize(("tokens", "status"), [("${max_tokens_per_step}", "not needed"), ("63", "differs")])
def test_lower_limit_of_a_reply_is_reported(tokens: str, status: str, tmp_path: Path) -> None:
    text = THEIRS.replace("ADV", "grpo").replace("${max_tokens_per_step}", tokens)  # of 64 tokens
    entries, _ = imported(tmp_path, text)
    assert entries["actor_infer.generating_args.max_new_tokens"].status == status


@pytest.mark.parametrize(
    ("estimator", "normalisation", "lines", "expected"),
    [
        ("gigpo", "grouping: traj_group_id, method: mean", "step_reward_gamma: 0.9\n", {
            "adv_options": {"mode": "mean_norm", "step_reward_gamma": 0.9}}),
        ("step_reinforce", "grouping: state, method: mean_std", "episode_reward_weight: 2\n", {
            "adv_options": {"method": "mean_std", "grouping": "state"}}),
        ("agentic_reinforce", "method: identity", "", {"norm_mean_type": None, "norm_std_type": None}),
        ("reinforce", "grouping: batch, method: mean", "", {"norm_mean_type": "batch", "norm_std_type": None}),
        ("reinforce", "grouping: traj_group_id, method: asym_clip", "", {
            "norm_mean_type": "group", "norm_std_type": "group"}),
        ("grpo", "grouping: batch, method: mean_std", "", {
            "adv_estimator": "reinforce", "norm_mean_type": "batch", "norm_std_type": "batch"}),
    ],
)  # fmt: skip
def test_normalisation_goes_to_the_estimator_that_reads_it(
    estimator: str, normalisation: str, lines: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    text = THEIRS.replace("ADV", estimator).replace("grouping: traj_group_id, method: mean_std", normalisation)
    _, config = imported(tmp_path, text + lines)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("group_size: 4", "group_size: 4\n  group_size_redundancy: 2", "train_env_manager.group_size_redundancy"),
        ("group_size: 4", "group_size: 4\n  llm_proxy: {proxy_type: openai}", "train_env_manager.llm_proxy"),
        ("adv_estimator: ADV", "adv_estimator: ADV\nratio_type: segment", "ratio_type"),
        ("method: mean_std", "method: mean_std, norm_mean_type: batch", "reward_normalization"),
        ("method: mean_std", "method: mean", "reward_normalization"),
    ],
)
def test_unsupported_training_settings_are_rejected_by_check(
    old: str, new: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "traj_envs.yaml").write_text(FRAGMENT, encoding="utf-8")
    file = tmp_path / "theirs.yaml"
    method = "mean_std" if "method" in old else "identity"
    text = THEIRS.replace("grouping: traj_group_id, method: mean_std", f"method: {method}")
    file.write_text(text.replace(old, new, 1).replace("ADV", "agentic_reinforce"), encoding="utf-8")
    assert main(["import", "roll", str(file), "-o", str(tmp_path / "ours.yaml")]) == 1
    assert re.search(rf"ours\.yaml:\d+:\d+: ROLL-[CP]\d+ {key}", capsys.readouterr().out)


def test_short_sequences_are_split_into_prompt_and_response(tmp_path):
    registry = load_registry()
    file = Path(__file__).parent / "roll" / "agentic.yaml"
    data = compose(file, ("sequence_length=1001",), registry).data
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(data))
    config = import_roll(tmp_path / "theirs.yaml", registry).config
    assert (config["prompt_length"], config["response_length"]) == (500, 501)
