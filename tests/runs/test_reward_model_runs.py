"""Whole runs whose rewards are scores of a model: PPO with a critic, validation, failures, several domains."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import ConfigError
from roll_core.spec.config import TokenizerConfig

ALPHABET = "0123456789>"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
SCORES = {"strategy_args": {"strategy_name": "hf_infer"}, "device_mapping": [0]}
CRITIC = {
    "strategy_args": {"strategy_name": "hf_train"},
    "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
    "training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 8},
    "device_mapping": [0],
}
PPO = {
    "adv_estimator": "gae",
    "critic": CRITIC,
    "add_token_level_kl": True,
    "init_kl_coef": 0.05,
    "reference": {**SCORES, "model_args": {"dtype": "fp32"}},
    "whiten_advantages": True,
    "num_return_sequences_in_group": 1,
    "rollout_batch_size": 16,
}


def make_reward_model(folder, *, vocab_size=13, scale=30.0, num_labels=1):
    """A directory with a reward model of random weights, as transformers writes it. Scores spread over ± a few."""
    torch.manual_seed(7)
    config = Qwen3Config(**SIZES, vocab_size=vocab_size, num_labels=num_labels, pad_token_id=0, eos_token_id=1)
    model = Qwen3ForSequenceClassification(config).eval()
    with torch.no_grad():
        model.score.weight.mul_(scale)
    model.save_pretrained(folder)
    return str(folder)


def rewarded_by(path, **given):
    return {"reward": "model", **SCORES, "model_args": {"model_name_or_path": path, "dtype": "fp32"}} | given


def samples(result, split="train"):
    lines = map(json.loads, result.run_dir.samples.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["split"] == split]


def scores_of(path, token_ids):
    """Scores by transformers, one sequence at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return [float(model(torch.tensor([ids])).logits[0, 0]) for ids in token_ids]


def test_rewards_are_the_scores_that_transformers_computes(runs):
    path = make_reward_model(runs.folder / "rm")
    held_out = {"data_args": {"file_name": str(runs.folder / "val.jsonl"), "max_samples": 4}}
    rewards = {"digits": rewarded_by(path, weight=0.5, infer_batch_size=4)}
    result = runs.ok(runs.rlvr(max_steps=1, eval_steps=1, validation=held_out, rewards=rewards))
    tokenizer = AutoTokenizer.from_pretrained(result.run_dir.tokenizer)
    for split in ("train", "val"):
        rows = samples(result, split)
        assert rows
        ids = [tokenizer(row["prompt"] + row["response"], add_special_tokens=False)["input_ids"] for row in rows]
        expected = [0.5 * score for score in scores_of(path, ids)]
        assert [row["reward"] for row in rows] == pytest.approx(expected, abs=1e-5)
        assert np.std(expected) > 0.05


def test_ppo_with_a_reward_model_a_critic_and_a_reference_trains(runs):
    path = make_reward_model(runs.folder / "rm")
    held_out = {"data_args": {"file_name": str(runs.folder / "val.jsonl"), "max_samples": 4}}
    rewards = {"digits": rewarded_by(path)}
    result = runs.ok(runs.rlvr(max_steps=2, eval_steps=1, validation=held_out, rewards=rewards, **PPO))
    lines = runs.metrics(result)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all("val/score/mean" in line for line in lines)
    for line in lines[1:]:
        assert line["reward/failures"] == 0
        assert line["actor/grad_norm"] > 0
        assert line["critic/loss"] > 0


def test_nan_score_is_a_failure_and_not_zero(local_runs):
    path = make_reward_model(local_runs.folder / "rm", scale=float("nan"))
    result = local_runs.run(local_runs.rlvr(rewards={"digits": rewarded_by(path)}))
    guards = json.loads(result.run_dir.record.read_text(encoding="utf-8"))["guards"]
    assert guards["counts"] == {"reward_failures": 1}
    off = local_runs.rlvr(rewards={"digits": rewarded_by(path)}, max_steps=1, guards={"reward_failures": "off"})
    result = local_runs.ok(off)
    assert {row["reward"] for row in samples(result)} == {None}
    assert all("nan" in row["failure"] for row in samples(result))


