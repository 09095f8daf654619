"""What happens to requests: determinism, sharing, ends, queues, aborts, errors."""

import asyncio
import gc
import itertools
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from roll_core.errors import DataError, ModelError, NonFiniteError, UnsupportedError
from roll_core.spec.weights import make_manifest
from roll_core.types import GenerateRequest, SamplingParams
from roll_infer_hf.kv_cache import KVCache
from roll_modeling.model import load_model
from roll_testing.errors import raises_error

VOCABULARY = 97


def request(name, prompt, *, n=1, prompt_logprobs=False, priority=0, **params):
    params = {"ignore_eos": True, "max_new_tokens": 8, **params}
    return GenerateRequest(
        id=name,
        prompt_ids=np.array(prompt),
        params=SamplingParams(**params),
        n=n,
        prompt_logprobs=prompt_logprobs,
        priority=priority,
    )


def some(num=6, **params):
    rng = np.random.default_rng(1)
    return [
        request(f"r{i}", rng.integers(0, VOCABULARY, int(rng.integers(1, 12))), n=2, max_new_tokens=5 + 4 * i, **params)
        for i in range(num)
    ]


def together(requests):
    async def act(engine):
        return await asyncio.gather(*[engine.generate(each) for each in requests])

    return act


def tokens(completions):
    return [[output.token_ids.tolist() for output in each.outputs] for each in completions]


def logprob_bytes(completions):
    return [[output.logprobs.tobytes() for output in each.outputs] for each in completions]


# -- determinism -------------------------------------------------------------------------------------------------------


def test_equal_requests_give_equal_tokens_and_logprob_bits(with_engine):
    first, second = with_engine(together(some())), with_engine(together(some()))
    assert tokens(first) == tokens(second)
    assert logprob_bytes(first) == logprob_bytes(second)


def test_seeded_request_samples_equal_tokens_in_any_batch(with_engine):
    seeded = some(seed=7)
    crowd = with_engine(together(some(5) and [*seeded, *[request(f"x{i}", [i], max_new_tokens=30) for i in range(9)]]))
    alone = [with_engine(together([each]))[0] for each in seeded[:3]]
    assert tokens(crowd)[:3] == tokens(alone)


def test_seeded_request_samples_equal_tokens_in_small_batches(with_engine):
    assert tokens(with_engine(together(some(seed=7)), max_num_seqs=2)) == tokens(with_engine(together(some(seed=7))))


def test_output_i_depends_on_the_seed_and_i_alone(with_engine):
    wide = with_engine(together([request("a", [5, 6], n=4, seed=11, max_new_tokens=12)]))[0]
    narrow = with_engine(together([request("b", [5, 6], n=2, seed=11, max_new_tokens=12)]))[0]
    assert tokens([wide])[0][:2] == tokens([narrow])[0]
    assert len({tuple(each) for each in tokens([wide])[0]}) == 4


def test_requests_without_a_seed_differ_from_one_another(with_engine):
    found = with_engine(together([request(f"{i}", [5, 6], max_new_tokens=12) for i in range(4)]))
    assert len({tuple(each[0]) for each in tokens(found)}) == 4


def test_temperature_0_equals_greedy_decoding_of_transformers(with_engine, tiny_spec):
    prompt = [3, 14, 15, 92, 65]
    found = with_engine(together([request("a", prompt, temperature=0.0, max_new_tokens=20)]))[0]
    model = load_model(tiny_spec)
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=20,
            min_new_tokens=20,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert found.outputs[0].token_ids.tolist() == expected[0, len(prompt) :].tolist()


def test_the_repetition_penalty_is_that_of_transformers(with_engine, tiny_spec):
    prompt = [3, 14, 15, 92, 65]
    found = with_engine(together([request("a", prompt, temperature=0.0, repetition_penalty=1.8, max_new_tokens=20)]))[0]
    with torch.no_grad():
        expected = load_model(tiny_spec).generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=20,
            min_new_tokens=20,
            repetition_penalty=1.8,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert found.outputs[0].token_ids.tolist() == expected[0, len(prompt) :].tolist()


# -- sharing -----------------------------------------------------------------------------------------------------------


