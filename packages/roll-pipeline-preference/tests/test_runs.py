"""Whole runs of the pipelines preference and reward_model."""

import asyncio
import json
import math

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from roll_core.config import load
from roll_core.data.rows import read_rows
from roll_core.errors import DataError
from roll_core.spec.config import DataArguments
from roll_core.spec.pipeline import ScoredSequences
from roll_core.types import TrainSequence
from roll_pipeline_preference.encode import encode_pairs
from roll_pipeline_preference.reference_cache import cached_logprobs
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.errors import mentions

REFERENCE = {"model_args": {"dtype": "fp32"}, "strategy_args": {"strategy_name": "hf_infer"}, "device_mapping": [0]}


def test_dpo_begins_at_log_2_and_separates_held_out_pairs(local_runs):
    lines = local_runs.metrics(
        local_runs.ok(local_runs.preference("dpo", precompute_ref_log_probs=True, max_steps=8, eval_steps=8))
    )
    assert lines[0]["val/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[0]["val/rewards/margins"] == 0
    assert lines[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[-1]["val/loss"] < lines[0]["val/loss"]
    assert lines[-1]["val/rewards/accuracies"] > 0.5
    assert f"{lines[-1]['val/rewards/accuracies']:.1%}" in local_runs.screen.getvalue()
    assert {"train/rewards/chosen", "train/logps/rejected", "train/chosen_nll", "train/grad_norm"} <= lines[1].keys()


def test_wrong_row_ends_the_run_before_a_model_is_built(local_runs, monkeypatch):
    rows = [json.dumps({"prompt": f"{at}>", "chosen": "1", "rejected": "2"}) for at in range(120)]
    wrong = json.dumps({"prompt": "1>", "chosen": "1", "rejected": ""})
    (local_runs.folder / "train.pairs.jsonl").write_text("\n".join([*rows, wrong]), encoding="utf-8")
    monkeypatch.setattr(HFTrainStrategy, "build", lambda *_: pytest.fail("a model was built"))
    result = local_runs.run(local_runs.preference(loss_type="orpo"))
    assert isinstance(result.error, DataError)
    assert mentions(str(result.error), "train.pairs.jsonl", "121", "rejected")
    assert "advice" not in json.loads(result.run_dir.record.read_text(encoding="utf-8"))["error"]


@pytest.mark.slow
def test_every_kind_of_reference_gives_the_same_run(local_runs):
    role = local_runs.ok(local_runs.preference(exp_name="role", reference=REFERENCE))
    cached = local_runs.ok(local_runs.preference(exp_name="cached", precompute_ref_log_probs=True))
    again = local_runs.ok(local_runs.preference(exp_name="again", precompute_ref_log_probs=True))
    assert len(list((local_runs.folder / "output" / "reference_logprobs").glob("*.npy"))) == 2  # train and val
    expected = local_runs.learnt(role)
    for result in (cached, again):
        for found, right in zip(local_runs.learnt(result), expected, strict=True):
            assert found == pytest.approx(right, abs=1e-5)


class Model:
    """A train role whose logprobs are all -1; counts its passes."""

    def __init__(self):
        self.passes = 0

    async def score(self, sequences, want):
        self.passes += 1
        return ScoredSequences(logprobs=[np.full(len(each), -1.0, dtype=np.float32) for each in sequences])


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        half,
        lambda path: path.write_bytes(b"not an array"),
        lambda path: np.save(path, np.zeros(3, dtype=np.float32)),
        lambda path: np.save(path, np.full(4, np.nan, dtype=np.float32)),
        lambda path: np.save(path, np.array([{}, {}, {}, {}], dtype=object)),
    ],
    ids=["empty", "truncated", "text", "short", "NaN", "pickle"],
)
def test_a_damaged_cache_of_reference_logprobs_is_written_again(local_runs, damage):
    path = local_runs.folder / "cache.yaml"
    path.write_text(yaml.safe_dump(local_runs.preference(precompute_ref_log_probs=True)), encoding="utf-8")
    config = load(path, [], local_runs.registry).config
    mask = np.array([False, True, True])
    sequences = [TrainSequence(id=name, tokens=np.arange(3), loss_mask=mask) for name in "ab"]
    model = Model()

    def logprobs():
        return [each.tolist() for each in asyncio.run(cached_logprobs(config, model, sequences))]

    expected = [[0.0, -1.0, -1.0]] * 2
    assert (logprobs(), logprobs(), model.passes) == (expected, expected, 1)
    (file,) = (local_runs.folder / "output" / "reference_logprobs").glob("*.npy")
    damage(file)
    assert (logprobs(), logprobs(), model.passes) == (expected, expected, 2)


