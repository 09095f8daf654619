"""Combinations of the distillation keys that train nothing or something else are refused, with the key."""

import json

import numpy as np
import pytest
import yaml

from roll_core.config import load
from roll_core.config.dump import dump
from roll_core.data.rows import Rows
from roll_core.errors import ConfigError, DataError
from roll_core.pipelines.experience import Experience
from roll_core.pipelines.stages import policy_masks
from roll_core.plugins.registry import load_registry
from roll_core.spec.config import DataArguments
from roll_core.types import Group, Reward, Sample
from roll_pipeline_distill.config import DistillConfig
from roll_testing.errors import mentions, raises_error

ROLE = {"model_args": {"random_init": {"model_type": "qwen3"}}, "device_mapping": [0]}
TEACHER = ROLE | {"strategy_args": {"strategy_name": "hf_infer"}}
TOPK = {"kd_support": "teacher_topk"}
ENGINE = {"strategy_args": {"strategy_name": "hf_infer"}, "device_mapping": [0]}
SERVED = {"served_teachers": {"main": ENGINE | ROLE}, "teachers": None}
DATASET = {"distill_data": "dataset", "actor_infer": None}
STORED = DATASET | {"kd_support": "stored", "teachers": None}
EMA = {"self_teacher": "ema", "teacher_prompt": "hint", "teachers": None}
ON_MEGATRON = {
    "actor_train": ROLE
    | {"strategy_args": {"strategy_name": "megatron_train"}, "data_args": {"file_name": "rows.jsonl"}}
}
HALF = {"generating_args": {"temperature": 0.5}}
FROM_TEACHER = {"distill_data": "teacher", "actor_infer": None, "teacher_infer": ENGINE}


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
            "actor_infer": ENGINE,
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
        ({"kd_support": "student_topk", "kd_tail": "drop"}, "kd_tail"),
        (STORED | {"kd_objective": "skewed_reverse_kl", "kd_tail": "drop"}, "kd_tail"),
        (TOPK | {"kd_discount": 0.5}, "kd_discount"),
        ({"kd_objective": "forward_kl"}, "kd_objective"),
        ({"distill_data": "mix"}, "distill_data"),
        ({"kd_temperature": 2.0}, "kd_temperature"),
        ({"distill_data": "dataset"} | TOPK, "actor_infer"),
        ({"actor_infer": None}, "distill_data"),
        ({"task_coef": 1.0}, "task_coef"),
        ({"difficulty_mask": True}, "difficulty_mask"),
        ({"positive_nll_coef": 0.1}, "positive_nll_coef"),
        ({"logprob_temperature": 1.0, "actor_infer": ENGINE | HALF, "ppo_epochs": 2}, "logprob_temperature"),
        ({"js_beta": 1.0}, "js_beta"),
        ({"teachers": {}}, "teachers"),
        ({"critic": ROLE | {"strategy_args": {"strategy_name": "hf_train"}}}, "critic"),
        (FROM_TEACHER | {"teacher_infer": None}, "teacher_infer"),
        (FROM_TEACHER, "teachers"),
        (FROM_TEACHER | TOPK | {"teachers": {"a": TEACHER, "b": TEACHER}}, "teachers"),
        (FROM_TEACHER | {"teachers": {}, "kd_placement": "advantage"}, "kd_placement"),
        (FROM_TEACHER | {"teachers": {}, "kd_objective": "reverse_kl"}, "kd_objective"),
        (FROM_TEACHER | {"teachers": {}, "actor_infer": ENGINE}, "actor_infer"),
        ({"teacher_infer": ENGINE}, "teacher_infer"),
        (EMA | ON_MEGATRON, "actor_train.strategy_args.strategy_name"),
        (EMA | {"teacher_prompt": None}, "self_teacher"),
        (EMA | {"ema_decay": 1.0}, "ema_decay"),
        (EMA | {"portable_checkpoints": True}, "portable_checkpoints"),
        (EMA | {"kd_support": "full"}, "self_teacher"),
        ({"kd_support": "full", "teachers": {"a": TEACHER, "b": TEACHER}}, "teachers"),
        ({"kd_support": "full", "kd_placement": "advantage"}, "kd_placement"),
        ({"nll_coef": 0.5}, "nll_coef"),
        (TOPK | {"nll_coef": 0.5, "kd_temperature": 2.0}, "nll_coef"),
        (TOPK | {"distill_on_prompt": True}, "distill_on_prompt"),
        (SERVED | {"kd_support": "student_topk"}, "kd_support"),
        (SERVED | {"kd_support": "full"}, "kd_support"),
        (SERVED | DATASET, "distill_data"),
        (SERVED | TOPK | {"kd_temperature": 2.0}, "temperature"),
        (SERVED | TOPK | {"kd_placement": "advantage"}, "kd_placement"),
        (SERVED | {"teachers": {"main": TEACHER}}, "teachers"),
        (SERVED | {"actor_infer": ENGINE | {"generating_args": {"temperature": 0.7}}}, "temperature"),
        ({"self_teacher": "policy", "teacher_prompt": "hint"}, "teachers"),
        ({"self_teacher": "policy", "teachers": None}, "teacher_prompt"),
        ({"self_teacher": "base", "teachers": None}, "lora_target"),
        ({"self_teacher": "policy", "teacher_prompt": "a", "teachers": None, "kd_support": "full"}, "self_teacher"),
        (TOPK | DATASET | {"distill_on_prompt": True, "teacher_prompt": "hint"}, "teacher_prompt"),
        (STORED | {"teachers": {"main": TEACHER}}, "teachers"),
        (STORED | {"kd_temperature": 2.0}, "kd_temperature"),
        (STORED | {"teacher_prompt": "hint"}, "teacher_prompt"),
        ({"kd_support": "stored", "teachers": None}, "distill_data"),
        ({"logits_topk": 0}, "logits_topk"),
        (TOPK | {"train_infer_correction": {"is_weight": {"enabled": True}}}, "train_infer_correction"),
        (TOPK | {"train_infer_correction": {"filters": [{"enabled": True}]}}, "train_infer_correction"),
        (FROM_TEACHER | {"teachers": {}, "async_generation_ratio": 1.0}, "async_generation_ratio"),
        ({"async_generation_ratio": 1.0, "actor_infer": ENGINE}, "async_generation_ratio"),
        (TOPK | DATASET | {"async_generation_ratio": 1.0}, "async_generation_ratio"),
        (TOPK | {"pg_variant": "gspo"}, "pg_variant"),
        ({"kd_placement": "loss", "entropy_loss_coef": 0.01}, "entropy_loss_coef"),
        ({"adv_estimator": "grpo"}, "adv_estimator"),
        ({"whiten_advantages": True}, "whiten_advantages"),
    ],
)
def test_combinations_that_train_nothing_are_refused(loaded, keys, located):
    with pytest.raises(ConfigError) as caught:
        loaded(**keys)
    assert any(located in f"{problem.key} {problem.message}" for problem in caught.value.problems)


