"""Whole runs of the pipeline distill."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

from roll_core.errors import ConfigError, DataError, GuardTrippedError
from roll_testing.errors import mentions
from roll_testing.runs import TINY

VOCABULARY = 13
"""Two special tokens, ten digits and a sign."""


def add_columns(runs, columns):
    """Add columns to the rows of training, each a function of the row."""
    path = runs.folder / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("".join(json.dumps(row | columns(row)) + "\n" for row in rows), encoding="utf-8")


def taught_by(config, changes):
    """The config with one teacher changed."""
    return config | {"teachers": {"main": config["teachers"]["main"] | changes}}


RECIPES = {
    "on-policy, sampled tokens as advantages": {},
    "with a discount and a clip": {"kd_discount": 0.9, "kd_clip": 1.0},
    "sampled tokens as a loss": {"kd_placement": "loss"},
    "the teacher's tokens": {"kd_support": "teacher_topk", "logits_topk": 4},
    "the student's tokens": {"kd_support": "student_topk", "logits_topk": 4},
    "all tokens, at a temperature": {
        "kd_support": "teacher_topk",
        "logits_topk": VOCABULARY,
        "kd_temperature": 2.0,
        "kd_objective": "js_divergence",
    },
    "the whole vocabulary": {"kd_support": "full", "kd_temperature": 2.0, "kd_objective": "js_divergence"},
    "the whole vocabulary of a data set": {"distill_data": "dataset", "kd_support": "full"},
    "a data set": {"distill_data": "dataset", "kd_support": "teacher_topk", "logits_topk": 4},
    "a data set, with its responses": {
        "distill_data": "dataset",
        "kd_support": "teacher_topk",
        "logits_topk": 4,
        "nll_coef": 0.1,
        "distill_on_prompt": True,
    },
    "the teacher's samples": {"distill_data": "teacher"},
    "the teacher's samples and tokens": {"distill_data": "teacher", "kd_support": "teacher_topk", "logits_topk": 4},
    "the student with another prompt": {
        "self_teacher": "policy",
        "teacher_prompt": "hint",
        "kd_support": "student_topk",
        "logits_topk": 4,
    },
    "the same on a data set": {
        "distill_data": "dataset",
        "self_teacher": "policy",
        "teacher_prompt": "hint",
        "kd_support": "teacher_topk",
        "logits_topk": 4,
    },
    "the student's moving average with another prompt": {
        "self_teacher": "ema",
        "ema_decay": 0.5,
        "teacher_prompt": "hint",
        "kd_support": "student_topk",
        "logits_topk": 4,
    },
    "both": {"distill_data": "mix", "kd_support": "student_topk", "logits_topk": 4},
}


NOISY = (
    "with a discount and a clip",
    "both",
    "the student with another prompt",
    "the same on a data set",
    "the student's moving average with another prompt",
)
"""The sum of later tokens' log-ratios has a high variance; rows and rollouts have different divergences; a student that
is its own teacher changes with it."""


FAST = ("on-policy, sampled tokens as advantages", "the teacher's tokens", "the teacher's samples", "both")


@pytest.mark.parametrize(
    "recipe", [pytest.param(each, marks=() if each in FAST else pytest.mark.slow) for each in RECIPES]
)
def test_every_recipe_comes_closer_to_the_teacher(local_runs, recipe):
    add_columns(local_runs, lambda row: {"hint": f"{row['prompt'][:2]}>"})
    result = local_runs.ok(local_runs.distill(max_steps=6, **RECIPES[recipe]))
    lines = local_runs.metrics(result)
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    name = "actor/divergence" if "actor/divergence" in lines[0] else "distillation/divergence"
    first, last = (sum(line[name] for line in part) for part in (lines[:2], lines[-2:]))
    assert last < first or recipe in NOISY
    if "logits_topk" in RECIPES[recipe]:
        assert all(0 < line["actor/teacher_mass"] <= 1 + 1e-5 for line in lines)
        assert all(0 < line["actor/student_mass"] <= 1 + 1e-5 for line in lines)
        overlaps = [line.get("actor/overlap", line.get("distillation/overlap")) for line in lines]
        assert all(0 <= overlap <= 1 for overlap in overlaps)


def test_the_moving_average_begins_as_the_student_and_follows_it(local_runs):
    one_update = {"rollout_batch_size": 2, "max_steps": 3}
    recipe = MOVING_AVERAGE | {"distill_data": "dataset", "logits_topk": 4} | one_update
    slow, fast = (
        local_runs.metrics(local_runs.ok(local_runs.distill(**recipe | {"ema_decay": decay, "exp_name": f"d{at}"})))
        for at, decay in enumerate((0.9, 0.1))
    )
    for lines in (slow, fast):
        assert lines[0]["actor/divergence"] == pytest.approx(0, abs=1e-6)
        assert all(line["actor/divergence"] > 0 for line in lines[1:])
    assert slow[-1]["actor/divergence"] > 2 * fast[-1]["actor/divergence"]


def test_the_whole_vocabulary_equals_k_tokens_of_all(local_runs):
    """Hidden states and the teacher's head give the same divergences as logprobs of all tokens."""
    recipe = {"kd_objective": "reverse_kl", "kd_temperature": 1.5, "max_steps": 2}
    whole = local_runs.ok(local_runs.distill(kd_support="full", exp_name="whole", **recipe))
    tokens = local_runs.ok(local_runs.distill(kd_support="student_topk", logits_topk=VOCABULARY, **recipe))
    found, expected = (local_runs.metrics(each) for each in (whole, tokens))
    for name in ("actor/divergence", "actor/grad_norm"):
        assert [line[name] for line in found] == pytest.approx([line[name] for line in expected], rel=1e-4)


