"""Combinations of the distillation keys that train nothing or something else are refused, with the key."""

import pytest
import yaml

from roll_core.config import load
from roll_core.errors import ConfigError
from roll_core.plugins.registry import load_registry

ROLE = {"model_args": {"random_init": {"model_type": "qwen3"}}, "device_mapping": [0]}
TEACHER = ROLE | {"strategy_args": {"strategy_name": "hf_infer"}}
TOPK = {"kd_support": "teacher_topk"}


@pytest.fixture(scope="module")
def registry():
    return load_registry()


@pytest.fixture
def loaded(tmp_path, registry):
    """`loaded(key=...)`, the config with these keys; None removes one."""

    def make(**given):
        strategy = {"strategy_args": {"strategy_name": "hf_train"}}
        base = {
            "pipeline": "distill",
            "rollout_batch_size": 4,
            "num_return_sequences_in_group": 2,
            "tokenizer": {"kind": "byte"},
            "actor_train": ROLE | strategy | {"data_args": {"file_name": "rows.jsonl"}},
            "actor_infer": {"strategy_args": {"strategy_name": "hf_infer"}, "device_mapping": [0]},
            "teachers": {"main": TEACHER},
        }
        config = {key: value for key, value in (base | given).items() if value is not None}
        path = tmp_path / "distill.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return load(path, [], registry)

    return make


@pytest.mark.parametrize(
    ("keys", "located"),
    [
        (TOPK | {"kd_placement": "advantage"}, "kd_placement"),
        ({"kd_support": "student_topk", "kd_placement": "advantage"}, "kd_placement"),
        (TOPK | {"kd_objective": "reverse_kl", "kd_tail": "drop"}, "kd_tail"),
        (TOPK | {"kd_discount": 0.5}, "kd_discount"),
        ({"kd_objective": "forward_kl"}, "kd_objective"),
        ({"distill_data": "mix"}, "distill_data"),
        ({"kd_temperature": 2.0}, "kd_temperature"),
        ({"distill_data": "dataset"} | TOPK, "actor_infer"),
        ({"actor_infer": None}, "distill_data"),
        ({"task_coef": 1.0}, "task_coef"),
        ({"difficulty_mask": True}, "difficulty_mask"),
        ({"js_beta": 1.0}, "js_beta"),
        ({"teachers": {}}, "teachers"),
        ({"teachers": {"a": TEACHER, "b": TEACHER}, "distill_data": "mix", "kd_support": "student_topk"}, "teachers"),
        ({"critic": ROLE | {"strategy_args": {"strategy_name": "hf_train"}}}, "critic"),
        ({"logits_topk": 0}, "logits_topk"),
    ],
)
def test_a_combination_that_trains_nothing_or_something_else_is_refused(loaded, keys, located):
    with pytest.raises(ConfigError) as caught:
        loaded(**keys)
    assert any(located in f"{problem.key} {problem.message}" for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ("reverse_kl", "advantage", True)),
        (TOPK, ("forward_kl", "loss", True)),
        ({"kd_support": "student_topk"}, ("reverse_kl", "loss", True)),
        ({"kd_placement": "loss"}, ("reverse_kl", "loss", True)),
        ({"distill_data": "dataset", "actor_infer": None} | TOPK, ("forward_kl", "loss", False)),
    ],
)
def test_defaults_follow_the_support(loaded, keys, expected):
    config = loaded(**keys).config
    assert (config.objective, config.placement, config.generates) == expected
