"""Test group *contract*: the life of a strategy, the form of its completions, and the requests that it refuses."""

from __future__ import annotations

import asyncio
import json
import math
import urllib.request
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from roll_core.errors import RollError, UnsupportedError
from roll_core.runtime.workers.infer import completion_problem
from roll_core.runtime.workers.strategy import model_vocab_size
from roll_core.spec.weights import make_manifest
from roll_testing.infer.engine import Engine, ask, together
from roll_testing.infer.kit import InferKit
from roll_testing.programs import Raised, expect, raised

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from roll_core.types import Completion, GenerateRequest
    from roll_testing.infer.engine import Setup
    from roll_testing.infer.models import Oracle

PIECE = 40
"""Tokens of a request that is generated between two reads of the metrics."""
LOOKS = 8


class InferContractTests(InferKit):
    """Order of calls, form of completions, and requests that must be refused."""

    # -- completions ---------------------------------------------------------------------------------------------------

    def test_completions_have_their_form(self, engine: Engine) -> None:
        """A completion must have the request's id and `n` outputs.

        Arrays must be numpy `[R]` of the dtypes that `CompletionOutput` states; logprobs must be finite and at most 0.
        """
        requests = [ask(self.prompt(3), n=3, max_new_tokens=4), ask(self.prompt(5), max_new_tokens=2)]
        vocab_size = model_vocab_size(engine.setup.model)
        for request, completion in zip(requests, engine.generate(*requests), strict=True):
            problem = completion_problem(completion, request, vocab_size=vocab_size)
            assert not problem, f"{request.id}: {problem}"
            for output in completion.outputs:
                assert len(output.token_ids) == request.params.max_new_tokens, (
                    f"{len(output.token_ids)} tokens; expected {request.params.max_new_tokens}"
                )
                assert not bool((output.logprobs > 0).any()), f"logprobs are {output.logprobs}; expected at most 0"

    def test_many_concurrent_requests_complete(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """Each of 48 concurrent requests must get its own completion, with correct logprobs.

        Their lengths and settings differ.
        """
        self.need_exact(setup)
        requests = [
            ask(self.prompt(1 + i % 23, seed=i), n=1 + i % 3, temperature=i % 2, max_new_tokens=1 + i % 13)
            for i in range(48)
        ]
        completions = engine.generate(*requests)
        self.check_logprobs(setup, oracle, requests, completions)
        for request, completion in zip(requests, completions, strict=True):
            sizes = [len(output.token_ids) for output in completion.outputs]
            if completion.id != request.id or sizes != [request.params.max_new_tokens] * request.n:
                raise AssertionError(
                    f"{request.id}: expected {request.n} outputs of {request.params.max_new_tokens} tokens;"
                    f" found {completion.id} with outputs of {sizes} tokens"
                )

    def test_metrics_are_numbers(self, engine: Engine) -> None:
        """Metrics must be finite numbers with the same names in every call.

        `metric_kinds` may name only metrics that exist.
        """
        names: set[str] = set()
        for _ in range(2):
            metrics = engine.run(lambda: _at_once(lambda: dict(engine.strategy.metrics())))
            wrong = {name: value for name, value in metrics.items() if not math.isfinite(float(value))}
            assert not wrong, f"metrics must be finite: {wrong}"
            if unknown := set(engine.strategy.metric_kinds) - set(metrics):
                raise AssertionError(f"metric_kinds names {sorted(unknown)}, which metrics() does not have")
            assert not names or names == set(metrics), (
                f"the names of the metrics changed: {sorted(names ^ set(metrics))}"
            )
            names = set(metrics)
            engine.generate(ask(self.prompt(3)))

    # -- capabilities and refusals -------------------------------------------------------------------------------------

    def test_undeclared_features_are_refused(self, engine: Engine) -> None:
        """Undeclared features must be refused with `UnsupportedError`: seeds, prompt logprobs, and routed experts.

        Routed experts must also be refused by an engine that was not started to return them. `endpoint()` must return a
        URL if and only if an endpoint is declared.
        """
        if not self.can.seeds:
            seeded = ask(self.prompt(4), seed=0)
            expect(raised(lambda: engine.generate(seeded)), UnsupportedError, "a request with a seed")
        if not self.can.prompt_logprobs:
            request = ask(self.prompt(4), prompt_logprobs=True)
            expect(raised(lambda: engine.generate(request)), UnsupportedError, "a request with prompt_logprobs")
        routed = replace(ask(self.prompt(4)), routed_experts=True)
        expect(raised(lambda: engine.generate(routed)), UnsupportedError, "a request with routed_experts")
        url = engine.strategy.endpoint()
        assert bool(url) == self.can.endpoint, (
            f"endpoint is {'' if self.can.endpoint else 'not '}declared, but its URL is {url!r}"
        )

    def test_the_endpoint_lists_its_models(self, engine: Engine) -> None:
        """`GET <endpoint>/models` must list at least one model, as OpenAI's API does.

        The endpoint's URL includes a prefix such as `/v1`.
        """
        self.need(self.can.endpoint, "endpoint")
        url = engine.strategy.endpoint()

        def models() -> int:
            with urllib.request.urlopen(f"{url}/models", timeout=30) as answer:
                return len(json.load(answer)["data"])

        assert engine.run(lambda: asyncio.to_thread(models)), f"{url}/models lists no model"

    def test_invalid_requests_are_refused(self, engine: Engine) -> None:
        """An invalid request must raise a `RollError` with a reason.

        A valid request that runs at the same time must succeed.
        """
        for what, request in {
            "an empty prompt": ask([]),
            "a token that the vocabulary does not have": ask([5, 10**6]),
            "a negative token": ask([5, -1]),
            "a negative temperature": ask([5], temperature=-1.0),
            "a top_p of 0": ask([5], top_p=0.0),
            "a min_p above 1": ask([5], min_p=1.5),
            "no outputs": ask([5], n=0),
        }.items():
            good = ask(self.prompt(3))
            results = _each(engine, request, good)
            expect(_error_of(results[0]), RollError, what)
            assert _error_of(results[1]) is None, f"a valid request next to one with {what} raised {results[1]}"

    def test_a_request_longer_than_the_context_is_refused(self, engine: Engine) -> None:
        """A request must raise a `RollError` if its prompt is too long, or leaves too little room for `max_new_tokens`.

        The message must have the length of the prompt, of prompt and response together, or of the context.
        """
        if self.context is None:
            pytest.skip(f"{self.name} has no limit of length")
        for prompt, new in ((self.context + 8, 4), (self.context - 8, 64)):
            numbers = {str(prompt), str(prompt + new), str(self.context)}
            results = _each(engine, ask(self.prompt(prompt), max_new_tokens=new))
            error = _error_of(results[0])
            expect(error, RollError, f"a prompt of {prompt} tokens with {new} new ones")
            assert error is not None
            assert any(number in error.message for number in numbers), (
                f"the error has no length of the prompt, of both together ({prompt + new}) or of the context"
                f" ({self.context}): {error}"
            )
        engine.generate(ask(self.prompt(self.context - 8), max_new_tokens=8))

    # -- life cycle ----------------------------------------------------------------------------------------------------

    def test_a_cancelled_call_harms_no_other(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """Cancelling a call must not affect the calls beside it and after it."""
        others = [ask(self.prompt(4 + i), temperature=0.0, max_new_tokens=40) for i in range(3)]

        async def act() -> list[Completion]:
            cancelled = asyncio.create_task(engine.strategy.generate(ask(self.prompt(3), max_new_tokens=300)))
            rest = [asyncio.create_task(engine.strategy.generate(request)) for request in others[:2]]
            await engine.strategy.generate(ask(self.prompt(2), max_new_tokens=6))  # by then the others run
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            return [*await asyncio.gather(*rest), *await together(engine.strategy, others[2:])]

        completions = engine.run(act)
        self.check_logprobs(setup, oracle, others, completions)
        sizes = [len(completion.outputs[0].token_ids) for completion in completions]
        assert sizes == [40, 40, 40], f"expected 40 tokens each next to a cancelled call, found {sizes}"

    def test_a_cancelled_call_stops_generating(self, engine: Engine) -> None:
        """A cancelled call must soon stop generating, because its tokens slow down other requests.

        Only for engines that count `generated_tokens` while they generate.
        """
        if "generated_tokens" not in engine.run(lambda: _at_once(lambda: dict(engine.strategy.metrics()))):
            pytest.skip(f"{self.name} does not count generated_tokens")

        async def act() -> list[float]:
            cancelled = asyncio.create_task(engine.strategy.generate(ask(self.prompt(3), max_new_tokens=400)))
            await engine.strategy.generate(ask(self.prompt(2), max_new_tokens=6))  # by then the other runs
            if cancelled.done():
                pytest.skip(f"{self.name} generates 400 tokens before 6 others: no running request to cancel")
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            counted: list[float] = []
            while len(counted) < LOOKS and PIECE not in counted:
                engine.strategy.metrics()
                await engine.strategy.generate(ask(self.prompt(2), max_new_tokens=PIECE))
                counted.append(engine.strategy.metrics()["generated_tokens"])
            return counted

        counted = engine.run(act)
        assert counted[-1] == PIECE, (
            f"after a cancelled call, requests of {PIECE} tokens counted {counted} generated tokens"
        )

    def test_calls_before_start_raise(self, setup: Setup, oracle: Oracle) -> None:
        """`generate` and `update_weights` must raise before `start`. `stop` must never raise, even if called twice."""
        engine = Engine(setup)
        strategy, weights = engine.strategy, self.published(oracle.weights(), setup.model)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "generate": lambda: strategy.generate(ask(self.prompt(3))),
            "update_weights": lambda: strategy.update_weights(
                1, make_manifest(1, weights.items()), iter(weights.items())
            ),
        }
        try:
            for name, call in calls.items():
                expect(raised(partial(engine.run, call)), Exception, f"{name} before start")
            engine.run(strategy.stop)
        finally:
            engine.close()


def _error_of(result: Completion | BaseException) -> Raised | None:
    return Raised.of(result) if isinstance(result, BaseException) else None


async def _at_once(call: Callable[[], dict[str, float]]) -> dict[str, float]:
    return call()


def _each(engine: Engine, *requests: GenerateRequest) -> list[Completion | BaseException]:
    """Return the completion or the error of each request."""

    async def act() -> list[Completion | BaseException]:
        return await asyncio.gather(
            *[engine.strategy.generate(request) for request in requests], return_exceptions=True
        )

    return engine.run(act)