@pytest.mark.parametrize(("keys", "kept"), [({}, ["0", "1"]), ({"difficulty_mask": True}, ["0"])])
def test_samples_need_a_reward_only_if_something_reads_it(loaded, keys, kept):
    rewards = {"only": {"reward": "math_rule", "world_size": 1}}
    config = loaded(rewards=rewards, **keys).config
    given = [Reward(value=0.5), Reward(value=None, failure="broke")]
    samples = [
        Sample(
            id=str(at),
            group_id="g",
            prompt_ids=np.array([7]),
            response_ids=np.array([8]),
            logprobs=np.zeros(1, dtype=np.float32),
            loss_mask=np.ones(1, dtype=bool),
            versions=np.zeros(1, dtype=np.int32),
            finish_reason="stop",
            reward=reward,
        )
        for at, reward in enumerate(given)
    ]
    experience = Experience.of([Group(id="g", samples=tuple(samples))], scored=config.reads_rewards)
    assert [sample.id for sample in experience.samples] == kept
    assert all(mask(experience).all() for mask in policy_masks(config))


@pytest.mark.parametrize(
    ("keys", "warns"),
    [({}, True), ({"kd_placement": "loss"}, True), ({"kd_support": "full"}, False), (TOPK, False)],
)
def test_greedy_rollouts_do_not_estimate_a_divergence(loaded, keys, warns):
    greedy = loaded(**keys | {"actor_infer": ENGINE | {"generating_args": {"temperature": 0.0}}})
    found = [each.key for each in greedy.warnings]
    assert found == ["actor_infer.generating_args.temperature"] * warns


