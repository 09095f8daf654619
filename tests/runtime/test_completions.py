"""Completions are checked where they enter: whatever an engine returns, the error says what is wrong with it."""

import asyncio
import contextlib
from dataclasses import replace

import numpy as np
import pytest

from roll_core.errors import InvalidCompletionError, RollError
from roll_core.runtime.cluster.executors.base import Peers, Place
from roll_core.runtime.workers.infer import InferWorker, completion_problem
from roll_core.runtime.workers.strategy import model_vocab_size
from roll_core.spec.config import StrategyConfig
from roll_core.spec.model import ModelSpec
from roll_core.spec.providers import InferCapabilities, InferProvider
from roll_core.types import Completion, CompletionOutput, GenerateRequest, SamplingParams, TopTokens
from roll_testing.errors import raises_error

REQUEST = GenerateRequest(id="r1", prompt_ids=np.arange(3), params=SamplingParams(max_new_tokens=4), n=2)
OUTPUT = CompletionOutput(
    token_ids=np.array([5, 6], np.int64),
    logprobs=np.array([-0.5, -1.5], np.float32),
    versions=np.zeros(2, np.int32),
    finish_reason="stop",
)
RIGHT = Completion(id="r1", outputs=(OUTPUT, OUTPUT))
OWNER = "infer strategy 'acme' of roll-infer-acme 1.2"


def with_output(**changes):
    return replace(RIGHT, outputs=(OUTPUT, replace(OUTPUT, **changes)))


WRONG = {
    "nothing": (None, "None"),
    "no completion": ({"id": "r1"}, "dict"),
    "of another request": (replace(RIGHT, id="r2"), "'r2'"),
    "a list of outputs": (replace(RIGHT, outputs=[OUTPUT, OUTPUT]), "list"),
    "an output that is none": (replace(RIGHT, outputs=(OUTPUT, None)), "tuple"),
    "one output too few": (replace(RIGHT, outputs=(OUTPUT,)), "1 outputs, expected n = 2"),
    "one output too many": (replace(RIGHT, outputs=(OUTPUT,) * 3), "3 outputs, expected n = 2"),
    "ids in a list": (with_output(token_ids=[5, 6]), "output 1: token_ids is a list"),
    "ids of another dtype": (with_output(token_ids=np.array([5, 6], np.int32)), "int32 with shape (2,)"),
    "ids with an axis more": (with_output(token_ids=np.array([[5, 6]])), "shape (1, 2)"),
    "too many tokens": (
        with_output(token_ids=np.ones(5, np.int64), logprobs=np.zeros(5, np.float32), versions=np.zeros(5, np.int32)),
        "5 tokens, more than max_new_tokens = 4",
    ),
    "a negative id": (with_output(token_ids=np.array([5, -1])), "from -1 to 5"),
    "an id outside the vocabulary": (with_output(token_ids=np.array([5, 10])), "vocabulary of 10"),
    "logprobs in a list": (with_output(logprobs=[-0.5, -1.5]), "logprobs is a list"),
    "logprobs of another dtype": (with_output(logprobs=np.array([-0.5, -1.5])), "float64"),
    "a logprob too few": (with_output(logprobs=np.zeros(1, np.float32)), "logprobs has 1 values for 2 tokens"),
    "a logprob that is NaN": (with_output(logprobs=np.array([-0.5, np.nan], np.float32)), "nan at token 1"),
    "a logprob that is infinite": (with_output(logprobs=np.array([-np.inf, 0], np.float32)), "-inf at token 0"),
    "a version too many": (with_output(versions=np.zeros(3, np.int32)), "versions has 3 values for 2 tokens"),
    "no versions": (with_output(versions=None), "versions is None"),
    "an unknown end": (with_output(finish_reason="eos"), "'eos'"),
    "experts of another dtype": (with_output(routed_experts=np.zeros((4, 1, 1), np.int64)), "int64"),
    "experts of too many tokens": (with_output(routed_experts=np.zeros((5, 1, 1), np.uint8)), "at most 4"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_completion_reports_the_expected_value(wrong):
    completion, says = WRONG[wrong]
    assert says in completion_problem(completion, REQUEST, vocab_size=10)


def test_a_right_completion_and_a_part_of_one_are_accepted():
    assert completion_problem(RIGHT, REQUEST, vocab_size=7) == ""
    empty = replace(
        OUTPUT,
        token_ids=np.zeros(0, np.int64),
        logprobs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
        finish_reason="abort",
        routed_experts=np.zeros((2, 1, 1), np.uint8),
    )
    assert completion_problem(replace(RIGHT, outputs=(OUTPUT, empty)), REQUEST, vocab_size=None) == ""


def test_top_tokens_of_a_prompt_are_k_for_each_of_its_tokens():
    request = replace(REQUEST, prompt_logprobs=True, prompt_topk=2)
    tops = TopTokens(ids=np.zeros((3, 2), np.int64), logprobs=np.zeros((3, 2), np.float32))
    found = replace(RIGHT, prompt_logprobs=np.zeros(3, np.float32), prompt_topk=tops)
    assert not completion_problem(found, request, vocab_size=None)
    for wrong in (
        replace(tops, ids=tops.ids[:2]),
        replace(tops, logprobs=tops.logprobs[:, :1]),
        replace(tops, logprobs=tops.logprobs - np.inf),
        replace(tops, ids=[[1, 2]]),
    ):
        assert "prompt_topk" in completion_problem(replace(found, prompt_topk=wrong), request, vocab_size=None)


def test_prompt_logprobs_are_one_for_each_token_of_the_prompt():
    request = replace(REQUEST, prompt_logprobs=True)
    short = replace(RIGHT, prompt_logprobs=np.zeros(2, np.float32))
    assert "prompt_logprobs has 2 values for 3 tokens" in completion_problem(short, request, vocab_size=None)
    right = replace(RIGHT, prompt_logprobs=np.zeros(3, np.float32))
    assert completion_problem(right, request, vocab_size=None) == ""


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"vocab_size": 11}, 11),
        ({"text_config": {"vocab_size": 12}}, 12),
        ({"model_type": "bigram"}, None),
    ],
)
def test_the_vocabulary_is_the_models_where_its_config_lies_here(tmp_path, config, size):
    import json

    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert model_vocab_size(ModelSpec(path=str(tmp_path))) == size
    assert model_vocab_size(ModelSpec(path="no-such/model-in-the-cache")) is None
    assert model_vocab_size(ModelSpec(random_init=config)) == size
    if size == 11:
        assert model_vocab_size(ModelSpec(path=str(tmp_path), config_overrides={"vocab_size": 99})) == 99


