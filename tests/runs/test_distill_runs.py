"""Whole runs of the pipeline distill."""

import json

import pytest
import torch
from safetensors.torch import load_file

from roll_core.errors import ConfigError, DataError
from roll_testing.errors import mentions

from .conftest import TINY

VOCABULARY = 13
"""Two special tokens, ten digits and a sign."""


def distill(runs, **given):
    """A teacher of random weights, wider than the student."""
    base = runs.rlvr(**given) | {"pipeline": "distill", "exp_name": given.get("exp_name", "distill")}
    del base["rewards"]
    wider = {**TINY, "hidden_size": 48, "initializer_range": 0.3}
    teacher = {
        "model_args": {"dtype": "fp32", "random_init": wider},
        "strategy_args": {"strategy_name": "hf_infer"},
        "device_mapping": [0],
    }
    config = base | {"teachers": {"main": teacher}} | given
    if config.get("distill_data") == "dataset":
        del config["actor_infer"]
    return config


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
    "a data set": {"distill_data": "dataset", "kd_support": "teacher_topk", "logits_topk": 4},
    "both": {"distill_data": "mix", "kd_support": "student_topk", "logits_topk": 4},
}


NOISY = ("with a discount and a clip", "both")
"""The sum of later tokens' log-ratios has a high variance; rows and rollouts have different divergences."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_comes_closer_to_the_teacher(local_runs, recipe):
    result = local_runs.ok(distill(local_runs, max_steps=6, **RECIPES[recipe]))
    lines = local_runs.metrics(result)
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    name = "actor/divergence" if "actor/divergence" in lines[0] else "distillation/divergence"
    first, last = (sum(line[name] for line in part) for part in (lines[:2], lines[-2:]))
    assert last < first or recipe in NOISY
    if ("tokens" in recipe and "sampled" not in recipe) or recipe in ("a data set", "both"):
        assert all(0 < line["actor/teacher_mass"] <= 1 + 1e-5 for line in lines)
        assert all(0 < line["actor/student_mass"] <= 1 + 1e-5 for line in lines)
        overlaps = [line.get("actor/overlap", line.get("distillation/overlap")) for line in lines]
        assert all(0 <= overlap <= 1 for overlap in overlaps)


def test_task_rewards_are_mixed_in(local_runs):
    rewards = {"digits": {"reward": "function", "function": "rollrewards:share_of_digits"}}
    recipe = {"kd_support": "student_topk", "logits_topk": 4, "rewards": rewards, "task_coef": 0.5}
    for line in local_runs.metrics(local_runs.ok(distill(local_runs, max_steps=2, **recipe))):
        assert {"score/mean", "actor/policy_loss", "actor/divergence", "advantage/max"} <= line.keys()


@pytest.mark.parametrize("data", ["student", "mix"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(local_runs, data):
    recipe = {"distill_data": data, "kd_support": "student_topk", "logits_topk": 4, "max_steps": 4}
    whole = local_runs.ok(distill(local_runs, exp_name="whole", **recipe))
    first = local_runs.ok(distill(local_runs, exp_name="halves", save_steps=2, **recipe))
    checkpoint = str(first.run_dir.checkpoints / "step-2")
    second = local_runs.ok(distill(local_runs, exp_name="halves", resume_from_checkpoint=checkpoint, **recipe))
    assert local_runs.timeless(second)[2:] == local_runs.timeless(whole)[2:]
    one, other = (load_file(each.run_dir.export / "model.safetensors") for each in (whole, second))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_tags_select_their_teachers(local_runs):
    """The run with two teachers that are the same equals that with one; a tag without a teacher ends a run."""
    rows = [json.loads(line) for line in (local_runs.folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    tagged = "".join(json.dumps(row | {"tag": "abc"[i % 3]}) + "\n" for i, row in enumerate(rows))
    (local_runs.folder / "train.jsonl").write_text(tagged, encoding="utf-8")
    one = distill(local_runs, kd_support="student_topk", logits_topk=4, max_steps=2)
    main = one["teachers"]["main"]
    two = one | {"teachers": {"a": main | {"tag_included": ["c"]}, "b": main}, "exp_name": "two"}
    found, expected = (local_runs.metrics(local_runs.ok(each)) for each in (two, one))
    assert [line["actor/divergence"] for line in found] == pytest.approx(
        [line["actor/divergence"] for line in expected]
    )
    error = local_runs.run(two | {"teachers": {"a": main, "b": main}}).error
    assert isinstance(error, DataError)
    assert mentions(str(error), "'c'")


def test_rewards_are_reported_without_a_weight(local_runs):
    rewards = {"digits": {"reward": "function", "function": "rollrewards:share_of_digits"}}
    lines = local_runs.metrics(local_runs.ok(distill(local_runs, max_steps=1, rewards=rewards)))
    plain = local_runs.metrics(local_runs.ok(distill(local_runs, max_steps=1, exp_name="plain")))
    assert "score/mean" in lines[0]
    assert lines[0]["actor/grad_norm"] == plain[0]["actor/grad_norm"]


def test_what_does_not_fit_together_ends_the_run_before_a_model_is_built(local_runs, tmp_path):
    def refused(config, *facts):
        result = local_runs.run(config)
        assert isinstance(result.error, ConfigError)
        assert result.error.exit_code == 2
        assert mentions(str(result.error), *facts)

    other = {"model_args": {"dtype": "fp32", "random_init": {**TINY, "vocab_size": 40}}}
    config = distill(local_runs)
    refused(taught_by(config, other), "teachers.main.model_args", 40, VOCABULARY)
    refused(distill(local_runs, kd_support="student_topk", logits_topk=14), "logits_topk", 14, VOCABULARY)
    # A teacher of equal size whose tokenizer has the digits in another order.
    taught = local_runs.ok(
        local_runs.sft(max_steps=1, tokenizer={"kind": "char", "alphabet": "9876543210>"}, exp_name="other")
    )
    path = {"model_args": {"dtype": "fp32", "model_name_or_path": str(taught.run_dir.export)}}
    refused(taught_by(config, path), "teachers.main.model_args", VOCABULARY)


def test_a_teacher_without_a_tokenizer_is_compared_by_its_vocabulary_size(local_runs):
    stored = local_runs.ok(local_runs.sft(max_steps=1, exp_name="stored")).run_dir.export
    for file in stored.glob("*token*"):
        file.unlink()
    path = {"model_args": {"dtype": "fp32", "model_name_or_path": str(stored)}}
    local_runs.ok(taught_by(distill(local_runs, max_steps=1), path))
