"""Sharded over any number of ranks, a model computes and learns as `hf_train` has it in one process.

`./run test` runs jobs on two ranks, `./run test-engines fsdp2` all of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from fsdp2_programs import (
    LORA,
    MOE,
    TINY,
    TRAINING,
    Job,
    ask_for_adapters,
    lose_and_go_on,
    model_spec,
    scored,
    sequences,
    shards_beside_whole_matrices,
    skip_and_go_on,
    step,
    train,
    weights,
)

from roll_core.errors import NonFiniteError, UnsupportedError
from roll_core.spec.model import LoraSpec, MeshInfo
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.errors import mentions
from shared_tests.tiny_architectures import LONGROPE, MULTIMODAL

GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
EXTRA = LoraSpec(targets=("q_proj", "v_proj"), rank=2, alpha=4.0, extra_modules=("norm", "lm_head"))
RANKS = {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"0.mlp.up_proj": 3.0}}
FUSED = LoraSpec(
    targets=("q_proj", "embed_tokens", "lm_head"),
    rank=2,
    alpha=4.0,
    rank_pattern={"gate_up_proj": 3},
    parameters=("experts.gate_up_proj", "experts.down_proj"),
)
PHI3 = TINY | {"model_type": "phi3", "pad_token_id": 0}
PHI3.pop("head_dim")
GPT_OSS = TINY | {"model_type": "gpt_oss", "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 4}
GEMMA2 = TINY | {"model_type": "gemma2", "sliding_window": 4, "attn_logit_softcapping": 3.0}
MIXTRAL = TINY | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
PHI3_LONG = {key: each for key, each in TINY.items() if key != "head_dim"} | LONGROPE
TENSOR = {"tensor_model_parallel_size": 2}
EXPERTS = {"ep_size": 2}
JOBS = {
    "1": Job(),
    "2": Job(world_size=2),
    "3, which divides no dimension": Job(world_size=3),
    "4, of which one has less to do": Job(world_size=4, max_sequences=1),
    "2 x 2": Job(world_size=4, config={"fsdp_size": 2}),
    "reduced each time": Job(
        world_size=2,
        max_sequences=1,
        config={"reduce_scatter_during_grad_accumulation": True, "reshard_after_forward": False},
    ),
    "root freed as well": Job(world_size=2, config={"reshard_after_forward": True}),
    "checkpointed": Job(world_size=2, model={"gradient_checkpointing": True}),
    "recomputed selectively": Job(
        world_size=2, config={"recompute_granularity": "selective"}, model={"gradient_checkpointing": True}
    ),
    "compiled": Job(world_size=2, config={"torch_compile": True}, model={"gradient_checkpointing": True}),
    "on the host": Job(world_size=2, config={"offload_policy": True}),
    "padded": Job(world_size=2, model={"attn_implementation": "sdpa"}),
    "tied": Job(world_size=2, model={"random_init": TINY | {"tie_word_embeddings": True}}),
    "experts": Job(world_size=2, max_sequences=1, model={"random_init": MOE}),
    "another architecture": Job(world_size=2, model={"random_init": GPT2, "gradient_checkpointing": True}),
    "text of a model with images": Job(
        world_size=2,
        max_sequences=1,
        model={"random_init": MULTIMODAL["qwen3_vl"], "gradient_checkpointing": True},
    ),
    "adapters": Job(world_size=2, model={"lora": LORA}),
    "adapters, 2 x 2, and whole modules": Job(world_size=4, model={"lora": EXTRA}, config={"fsdp_size": 2}),
    "adapters of fused experts and embeddings, ranks by pattern, checkpointed": Job(
        world_size=2, model={"random_init": MOE, "lora": FUSED, "gradient_checkpointing": True}
    ),
    "adapters, 4 bits": Job(world_size=2, model={"lora": replace(LORA, load_in_4bit=True)}),
    "adapters, 4 bits, 2 x 2, bf16, checkpointed": Job(
        world_size=4,
        config={"fsdp_size": 2, "reshard_after_forward": False},
        model={"lora": replace(LORA, load_in_4bit=True), "dtype": "bf16", "gradient_checkpointing": True},
    ),
    "adapters, 4 bits, on the host, checkpointed": Job(
        world_size=2,
        config={"offload_policy": True},
        model={"lora": replace(LORA, load_in_4bit=True), "gradient_checkpointing": True},
    ),
    "DoRA": Job(world_size=2, model={"lora": replace(LORA, use_dora=True, use_rslora=True)}),
    "DoRA, bf16, checkpointed": Job(
        world_size=2, model={"lora": replace(LORA, use_dora=True), "dtype": "bf16", "gradient_checkpointing": True}
    ),
    "tensor 2, adapters of an embedding, ranks by pattern": Job(
        world_size=2,
        config=TENSOR,
        model={"lora": replace(LORA, targets=("embed_tokens", "o_proj", "up_proj"), **RANKS)},
    ),
    "adapters on a critic, checkpointed": Job(
        world_size=2, model={"lora": LORA, "task": "value", "gradient_checkpointing": True}
    ),
    "value": Job(world_size=2, model={"task": "value"}),
    "reward": Job(world_size=2, model={"task": "reward"}),
    "bf16": Job(world_size=2, model={"dtype": "bf16"}),
    "bf16, 2 x 2": Job(world_size=4, model={"dtype": "bf16"}, config={"fsdp_size": 2}),
    "tensor 2": Job(world_size=2, config=TENSOR),
    "tensor 2, 2 x 2, tied, checkpointed": Job(
        world_size=4,
        max_sequences=1,
        config=TENSOR,
        model={"random_init": TINY | {"tie_word_embeddings": True}, "gradient_checkpointing": True},
    ),
    "tensor 2, two copies, bf16": Job(world_size=4, model={"dtype": "bf16"}, config=TENSOR | {"fsdp_size": 1}),
    "tensor 2, experts": Job(world_size=4, max_sequences=1, config=TENSOR, model={"random_init": MOE}),
    "tensor 2, biases": Job(world_size=2, config=TENSOR, model={"random_init": TINY | {"attention_bias": True}}),
    "tensor 2, gathered in between": Job(world_size=2, config=TENSOR, model={"random_init": PHI3}),
    "tensor 2, adapters": Job(world_size=4, config=TENSOR, model={"lora": LORA, "gradient_checkpointing": True}),
    "tensor 2, value, on the host": Job(
        world_size=2, config=TENSOR | {"offload_policy": True}, model={"task": "value"}
    ),
    "ulysses 2": Job(world_size=2, max_sequences=1, config={"ulysses_size": 2}),
    "ulysses 4, key heads repeated, checkpointed": Job(
        world_size=4, config={"ulysses_size": 4}, model={"gradient_checkpointing": True}
    ),
    "ulysses 2, two copies": Job(world_size=4, config={"ulysses_size": 2, "fsdp_size": 1}),
    "ulysses 2, tensor 2": Job(world_size=4, config=TENSOR | {"ulysses_size": 2}),
    "ulysses 2, windows, softcap": Job(world_size=2, config={"ulysses_size": 2}, model={"random_init": GEMMA2}),
    "ulysses 2, sinks": Job(world_size=2, config={"ulysses_size": 2}, model={"random_init": GPT_OSS}),
    "ulysses 2, other frequencies for long sequences": Job(
        world_size=2, config={"ulysses_size": 2}, model={"random_init": PHI3_LONG}
    ),
    "ulysses 2, experts": Job(world_size=4, max_sequences=1, config={"ulysses_size": 2}, model={"random_init": MOE}),
    "ulysses 2, adapters": Job(world_size=2, config={"ulysses_size": 2}, model={"lora": LORA}),
    "ulysses 2, value": Job(world_size=2, max_sequences=1, config={"ulysses_size": 2}, model={"task": "value"}),
    "ulysses 2, reward, bf16": Job(world_size=2, config={"ulysses_size": 2}, model={"task": "reward", "dtype": "bf16"}),
    "ring 2": Job(world_size=2, max_sequences=1, config={"ring_size": 2}),
    "ring 3, checkpointed": Job(world_size=3, config={"ring_size": 3}, model={"gradient_checkpointing": True}),
    "ring 2, tensor 2": Job(world_size=4, config=TENSOR | {"ring_size": 2}),
    "ring 2, two copies, adapters": Job(world_size=4, config={"ring_size": 2, "fsdp_size": 2}, model={"lora": LORA}),
    "ring 2, windows, softcap": Job(world_size=2, config={"ring_size": 2}, model={"random_init": GEMMA2}),
    "ring 2, sinks": Job(world_size=2, config={"ring_size": 2}, model={"random_init": GPT_OSS}),
    "ring 2, value": Job(world_size=2, max_sequences=1, config={"ring_size": 2}, model={"task": "value"}),
    "ring 2, reward, bf16": Job(world_size=2, config={"ring_size": 2}, model={"task": "reward", "dtype": "bf16"}),
    "experts 2": Job(world_size=2, max_sequences=1, config=EXPERTS, model={"random_init": MOE}),
    "experts 2, each half shared by two, checkpointed": Job(
        world_size=4, max_sequences=1, config=EXPERTS, model={"random_init": MOE, "gradient_checkpointing": True}
    ),
    "experts 2, two copies, on the host": Job(
        world_size=4, config=EXPERTS | {"fsdp_size": 2, "offload_policy": True}, model={"random_init": MOE}
    ),
    "experts 4, ring 2": Job(world_size=4, config={"ep_size": 4, "ring_size": 2}, model={"random_init": MOE}),
    "experts 2, Mixtral, value": Job(world_size=2, config=EXPERTS, model={"random_init": MIXTRAL, "task": "value"}),
    "experts 2, adapters": Job(world_size=2, config=EXPERTS, model={"random_init": MOE, "lora": LORA}),
    "two in each layer": Job(
        world_size=2,
        config={"wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen3MLP", "Qwen3Attention"]}},
    ),
}


def alone(job: Job) -> dict:
    """`hf_train` in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    strategy = HFTrainStrategy(HFTrainConfig(), job.training)
    strategy.build(model_spec(job), MeshInfo(role="student"))
    found = {"before": weights(strategy), "scored_before": scored(strategy, job)}
    found["steps"] = [step(strategy, job, sequences()) for _ in range(3)]
    found |= {"weights": weights(strategy), "scored": scored(strategy, job)}
    strategy.close()
    torch.set_num_threads(before)
    return found