def test_domains_have_different_kinds_of_rewards_and_filters(local_runs):
    runs = local_runs
    rows = [json.loads(line) for line in (runs.folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    tagged = "".join(json.dumps(row | {"tag": ["chat", "digits"][i % 2]}) + "\n" for i, row in enumerate(rows))
    (runs.folder / "train.jsonl").write_text(tagged, encoding="utf-8")
    path = make_reward_model(runs.folder / "rm")
    rewards = {
        "style": rewarded_by(path, tag_included=["chat"], query_filter_config={"type": "std_filter"}),
        "digits": {"reward": "function", "function": "rollrewards:share_of_digits"},
    }
    result = runs.ok(runs.rlvr(rewards=rewards, max_steps=2, rollout_batch_size=2))
    by_tag = {tag: [row for row in samples(result) if row["tag"] == tag] for tag in ("chat", "digits")}
    assert all(by_tag.values())
    tokenizer = AutoTokenizer.from_pretrained(result.run_dir.tokenizer)
    ids = [tokenizer(row["prompt"] + row["response"])["input_ids"] for row in by_tag["chat"]]
    assert [row["reward"] for row in by_tag["chat"]] == pytest.approx(scores_of(path, ids), abs=1e-5)
    assert all(row["reward"] in {i / 6 + parity for i in range(8) for parity in (0, 1)} for row in by_tag["digits"])
    assert "rollout/left_out_groups" in runs.metrics(result)[-1]


@pytest.mark.parametrize(
    "ahead",
    [{"async_generation_ratio": 1}, {"is_use_additional_prompts": True, "max_additional_running_prompts": 2}],
)
def test_groups_are_scored_while_others_are_generated_ahead(local_runs, ahead):
    """On the engine's slots where it pauses between batches, and on the trainer's where it does not."""
    path = make_reward_model(local_runs.folder / "rm")
    config = local_runs.rlvr(rewards={"digits": rewarded_by(path)}, max_steps=3, num_gpus_per_node=2, **ahead)
    if "async_generation_ratio" in ahead:
        config["actor_infer"]["device_mapping"] = [1]
    result = local_runs.ok(config)
    assert [line["reward/failures"] for line in local_runs.metrics(result)] == [0, 0, 0]
    assert len(samples(result)) >= 3


def test_a_model_with_another_tokenizer_reads_the_text(local_runs):
    runs = local_runs
    path = make_reward_model(runs.folder / "rm", vocab_size=20)
    reordered = make_tokenizer(TokenizerConfig(kind="char", alphabet=ALPHABET[::-1]), [], runs.folder / "rm")
    result = runs.ok(runs.rlvr(rewards={"digits": rewarded_by(path)}, max_steps=1))
    rows = samples(result)
    responses = [row["response"].replace("<eos>", "").replace("<pad>", "") for row in rows]
    texts = [row["prompt"] + response + "<eos>" for row, response in zip(rows, responses, strict=True)]
    expected = scores_of(path, [reordered(text)["input_ids"] for text in texts])
    assert [row["reward"] for row in rows] == pytest.approx(expected, abs=1e-5)


def test_inputs_that_do_not_fit_the_reward_model_fail_early(local_runs, monkeypatch):
    runs = local_runs
    monkeypatch.setattr("roll_core.runtime.run.assemble.make_executor", None)
    small = make_reward_model(runs.folder / "small", vocab_size=12)
    two = make_reward_model(runs.folder / "two", num_labels=2)
    other = make_reward_model(runs.folder / "other", vocab_size=20)
    make_tokenizer(TokenizerConfig(kind="char", alphabet=ALPHABET[::-1]), [], runs.folder / "other")
    for reward, key in (
        (rewarded_by(small), "rewards.digits.model_args.model_name_or_path"),
        (rewarded_by("./gone"), "rewards.digits.model_args.model_name_or_path"),
        (rewarded_by(two), "rewards.digits.model_args.model_name_or_path"),
        (rewarded_by(small, input="text"), "rewards.digits.input"),
        (rewarded_by(other, input="tokens"), "rewards.digits.input"),
    ):
        result = runs.run(runs.rlvr(rewards={"digits": reward}))
        assert isinstance(result.error, ConfigError)
        assert result.error.exit_code == 2
        assert [problem.key for problem in result.error.problems] == [key]


def test_the_reward_model_does_not_give_the_run_its_tokenizer(local_runs):
    """The policy is `pretrain`, the only role that names a model is the reward."""
    runs = local_runs
    sft = runs.ok(runs.sft(max_steps=1))
    path = make_reward_model(runs.folder / "rm", vocab_size=20)
    make_tokenizer(TokenizerConfig(kind="char", alphabet=ALPHABET[::-1]), [], runs.folder / "rm")
    config = runs.rlvr(rewards={"digits": rewarded_by(path)}, max_steps=1, pretrain=str(sft.run_dir.export))
    del config["tokenizer"], config["actor_train"]["model_args"]["random_init"]
    result = runs.ok(config)
    mine = AutoTokenizer.from_pretrained(result.run_dir.tokenizer)
    assert mine.get_vocab() == AutoTokenizer.from_pretrained(sft.run_dir.tokenizer).get_vocab()
