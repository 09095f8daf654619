"""The formulas of the plugins' strategies, by hand on a model of round numbers."""

from dataclasses import replace

import pytest

from roll_core.config.loading import strategy_config
from roll_core.plugins.registry import load_registry
from roll_core.plugins.targets import load_target
from roll_core.spec.config import StrategyConfig
from roll_core.spec.plan import ComparedModel, MemoryInput
from roll_core.spec.providers import InferProvider, TrainProvider
from roll_modeling.memory import head_bytes
from roll_tools.sizes import model_size

MODEL = model_size(
    {
        "model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    }
)  # fmt: skip
LAYER = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
P = 2 * 64_000 + 64 + 4 * LAYER
REST = 2 * 64_000 + 64
MIXTURE = model_size(
    {
        "model_type": "mixtral", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8,
    }
)  # fmt: skip
EXPERTS = 8 * 3 * 64 * 128
"""Parameters of a layer's."""


def answer(kind, name, keys, **more):
    """What a strategy's formula says."""
    registry = load_registry()
    provider = registry.find(kind, name)
    numbers = {
        "model": MODEL, "dtype": "fp32", "trains": True, "trained_parameters": P, "world_size": 2,
        "train_tokens": 8, "score_tokens": 8, "longest": 8, "on_host": True,
    }  # fmt: skip
    question = MemoryInput(config=strategy_config(provider, keys, owner=name), **{**numbers, **more})
    return load_target(provider.memory, owner=name)(question)


def uses(kind, name, keys, act, *, apart=False, **more):
    """Bytes by what, or by what and where if `apart`, of one act."""
    found = {}
    for use in answer(kind, name, keys, **more).uses:
        if not use.during or act in use.during:
            key = (use.what, use.on) if apart else use.what
            found[key] = found.get(key, 0) + use.num_bytes
    return found


def train(name, keys, act="backward", **more):
    return uses(TrainProvider, name, keys, act, **more)


@pytest.mark.parametrize("name", ["hf_train", "fsdp2_train", "deepspeed_train", "megatron_train"])
def test_model_comparison_counts_head_states_and_both_logits(name):
    tokens = {"train_tokens": 512, "longest": 512, "on_host": False}
    compared = ComparedModel(hidden_size=32, dtype="bf16", num_arrays=10)
    found, plain = train(name, {}, **tokens, compared=compared), train(name, {}, **tokens)
    assert found["logits"] == 4 * 512 * 1000 * 10 + 512 * (2 * 4 * 32 + 3 * 4 * 64)
    assert found["weights"] - plain["weights"] == 2 * 1000 * 32
    assert (
        train(name, {}, "score", **tokens, compared=compared)["logits"] == train(name, {}, "score", **tokens)["logits"]
    )


@pytest.mark.parametrize(("chunk", "rows"), [(None, 6 + 6), (4, 6 + 4), (2, 6 + 2), (1, 4 + 2)])
def test_logits_chunk_is_counted_beside_the_log_softmax(chunk, rows):
    """Of 6 tokens of 8, in chunks of which four are kept. A chunk that is not kept takes twice its logits."""
    question = MemoryInput(model=MODEL, config=StrategyConfig(), dtype="fp32", longest=4, logprob_tokens=3)
    states = 4 * 64 * (8 + 2 * 6)
    assert head_bytes(question, 8, chunk, backward=True, keeps=True) == states + 4 * 1000 * rows


def test_twins_that_only_score_have_a_formula_as_well():
    for name in ("hf_infer", "fsdp2_infer", "deepspeed_infer", "megatron_infer"):
        found = train(name, {}, "score", trains=False, trained_parameters=0, on_host=name != "megatron_infer")
        assert found["weights"] > 0
        assert not {"gradients", "optimizer"} & found.keys()


def test_fsdp2_shares_everything_but_what_is_gathered():
    found = train("fsdp2_train", {})
    assert MODEL.parameters == P
    assert found["weights"] == 4 * P // 2
    assert found["optimizer"] == 8 * P // 2
    # The backward pass of the model's first layer: the output layer's gradient waits, all other layers' are shared, one
    # layer's is on its way, and one is made.
    assert found["gradients"] == 4 * (P - REST) // 2 + 4 * (64_000 + LAYER)
    assert found["buffers"] == 4 * (REST + LAYER) + 4 * LAYER
    assert train("fsdp2_train", {}, "step")["gradients"] == 4 * P // 2
    assert train("fsdp2_train", {}, "score")["buffers"] == 4 * (REST + 2 * LAYER)


def test_fsdp2_at_the_end_sends_what_stands_in_no_layer():
    """A wide vocabulary over one layer: its gradient is laid out for the other ranks, and gloo adds up in a copy."""
    wide = model_size(
        {
            "model_type": "llama", "vocab_size": 10_000, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
        }
    )  # fmt: skip
    found = train("fsdp2_train", {}, model=wide, trained_parameters=wide.parameters, train_tokens=1, world_size=8)
    rest = 2 * 640_000 + 64
    assert found["gradients"] == 4 * wide.parameters // 8
    assert found["buffers"] == 2 * 4 * rest
    on_gpu = train(
        "fsdp2_train", {}, model=wide, trained_parameters=wide.parameters, train_tokens=1, world_size=8, on_host=False
    )
    # There the embedding's gradient is made beside the waiting one while both are still gathered.
    assert on_gpu["buffers"] == 4 * rest + 4 * LAYER
    assert on_gpu["gradients"] == 4 * (wide.parameters - rest) // 8 + 4 * 2 * 640_000


def test_fsdp2_tied_model_counts_output_and_embedding_gradients():
    tied = model_size(
        {
            "model_type": "llama", "vocab_size": 10_000, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True,
        }
    )  # fmt: skip
    found = train("fsdp2_train", {}, model=tied, trained_parameters=tied.parameters, train_tokens=1)
    assert found["gradients"] == 4 * LAYER // 2 + 4 * 2 * 640_000
    assert found["buffers"] == 4 * (640_000 + 64) + 4 * LAYER


def test_fsdp2_peak_starts_with_activations_and_logits():
    few, many = (train("fsdp2_train", {}, train_tokens=tokens) for tokens in (1000, 2000))
    rows = 1024  # the host computes a microbatch with up to a sixteenth more
    assert few["logits"] == 3 * rows * 64 * 4 + 4 * rows * 1000
    assert few["gradients"] == 4 * 64_000
    assert few["buffers"] == 4 * (REST + LAYER)
    assert many["activations"] == 2 * few["activations"]


def test_fsdp2_accumulates_full_gradients_by_default():
    """All of them, when the first of the last microbatch's is made."""
    found = train("fsdp2_train", {}, num_micro_batches=3)
    assert found["gradients"] == 4 * P + 4 * 64_000
    assert found["buffers"] == 4 * (REST + LAYER)
    eager = {"reduce_scatter_during_grad_accumulation": True}
    found = train("fsdp2_train", eager, num_micro_batches=3)
    assert found["gradients"] == 4 * P // 2 + 4 * (64_000 + LAYER)


def test_fsdp2_cuts_layers_by_tensor_parallelism():
    keys = {"tensor_model_parallel_size": 2, "fsdp_size": 2}
    found = train("fsdp2_train", keys, world_size=8)
    assert found["weights"] == 4 * P // 4
    assert (found["gradients"], found["buffers"]) == (4 * P // 4, 2 * 4 * REST)  # at the end
    assert train("fsdp2_train", keys, "score", world_size=8)["buffers"] == 4 * (REST + 2 * (LAYER // 2))


def test_fsdp2_gathers_of_the_experts_those_of_a_rank():
    found = train(
        "fsdp2_train", {"ep_size": 4}, "score", model=MIXTURE, trained_parameters=MIXTURE.parameters, world_size=4
    )
    layer = MIXTURE.layers[0].parameters - EXPERTS + EXPERTS // 4
    assert found["weights"] == 4 * MIXTURE.parameters // 4
    assert found["buffers"] == 4 * (REST + 2 * layer)


@pytest.mark.parametrize("key", ["ulysses_size", "ring_size"])
def test_fsdp2_divides_tokens_over_sequence_parallel_ranks(key):
    alone, shared = (train("fsdp2_train", keys, train_tokens=tokens) for keys, tokens in (({}, 64), ({key: 2}, 128)))
    assert shared == alone


@pytest.mark.parametrize(
    ("stage", "act", "weights", "optimizer", "gradients", "buffers"),
    [
        (0, "step", 4 * P, 8 * P, 4 * P, 4 * P),
        (1, "backward", 4 * P, 12 * P // 2, 4 * P, 0),
        (1, "step", 4 * P, 12 * P // 2, 4 * P, 4 * P),
        (2, "backward", 4 * P, 12 * P // 2, 0, 4 * P + 4 * P),
        (2, "step", 4 * P, 12 * P // 2, 8 * P // 2, 0),
        (3, "backward", 4 * P // 2, 12 * P // 2, 4 * P // 2, 4 * P + 2 * 4 * P),
        (3, "step", 4 * P // 2, 12 * P // 2, 4 * P // 2, 4 * P),
        (3, "score", 4 * P // 2, 12 * P // 2, 4 * P // 2, 4 * P),
    ],
)
def test_deepspeed_shards_the_states_of_its_stage(stage, act, weights, optimizer, gradients, buffers):
    found = train("deepspeed_train", {"zero_optimization": {"stage": stage}}, act)
    assert {name: found.get(name, 0) for name in ("weights", "optimizer", "gradients", "buffers")} == {
        "weights": weights,
        "optimizer": optimizer,
        "gradients": gradients,
        "buffers": buffers,
    }


def test_deepspeed_keeps_gradients_of_earlier_microbatches():
    alone, several = (
        train("deepspeed_train", {"zero_optimization": {"stage": 2}}, num_micro_batches=count).get("gradients", 0)
        for count in (1, 3)
    )
    assert (alone, several) == (0, 4 * P // 2)


def test_deepspeed_small_bucket_keeps_gathered_parameters():
    keys = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 100_000}}
    assert train("deepspeed_train", keys)["buffers"] == 4 * (P - 100_000) + 4 * 100_000 + 2 * 4 * 100_000


def test_deepspeeds_bucket_is_whole_on_an_accelerator():
    keys = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 10_000_000}}
    found = train("deepspeed_train", keys, on_host=False, dtype="bf16")
    assert found["buffers"] == 2 * 10_000_000 + 4 * P


def test_megatron_splits_by_tp_and_pp_and_shards_state():
    keys = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    found = train("megatron_train", keys, world_size=8, on_host=False, dtype="bf16")
    held = 4 * LAYER // 4 + 64_000 // 2
    assert found["weights"] == 2 * held
    assert found["gradients"] == 4 * held + (4 + 2) * 64_000 // 2  # the output layer's comes in float32, and as it is
    assert found["optimizer"] == 12 * (held // 2)


def test_megatron_stores_moments_on_the_host_if_configured():
    keys = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    found = uses(TrainProvider, "megatron_train", keys, "backward", on_host=False, dtype="bf16", apart=True)
    share = (P - MODEL.final_norm) // 2
    assert found["optimizer", "device"] == 12 * share - 8 * (share // 2)
    assert found["optimizer", "host"] == 16 * (share // 2)


@pytest.mark.parametrize(
    ("more", "offered"),
    [({"dtype": "bf16"}, True), ({"dtype": "fp32"}, False), ({"dtype": "bf16", "added_parameters": 9}, False)],
    ids=["masters", "float32", "adapters"],
)
def test_megatron_offers_host_memory_only_where_check_accepts_it(more, offered):
    found = answer(TrainProvider, "megatron_train", {}, on_host=False, **more)
    assert ("optimizer_cpu_offload" in [key for saving in found.savings for key in saving.keys]) is offered


def test_megatron_spreads_experts_by_their_own_parallelism():
    found = train("megatron_train", {"expert_model_parallel_size": 4}, model=MIXTURE, world_size=4, on_host=False)
    assert found["weights"] == 4 * (MIXTURE.parameters - 2 * EXPERTS - MIXTURE.final_norm + 2 * EXPERTS // 4)


@pytest.mark.parametrize(
    ("keys", "more", "cache"),
    [
        ({"kv_cache_memory_bytes": 12345}, {}, 12345),
        ({}, {}, 4 << 30),
        ({"gpu_memory_utilization": 0.5}, {"on_host": False, "slot_bytes": 1 << 30}, (1 << 29) - 4 * P),
        ({}, {"on_host": False, "slot_bytes": 1 << 30}, int(0.9 * (1 << 30)) - 4 * P),
    ],
)
def test_vllm_takes_the_share_that_it_is_given(keys, more, cache):
    found = uses(InferProvider, "vllm", keys, "generate", trains=False, **more)
    assert found == {"weights": 4 * P, "kv cache": cache}


def test_vllm_fp8_counts_one_byte_per_element_and_row_scales():
    found = uses(InferProvider, "vllm", {"quantization": "fp8"}, "generate", trains=False, dtype="bf16")
    elements, rows = 4 * 64 * 64 + 3 * 64 * 128, 4 * 64 + 2 * 128 + 64
    assert found["weights"] == 4 * (elements + 4 * rows) + 2 * (P - 4 * elements)


def test_vllm_blocks_count_a_scale_per_block():
    found = uses(InferProvider, "vllm", {"quantization": "fp8_per_block"}, "generate", trains=False, dtype="bf16")
    elements, blocks = 4 * 64 * 64 + 3 * 64 * 128, 4 + 3
    assert found["weights"] == 4 * (elements + 4 * blocks) + 2 * (P - 4 * elements)


@pytest.mark.parametrize("quantization", [None, "fp8_per_block"])
def test_vllm_copies_all_but_experts_to_data_parallel_ranks(quantization):
    """On each of 2 × 4 slots."""
    keys = {"tensor_parallel_size": 2, "data_parallel_size": 4, "enable_expert_parallel": True}
    keys |= {} if quantization is None else {"quantization": quantization}
    more = {"trains": False, "dtype": "bf16", "model": MIXTURE}
    found = uses(InferProvider, "vllm", keys, "generate", **more)
    attention, norms = 2 * 4 * 64 * 64, MIXTURE.parameters - 2 * EXPERTS - 2 * 4 * 64 * 64
    if quantization is None:
        assert found["weights"] == (2 * 2 * EXPERTS // 4 + 2 * (attention + norms)) // 2
    else:  # a scale for each block, of which a matrix of attention has one
        experts = 2 * EXPERTS + 4 * 2 * EXPERTS // 128**2
        assert found["weights"] == (experts // 4 + attention + 4 * 2 * 4 + 2 * norms) // 2


@pytest.mark.parametrize(
    ("keys", "on_host", "gone"),
    [
        ({}, True, {"kv cache"}),
        ({}, False, {"kv cache", "weights"}),
        ({"sleep_level": 2}, False, {"kv cache", "weights"}),
        ({"sleep_level": 0}, False, set()),
    ],
)
def test_vllm_sleep_releases_memory(keys, on_host, gone):
    provider = load_registry().find(InferProvider, "vllm")
    question = MemoryInput(
        config=strategy_config(provider, keys, owner="vllm"), model=MODEL, dtype="fp32", trains=False,
        trained_parameters=0, world_size=1,
        train_tokens=8, score_tokens=8, longest=8, on_host=on_host, slot_bytes=1 << 30,
    )  # fmt: skip
    answer = load_target(provider.memory, owner="vllm")(question)
    assert {use.what for use in answer.uses if use.offloads} == gone


@pytest.mark.parametrize(
    ("name", "keys", "ranks"),
    [
        ("hf_train", {}, 1),
        ("fsdp2_train", {}, 2),
        ("deepspeed_train", {"zero_optimization": {"stage": 0}}, 1),
        ("deepspeed_train", {"zero_optimization": {"stage": 2}}, 2),
    ],
)
def test_a_moving_average_is_shared_like_the_optimizers_state(name, keys, ranks):
    with_average, without = (train(name, keys, "score", averages=each)["optimizer"] for each in (True, False))
    assert with_average - without == 4 * P // ranks


@pytest.mark.parametrize("name", ["hf_train", "fsdp2_train", "deepspeed_train"])
def test_a_model_without_a_vocabulary_needs_no_head(name):
    numbers = {"task": "flow", "train_tokens": 4096}
    without, one_word = (train(name, {}, model=replace(MODEL, vocab_size=each), **numbers) for each in (0, 1))
    assert without == one_word
    assert without["activations"] > 0