def test_stale_samples_estimate_a_divergence_only_with_weights(loaded):
    given = {"async_generation_ratio": 1.0, "actor_infer": ENGINE | {"device_mapping": [1]}}
    assert not loaded(**given).warnings
    assert loaded(**given).config.correction.is_weight.enabled
    assert not loaded(**given | {"kd_support": "full"}).warnings
    assert [each.key for each in loaded(**given | {"kd_placement": "loss"}).warnings] == ["kd_placement"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ("reverse_kl", "advantage", True)),
        (TOPK, ("forward_kl", "loss", True)),
        ({"kd_support": "student_topk"}, ("reverse_kl", "loss", True)),
        ({"kd_support": "full"}, ("reverse_kl", "loss", True)),
        ({"kd_support": "full", "distill_data": "dataset", "actor_infer": None}, ("forward_kl", "loss", False)),
        ({"kd_placement": "loss"}, ("reverse_kl", "loss", True)),
        ({"distill_data": "dataset", "actor_infer": None} | TOPK, ("forward_kl", "loss", False)),
        (FROM_TEACHER | {"teachers": {}, "teacher_infer": ENGINE | ROLE}, ("forward_kl", "loss", False)),
        (FROM_TEACHER | {"kd_support": "student_topk"}, ("reverse_kl", "loss", False)),
        (STORED, ("forward_kl", "loss", False)),
        (SERVED, ("reverse_kl", "advantage", True)),
        (SERVED | TOPK, ("forward_kl", "loss", True)),
        (SERVED | TOPK | DATASET, ("forward_kl", "loss", False)),
        ({"self_teacher": "policy", "teacher_prompt": "hint", "teachers": None}, ("reverse_kl", "advantage", True)),
    ],
)
def test_defaults_follow_the_support(loaded, keys, expected):
    config = loaded(**keys).config
    assert (config.objective, config.placement, config.generates) == expected


@pytest.mark.parametrize(
    ("keys", "roles"),
    [
        ({}, ["actor_train", "actor_infer", "teachers.main"]),
        (TOPK | DATASET, ["actor_train", "teachers.main"]),
        (STORED, ["actor_train"]),
        (FROM_TEACHER | {"teachers": None}, ["actor_train", "teacher_infer"]),
        (SERVED, ["actor_train", "actor_infer", "served_teachers.main"]),
        (EMA, ["actor_train", "actor_infer"]),
    ],
)
def test_the_config_that_a_run_saves_is_the_same_config(loaded, registry, tmp_path, keys, roles):
    config = loaded(**keys).config
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump(config), encoding="utf-8")
    again = load(saved, [], registry).config
    assert again == config
    assert sorted(again.roles()) == sorted(roles)


def test_the_teachers_engine_has_the_teachers_model(loaded):
    teacher = TEACHER | {"model_args": {"model_name_or_path": "/models/teacher"}}
    config = loaded(**FROM_TEACHER | TOPK, teachers={"main": teacher}).config
    assert config.teacher_infer.model_args.model_name_or_path == "/models/teacher"


def test_served_teachers_engine_is_checked_with_its_own_model(loaded):
    """vLLM refuses expert parallelism for a dense model."""
    experts = {"random_init": {"model_type": "qwen3_moe", "num_experts": 8}}
    strategy = {"strategy_name": "vllm", "strategy_config": {"enable_expert_parallel": True}}
    engine = {"strategy_args": strategy, "device_mapping": [0]}
    teachers = {"served_teachers": {"main": engine | {"model_args": experts}}}
    loaded(**SERVED | teachers)
    with pytest.raises(ConfigError) as caught:
        loaded(**SERVED | teachers | {"actor_infer": engine})
    assert [each.key for each in caught.value.problems] == ["actor_infer.strategy_args.strategy_config"]


def test_served_teacher_needs_room_for_one_more_token(loaded):
    """Engines sample at least one token of each request; the student's engine stops at the last one."""

    def given(limit):
        engine = ENGINE | {"strategy_args": {"strategy_name": "vllm", "strategy_config": {"max_model_len": limit}}}
        lengths = {"prompt_length": 100, "response_length": 28}
        return SERVED | lengths | {"served_teachers": {"main": engine | ROLE}}

    loaded(**given(129))
    with pytest.raises(ConfigError) as caught:
        loaded(**given(128))
    role = "served_teachers.main.strategy_args.strategy_config"
    assert [(each.key, each.code) for each in caught.value.problems] == [(role, "ROLL-C014")]
    assert mentions(str(caught.value), "max_model_len", "129")