def test_task_rewards_are_mixed_in(local_runs):
    rewards = {"digits": {"reward": "function", "function": "rollrewards:share_of_digits"}}
    recipe = {"kd_support": "student_topk", "logits_topk": 4, "rewards": rewards, "task_coef": 0.5}
    for line in local_runs.metrics(local_runs.ok(local_runs.distill(max_steps=2, **recipe))):
        assert {"score/mean", "actor/policy_loss", "actor/divergence", "advantage/max"} <= line.keys()


@pytest.mark.parametrize("recipe", [{}, {"kd_support": "student_topk", "logits_topk": 4}])
def test_masks_that_exclude_all_samples_trip_a_guard(local_runs, recipe):
    """The first step has no whole response of one token."""
    given = {"max_len_mask": True, "response_length": 1, "max_steps": 1, "guards": {"all_groups_filtered": "error"}}
    result = local_runs.run(local_runs.distill(**recipe, **given))
    assert isinstance(result.error, GuardTrippedError)
    assert mentions(str(result.error), "all_groups_filtered")


@pytest.mark.parametrize("teachers", ["teachers", "served_teachers"])
def test_ids_of_a_padded_vocabulary_are_not_taught(local_runs, teachers):
    """The teacher's most likely ids are padding: its K tokens are those that the student has."""
    from transformers import AutoModelForCausalLM

    student = local_runs.ok(local_runs.sft(max_steps=1, exp_name="base")).run_dir.export
    padded = local_runs.folder / "padded"
    shutil.copytree(student, padded)
    model = AutoModelForCausalLM.from_pretrained(student)
    model.resize_token_embeddings(2 * VOCABULARY, mean_resizing=False)
    weight_VH = model.get_output_embeddings().weight
    with torch.no_grad():
        weight_VH[VOCABULARY:] = weight_VH[:VOCABULARY]
    model.save_pretrained(padded)
    config = local_runs.distill(max_steps=1, kd_support="teacher_topk", logits_topk=VOCABULARY, tokenizer=None)
    config["actor_train"]["model_args"] = {"dtype": "fp32", "model_name_or_path": str(student)}
    found = taught_by(config, {"model_args": {"dtype": "fp32", "model_name_or_path": str(padded)}})
    found[teachers] = found.pop("teachers")
    (line,) = local_runs.metrics(local_runs.ok(found))
    assert line["actor/teacher_mass"] == pytest.approx(0.5, abs=1e-5)  # each logit occurs twice
    assert line["actor/student_mass"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("kind", "larger"), [("reverse_kl", True), ("forward_kl", True), ("reverse_kl", False)])