def together(answers, what):
    """Of all ranks' shares."""
    return {name: rows for each in answers for name, rows in each[what].items()}


def numbers(rows):
    """Without the ids of the top tokens, of which several may be equally likely in bf16."""
    return {name: each[:, :5] for name, each in rows.items()}


def way_off(found, expected, start):
    """How far the weights ended from where they should, relative to the way that they should have gone."""
    missed = math.sqrt(sum(float(np.square(found[name] - each).sum()) for name, each in expected.items()))
    went = math.sqrt(sum(float(np.square(start[name] - each).sum()) for name, each in expected.items()))
    assert went > 0.1
    return missed / went


def typical(found, expected):
    """Root of the mean square of what they differ by."""
    return math.sqrt(np.concatenate([np.square(found[name] - each).ravel() for name, each in expected.items()]).mean())


def furthest(found, expected):
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - expected[name]).max()) for name in expected)


ALWAYS = {"2", "adapters"}
OFTEN = {
    "text of a model with images",
    "recomputed selectively",
    "tensor 2",
    "4, of which one has less to do",
    "reduced each time",
    "on the host",
    "adapters, 2 x 2, and whole modules",
    "adapters, 4 bits",
    "reward",
    "bf16",
    "tensor 2, 2 x 2, tied, checkpointed",
    "tensor 2, two copies, bf16",
    "tensor 2, experts",
    "tensor 2, adapters",
    "ulysses 4, key heads repeated, checkpointed",
    "ulysses 2, other frequencies for long sequences",
    "ring 3, checkpointed",
    "ring 2, tensor 2",
    "ring 2, two copies, adapters",
    "experts 2, each half shared by two, checkpointed",
    "experts 2, adapters",
}
"""Every kind of parallelism, with another, adapters, bf16, checkpointing. `tests/train/test_blocks.py` compiles."""