class Engine:
    """Returns what it is told to."""

    capabilities = InferCapabilities()
    returns = RIGHT

    def __init__(self, config):
        pass

    async def generate(self, request):
        return self.returns

    async def abort(self, ids):
        self.aborted = ids
        return [self.returns]

    async def progress(self):
        return self.returns if isinstance(self.returns, (list, str)) else [self.returns]

    async def stop(self):
        pass


@pytest.fixture
def worker():
    provider = InferProvider(
        name="acme", target=f"{__name__}:Engine", summary="", config="roll_core.spec.config:StrategyConfig"
    )

    def make(returns):
        made = InferWorker(
            place=Place(rank=0, world_size=1),
            peers=Peers(),
            role="actor_infer",
            provider=provider,
            strategy_config=StrategyConfig().model_dump(),
            model=ModelSpec(random_init={"model_type": "bigram", "vocab_size": 10}),
            backend="gloo",
            timeout_s=1.0,
            owner=OWNER,
        )
        made.strategy.returns = returns
        return made

    return make


@pytest.mark.parametrize("method", ["result", "progress"])
@pytest.mark.parametrize("wrong", ["one output too few", "an id outside the vocabulary", "a logprob that is NaN"])
def test_worker_refuses_invalid_completions_with_engine_name(worker, method, wrong):
    async def main():
        engine = worker(WRONG[wrong][0])
        await engine.submit([REQUEST])
        await (engine.result("r1") if method == "result" else engine.progress())

    with raises_error(InvalidCompletionError, "'acme'", "roll-infer-acme 1.2"):
        asyncio.run(main())


def test_invalid_progress_raises_and_unknown_ids_are_ignored(worker):
    async def told(returns):
        engine = worker(returns)
        await engine.submit([REQUEST])
        try:
            return await engine.progress()
        finally:
            await engine.close()

    with pytest.raises(InvalidCompletionError):
        asyncio.run(told("nothing"))
    assert asyncio.run(told([replace(RIGHT, id="finished")])) == []
    assert asyncio.run(told([RIGHT])) == [RIGHT]


def test_an_abort_returns_no_completion_because_the_result_does(worker):
    async def main():
        engine = worker(RIGHT)
        await engine.submit([REQUEST])
        assert await engine.abort(["r1"]) is None
        assert engine.strategy.aborted == ["r1"]
        assert await engine.result("r1") == RIGHT
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("aborts", [False, True])
def test_partial_completion_without_abort_is_an_engine_error(worker, aborts):
    part = with_output(finish_reason="abort")

    async def main():
        engine = worker(part)
        await engine.submit([REQUEST])
        if aborts:
            await engine.abort(["r1", "unknown"])
        try:
            return await engine.result("r1")
        finally:
            assert not engine.running
            await engine.close()

    if aborts:
        assert asyncio.run(main()) == part
    else:
        with raises_error(InvalidCompletionError, "'acme'", "roll-infer-acme 1.2", "'r1'"):
            asyncio.run(main())


def test_request_id_may_be_reused_once_forgotten(worker):
    async def main():
        engine = worker(RIGHT)
        never = asyncio.Event()
        engine.strategy.generate = lambda request: never.wait()
        await engine.submit([REQUEST])
        first = asyncio.create_task(engine.result("r1"))
        await asyncio.sleep(0)
        await engine.forget(["r1"])
        del engine.strategy.generate
        await engine.submit([REQUEST])
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await engine.result("r1") == RIGHT
        await engine.close()

    asyncio.run(main())


def test_an_engine_never_has_two_requests_of_one_id(worker):
    """An engine that ends a cancelled request takes its time, and refuses another one of that id meanwhile."""

    async def main():
        engine = worker(RIGHT)
        inside, most, begun = [], [], []

        async def generate(request):
            begun.append(request.id)
            inside.append(request.id)
            most.append(len(inside))
            try:
                await asyncio.sleep(0.01 if len(begun) > 1 else 600)
                return RIGHT
            finally:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.02)
                inside.remove(request.id)

        engine.strategy.generate = generate
        for _ in range(3):
            await engine.submit([REQUEST])
            await asyncio.sleep(0)
            await engine.forget(["r1"])
        await engine.submit([REQUEST])
        assert await engine.result("r1") == RIGHT
        assert (begun, max(most)) == (["r1"] * 2, 1)
        assert not engine.running
        assert not engine.leaving
        await engine.close()

    asyncio.run(main())


def test_a_request_is_forgotten_with_its_result(worker):
    async def main():
        engine = worker(RIGHT)
        await engine.submit([REQUEST])
        assert await engine.result("r1") == RIGHT
        assert not engine.running
        with pytest.raises(RollError):
            await engine.submit([REQUEST, REQUEST])
        await engine.close()

    asyncio.run(main())
