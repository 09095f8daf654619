"""The host may be one step behind, as on a device: results are those of an engine that reads every step at once."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from roll_core.errors import NonFiniteError
from roll_core.spec.weights import make_manifest
from roll_core.types import GenerateRequest, SamplingParams
from roll_infer_hf.sequence import StopStrings
from roll_modeling.model import load_model

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 97}


STOPS = ("a", "bc", "d", "FG", "k", "Q")


class LetterTokenizer:
    def decode(self, ids, **_):
        return "".join(chr(ord("A") + each) for each in ids)


def request(name, prompt, n=1, **params):
    params = {"ignore_eos": True, "max_new_tokens": 40, "seed": 4, **params}
    return GenerateRequest(id=name, prompt_ids=np.array(prompt), params=SamplingParams(**params), n=n)


def mixed():
    """Responses that end in every way, some of them with their first token, and rows that wait for others to end."""
    shared = list(range(40, 60))
    ends = {"ignore_eos": False, "stop_token_ids": (5, 6, 7, 8)}
    return [
        request("plain", [*shared, 3], n=3, max_new_tokens=9),
        request("one", [4], n=2, max_new_tokens=1),
        request("ends", [5, 6], n=4, **ends),
        request("late end", [5, 7], n=3, min_new_tokens=12, **ends),
        request("text", [*shared, 9], n=3, ignore_eos=False, stop=STOPS),
        request("greedy", [8], temperature=0.0, max_new_tokens=50),
        request("penalty", [3, 14, 15], n=2, temperature=0.0, repetition_penalty=1.8),
        request("cut", [8, 9], n=2, top_p=0.8, top_k=30, temperature=0.7, repetition_penalty=1.1, **ends),
        request("mass", [8, 9, 10], top_p=0.9),
        request("floor", shared, n=2, min_p=0.05, max_new_tokens=70),
    ]


async def both(engine, requests):
    """Completions with each step read at once, and one step late."""
    found = []
    for unread in (0, 1):
        engine._core.max_unread = unread
        engine.metrics()
        found.append(await asyncio.gather(*[engine.generate(each) for each in requests]))
        assert engine.metrics()["generated_tokens"] == sum(
            len(out.token_ids) for each in found[-1] for out in each.outputs
        )
    return found


@pytest.mark.parametrize("rows", [4, 256])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_a_step_that_is_read_late_changes_no_result(with_engine, tiny_spec, kind, rows):
    spec = tiny_spec if kind == "qwen3" else replace(tiny_spec, random_init={**GPT2, "initializer_range": 0.3})

    async def act(engine):
        engine._spec = replace(spec, tokenizer="letters")
        engine._stop_strings[STOPS] = StopStrings(LetterTokenizer(), STOPS)
        return await both(engine, mixed())

    at_once, late = with_engine(act, spec=spec, max_num_seqs=rows)
    reasons = set()
    for expected, found in zip(at_once, late, strict=True):
        for one, other in zip(expected.outputs, found.outputs, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert (one.finish_reason, one.stop) == (other.finish_reason, other.stop)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
            reasons.add((one.finish_reason, type(one.stop)))
    assert reasons == {("length", type(None)), ("stop", int), ("stop", str)}


def test_rows_that_end_by_length_together_need_no_extra_step(with_engine):
    async def act(engine):
        engine._core.max_unread = 1
        await engine.generate(request("a", [3], n=3, max_new_tokens=20))
        return engine.metrics()

    assert with_engine(act)["decode_steps"] == 19


@pytest.fixture
def changed_model(tiny_spec):
    model = load_model(tiny_spec)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)) * 0.1)
    return model


@pytest.mark.parametrize("kept", ["keep", "recompute"])
def test_unread_token_has_the_version_that_sampled_it(with_engine, half_drawn, changed_model, kept):
    async def act(engine):
        tensors = list(changed_model.named_parameters())
        found = []
        for version, unread in ((1, 1), (3, 0)):
            engine._core.max_unread = unread
            [task] = await half_drawn(engine, [request("a", [3, 4])])
            [before] = await engine.progress()
            await engine.update_weights(version, make_manifest(version, tensors), tensors)
            found.append((len(before.outputs[0].token_ids), (await task).outputs[0]))
            original = list(load_model(engine._spec).named_parameters())
            await engine.update_weights(version + 1, make_manifest(version + 1, original), original)
        return found

    (num_late, late), (num, at_once) = with_engine(act, kv_after_update=kept)
    assert (num_late, num) == (1, 2)
    # Rows that are computed again leave the batch, and with them the token that was not read.
    sampled = num_late if kept == "recompute" else num
    assert late.versions.tolist() == [0] * sampled + [1] * (40 - sampled)
    assert at_once.versions.tolist() == [2] * num + [3] * (40 - num)
    if kept == "keep":
        assert late.token_ids.tolist() == at_once.token_ids.tolist()


def test_row_in_a_reused_slot_gets_no_tokens_of_an_aborted_one(with_engine, half_drawn):
    async def act(engine):
        requests = [request("victim", [3], repetition_penalty=1.5), request("stays", [5, 6]), request("new", [7, 8, 9])]
        requests[2] = replace(requests[2], params=replace(requests[2].params, repetition_penalty=1.3))
        alone = [await engine.generate(each) for each in requests]
        engine._core.max_unread = 1
        victim, stays = await half_drawn(engine, requests[:2])
        partial = await engine.abort(["victim"])
        await victim
        return alone, [*partial, *await asyncio.gather(stays, engine.generate(requests[2]))]

    alone, (victim, *others) = with_engine(act)
    assert victim.outputs[0].token_ids.tolist() == alone[0].outputs[0].token_ids[:1].tolist()
    assert victim.outputs[0].finish_reason == "abort"
    for expected, found in zip(alone[1:], others, strict=True):
        assert found.outputs[0].token_ids.tolist() == expected.outputs[0].token_ids.tolist()


def test_non_finite_logits_fail_a_step_later_and_only_their_row(with_engine):
    async def act(engine):
        expected = await engine.generate(request("alone", [5, 6]))
        core = engine._core
        core.max_unread, decode, steps = 1, core.runner.decode, iter(range(100))

        def broken(tokens):
            logits = decode(tokens).clone()
            if next(steps) == 3:
                logits[0] = torch.nan
            return logits

        core.runner.decode = broken
        one, other = [asyncio.create_task(engine.generate(request(*each))) for each in (("a", [3]), ("b", [5, 6]))]
        with pytest.raises(NonFiniteError):
            await one
        return expected, await other

    expected, found = with_engine(act)
    assert found.outputs[0].token_ids.tolist() == expected.outputs[0].token_ids.tolist()