def jobs(names):
    """Parameters; those that are not in `ALWAYS` wait for `./run test-engines`, and are slow if not in `OFTEN`."""
    engine, slow = pytest.mark.engine, pytest.mark.slow
    return [
        pytest.param(name, marks=() if name in ALWAYS else engine if name in OFTEN else (engine, slow))
        for name in names
    ]


@pytest.fixture(scope="module")
def trained(ranks):
    """`trained(name)`: what each rank returned of three steps of a job, which runs once."""
    return cache(lambda name: ranks(train, JOBS[name]))


@pytest.mark.parametrize("name", jobs(JOBS))
def test_training_equals_hf_train(trained, name):
    job, answers = JOBS[name], trained(name)
    expected = alone(job)
    exact = "dtype" not in job.model
    # In bf16 the same sums in another order: Adam's first steps turn an ulp of a small gradient into a whole step.
    bound = {"weights": 1e-4, "norm": 1e-5} if exact else {"weights": 0.1, "norm": 1e-2}
    assert furthest(answers[0]["before"], expected["before"]) == 0
    for each in answers:
        assert furthest(each["weights"], answers[0]["weights"]) == 0
        assert [stats for _, stats in each["steps"]] == [stats for _, stats in answers[0]["steps"]]
    assert way_off(answers[0]["weights"], expected["weights"], expected["before"]) < bound["weights"]
    precise = expected if exact else alone(job.with_(model=job.model | {"dtype": "fp32"}))
    for what in ("scored_before", "scored"):
        if exact:
            assert furthest(together(answers, what), expected[what]) < 1e-5
        else:
            found, theirs, true = map(numbers, (together(answers, what), expected[what], precise[what]))
            assert typical(found, true) < 2 * typical(theirs, true)
    for at, (loss, stats) in enumerate(expected["steps"]):
        found = answers[0]["steps"][at][1]
        assert sum(each["steps"][at][0] for each in answers if each["leads"]) == pytest.approx(loss, rel=bound["norm"])
        assert found["grad_norm"] == pytest.approx(stats["grad_norm"], rel=bound["norm"])
        assert found["learning_rate"] == stats["learning_rate"]


