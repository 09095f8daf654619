"""Hints for keys of TRL, verl and OpenRLHF."""

import re
from pathlib import Path

import pytest

from roll_core.config import load
from roll_core.config.schema import paths
from roll_core.config.unknown_keys import foreign_keys
from roll_core.errors import ConfigError
from roll_core.pipelines.config import RLVRConfig, SFTConfig
from roll_core.plugins.registry import Registry
from roll_testing.errors import raises_error
from shared_tests.hf_plugins import hf_plugins

REGISTRY = Registry(hf_plugins())
RLVR = """\
pipeline: rlvr
actor_train:
  training_args: {learning_rate: 1e-6, %s}
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
actor_infer:
  strategy_args: {strategy_name: hf_infer}
  generating_args: {top_p: 1.0, %s}
validation:
  data_args: {file_name: rows.jsonl}
  generating_args: {top_p: 1.0, %s}
rewards:
  math: {reward: math_rule}
%s
"""
SFT = """\
pipeline: sft
sft_train:
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
"""


def hints(tmp_path, text):
    """(line, column, key) -> our keys in the hint, of each mistake."""
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load(file, (), REGISTRY)
    ours = {".".join(path) for schema in (RLVRConfig, SFTConfig) for path in paths(schema)}
    return {
        (*map(int, each.where.split(":")[-2:]), each.key): [
            name for name in re.findall(r"[A-Za-z_][\w.]*", each.hint) if name in ours
        ]
        for each in raised.value.problems
    }


def test_every_key_in_the_place_of_a_foreign_one_exists():
    ours = {path for schema in (RLVRConfig, SFTConfig) for path in paths(schema)}
    for foreign, (targets, note) in foreign_keys().items():
        assert targets or note, foreign
        for target in targets.split():
            steps = tuple(target.split("."))
            assert any(path[-len(steps) :] == steps for path in ours), (foreign, target)


def test_no_foreign_key_is_a_roll_key_in_its_place():
    ours = {path for schema in (RLVRConfig, SFTConfig) for path in paths(schema)}
    assert not [foreign for foreign in foreign_keys() if tuple(foreign.split(".")) in ours]


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        ("num_generations", ["num_return_sequences_in_group"]),
        ("beta", ["kl_loss_coef", "use_kl_loss"]),
        ("loss_type", ["loss_agg_mode", "pg_variant"]),
        ("max_completion_length", ["response_length"]),
        ("clip_ratio", ["pg_clip"]),
        ("kl_coef", ["init_kl_coef", "add_token_level_kl", "kl_loss_coef"]),
        ("n", ["num_return_sequences_in_group"]),
        ("train_batch_size", ["rollout_batch_size"]),
        ("n_samples_per_prompt", ["num_return_sequences_in_group"]),
        ("lr", ["actor_train.training_args.learning_rate"]),
        ("temperature", ["actor_infer.generating_args.temperature"]),
        ("top_p", ["actor_infer.generating_args.top_p"]),
        ("top_k", ["actor_infer.generating_args.top_k"]),
        ("deepspeed", ["actor_train.strategy_args.strategy_name"]),
        ("fsdp", ["actor_train.strategy_args.strategy_name"]),
        ("vespo_k_pos", ["pg_options", "pg_variant"]),
        ("vespo_lambda_neg", ["pg_options", "pg_variant"]),
        ("sapo_temperature_neg", ["pg_options", "pg_variant"]),
        ("vllm_importance_sampling_correction", ["train_infer_correction.is_weight.enabled"]),
        ("vllm_importance_sampling_cap", ["train_infer_correction.is_weight.upper_bound"]),
        ("adam_epsilon", ["actor_train.training_args.adam_epsilon"]),
        ("multi_objective_aggregation", ["adv_estimator"]),
        ("steps_per_generation", ["rollout_batch_size"]),
        ("load_best_model_at_end", ["save_best"]),
        ("push_to_hub", []),
    ],
)
def test_a_foreign_key_gets_ours(tmp_path, foreign, ours):
    text = RLVR % ("weight_decay: 0.0", "top_k: 0", "top_k: 0", f"{foreign}: 1")
    assert hints(tmp_path, text) == {(14, 1, foreign): ours}


@pytest.mark.parametrize(
    "overrides",
    [
        ("adv_estimator=grpo",),
        ("adv_estimator=reinforce", "norm_mean_type=group"),
        ("adv_estimator=reinforce", "norm_mean_type=group", "norm_std_type=batch"),
    ],
)
def test_hint_for_scale_rewards_is_a_valid_config(overrides, tmp_path):
    file = tmp_path / "run.yaml"
    key = "actor_train.training_args.gradient_accumulation_steps=128"
    file.write_text(RLVR % ("per_device_train_batch_size: 8", "top_k: 0", "top_k: 0", "scale_rewards: none"))
    with pytest.raises(ConfigError) as error:
        load(file, (), REGISTRY)
    (hint,) = [each.hint for each in error.value.problems if each.key == "scale_rewards"]
    for override in overrides:
        assert all(word in hint for word in override.split("="))
    assert load(file, ("~scale_rewards", "num_return_sequences_in_group=8", "pretrain=m", key, *overrides), REGISTRY)


