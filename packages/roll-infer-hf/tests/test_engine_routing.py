"""The experts that the embedded engine returns are those that transformers' routers choose."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from roll_core.errors import UnsupportedError
from roll_core.spec.model import ModelSpec
from roll_core.spec.weights import make_manifest
from roll_core.types import GenerateRequest, SamplingParams
from roll_modeling.model import load_model
from roll_testing.errors import raises_error

TOP_K, LAYERS = 2, 2


@pytest.fixture(scope="module")
def mixture() -> ModelSpec:
    return ModelSpec(
        random_init={
            "model_type": "qwen3_moe",
            "hidden_size": 32,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "num_experts": 8,
            "num_experts_per_tok": TOP_K,
            "norm_topk_prob": True,
            "vocab_size": 97,
            "max_position_embeddings": 128,
            "initializer_range": 0.3,
            "eos_token_id": 1,
        },
        dtype="fp32",
        seed=5,
        router_replay=True,
    )


def chosen(model, tokens):
    """`[L, M, K]` in ascending order, from the logits of the routers, all tokens at once."""
    with torch.no_grad():
        found = model(input_ids=torch.as_tensor(tokens)[None], use_cache=False, output_router_logits=True)
    logits = torch.stack([each.view(len(tokens), -1) for each in found.router_logits], dim=1)
    return np.sort(logits.topk(TOP_K).indices.numpy(), axis=-1)


def ask(prompt, *, id="r", n=1, routed_experts=True, **params):
    given = SamplingParams(max_new_tokens=12, **{"seed": 3, **params})
    return GenerateRequest(id=id, prompt_ids=np.array(prompt), params=given, n=n, routed_experts=routed_experts)


def test_experts_of_prompt_and_response_are_the_routers_own(with_engine, mixture):
    prompts = [[5, 9, 33, 2], [7], [5, 9, 33, 2], list(range(2, 40))]

    async def act(engine):
        requests = [ask(each, id=str(i), n=2, seed=i) for i, each in enumerate(prompts)]
        plain = ask([4, 4], id="plain", routed_experts=False)
        return await asyncio.gather(*(engine.generate(each) for each in [*requests, plain]))

    *found, plain = with_engine(act, mixture, max_num_seqs=5)  # some wait
    model = load_model(mixture, device="cpu")
    lengths = set()
    for prompt, completion in zip(prompts, found, strict=True):
        for output in completion.outputs:
            tokens = [*prompt, *output.token_ids.tolist()]
            assert output.routed_experts.dtype == np.uint8
            assert np.array_equal(np.sort(output.routed_experts, axis=-1), chosen(model, tokens)[:-1])
            lengths.add(len(tokens))
    assert len(lengths) > 2
    assert plain.outputs[0].routed_experts is None


def test_an_answer_of_no_token_has_the_experts_before_it(with_engine, mixture):
    async def act(engine):
        params = SamplingParams(max_new_tokens=0)
        prompt = np.array([5, 9, 33])
        return await engine.generate(GenerateRequest(id="r", prompt_ids=prompt, params=params, routed_experts=True))

    assert with_engine(act, mixture).outputs[0].routed_experts.shape == (2, LAYERS, TOP_K)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_tokens_keep_the_experts_that_sampled_them_after_updates(with_engine, half_drawn, mixture, kv):
    model = load_model(mixture, device="cpu")
    old = {name: each.detach().clone() for name, each in model.named_parameters()}
    draw = torch.Generator().manual_seed(2)
    new = {name: each + 0.3 * torch.randn(each.shape, generator=draw) for name, each in old.items()}

    async def act(engine):
        request = ask([5, 9, 33, 2], ignore_eos=True)
        request = replace(request, params=replace(request.params, max_new_tokens=60))
        [answer] = await half_drawn(engine, [request])
        [part] = await engine.progress()
        partial = part.outputs[0]
        assert len(partial.routed_experts) == 4 + len(partial.token_ids) - 1
        await engine.update_weights(1, make_manifest(1, new.items()), iter(new.items()))
        return await answer

    output = with_engine(act, mixture, kv_after_update=kv).outputs[0]
    before = int((output.versions == 0).sum())
    assert 0 < before < 60
    assert len(output.routed_experts) == 4 + 60 - 1
    tokens = [5, 9, 33, 2, *output.token_ids.tolist()]
    under_old, under_new = chosen(model, tokens), None
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(new[name])
    under_new = chosen(model, tokens)
    found = np.sort(output.routed_experts, axis=-1)
    first = 4 + before - 1  # states from which tokens of version 0 were drawn
    assert np.array_equal(found[:first], under_old[:first])
    assert not np.array_equal(found[first:], under_old[first:-1])
    if kv == "recompute":
        assert np.array_equal(found[first:], under_new[first:-1])


def test_engines_that_cannot_or_were_not_told_to_refuse(with_engine, mixture, tiny_spec):
    async def act(engine):
        await engine.generate(ask([5]))

    with raises_error(UnsupportedError, "routed_experts"):
        with_engine(act, replace(mixture, router_replay=False))
    with raises_error(UnsupportedError, "qwen3"):
        with_engine(act, replace(tiny_spec, router_replay=True))