def test_base_model_of_adapters_is_unchanged(trained):
    for each in trained("adapters"):
        assert furthest(each["base"], each["scored_before"]) == 0
        assert furthest(each["scored"], each["scored_before"]) > 1e-2


@pytest.mark.parametrize(
    "name", jobs(["adapters", "tensor 2, adapters", "ring 2, two copies, adapters", "experts 2, adapters"])
)
def test_exported_adapters_and_base_make_the_merged_weights(trained, name):
    answers = trained(name)
    beneath, merged = answers[0]["before"], answers[0]["weights"]  # B is zero before the first step
    layers = {each.rpartition(".lora_")[0] for each in answers[0]["alone"]}
    changed = {each for each, weight in merged.items() if not np.array_equal(weight, beneath[each])}
    assert changed == {f"{layer}.weight" for layer in layers}
    for each in answers:
        assert set(each["alone"]) == {f"{layer}.lora_{side}.weight" for layer in layers for side in "AB"}
        for layer in layers:
            a_RI, b_OR = (each["alone"][f"{layer}.lora_{side}.weight"] for side in "AB")
            np.testing.assert_allclose(merged[f"{layer}.weight"], beneath[f"{layer}.weight"] + b_OR @ a_RI, atol=1e-6)


def test_a_model_without_adapters_exports_none_alone(ranks):
    [error] = ranks(ask_for_adapters, Job())
    assert error.is_a(UnsupportedError)
    assert mentions(error.message, "adapters")


def test_adapters_alone_have_gradients_and_moments(trained):
    for each in trained("adapters"):
        assert each["memory"]["optimizer"] < each["memory"]["weights"]


SHARES = {
    "2": (2, 0.02),  # each tensor is cut by rows, so a share is a half up to one row
    "bf16": (2, 0.02),
    # Only the norms inside layers, 1 % here, are whole in each tensor-parallel half.
    "tensor 2": (2, 0.04),
    "tensor 2, 2 x 2, tied, checkpointed": (4, 0.04),
    "tensor 2, two copies, bf16": (2, 0.04),
    "experts 2, each half shared by two, checkpointed": (4, 0.02),
}
"""Into how many shares the model is cut, and the bound on the relative difference of their sizes."""