def prompt_tokens_computed(requests, **config):
    async def act(engine):
        completions = await asyncio.gather(*[engine.generate(each) for each in requests])
        return engine.metrics()["prompt_tokens"], completions

    return act, config


def test_equal_prompts_are_prefilled_once(with_engine):
    requests = [request(f"{i}", range(20), n=8, max_new_tokens=3) for i in range(3)]
    act, _ = prompt_tokens_computed(requests)
    assert with_engine(act)[0] == 20


def test_common_prefix_is_prefilled_once_and_keeps_logprobs(with_engine):
    beginning = list(range(40))
    requests = [
        request("a", [*beginning, 50, 51], max_new_tokens=6, seed=1),
        request("b", [*beginning, 60], max_new_tokens=6, seed=2),
        request("c", beginning, max_new_tokens=6, seed=3),
        request("d", [*beginning, 50, 52, 53], max_new_tokens=6, seed=4),
    ]
    act, _ = prompt_tokens_computed(requests)
    computed, shared = with_engine(act, min_shared_prefix=8)
    # "c" comes first and gives 40 to "a", which adds 2, gives 41 to "d", which adds 2, and that gives 40 to "b".
    assert computed == 40 + 2 + 2 + 1
    computed, separate = with_engine(act, min_shared_prefix=0)
    assert computed == 40 + 42 + 43 + 41
    assert tokens(shared) == tokens(separate)
    for one, other in zip(shared, separate, strict=True):
        np.testing.assert_allclose(one.outputs[0].logprobs, other.outputs[0].logprobs, atol=1e-5)


@pytest.mark.parametrize("budget", [1, 7, 16])
def test_chunked_prefill_gives_equal_tokens_and_logprobs(with_engine, budget):
    requests = [
        request(f"{i}", np.arange(length) % 90, n=2, max_new_tokens=6, seed=i, prompt_logprobs=i == 1)
        for i, length in enumerate([23, 40, 5, 40, 1])
    ]
    whole = with_engine(together(requests))
    pieces = with_engine(together(requests), max_num_batched_tokens=budget, min_shared_prefix=4)
    assert tokens(whole) == tokens(pieces)
    for one, other in zip(whole, pieces, strict=True):
        np.testing.assert_allclose(one.outputs[1].logprobs, other.outputs[1].logprobs, atol=1e-5)
    np.testing.assert_allclose(whole[1].prompt_logprobs, pieces[1].prompt_logprobs, atol=1e-5)


# -- ends --------------------------------------------------------------------------------------------------------------


def free_run(with_engine, **params):
    return with_engine(together([request("free", [9, 8, 7], max_new_tokens=60, seed=3, **params)]))[0].outputs[0]


def test_response_ends_with_the_named_end_token(with_engine):
    free = free_run(with_engine).token_ids.tolist()
    end = free[17]
    ended = with_engine(
        together([request("a", [9, 8, 7], max_new_tokens=60, seed=3, stop_token_ids=(end,), ignore_eos=False)])
    )[0].outputs[0]
    place = min(free.index(end), free.index(1) if 1 in free else 60)
    assert ended.token_ids.tolist() == free[: place + 1]
    assert (ended.finish_reason, ended.stop) == ("stop", free[place])
    assert len(ended.logprobs) == len(ended.versions) == place + 1


def test_ignore_eos_continues_past_every_end(with_engine):
    free = free_run(with_engine, stop_token_ids=tuple(range(VOCABULARY)))
    assert (len(free.token_ids), free.finish_reason, free.stop) == (60, "length", None)


def test_no_end_token_is_sampled_before_min_new_tokens(with_engine):
    ends = tuple(range(1, VOCABULARY, 2))
    found = with_engine(
        together(
            [
                request("a", [4], max_new_tokens=40, min_new_tokens=10, stop_token_ids=ends, ignore_eos=False, n=6),
                request(
                    "b",
                    [4],
                    max_new_tokens=40,
                    min_new_tokens=10,
                    stop_token_ids=ends,
                    ignore_eos=False,
                    temperature=0.0,
                ),
            ]
        )
    )
    for output in (*found[0].outputs, *found[1].outputs):
        assert not set(output.token_ids[:10].tolist()) & set(ends)
        assert len(output.token_ids) > 10


