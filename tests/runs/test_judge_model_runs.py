"""Whole runs whose rewards are scores that a judge generates: a role of the run with a model of its own."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
import torch
from torch.nn.functional import softmax
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import ConfigError
from roll_core.pipelines.rlvr import RLVRPipeline
from roll_core.spec.config import TokenizerConfig
from roll_testing.runs import TINY

TEMPLATE = (
    "{% for m in messages %}<{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}{{ mark or ':' }}{% endif %}"
)
MARKED = {"mark": ">:"}
"""A variable of the template."""
DIGITS = {
    "chat_template_kwargs": MARKED,
    "judge_prompt": "{prompt}{response}",
    "judge_scale": "score",
    "score_pattern": r"(\d)",
    "score_range": [0, 9],
    "max_tokens": 12,
}
"""The last digit of the reply, over 9."""


def make_judge(folder, alphabet="<>:0123456789", chat_template=TEMPLATE):
    """A directory with a model of random weights and a tokenizer that is not the policy's."""
    tokenizer = make_tokenizer(TokenizerConfig(kind="char", alphabet=alphabet), (), folder)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    keys = {name: value for name, value in TINY.items() if name != "model_type"} | {"initializer_range": 0.4}
    model = Qwen3ForCausalLM(Qwen3Config(**keys, vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1))
    with torch.no_grad():
        model.lm_head.weight[1] *= 4  # some replies end before they are cut
    model.save_pretrained(folder)
    return str(folder)


def judged_by(path, **given):
    return {
        "reward": "judge_model",
        "model_args": {"model_name_or_path": path, "dtype": "fp32"},
        "strategy_args": {"strategy_name": "hf_infer"},
        "device_mapping": [0],
    } | (DIGITS | given)


def samples(result, split="train"):
    lines = map(json.loads, result.run_dir.samples.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["split"] == split]


def greedy_reply(model, tokenizer, text):
    """The reply by transformers, token by token."""
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **MARKED)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    reply = []
    with torch.no_grad():
        while len(reply) < DIGITS["max_tokens"] and (not reply or reply[-1] != 1):
            reply.append(int(softmax(model(torch.tensor([ids + reply])).logits[0, -1], -1).argmax()))
    return tokenizer.decode(reply, skip_special_tokens=True), reply[-1] == 1


def test_rewards_are_scores_in_transformers_replies(runs):
    path = make_judge(runs.folder / "judge")
    held_out = {"data_args": {"file_name": str(runs.folder / "val.jsonl"), "max_samples": 4}}
    rewards = {"digits": judged_by(path, weight=2.0)}
    off = {"reward_failures": "off"}
    result = runs.ok(runs.rlvr(max_steps=2, eval_steps=1, validation=held_out, rewards=rewards, guards=off))
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    values, cut_with_digits = [], 0
    for split in ("train", "val"):
        rows = samples(result, split)
        assert rows
        for row in rows:
            response = re.sub("<eos>|<pad>", "", row["response"])
            reply, complete = greedy_reply(model, tokenizer, row["prompt"] + response)
            digits = [each for each in reply if each.isdigit()]
            cut_with_digits += bool(digits) and not complete
            if digits and complete:
                assert row["reward"] == pytest.approx(2 * int(digits[-1]) / 9)
                assert row["detail"] == {"votes": 1.0, "reply": reply}
            else:
                assert (row["reward"], repr(reply) in row["failure"]) == (None, True)
            values.append(row["reward"])
    assert len(set(values)) > 3
    assert cut_with_digits
    lines = runs.metrics(result)
    assert all(line["engine/rewards.digits/generated_tokens"] > 0 for line in lines[1:])


def test_votes_are_repeatable_and_a_resumed_run_has_the_same(local_runs):
    runs = local_runs
    rewards = {"digits": judged_by(make_judge(runs.folder / "judge"), num_votes=3, temperature=1.0)}
    recipe = {"rewards": rewards, "max_steps": 4, "guards": {"reward_failures": "off"}}
    whole = runs.ok(runs.rlvr(exp_name="whole", save_steps=2, **recipe))
    checkpoint = whole.run_dir.checkpoints / "step-2"
    second = runs.ok(runs.rlvr(exp_name="resumed", resume_from_checkpoint=str(checkpoint), **recipe))
    assert runs.timeless(second)[2:] == runs.timeless(whole)[2:]
    assert {row["detail"]["votes"] for row in samples(whole) if row["reward"] is not None} <= {2.0, 3.0}
    # Samples with the same prompt and response are judged with different seeds.
    assert len({row["detail"]["reply"] for row in samples(whole) if row["reward"] is not None}) > 8


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"score_pattern": "(Z)"}, "0 of 1"),
        ({"max_tokens": 60}, "60"),  # more than the model's 64 positions
    ],
)
def test_unscored_sample_is_a_failure_and_not_zero(local_runs, given, why):
    rewards = {"digits": judged_by(make_judge(local_runs.folder / "judge"), **given)}
    result = local_runs.ok(local_runs.rlvr(rewards=rewards, max_steps=1, guards={"reward_failures": "off"}))
    assert {row["reward"] for row in samples(result)} == {None}
    assert all(why in row["failure"] for row in samples(result))