@pytest.mark.parametrize("keys", [SERVED | TOPK | DATASET, FROM_TEACHER | {"teachers": {}}], ids=["served", "samples"])
def test_engine_with_fixed_weights_needs_no_transport(loaded, keys):
    """DeepSpeed sends no weights within one process; no weights are sent to a teacher."""
    trained = ON_MEGATRON["actor_train"] | {"strategy_args": {"strategy_name": "deepspeed_train"}}
    engine = ENGINE | ROLE

    def given(engine):
        if "served_teachers" in keys:
            return keys | {"served_teachers": {"main": engine}}
        return keys | {"teacher_infer": engine}

    loaded(**given(engine) | {"actor_train": trained, "executor": "local"})
    loaded(**given(engine | {"is_offload_states": False}))
    with pytest.raises(ConfigError) as caught:
        loaded(**given(engine | {"is_offload_states": True}))
    role = "served_teachers.main" if "served_teachers" in keys else "teacher_infer"
    assert [(each.key, each.code) for each in caught.value.problems] == [(f"{role}.is_offload_states", "ROLL-C017")]


def write_model(folder, vocabulary, size):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": size}), encoding="utf-8")
    stored = {"model": {"vocab": vocabulary}}
    (folder / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    return {"model_args": {"model_name_or_path": str(folder)}}


def test_vocabularies_are_compared_before_anything_is_built(loaded, tmp_path):
    """A padded vocabulary is the same one; another tokenizer, and more tokens than the vocabulary, are refused."""
    vocabulary = {f"t{at}": at for at in range(64)}
    student = ROLE | {"strategy_args": {"strategy_name": "hf_train"}, "data_args": {"file_name": "rows.jsonl"}}
    given = {
        "tokenizer": None,
        "actor_train": student | write_model(tmp_path / "student", vocabulary, 64),
        "teachers": {"main": TEACHER | write_model(tmp_path / "padded", vocabulary, 128)},
    }
    other = {"teachers": {"main": TEACHER | write_model(tmp_path / "other", {**vocabulary, "t63": 70}, 64)}}
    for changes, key, facts in (
        (TOPK, "", ()),
        ({"kd_support": "full"}, "teachers.main.model_args", ("128", "64", "student_topk")),
        (other, "teachers.main.model_args", ("'t63'", "63")),
        (TOPK | {"logits_topk": 65}, "logits_topk", ("65", "actor_train", "64")),
    ):
        problems = loaded(**given | changes).config.file_problems()
        assert list(problems) == ([key] if key else [])
        assert all(fact in problems[key] for fact in facts)


def test_rows_are_checked_for_what_the_config_reads(tmp_path):
    def check(values, row):
        rows = Rows([("rows.jsonl", [row])], DataArguments())
        DistillConfig.check_rows("actor_train", rows, DataArguments(), values)

    check({}, {"prompt": "1"})
    with raises_error(DataError, "hint"):
        check({"teacher_prompt": "hint"}, {"prompt": "1"})
    with raises_error(DataError, "response"):
        check({"distill_data": "dataset"}, {"prompt": "1"})
    with raises_error(DataError, "ids"):
        check({"distill_data": "dataset", "kd_support": "stored", "kd_ids": "ids"}, {"prompt": "1", "response": "2"})


def test_image_after_the_first_reply_is_refused():
    part = {"type": "image", "image": "a.png"}
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [part]},
    ]
    values = {"chat": [*chat, {"role": "assistant", "content": "c"}], "hint": "h"}
    data = DataArguments(file_name="rows.jsonl", messages="chat")
    rows = Rows([("rows.jsonl", [values])], data)
    DistillConfig.check_rows("actor_train", rows, data, {"distill_data": "dataset"})
    with raises_error(DataError, "rows.jsonl row 1", "teacher_prompt"):
        DistillConfig.check_rows("actor_train", rows, data, {"distill_data": "dataset", "teacher_prompt": "hint"})
