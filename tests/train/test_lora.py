"""Adapters: what is trained, what the model computes with and without them, and the weights that engines get."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from roll_core.algorithms.losses import ValueObjective, sft_objective
from roll_core.data.pack import pack
from roll_core.errors import ModelError, UnsupportedError, WeightSyncError
from roll_core.spec.model import LoraSpec, ModelSpec
from roll_core.spec.train import TrainingSpec, WantedOutputs
from roll_modeling.model import load_model, scalar_head
from roll_testing.errors import raises_error
from shared_tests.tiny_architectures import EXPERTS, MIXERS

LORA = LoraSpec(targets=("all-linear",), rank=4, alpha=12.0)
MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 61,
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXTRA = LoraSpec(targets=("q_proj", "v_proj"), rank=2, alpha=4.0, extra_modules=("norm", "lm_head", "embed_tokens"))
GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
GEMMA = {
    "model_type": "gemma2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "tie_word_embeddings": True,
}


def train(strategy, sequences, steps=3, loss=None):
    found = []
    for _ in range(steps):
        strategy.forward_backward(pack(sequences), loss or sft_objective())
        found.append(strategy.optimizer_step())
    return found


def logprobs(strategy, sequences, **want):
    return strategy.forward(pack(sequences)[0], WantedOutputs(logprobs=True, entropy=True, **want)).logprobs_T


def frozen(strategy):
    return {name: each.detach().clone() for name, each in strategy.model.named_parameters() if not each.requires_grad}


def merged_by_hand(strategy, lora):
    """W + alpha / rank · B A for every layer that has A and B, by a plain product."""
    live = dict(strategy.model.named_parameters())
    found = {}
    for name, each in live.items():
        if ".base_layer.weight" in name:
            layer = name.removesuffix(".base_layer.weight")
            a, b = live[f"{layer}.lora_A.default.weight"], live[f"{layer}.lora_B.default.weight"]
            found[f"{layer}.weight"] = each.detach() + lora.alpha / lora.rank * torch.einsum("or,ri->oi", b, a).detach()
    return found


def test_adapters_are_not_exported_alone_where_they_are_not_all(build):
    with raises_error(UnsupportedError, "lm_head", "embed_tokens", "additional_target"):
        next(iter(build(lora=EXTRA).export_adapters()))
    with raises_error(UnsupportedError, "student", "adapters"):
        next(iter(build().export_adapters()))


# -- what is trained ---------------------------------------------------------------------------------------------------


def test_before_the_first_step_adapters_change_nothing(build, sequences):
    assert torch.equal(logprobs(build(lora=LORA), sequences), logprobs(build(), sequences))


def test_only_adapters_are_trained_and_in_the_optimizer(build, sequences):
    strategy = build(lora=LORA)
    base = frozen(strategy)
    before = {name: each.detach().clone() for name, each in strategy.adapters.trained().items()}
    train(strategy, sequences)
    assert all(torch.equal(each, frozen(strategy)[name]) for name, each in base.items())
    assert all(not torch.equal(each, before[name]) for name, each in strategy.adapters.trained().items())
    # Two layers with seven linear layers each: sizes by hand, rank 4.
    sizes = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]
    trained = 2 * sum(4 * (inputs + outputs) for inputs, outputs in sizes)
    memory = strategy.memory()
    assert memory["grads"] == 4 * trained
    assert 8 * trained <= memory["optimizer"] < 8 * trained + 28 * 8
    assert memory["weights"] == build().memory()["weights"] + 4 * trained


def test_the_gradient_equals_that_of_peft_on_plain_transformers(build, sequences, tiny):
    strategy = build(lora=LORA)
    train(strategy, sequences)  # so that B is not 0
    strategy.forward_backward(pack(sequences), sft_objective())
    found = {name: each.clone() for name, each in strategy.optimizer.grads.items()}

    config = LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM")
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        plain = get_peft_model(load_model(ModelSpec(random_init=tiny, seed=3)), config)
    state = {f"base_model.model.{name}": each.detach() for name, each in strategy.adapters.trained().items()}
    plain.load_state_dict(state, strict=False)
    plain.double()
    loss = 0.0
    for row in sequences:
        tokens = torch.from_numpy(row.tokens)
        logits = plain(input_ids=tokens[None], use_cache=False).logits[0]
        nll = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        loss = loss + (nll * torch.from_numpy(row.loss_mask)[1:]).sum()
    (loss / sum(row.loss_mask.sum() for row in sequences)).backward()
    expected = {n.removeprefix("base_model.model."): p.grad for n, p in plain.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    flat, other = (torch.cat([each[name].flatten() for name in expected]) for each in (found, expected))
    assert float((flat - other).norm() / other.norm()) < 1e-6


def test_adapters_of_a_bf16_model_are_float32_and_learn(build, sequences):
    strategy = build(lora=LORA, dtype="bf16")
    before = logprobs(strategy, sequences)
    assert {each.dtype for each in strategy.adapters.trained().values()} == {torch.float32}
    train(strategy, sequences, steps=5)
    assert torch.equal(logprobs(strategy, sequences, base=True), before)
    assert float((logprobs(strategy, sequences) - before).sum()) > 0.1
    exported = dict(strategy.export_weights())
    assert {each.dtype for each in exported.values()} == {torch.bfloat16}
    for name, each in merged_by_hand(strategy, LORA).items():
        assert torch.equal(exported[name], each.bfloat16())  # computed in float32, rounded once


@pytest.mark.parametrize("task", ["value", "reward"])
def test_a_scalar_head_is_trained_in_full(build, sequences, task):
    strategy = build(task=task, lora=LORA, training=TrainingSpec(learning_rate=1e-2, num_steps=9))
    assert "score.modules_to_save.default.weight" in strategy.optimizer.parameters
    original = build(task=task)
    (micro,) = pack(sequences)
    before = original.forward(micro, WantedOutputs(values=True)).values_T
    assert torch.equal(strategy.forward(micro, WantedOutputs(values=True)).values_T, before)
    train(strategy, sequences, loss=ValueObjective())
    assert not torch.equal(strategy.forward(micro, WantedOutputs(values=True)).values_T, before)
    assert torch.equal(strategy.forward(micro, WantedOutputs(values=True, base=True)).values_T, before)
    exported = dict(strategy.export_weights())
    assert exported.keys() == dict(original.export_weights()).keys()
    assert not torch.equal(exported["score.weight"], scalar_head(original.model).weight)


def test_value_head_replacing_a_language_head_is_fully_trained(build, sequences):
    """Where transformers has no scoring form: the head is the output layer."""
    keys = {"model_type": "granite", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48}
    keys |= {"num_hidden_layers": 1, "num_attention_heads": 4}
    strategy = build(random_init=keys, task="value", lora=LORA)
    assert "lm_head.modules_to_save.default.weight" in strategy.optimizer.parameters
    train(strategy, sequences, loss=ValueObjective())
    assert dict(strategy.export_weights())["lm_head.weight"].shape == (1, 32)


def test_extra_modules_are_fully_trained_and_the_base_unchanged(build, sequences):
    strategy, plain = build(lora=EXTRA), build()
    before = logprobs(plain, sequences)
    assert torch.allclose(logprobs(strategy, sequences), before, atol=1e-5)
    train(strategy, sequences)
    found, original = dict(strategy.export_weights()), dict(plain.export_weights())
    assert list(found) == list(original)
    changed = {name for name in found if not torch.equal(found[name], original[name])}
    expected = {"model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"}
    layers = [f"model.layers.{i}.self_attn.{each}.weight" for i in range(2) for each in ("q_proj", "v_proj")]
    assert changed == expected | set(layers)
    assert torch.allclose(logprobs(strategy, sequences, base=True), before, atol=1e-5)


def test_an_adapter_on_the_language_head_learns(build, sequences):
    lora = LoraSpec(targets=("lm_head",), rank=2, alpha=4.0)
    strategy = build(lora=lora)
    before = logprobs(strategy, sequences)
    train(strategy, sequences)
    assert float((logprobs(strategy, sequences) - before).sum()) > 0
    assert torch.equal(logprobs(strategy, sequences, base=True), before)


# -- which modules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "owners"),
    [
        (("q_proj",), {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"}),
        (("model.layers.1.mlp.up_proj",), {"model.layers.1.mlp.up_proj"}),
        (("layers.0.self_attn.o_proj", "down_proj"), {
            "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"
        }),
        (r".*\.1\..*(gate|up)_proj", {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"}),
    ],
    ids=["of_each_layer", "whole_path", "several", "regular_expression"],
)  # fmt: skip
def test_targets_are_ends_of_paths_or_a_regular_expression(build, targets, owners):
    strategy = build(lora=LoraSpec(targets=targets, rank=2, alpha=2.0))
    assert {name.partition(".lora_")[0] for name in strategy.optimizer.parameters} == owners


@pytest.mark.parametrize(
    ("lora", "facts"),
    [
        ({"targets": ("q_porj",)}, ("lora_target", "'q_porj'", "'q_proj'")),
        ({"targets": ("xyz",)}, ("'xyz'", "down_proj", "gate_proj", "k_proj")),
        ({"targets": ("mlp",)}, ("lora_target",)),
        ({"targets": ("norm",)}, ("Qwen3RMSNorm",)),
        ({"targets": ("q_proj",), "rank_pattern": {"k_proj": 2}}, ("rank_pattern", "'k_proj'")),
        (
            {"targets": ("q_proj",), "alpha_pattern": {"q_proj": 2.0, "0.+q_proj": 1.0}},
            ("alpha_pattern", "'0.+q_proj'"),
        ),
        ({"targets": ("q_proj",), "parameters": ("experts.up",)}, ("target_parameters", "'experts.up'")),
        ({"targets": "q_proj$|v_proj$"}, ("linear",)),
        ({"targets": ("q_proj",), "extra_modules": ("lmhead",)}, ("additional_target", "'lm_head'")),
        ({"targets": ("q_proj", "up_proj"), "extra_modules": ("mlp",)}, ("model.layers.0.mlp.up_proj",)),
    ],
    ids=str,
)
def test_modules_that_cannot_be_taken_are_named_with_the_nearest(build, lora, facts):
    with raises_error(ModelError, *facts):
        build(lora=LoraSpec(**{"rank": 2, "alpha": 2.0} | lora))


@pytest.mark.parametrize("keys", (EXPERTS | MIXERS).values(), ids=EXPERTS | MIXERS)
def test_exports_have_the_names_and_outputs_of_the_model(build, sequences, tmp_path, keys):
    from transformers import AutoModelForCausalLM

    strategy = build(random_init=keys, lora=LORA)
    train(strategy, sequences)
    names = [name for name, _ in load_model(ModelSpec(random_init=keys, seed=3)).named_parameters()]
    assert [name for name, _ in strategy.export_weights()] == names
    assert all(each.any() for name, each in strategy.adapters.trained().items() if ".lora_B." in name)

    strategy.export_model(tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = torch.from_numpy(sequences[2].tokens)
    with torch.no_grad():
        logp = torch.log_softmax(model.eval()(input_ids=tokens[None], use_cache=False).logits[0], dim=-1)
    found = strategy.forward(pack([sequences[2]])[0], WantedOutputs(logprobs=True)).logprobs_T
    torch.testing.assert_close(found[1:], logp[:-1].gather(1, tokens[1:, None])[:, 0], rtol=0, atol=3e-5)


def test_dense_and_shared_layers_have_adapters_but_experts_not(build):
    strategy = build(random_init=EXPERTS["deepseek_v3"], lora=LoraSpec(targets=("gate_proj",), rank=2, alpha=2.0))
    layers = {name.partition(".lora_")[0] for name in strategy.adapters.trained()}
    assert layers == {"model.layers.0.mlp.gate_proj", "model.layers.1.mlp.shared_experts.gate_proj"}


@pytest.mark.parametrize(
    ("keys", "target"), [(MIXERS["falcon_h1"], "out_proj"), (MIXERS["mamba"], "x_proj"), (EXPERTS["phimoe"], "router")]
)
def test_layers_that_ignore_an_adapter_are_refused(build, keys, target):
    with raises_error(ModelError, "lora_target", target):
        build(random_init=keys, lora=LoraSpec(targets=(target,), rank=2, alpha=2.0))


def test_linear_subclasses_are_adapted_if_they_are_linear(build):
    falcon = {"model_type": "falcon", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1}
    strategy = build(random_init=falcon | {"num_attention_heads": 4}, lora=LORA)
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in strategy.adapters.trained()}
    assert layers == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}


def test_indexers_of_sparse_attention_have_no_adapters(build, sequences):
    indexer = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
    keys = EXPERTS["deepseek_v3"] | {"model_type": "deepseek_v32"} | indexer
    strategy = build(random_init=keys, lora=LORA)
    train(strategy, sequences)
    assert all(each.any() for name, each in strategy.adapters.trained().items() if ".lora_B." in name)


def test_parameters_renamed_by_a_wrapper_are_refused_at_export(build):
    strategy = build(lora=LORA)
    layer = strategy.model.model.layers[0]
    layer.mlp = torch.nn.Sequential(layer.mlp)
    with raises_error(WeightSyncError, "model.layers.0.mlp"):
        next(iter(strategy.export_weights()))


def test_weights_that_are_one_are_not_untied(build, tiny):
    tied = tiny | {"tie_word_embeddings": True}
    for lora in ({"targets": ("lm_head",)}, {"targets": ("q_proj",), "extra_modules": ("embed_tokens",)}):
        with raises_error(ModelError, "tie_word_embeddings"):
            build(random_init=tied, lora=LoraSpec(**{"rank": 2, "alpha": 2.0} | lora))
    assert "lm_head.weight" not in dict(build(random_init=tied, lora=LORA).export_weights())


def test_equal_seeds_give_equal_adapters_and_keep_the_rng_state(build):
    torch.manual_seed(5)
    one = build(lora=LORA)
    drawn = torch.rand(2)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(2), drawn)
    for name, each in build(lora=LORA).adapters.trained().items():
        assert torch.equal(each, one.adapters.trained()[name])


# -- merged weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [None, GPT2, GEMMA, MOE], ids=["qwen3", "gpt2", "gemma2", "qwen3_moe"])
def test_merged_weights_equal_peft_under_the_model_names(build, sequences, tiny, keys):
    keys = keys or tiny
    strategy = build(random_init=keys, lora=LORA)
    train(strategy, sequences)
    trained = {name: each.detach().clone() for name, each in strategy.adapters.trained().items()}
    base = frozen(strategy)
    merged = {name: each.clone() for name, each in strategy.export_weights()}

    plain = load_model(ModelSpec(random_init=keys, seed=3))
    assert list(merged) == [name for name, _ in plain.named_parameters()]
    assert all(torch.equal(each, strategy.adapters.trained()[name]) for name, each in trained.items())
    assert all(torch.equal(each, frozen(strategy)[name]) for name, each in base.items())
    for layer in strategy.model.modules():
        if isinstance(layer, LoraLayer):
            layer.merge()  # peft adds into the weights themselves
    expected = {name.replace(".base_layer", ""): each for name, each in frozen(strategy).items()}
    assert expected.keys() == merged.keys()
    assert all(torch.equal(merged[name], each) for name, each in expected.items())


def test_merged_weights_are_copies_and_the_rest_is_live(build, sequences):
    strategy = build(lora=LORA)
    train(strategy, sequences)
    one, other = (dict(strategy.export_weights()) for _ in range(2))
    shared = {name for name in one if one[name].data_ptr() == other[name].data_ptr()}
    assert shared == {name for name in one if "_proj." not in name}
    before = one["model.layers.0.mlp.up_proj.weight"].clone()
    train(strategy, sequences)
    assert torch.equal(one["model.layers.0.mlp.up_proj.weight"], before)
    assert not torch.equal(dict(strategy.export_weights())["model.layers.0.mlp.up_proj.weight"], before)


def test_parameters_that_are_shards_are_made_whole_first(build, sequences):
    strategy = build(lora=LORA)
    train(strategy, sequences)
    asked = []

    def full(tensor):
        asked.append(tuple(tensor.shape))
        return tensor.clone()

    whole, live = dict(strategy.adapters.merged(full)), dict(strategy.export_weights())
    assert all(torch.equal(whole[name], live[name]) for name in live)
    assert len(asked) == len(live) + 2 * 14  # every weight, and A and B of seven layers twice
    assert not {each.data_ptr() for each in whole.values()} & {each.data_ptr() for each in strategy.model.parameters()}


# -- the base model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [(None, "fp32"), (None, "bf16"), (GPT2, "fp32"), (GEMMA, "bf16"), (MOE, "fp32")],
    ids=["qwen3", "qwen3 in bf16", "gpt2", "gemma2", "qwen3_moe"],
)
def test_model_without_adapters_equals_a_reference_bit_for_bit(build, sequences, tiny, keys, dtype):
    keys = keys or tiny
    strategy = build(random_init=keys, lora=LORA, dtype=dtype, gradient_checkpointing=keys is tiny)
    reference = build(random_init=keys, dtype=dtype, forward_only=True)
    for steps in (0, 3):
        train(strategy, sequences, steps)
        assert torch.equal(logprobs(strategy, sequences, base=True), logprobs(reference, sequences))
    assert not torch.equal(logprobs(strategy, sequences), logprobs(reference, sequences))


def test_looking_at_the_base_model_changes_no_later_step(build, sequences):
    one, other = build(lora=LORA), build(lora=LORA)
    for strategy in (one, other):
        for _ in range(3):
            if strategy is other:
                strategy.forward(pack(sequences)[0], WantedOutputs(logprobs=True, base=True))
            strategy.forward_backward(pack(sequences)[:1], sft_objective())
            strategy.optimizer_step()
    assert torch.equal(logprobs(one, sequences), logprobs(other, sequences))


@pytest.mark.parametrize("forward_only", [False, True])
def test_switching_adapters_off_freezes_and_thaws_nothing(build, forward_only):
    from roll_modeling.lora import adapters_off

    model = build(lora=EXTRA, forward_only=forward_only).model
    before = {name: each.requires_grad for name, each in model.named_parameters()}
    assert any(before.values()) is not forward_only
    with adapters_off(model):
        assert {name: each.requires_grad for name, each in model.named_parameters()} == before
    assert {name: each.requires_grad for name, each in model.named_parameters()} == before


def test_base_outputs_of_a_model_without_adapters_raise(build, sequences):
    with raises_error(UnsupportedError, "Qwen3ForCausalLM"):
        build().forward(pack(sequences)[0], WantedOutputs(logprobs=True, base=True))