def test_too_many_failures_of_the_judge_end_the_run(local_runs):
    rewards = {"digits": judged_by(make_judge(local_runs.folder / "judge"), score_pattern="(Z)")}
    result = local_runs.run(local_runs.rlvr(rewards=rewards))
    guards = json.loads(result.run_dir.record.read_text(encoding="utf-8"))["guards"]
    assert guards["counts"] == {"reward_failures": 1}


@pytest.mark.parametrize(
    "ahead",
    [{"async_generation_ratio": 1}, {"is_use_additional_prompts": True, "max_additional_running_prompts": 2}],
)
def test_a_judge_works_beside_engines_that_generate_ahead(local_runs, ahead):
    rewards = {"digits": judged_by(make_judge(local_runs.folder / "judge"))}
    config = local_runs.rlvr(rewards=rewards, max_steps=4, guards={"reward_failures": "off"}, **ahead)
    if "async_generation_ratio" in ahead:
        config["actor_infer"]["device_mapping"], config["num_gpus_per_node"] = [1], 2
    assert local_runs.ok(config).steps_done == 4


def test_a_judge_beside_a_reward_model_scores_its_own_domain(local_runs):
    from transformers import Qwen3ForSequenceClassification

    runs = local_runs
    rows = [json.loads(line) for line in (runs.folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    tagged = "".join(json.dumps(row | {"tag": ["chat", "digits"][i % 2]}) + "\n" for i, row in enumerate(rows))
    (runs.folder / "train.jsonl").write_text(tagged, encoding="utf-8")
    keys = {name: value for name, value in TINY.items() if name != "model_type"}
    torch.manual_seed(7)
    config = Qwen3Config(**keys, vocab_size=13, num_labels=1, pad_token_id=0, eos_token_id=1)
    Qwen3ForSequenceClassification(config).save_pretrained(runs.folder / "rm")
    model = {"model_args": {"model_name_or_path": str(runs.folder / "rm"), "dtype": "fp32"}}
    rewards = {
        "chat": model | {"reward": "model", "strategy_args": {"strategy_name": "hf_infer"}, "device_mapping": [0]},
        "digits": judged_by(make_judge(runs.folder / "judge")),
    }
    off = {"reward_failures": "off"}
    result = runs.ok(runs.rlvr(rewards=rewards, max_steps=2, rollout_batch_size=2, guards=off))
    by_tag = {tag: [row for row in samples(result) if row["tag"] == tag] for tag in ("chat", "digits")}
    assert all(row["reward"] is not None and "reply" not in row.get("detail", {}) for row in by_tag["chat"])
    assert any("reply" in row.get("detail", {}) for row in by_tag["digits"])


def test_killed_judge_is_restarted_without_other_effects(ray_runs, monkeypatch):
    runs, step = ray_runs, RLVRPipeline.step
    rewards = {"digits": judged_by(make_judge(runs.folder / "judge"))}
    recipe = {"rewards": rewards, "max_steps": 3, "guards": {"reward_failures": "off"}}
    whole = runs.ok(runs.rlvr(exp_name="whole", **recipe))

    async def step_with_an_accident(self, run):
        if run.step == 1:
            os.kill(run.infer_role("rewards.digits").group.members[0].pid, signal.SIGKILL)
        await step(self, run)

    monkeypatch.setattr(RLVRPipeline, "step", step_with_an_accident)
    killed = runs.ok(runs.rlvr(exp_name="killed", **recipe))
    assert [(row["response"], row["reward"]) for row in samples(killed)] == [
        (row["response"], row["reward"]) for row in samples(whole)
    ]


def test_judge_without_chat_template_is_refused_before_start(local_runs):
    plain = {"judge_prompt": "{response}"}
    random = judged_by("", **plain) | {"model_args": {"random_init": TINY, "dtype": "fp32"}}
    error = local_runs.run(local_runs.rlvr(rewards={"digits": random})).error
    assert isinstance(error, ConfigError)
    (problem,) = error.problems
    assert (problem.key, problem.code, error.exit_code) == ("rewards.digits.model_args", "ROLL-C041", 2)