@pytest.mark.parametrize("name", jobs(SHARES))
def test_a_rank_holds_its_share_of_everything(trained, name):
    num_shares, bound = SHARES[name]
    for each in trained(name):
        whole = sum(tensor.size for tensor in each["weights"].values())
        assert each["memory"]["weights"] == pytest.approx(4 * whole / num_shares, rel=bound)
        assert each["memory"]["optimizer"] == pytest.approx(8 * whole / num_shares, rel=bound)
        assert each["memory"]["grads"] == 0


def test_scoring_role_holds_only_weights_in_its_dtype(ranks):
    job = Job(world_size=2, training=None, model={"dtype": "bf16"})
    answers = ranks(train, job, 0)
    trained = ranks(train, job.with_(training=JOBS["2"].training), 0)
    whole = sum(each.size for each in answers[0]["weights"].values())
    assert answers[0]["memory"] == {"weights": pytest.approx(whole, rel=0.02), "grads": 0, "optimizer": 0}
    assert furthest(numbers(together(answers, "scored")), numbers(together(trained, "scored"))) < 1e-5


def test_param_dtype_rounds_what_computes_and_nothing_else(ranks):
    """A float32 model that computes in bf16 exports what computes, and continues from float32 numbers."""
    config = {"param_dtype": "bf16", "reduce_dtype": "bf16"}
    answers = ranks(train, Job(world_size=2, config=config))
    exact = alone(Job())
    rounded = {name: torch.from_numpy(each).bfloat16().float().numpy() for name, each in exact["before"].items()}
    assert furthest(answers[0]["before"], rounded) == 0
    assert 0 < way_off(answers[0]["weights"], exact["weights"], exact["before"]) < 0.2
    for at, (loss, stats) in enumerate(exact["steps"]):
        assert sum(each["steps"][at][0] for each in answers) == pytest.approx(loss, rel=1e-2)
        assert answers[0]["steps"][at][1]["grad_norm"] == pytest.approx(stats["grad_norm"], rel=3e-2)


def test_non_finite_gradient_is_skipped_on_every_rank(ranks):
    for spoilt, straight in ranks(skip_and_go_on, JOBS["2"]):
        skipped, after = spoilt["steps"]
        assert skipped["skipped"]
        assert not math.isfinite(skipped["grad_norm"])
        assert after == straight["steps"][0]
        assert furthest(spoilt["weights"], straight["weights"]) == 0


@pytest.mark.parametrize(
    "name", jobs(["4, of which one has less to do", "2 x 2", "tensor 2, 2 x 2, tied, checkpointed"])
)
def test_non_finite_loss_of_a_rank_ends_the_call_on_all_ranks(ranks, name):
    """None waits for the others, and what comes after is as if nothing had been."""
    for error, after, alone_after in ranks(lose_and_go_on, JOBS[name], "s4"):
        assert error.is_a(NonFiniteError)
        assert "s4" in error.message
        assert after["step"] == alone_after["step"]
        assert furthest(after["weights"], alone_after["weights"]) == 0


@pytest.mark.parametrize(
    ("world_size", "config"),
    [
        (2, {}),
        pytest.param(3, {}, marks=pytest.mark.engine),
        pytest.param(2, TENSOR, marks=pytest.mark.engine),
        pytest.param(4, TENSOR, marks=pytest.mark.engine),
        pytest.param(2, {"offload_policy": True}, marks=pytest.mark.engine),
    ],
)
def test_muon_steps_whole_matrices(ranks, world_size, config):
    training = replace(TRAINING, optimizer="roll_core.algorithms.optimizers:muon", warmup_steps=0)
    job = Job(world_size=world_size, config=config, training=training)
    for found in ranks(shards_beside_whole_matrices, job):
        assert any(".layers." in name and before.ndim == 2 for name, (before, _, _) in found.items())
        for before, sharded, whole in found.values():
            assert np.abs(whole - before).max() > 1e-4
            np.testing.assert_allclose(sharded, whole, rtol=0, atol=1e-6)
