"""Whole runs of the pipelines preference and reward_model."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from roll_core.data.encode_preferences import encode_pairs
from roll_core.data.rows import read_rows
from roll_core.spec.config import DataArguments

REFERENCE = {"model_args": {"dtype": "fp32"}, "strategy_args": {"strategy_name": "hf_infer"}, "device_mapping": [0]}


@pytest.fixture
def pairs(local_runs):
    """`pairs(pipeline, **keys)`: a config of a run on pairs of sorted digits and other digits."""
    runs = local_runs
    for name in ("train", "val"):
        rows = [json.loads(line) for line in (runs.folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        with (runs.folder / f"{name}.pairs.jsonl").open("w", encoding="utf-8") as file:
            for row in rows:
                wrong = row["response"][::-1] if row["response"][::-1] != row["response"] else row["response"] + "0"
                pair = {"id": row["id"], "prompt": row["prompt"], "chosen": row["response"], "rejected": wrong}
                file.write(json.dumps(pair | {"margin": 0.5, "ground_truth": row["ground_truth"]}) + "\n")

    def make(pipeline="preference", **given):
        role = runs.sft()["sft_train"]
        role["data_args"] = {"file_name": str(runs.folder / "train.pairs.jsonl")}
        role["training_args"] |= {"learning_rate": 3e-3, "lr_scheduler_type": "constant"}
        return (
            runs.base(pipeline)
            | {
                "max_steps": 3,
                "eval_steps": 3,
                "reward_train" if pipeline == "reward_model" else "actor_train": role,
                "validation": {"data_args": {"file_name": str(runs.folder / "val.pairs.jsonl")}},
            }
            | given
        )

    return make


def preference_metrics(lines):
    """What a run's lines say of preferences, without the clock."""
    kept = ("train/", "val/")
    return [{name: value for name, value in line.items() if name.startswith(kept)} for line in lines]


def test_dpo_begins_at_log_2_and_separates_held_out_pairs(local_runs, pairs):
    lines = local_runs.metrics(local_runs.ok(pairs("dpo", precompute_ref_log_probs=True, max_steps=8, eval_steps=8)))
    assert lines[0]["val/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[0]["val/rewards/margins"] == 0
    assert lines[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[-1]["val/loss"] < lines[0]["val/loss"]
    assert lines[-1]["val/rewards/accuracies"] > 0.5
    assert {"train/rewards/chosen", "train/logps/rejected", "train/chosen_nll", "train/grad_norm"} <= lines[1].keys()


@pytest.mark.slow
def test_each_kind_of_reference_gives_the_same_run(local_runs, pairs):
    role = local_runs.ok(pairs(exp_name="role", reference=REFERENCE))
    cached = local_runs.ok(pairs(exp_name="cached", precompute_ref_log_probs=True))
    again = local_runs.ok(pairs(exp_name="again", precompute_ref_log_probs=True))
    assert len(list((local_runs.folder / "output" / "reference_logprobs").glob("*.npy"))) == 2  # train and val
    expected = preference_metrics(local_runs.metrics(role))
    for result in (cached, again):
        for found, right in zip(preference_metrics(local_runs.metrics(result)), expected, strict=True):
            assert found == pytest.approx(right, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_adapters_are_their_own_reference(local_runs, pairs, loss):
    config = pairs(loss_type=loss)
    config["actor_train"]["model_args"] |= {"lora_target": "all-linear", "lora_rank": 4}
    lines = local_runs.metrics(local_runs.ok(config))
    assert lines[0]["val/rewards/chosen"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["val/rewards/margins"] > 0
    assert ("val/kl" in lines[-1]) == (loss == "kto")


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"loss_type": "orpo"}, {"loss_type": ["simpo", "sft"], "loss_weights": [1, 0.5]}])
def test_losses_without_a_reference_need_none(local_runs, pairs, given):
    lines = local_runs.metrics(local_runs.ok(pairs(**given)))
    assert lines[-1]["val/loss"] < lines[0]["val/loss"]
    assert lines[-1]["val/chosen_nll"] < lines[0]["val/chosen_nll"]


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(local_runs, pairs):
    runs = local_runs
    given = {"precompute_ref_log_probs": True, "max_steps": 4, "eval_steps": 2}
    whole = runs.ok(pairs(exp_name="whole", save_steps=4, **given))
    first = runs.ok(pairs(exp_name="halves", save_steps=2, **given))
    checkpoint = first.run_dir.checkpoints / "step-2"
    second = runs.ok(pairs(exp_name="halves", save_steps=4, resume_from_checkpoint=str(checkpoint), **given))
    assert runs.timeless(second) == runs.timeless(whole)
    one, other = (load_file(each.run_dir.export / "model.safetensors") for each in (whole, second))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_reward_models_export_scores_like_the_trained_model(local_runs, pairs):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    result = local_runs.ok(
        pairs("reward_model", margin="margin", center_rewards_coefficient=0.01, max_steps=6, eval_steps=6)
    )
    lines = local_runs.metrics(result)
    assert lines[-1]["val/loss"] < lines[0]["val/loss"]
    model = AutoModelForSequenceClassification.from_pretrained(result.run_dir.export)
    tokenizer = AutoTokenizer.from_pretrained(result.run_dir.export)
    assert model.config.num_labels == 1
    data = DataArguments(file_name=str(local_runs.folder / "val.pairs.jsonl"))
    sequences, _ = encode_pairs(read_rows(data), data, tokenizer, prompt_length=8, response_length=6)
    with torch.no_grad():
        scores = [model(torch.from_numpy(each.tokens)[None]).logits.item() for each in sequences]
    better, worse = np.array(scores[::2]), np.array(scores[1::2])
    assert lines[-1]["val/rewards/chosen"] == pytest.approx(better.mean(), abs=1e-4)
    assert lines[-1]["val/rewards/accuracies"] == pytest.approx((better > worse).mean())


@pytest.mark.slow
def test_a_language_model_becomes_a_reward_model(local_runs, pairs):
    language_model = local_runs.ok(local_runs.sft(max_steps=1, eval_steps=0))
    config = pairs("reward_model", pretrain=str(language_model.run_dir.export), tokenizer=None)
    del config["reward_train"]["model_args"]["random_init"]
    lines = local_runs.metrics(local_runs.ok(config))
    assert lines[-1]["val/loss"] < lines[0]["val/loss"]


@pytest.mark.slow
def test_responses_are_generated_and_scored_where_the_run_has_an_engine(local_runs, pairs):
    config = pairs(
        "dpo",
        precompute_ref_log_probs=True,
        max_steps=1,
        eval_steps=1,
        actor_infer=local_runs.rlvr()["actor_infer"],
        rewards={"digits": {"reward": "function", "function": "rollrewards:constant"}},
    )
    last = local_runs.metrics(local_runs.ok(config))[-1]
    assert last["val/score/mean"] == 1.0
    assert last["val/num_samples"] == 32
    assert "val/rewards/margins" in last