def test_a_key_of_another_framework_may_be_a_command_here(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(RLVR % ("weight_decay: 0.0", "top_k: 0", "top_k: 0", "push_to_hub: true"))
    with raises_error("ROLL-C010", "`roll-core push`", key="push_to_hub"):
        load(file, (), REGISTRY)


def test_the_place_decides_where_the_meaning_depends_on_it(tmp_path):
    batch = ["per_device_train_batch_size", "gradient_accumulation_steps"]
    assert hints(tmp_path, RLVR % ("train_batch_size: 8", "n: 8", "n: 8", "")) == {
        (3, 40, "actor_train.training_args.train_batch_size"): [f"actor_train.training_args.{key}" for key in batch],
        (8, 33, "actor_infer.generating_args.n"): ["num_return_sequences_in_group"],
        (11, 33, "validation.generating_args.n"): ["validation.generating_args.num_return_sequences"],
    }


def test_the_keys_of_a_foreign_section_are_found_in_it(tmp_path):
    section = "actor_rollout_ref: {actor: {optim: {lr: 1e-6}}, rollout: {val_kwargs: {n: 2}, n: 4, unheard_of: 1}}"
    assert hints(tmp_path, RLVR % ("weight_decay: 0.0", "top_k: 0", "top_k: 0", section)) == {
        (14, 1, "actor_rollout_ref"): [
            "actor_train.training_args.learning_rate",
            "validation.generating_args.num_return_sequences",
            "num_return_sequences_in_group",
        ]
    }


def test_a_section_with_almost_our_name_is_ours(tmp_path):
    section = "validations: {generating_args: {n: 2, temperature: 1.0}}"
    assert hints(tmp_path, RLVR % ("weight_decay: 0.0", "top_k: 0", "top_k: 0", section)) == {
        (14, 1, "validations"): ["validation"]
    }


def test_a_foreign_config_without_a_pipeline_gets_one(tmp_path):
    (tmp_path / "run.yaml").write_text("algorithm: {filter_groups: {enable: true}}\n")
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "run.yaml", (), REGISTRY)
    (problem,) = error.value.problems
    assert problem.key == "pipeline"
    assert "pipeline: rlvr" in problem.hint


def test_keys_that_a_pipeline_does_not_have_are_not_named(tmp_path):
    assert hints(tmp_path, SFT + "max_seq_length: 8\nloss_type: nll\nnum_generations: 8\n") == {
        (5, 1, "max_seq_length"): ["prompt_length", "response_length"],
        (6, 1, "loss_type"): [],
        (7, 1, "num_generations"): [],
    }


def test_a_batch_size_in_foreign_words_brings_no_second_mistake(tmp_path):
    text = RLVR.replace("rewards:", "num_return_sequences_in_group: 3\nrewards:") % (
        "per_device_train_batch_size: 5",
        "top_k: 0",
        "top_k: 0",
        "train_batch_size: 5",
    )
    assert list(hints(tmp_path, text)) == [(15, 1, "train_batch_size")]


def test_coming_from_page_names_keys_and_defaults_of_the_schema():
    """docs/coming-from.md: the columns `here` have keys and defaults, the column `keys here` settings."""
    docs = Path(__file__).parents[2] / "docs"
    pages = (docs / "configuration.md").read_text(encoding="utf-8")
    listed = re.findall(
        r"^- `(\w+)` \(.*?(?:default\s+`([^`]*)`(?:,\s+example\s+`[^`]*`)?)?\):", pages, re.MULTILINE | re.DOTALL
    )
    schema = dict(reversed(listed))  # rlvr's default, not that of a later schema that overrides it
    column, seen, wrong = None, set(), []
    for line in (docs / "coming-from.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells:
            column = None
        elif column is None:
            column = next((name for name in ("here", "keys here") if name in cells), "")
            index = cells.index(column) if column else None
        elif column:
            for key, value in re.findall(r"`(?:\w+\.)*(\w+_\w+|lambd)(?:: ([^`]+))?`", cells[index]):
                seen.add(key)
                if key not in schema or (column == "here" and value and value.strip('"') != schema[key].strip("'")):
                    wrong.append((key, value, schema.get(key)))
    assert len(seen) > 25
    assert wrong == []