def test_padded_ids_of_a_student_are_not_in_its_support(local_runs, kind, larger):
    """The support has the K most likely tokens of those that both have: here, the whole smaller vocabulary."""
    from transformers import AutoModelForCausalLM

    small = local_runs.ok(local_runs.sft(max_steps=1, exp_name="base")).run_dir.export
    padded = local_runs.folder / "padded"
    shutil.copytree(small, padded)
    model = AutoModelForCausalLM.from_pretrained(small)
    model.resize_token_embeddings(VOCABULARY + 7, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    model.save_pretrained(padded)
    student, teacher = (padded, small) if larger else (small, padded)
    config = local_runs.distill(
        max_steps=1, kd_support="student_topk", kd_objective=kind, logits_topk=VOCABULARY, tokenizer=None
    )
    config |= {"distill_data": "dataset", "rollout_batch_size": 8, "num_return_sequences_in_group": 1}
    config.pop("actor_infer", None)
    config["actor_train"]["model_args"] = {"dtype": "fp32", "model_name_or_path": str(student)}
    config["actor_train"]["training_args"] |= {"learning_rate": 0.0}
    found = taught_by(config, {"model_args": {"dtype": "fp32", "model_name_or_path": str(teacher)}})
    (line,) = local_runs.metrics(local_runs.ok(found))
    masses = line["actor/student_mass"], line["actor/teacher_mass"]
    assert min(masses) < 0.999
    assert max(masses) == pytest.approx(1, abs=1e-5)
    assert masses[0 if larger else 1] == min(masses)
    assert 0 < line["actor/divergence"] < 20


AHEAD = {
    "advantages": {},
    "K tokens": {"kd_support": "student_topk", "logits_topk": 4},
    "the whole vocabulary": {"kd_support": "full"},
    "both": {"distill_data": "mix", "kd_support": "student_topk", "logits_topk": 4},
    "moving average": {"self_teacher": "ema", "nll_coef": 0.1, "kd_support": "teacher_topk", "logits_topk": 4},
}


@pytest.mark.parametrize(
    "recipe", [pytest.param(each, marks=[] if each == "advantages" else pytest.mark.slow) for each in AHEAD]
)
def test_generation_may_run_two_steps_ahead(local_runs, recipe):
    """The teacher scores stale rollouts. Trained on again from their recording, they give the same numbers."""
    given = AHEAD[recipe] | {"num_gpus_per_node": 2, "async_generation_ratio": 2.0, "max_steps": 4}
    config = local_runs.distill(exp_name="ahead", record_rollouts=True, **given)
    config["actor_infer"] = config["actor_infer"] | {"device_mapping": [1]}
    result = local_runs.ok(config)
    lines = local_runs.metrics(result)
    staleness = [line["rollout/staleness/max"] for line in lines if "rollout/staleness/max" in line]
    assert staleness[0] == 0
    assert max(staleness) == 2
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    if recipe == "advantages":
        assert lines[0]["correction/weight/mean"] == pytest.approx(1, abs=1e-5)
        assert all(line["correction/weight/mean"] != pytest.approx(1, abs=1e-3) for line in lines[1:])
    again = config | {"exp_name": "again", "record_rollouts": False, "replay_rollouts": str(result.run_dir.path)}
    replayed = local_runs.learnt(local_runs.ok(again))
    for found, expected in zip(replayed, local_runs.learnt(result), strict=True):
        common = found.keys() & expected.keys()
        assert {"actor/loss", "actor/grad_norm"} <= common
        assert {name: found[name] for name in common} == pytest.approx({name: expected[name] for name in common})


MOVING_AVERAGE = {"self_teacher": "ema", "ema_decay": 0.5, "nll_coef": 0.1, "kd_support": "teacher_topk"}


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param({"kd_support": "student_topk"}, marks=pytest.mark.slow, id="student"),
        pytest.param({"distill_data": "mix", "kd_support": "student_topk"}, id="mix"),
        pytest.param({"distill_data": "dataset"} | MOVING_AVERAGE, id="moving average"),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(local_runs, recipe):
    recipe = recipe | {"logits_topk": 4, "max_steps": 4}
    whole = local_runs.ok(local_runs.distill(exp_name="whole", save_steps=2, **recipe))
    checkpoint = str(whole.run_dir.checkpoints / "step-2")
    second = local_runs.ok(local_runs.distill(exp_name="resumed", resume_from_checkpoint=checkpoint, **recipe))
    assert local_runs.timeless(second)[2:] == local_runs.timeless(whole)[2:]
    one, other = (load_file(each.run_dir.export / "model.safetensors") for each in (whole, second))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("data", [pytest.param("student", marks=pytest.mark.slow), "dataset"])
def test_tags_select_their_teachers(local_runs, data):
    """The run with two teachers that are the same equals that with one; a tag without a teacher ends a run."""
    add_columns(local_runs, lambda row: {"tag": "abc"[row["id"] % 3]})
    one = local_runs.distill(kd_support="student_topk", logits_topk=4, max_steps=2, distill_data=data)
    main = one["teachers"]["main"]
    two = one | {"teachers": {"a": main | {"tag_included": ["c"]}, "b": main}, "exp_name": "two"}
    found, expected = (local_runs.metrics(local_runs.ok(each)) for each in (two, one))
    assert [line["actor/divergence"] for line in found] == pytest.approx(
        [line["actor/divergence"] for line in expected]
    )
    error = local_runs.run(two | {"teachers": {"a": main, "b": main}}).error
    assert isinstance(error, DataError)
    assert mentions(str(error), "'c'")


def test_stored_logprobs_equal_those_of_the_teacher(local_runs):
    """Rows with the logprobs of a teacher that scores uniformly: log K of all tokens, or of a part of them."""
    rate = -math.log(VOCABULARY)

    def stored(row):
        ids = [[(7 * at + each) % VOCABULARY for each in range(4)] for at in range(len(row["response"]) + 1)]
        return {"teacher_ids": ids, "teacher_logprobs": [[rate] * 4 for _ in ids]}

    add_columns(local_runs, stored)
    lines = local_runs.metrics(
        local_runs.ok(local_runs.distill(distill_data="dataset", kd_support="stored", max_steps=4))
    )
    assert [line["actor/teacher_mass"] for line in lines] == pytest.approx([4 / VOCABULARY] * 4)
    assert lines[-1]["actor/divergence"] < lines[0]["actor/divergence"]
    add_columns(local_runs, lambda row: {"teacher_ids": [[0] * 4]} if row["id"] == 9 else {})
    error = local_runs.run(local_runs.distill(distill_data="dataset", kd_support="stored")).error
    assert isinstance(error, DataError)
    assert mentions(str(error), "train.jsonl row 10", "teacher_ids")


@pytest.mark.parametrize(
    "recipe",
    [{}, {"kd_support": "teacher_topk", "logits_topk": 4, "distill_data": "dataset"}],
    ids=["sampled", "top-k"],
)
def test_a_served_teacher_gives_the_logprobs_of_the_model(local_runs, recipe):
    """The run with an engine as teacher equals the run with a model that scores, whose divisor is 1."""
    by_model = local_runs.distill(max_steps=2, exp_name="model", **recipe)
    by_engine = by_model | {"exp_name": "engine", "served_teachers": by_model["teachers"]}
    del by_engine["teachers"]
    found, expected = (local_runs.learnt(local_runs.ok(each)) for each in (by_engine, by_model))
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


def test_a_missing_prompt_of_the_teacher_is_named(local_runs):
    add_columns(local_runs, lambda row: {"hint": "" if row["id"] == 0 else row["prompt"]})
    recipe = {"self_teacher": "policy", "teacher_prompt": "hint", "kd_support": "student_topk", "logits_topk": 4}
    error = local_runs.run(local_runs.distill(distill_data="dataset", max_steps=16, **recipe)).error
    assert isinstance(error, DataError)
    assert mentions(str(error), "train.jsonl row 1", "hint")


def test_teacher_with_the_students_prompt_has_no_divergence(local_runs):
    """The outputs for the teacher's prompt are moved to the student's positions."""
    add_columns(local_runs, lambda row: {"hint": row["prompt"]})
    recipe = {"self_teacher": "policy", "teacher_prompt": "hint", "kd_support": "teacher_topk", "logits_topk": 4}
    (line,) = local_runs.metrics(local_runs.ok(local_runs.distill(max_steps=1, rollout_batch_size=2, **recipe)))
    assert line["actor/divergence"] == pytest.approx(0, abs=1e-5)
    assert line["actor/teacher_mass"] == pytest.approx(line["actor/student_mass"], abs=1e-5)


def test_rewards_are_reported_without_a_weight(local_runs):
    rewards = {"digits": {"reward": "function", "function": "rollrewards:share_of_digits"}}
    lines = local_runs.metrics(local_runs.ok(local_runs.distill(max_steps=1, rewards=rewards)))
    plain = local_runs.metrics(local_runs.ok(local_runs.distill(max_steps=1, exp_name="plain")))
    assert "score/mean" in lines[0]
    assert lines[0]["actor/grad_norm"] == plain[0]["actor/grad_norm"]


def test_mismatches_end_the_run_before_a_model_is_built(local_runs, tmp_path):
    def refused(config, *facts):
        result = local_runs.run(config)
        assert isinstance(result.error, ConfigError)
        assert result.error.exit_code == 2
        assert mentions(str(result.error), *facts)

    other = {"model_args": {"dtype": "fp32", "random_init": {**TINY, "vocab_size": 40}}}
    config = local_runs.distill()
    refused(taught_by(config, other), "teachers.main.model_args", 40, VOCABULARY)
    refused(local_runs.distill(kd_support="student_topk", logits_topk=14), "logits_topk", 14, VOCABULARY)
    # A teacher of equal size whose tokenizer has the digits in another order.
    taught = local_runs.ok(
        local_runs.sft(max_steps=1, tokenizer={"kind": "char", "alphabet": "9876543210>"}, exp_name="other")
    )
    path = {"model_args": {"dtype": "fp32", "model_name_or_path": str(taught.run_dir.export)}}
    refused(taught_by(config, path), "teachers.main.model_args", VOCABULARY)


def test_teacher_without_tokenizer_is_compared_by_size(local_runs):
    stored = local_runs.ok(local_runs.sft(max_steps=1, exp_name="stored")).run_dir.export
    for file in stored.glob("*token*"):
        file.unlink()
    path = {"model_args": {"dtype": "fp32", "model_name_or_path": str(stored)}}
    local_runs.ok(taught_by(local_runs.distill(max_steps=1), path))