@pytest.mark.parametrize(
    ("overrides", "tokens", "mask", "passes"),
    [
        (["beta=0.5", "actor_train.training_args.learning_rate=0.1"], [0, 1, 2], [0, 1, 1], 1),
        (["actor_train.model_args.dtype=bf16"], [0, 1, 2], [0, 1, 1], 2),
        (["seed=4"], [0, 1, 2], [0, 1, 1], 2),
        (["actor_train.model_args.random_init.num_hidden_layers=2"], [0, 1, 2], [0, 1, 1], 2),
        (["tokenizer.alphabet='0123456789<'"], [0, 1, 2], [0, 1, 1], 2),
        ([], [0, 1, 3], [0, 1, 1], 2),  # another template, tokenizer or row
        ([], [0, 1, 2], [0, 0, 1], 2),  # another length of the prompt
        ([], [0, 1], [0, 1], 2),  # truncated
    ],
)
def test_cached_references_are_of_one_model_and_the_rows_tokens(local_runs, overrides, tokens, mask, passes):
    path = local_runs.folder / "cache.yaml"
    path.write_text(yaml.safe_dump(local_runs.preference(precompute_ref_log_probs=True)), encoding="utf-8")
    model = Model()
    for given, ids, masked in (([], [0, 1, 2], [0, 1, 1]), (overrides, tokens, mask)):
        config = load(path, given, local_runs.registry).config
        row = TrainSequence(id="a", tokens=np.array(ids), loss_mask=np.array(masked, dtype=bool))
        asyncio.run(cached_logprobs(config, model, [row]))
    assert model.passes == passes


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_adapters_are_their_own_reference(local_runs, loss):
    config = local_runs.preference(loss_type=loss)
    config["actor_train"]["model_args"] |= {"lora_target": "all-linear", "lora_rank": 4}
    lines = local_runs.metrics(local_runs.ok(config))
    assert lines[0]["val/rewards/chosen"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["val/rewards/margins"] > 0
    assert ("val/kl" in lines[-1]) == (loss == "kto")


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"loss_type": "orpo"}, {"loss_type": ["simpo", "sft"], "loss_weights": [1, 0.5]}])
def test_losses_without_a_reference_need_none(local_runs, given):
    lines = local_runs.metrics(local_runs.ok(local_runs.preference(**given)))
    assert lines[-1]["val/loss"] < lines[0]["val/loss"]
    assert lines[-1]["val/chosen_nll"] < lines[0]["val/chosen_nll"]


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(local_runs):
    runs = local_runs
    given = {"precompute_ref_log_probs": True, "max_steps": 4, "eval_steps": 2}
    whole = runs.ok(runs.preference(exp_name="whole", save_steps=4, **given))
    first = runs.ok(runs.preference(exp_name="halves", save_steps=2, **given))
    checkpoint = first.run_dir.checkpoints / "step-2"
    second = runs.ok(runs.preference(exp_name="halves", save_steps=4, resume_from_checkpoint=str(checkpoint), **given))
    assert runs.timeless(second) == runs.timeless(whole)
    one, other = (load_file(each.run_dir.export / "model.safetensors") for each in (whole, second))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_reward_models_export_scores_like_the_trained_model(local_runs):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    result = local_runs.ok(
        local_runs.preference(
            "reward_model", margin="margin", center_rewards_coefficient=0.01, max_steps=6, eval_steps=6
        )
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
def test_a_language_model_becomes_a_reward_model(local_runs):
    language_model = local_runs.ok(local_runs.sft(max_steps=1, eval_steps=0))
    config = local_runs.preference("reward_model", pretrain=str(language_model.run_dir.export), tokenizer=None)
    del config["reward_train"]["model_args"]["random_init"]
    lines = local_runs.metrics(local_runs.ok(config))
    assert lines[-1]["val/loss"] < lines[0]["val/loss"]


@pytest.mark.slow
def test_responses_are_generated_and_scored_with_an_engine(local_runs):
    config = local_runs.preference(
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


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    ("pipeline", "given"),
    [("dpo", {"reference": REFERENCE}), ("dpo", {"loss_type": "kto", "reference": REFERENCE}), ("reward_model", {})],
)
def test_ranks_on_ray_equal_one(local_runs, pipeline, given):
    config = local_runs.preference(pipeline, **given)
    expected = local_runs.learnt(local_runs.ok(config))
    found = local_runs.learnt(local_runs.ok(local_runs.on_ranks(config, "hf", 2, replicas=2)))
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