def test_prompt_logprobs_need_no_new_token(with_engine):
    found = with_engine(together([request("a", [4, 5, 6], max_new_tokens=0, prompt_logprobs=True)]))[0]
    assert found.prompt_logprobs.shape == (3,)
    assert found.prompt_logprobs[0] == 0
    assert (found.prompt_logprobs[1:] < 0).all()
    assert (len(found.outputs[0].token_ids), found.outputs[0].finish_reason) == (0, "length")


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    """Every byte is a token, so characters of more than one byte and all stop strings span tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def test_response_ends_with_the_token_that_completes_a_stop(with_engine, tiny_spec, byte_tokenizer):
    from transformers import AutoTokenizer

    spec = replace(tiny_spec, random_init={**tiny_spec.random_init, "vocab_size": 256}, tokenizer=str(byte_tokenizer))
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer)
    free = with_engine(together([request("a", [9], max_new_tokens=60, seed=3, n=4)]), spec=spec)[0]
    texts = [tokenizer.decode(each.token_ids, clean_up_tokenization_spaces=False) for each in free.outputs]
    stop = next(text[i : i + 2] for text in texts for i in range(20, 58) if text[i : i + 2].isprintable())
    ended = with_engine(
        together([request("a", [9], max_new_tokens=60, seed=3, n=4, stop=(stop,), ignore_eos=False)]), spec=spec
    )[0]
    stopped = 0
    for output, whole in zip(ended.outputs, free.outputs, strict=True):
        ids = output.token_ids.tolist()
        assert ids == whole.token_ids[: len(ids)].tolist()
        if output.stop == stop:
            stopped += 1
            assert stop in tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            assert stop not in tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False)
    assert stopped


# -- queues and aborts -------------------------------------------------------------------------------------------------


def test_lower_priority_numbers_are_served_first(with_engine):
    async def act(engine):
        order = []

        async def one(each):
            await engine.generate(each)
            order.append(each.id)

        await asyncio.gather(
            *[one(request(name, [3], max_new_tokens=4, priority=p)) for name, p in [("x", 2), ("y", 0), ("z", 1)]]
        )
        return order

    assert with_engine(act, max_num_seqs=1) == ["y", "z", "x"]


def test_aborted_request_returns_its_tokens_and_spares_others(with_engine, half_drawn):
    requests = [
        request("victim", [3, 4], n=2, max_new_tokens=120, seed=1),
        request("b", [5], max_new_tokens=90, seed=2),
    ]

    async def act(engine):
        tasks = await half_drawn(engine, requests)
        returned = await engine.abort(["victim", "nobody"])
        return returned, await asyncio.gather(*tasks)

    returned, (victim, other) = with_engine(act)
    assert [each.id for each in returned] == ["victim"]
    assert tokens(returned) == tokens([victim])
    reference = with_engine(together(requests))
    for part, whole in zip(victim.outputs, reference[0].outputs, strict=True):
        assert part.finish_reason == "abort"
        assert 0 < len(part.token_ids) < 120
        assert part.token_ids.tolist() == whole.token_ids[: len(part.token_ids)].tolist()
    assert tokens([other]) == tokens([reference[1]])


def test_progress_returns_partial_outputs_and_ends_nothing(with_engine, half_drawn):
    requests = [
        request("long", [3, 4], n=2, max_new_tokens=120, seed=1),
        request("waits", [5], max_new_tokens=20, seed=2),
    ]

    async def act(engine):
        assert await engine.progress() == []
        tasks = await half_drawn(engine, requests)
        return await engine.progress(), await asyncio.gather(*tasks)

    told, whole = with_engine(act, max_num_seqs=2)
    assert [each.id for each in told] == ["long", "waits"]
    assert told[1].outputs[0].token_ids.tolist() == []
    for part, output in zip(told[0].outputs, whole[0].outputs, strict=True):
        assert part.finish_reason == "abort"
        num = len(part.token_ids)
        assert 0 < num < 120
        assert part.token_ids.tolist() == output.token_ids[:num].tolist()
        assert part.logprobs.tobytes() == output.logprobs[:num].tobytes()
        assert part.versions.tolist() == [0] * num
    assert tokens(whole) == tokens(with_engine(together(requests), max_num_seqs=2))


def test_a_waiting_request_can_be_aborted(with_engine):
    async def act(engine):
        tasks = [asyncio.create_task(engine.generate(request(f"{i}", [3], max_new_tokens=100))) for i in range(2)]
        await asyncio.sleep(0)
        await engine.abort(["1"])
        return await asyncio.gather(*tasks)

    running, waiting = with_engine(act, max_num_seqs=1)
    assert len(running.outputs[0].token_ids) == 100
    assert (len(waiting.outputs[0].token_ids), waiting.outputs[0].finish_reason) == (0, "abort")


def test_a_cancelled_call_leaves_the_engine(with_engine, half_drawn):
    async def act(engine):
        [task] = await half_drawn(engine, [request("a", [3], max_new_tokens=120)])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await engine.generate(request("a", [3], max_new_tokens=2))

    assert len(with_engine(act).outputs[0].token_ids) == 2


def test_id_of_a_cancelled_call_may_be_reused_at_once(with_engine):
    async def act(engine):
        step, ended, may_return = engine._core.step, threading.Event(), threading.Event()

        def last_step():
            done = step()
            ended.set()
            may_return.wait(20)
            return done

        engine._core.step = last_step
        first = asyncio.create_task(engine.generate(request("a", [3], max_new_tokens=1)))
        await asyncio.to_thread(ended.wait, 20)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(engine.generate(request("a", [3, 4], max_new_tokens=5)))
        await asyncio.sleep(0)
        may_return.set()
        return await second

    assert len(with_engine(act).outputs[0].token_ids) == 5


def test_stop_ends_what_waits(with_engine, half_drawn):
    async def act(engine):
        [task] = await half_drawn(engine, [request("a", [3], max_new_tokens=120, n=50)])
        await engine.stop()
        await engine.stop()
        return (await asyncio.gather(task, return_exceptions=True))[0]

    assert isinstance(with_engine(act), asyncio.CancelledError)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error", "facts"),
    [
        (request("a", []), DataError, ("'a'",)),
        (request("a", [5, 97]), DataError, ("token 1", "97")),
        (request("a", [-1]), DataError, ("token 0", "-1")),
        (request("a", [0.5]), DataError, ("float64",)),
        (request("a", [1] * 100, max_new_tokens=29), DataError, ("100", "max_new_tokens", "29", "129")),
        (request("a", [1], stop_token_ids=(200,)), DataError, ("stop_token_ids", "200")),
        (request("a", [1], temperature=-1.0), DataError, ("-1",)),
        (request("a", [1], top_p=0.0), DataError, ("top_p", "0")),
        (replace(request("a", [1], prompt_logprobs=True), prompt_topk=98), DataError, ("prompt_topk", "98", "97")),
        (request("a", [1], max_new_tokens=5, stop=("x",), ignore_eos=False), UnsupportedError, ("stop",)),
    ],
)
def test_unsupported_requests_are_refused_with_the_reason(with_engine, wrong, error, facts):
    with raises_error(error, *facts):
        with_engine(together([wrong]))


def test_a_request_larger_than_the_cache_says_which_key_to_raise(with_engine):
    with raises_error(ModelError, "kv_cache_gib"):
        with_engine(together([request("a", [1], max_new_tokens=100)]), kv_cache_gib=1e-6)


def test_running_requests_have_different_ids(with_engine):
    with raises_error(DataError, "'a'"):
        with_engine(together([request("a", [1], max_new_tokens=5), request("a", [2], max_new_tokens=5)]))


def test_non_finite_logits_fail_the_request_and_spare_the_engine(with_engine, tiny_spec):
    good = {name: each.detach().clone() for name, each in load_model(tiny_spec).named_parameters()}
    bad = {**good, "model.norm.weight": torch.full_like(good["model.norm.weight"], torch.nan)}

    async def act(engine):
        await engine.update_weights(1, make_manifest(1, bad.items()), bad.items())
        failed = await asyncio.gather(*[engine.generate(each) for each in some(2)], return_exceptions=True)
        await engine.update_weights(2, make_manifest(2, good.items()), good.items())
        return failed, await asyncio.gather(*[engine.generate(each) for each in some(seed=7)])

    failed, after = with_engine(act)
    assert [str(each).split(":")[0] for each in failed] == ["request 'r0'", "request 'r1'"]
    assert all(isinstance(each, NonFiniteError) for each in failed)
    assert tokens(after) == tokens(with_engine(together(some(seed=7))))


def failing_at(call, function):
    """`function`, whose call with this number raises."""
    calls = itertools.count(1)

    def run(*args, **kwargs):
        if next(calls) == call:
            raise RuntimeError("out of memory")
        return function(*args, **kwargs)

    return run


def num_caches():
    gc.collect()
    return sum(isinstance(each, KVCache) for each in gc.get_objects())


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
@pytest.mark.parametrize("step", ["prefill", "join", "sample"])
def test_engine_samples_as_before_after_a_failed_step(with_engine, tiny_spec, monkeypatch, kind, step):
    if kind == "gpt2":
        keys = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
        tiny_spec = replace(tiny_spec, random_init={**keys, "vocab_size": VOCABULARY, "initializer_range": 0.3})
    expected = with_engine(together(some(seed=7)), spec=tiny_spec)

    async def act(engine):
        async def gathered(requests):
            return await asyncio.gather(*[engine.generate(each) for each in requests], return_exceptions=True)

        core, runner = engine._core, engine._core.runner
        if step == "join" and kind == "gpt2":  # the rows of one of the two prompts have joined already
            monkeypatch.setattr(DynamicCache, "reorder_cache", failing_at(2, DynamicCache.reorder_cache))
        else:
            owner = core._batch if step == "sample" else runner
            monkeypatch.setattr(owner, step, failing_at(1, getattr(owner, step)))
        failed = await gathered([request("x", [3]), request("y", [3, 4])])
        kept = len(runner._prompts) if kind == "gpt2" else num_caches() - 1
        return failed, kept, await gathered(some(seed=7))

    failed, kept, after = with_engine(act, spec=tiny_spec)
    assert [type(each) for each in failed] == [RuntimeError, RuntimeError]
    assert kept == 0
    assert tokens(after) == tokens(expected)


def test_failed_command_spares_the_following_ones(with_engine):
    async def act(engine):
        def fail():
            raise RuntimeError("out of memory")

        engine._post(fail, None)
        return await engine.progress()

    assert with_engine(act) == []


def test_requests_after_stop_raise(with_engine):
    async def act(engine):
        await engine.generate(request("a", [3], max_new_tokens=2))
        await engine.stop()
        with raises_error(RuntimeError):
            await engine.generate(request("b", [3]))

    with_engine(act)


def test_prompts_without_a_response_share_nothing(with_engine):
    async def act(engine):
        await together([request("a", [3, 4, 5], prompt_logprobs=True, max_new_tokens=0)])(engine)
        await together([request("b", [3, 4, 5], n=3)])(engine)
        return engine.metrics()

    found = with_engine(act)
    assert (found["prompt_tokens"], found["shared_prompt_tokens"]) == (6, 6)


def test_metrics_taken_while_the_engine_runs_lose_no_token(with_engine):
    """Other threads take metrics while the worker thread counts."""
    requests = [request(f"r{at}", [2 + at, 3], max_new_tokens=60) for at in range(16)]

    async def act(engine):
        found = []
        done = threading.Event()

        def take():
            while not done.is_set():
                found.append(engine.metrics()["generated_tokens"])

        takers = [threading.Thread(target=take) for _ in range(4)]
        for each in takers:
            each.start()
        try:
            completions = await asyncio.gather(*[engine.generate(each) for each in requests])
        finally:
            done.set()
            for each in takers:
                each.join()
        generated = sum(len(each.outputs[0].token_ids) for each in completions)
        return sum(found) + engine.metrics()["generated_tokens"], generated

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        counted, generated = with_engine(act)
    finally:
        sys.setswitchinterval(before)
    assert counted == generated
