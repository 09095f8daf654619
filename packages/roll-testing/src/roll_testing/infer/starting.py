"""Test group *starting*: how an engine starts and stops. Few tests need one of their own: starting may be slow."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from roll_core.errors import RollError
from roll_testing.infer.engine import ask
from roll_testing.infer.interrupting import is_open, stopped, until_interrupted
from roll_testing.infer.kit import TIGHT, InferKit
from roll_testing.infer.trainer import check_against_trainer
from roll_testing.packaging import RefusalTests
from roll_testing.programs import expect, raised

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from roll_core.types import Completion
    from roll_testing.infer.engine import Engine, Setup
    from roll_testing.infer.models import Oracle
    from roll_testing.programs import Raised

    Fresh = Callable[[Setup], Engine]
    EngineOf = Callable[[Setup], Engine]

CONFIG = """\
pipeline: rlvr
platform: {platform}
actor_train:
  data_args: {{file_name: rows.jsonl}}
  model_args: {{random_init: {{model_type: qwen3}}}}
  strategy_args: {{strategy_name: hf_train}}
actor_infer:
  model_args: {{dtype: {dtype}, random_init: {{model_type: qwen3}}}}
  strategy_args: {{strategy_name: {name}}}
"""
PROMPT_S = 60.0
"""Seconds within which a pending call must fail after its engine was killed."""
ARRIVED_S = 0.002
"""Seconds in which a result arrives that was already sent. An engine in this process generates some tens of tokens
meanwhile."""


class StartingTests(RefusalTests, InferKit):
    """The first test stops the shared engine. The tests in lower precision share another, which a test then kills."""

    _run = CONFIG

    def test_requests_after_stop_raise(self, doomed: EngineOf, setup: Setup) -> None:
        """After `stop`, requests must raise, and `stop` may be called again.

        A running request must end, with an error or with the tokens that it has.
        """
        engine = doomed(setup)

        async def act() -> tuple[object, object]:
            running = asyncio.create_task(engine.strategy.generate(ask(self.prompt(3), n=2, max_new_tokens=400)))
            await asyncio.sleep(0.05)
            await engine.strategy.stop()
            await engine.strategy.stop()
            (ended,) = await asyncio.gather(running, return_exceptions=True)
            (late,) = await asyncio.gather(engine.strategy.generate(ask(self.prompt(3))), return_exceptions=True)
            return ended, late

        _, late = engine.run(act)
        assert isinstance(late, Exception), f"a request after stop returned {late}, expected an error"

    def test_logprobs_in_lower_precision_stay_in_bounds(
        self, engine_of: EngineOf, setup: Setup, low_dtype: str
    ) -> None:
        """Low-precision logprobs must stay within bounds of a reference with weights rounded alike.

        The test compares them before and after an update.
        """
        setup = setup.with_(model=replace(setup.model, dtype=low_dtype))
        engine, oracle = engine_of(setup), self.oracle_of(setup.model)
        oracle.take(self.stored(setup))
        self.check_outputs(engine, setup, oracle)
        if self.can.weight_transports:
            engine.publish(self.published(self.stored(setup), setup.model))
            self.check_outputs(engine, setup, oracle)

    def test_logprobs_in_lower_precision_are_near_the_train_strategys(
        self, engine_of: EngineOf, setup: Setup, low_dtype: str
    ) -> None:
        """Low-precision logprobs must be near those of the train strategy.

        Both use the same dtype and the same weights.
        """
        setup = setup.with_(model=replace(setup.model, dtype=low_dtype))
        self.need_trainer(setup)
        engine = engine_of(setup)
        requests = [
            ask(self.prompt(length), n=2, temperature=0.8, seed=self.seed(engine, length)) for length in (1, 9, 30)
        ]
        check_against_trainer(self.train_strategy, setup, requests, engine.generate(*requests))

    def test_requests_of_a_killed_engine_raise(self, doomed: EngineOf, setup: Setup) -> None:
        """If the engine's processes are killed, `generate` must raise within a minute, with a reason.

        `stop` must then work. Only for engines whose author names their `processes`.
        """
        completions: list[Completion] = []

        def attempt() -> tuple[Engine, Raised | None]:
            engine = doomed(setup)
            processes = self.processes(engine.strategy)
            if not processes:
                pytest.skip(f"{self.name} has no processes() to kill")

            async def act() -> None:
                running = asyncio.create_task(engine.strategy.generate(ask(self.prompt(3), max_new_tokens=400)))
                await engine.strategy.generate(ask(self.prompt(3), max_new_tokens=2))
                with stopped(processes):
                    if await is_open(running, ARRIVED_S):
                        for pid in processes:
                            os.kill(pid, signal.SIGKILL)
                completions.append(await running)

            return engine, raised(lambda: engine.run(act, PROMPT_S))

        def missed(outcome: tuple[Engine, Raised | None]) -> bool:
            """True if the engine had sent all 400 tokens before it was killed."""
            return outcome[1] is None and all(len(output.token_ids) == 400 for output in completions[-1].outputs)

        engine, error = until_interrupted(attempt, missed)
        expect(error, Exception, "a request of an engine that was killed")
        engine.run(engine.strategy.stop)

    def test_a_missing_model_is_named(self, fresh: Fresh, setup: Setup, tmp_path: Path) -> None:
        """`start` must raise a `RollError` that contains the missing model path. `stop` must not raise afterwards."""
        self.need(bool(setup.model.path), "a model that is loaded from a path")
        nowhere = str(tmp_path / "no-such-model")
        engine = fresh(setup.with_(model=replace(setup.model, path=nowhere)))
        expect(raised(engine.start), RollError, "starting with a model path that does not exist", nowhere)
        engine.run(engine.strategy.stop)

    def test_requests_beyond_the_cache_complete(self, engine_of: EngineOf, setup: Setup, oracle: Oracle) -> None:
        """Requests that exceed the KV cache must be queued or restarted, and each must get its full response.

        The test runs 8 sequences of 260 to 272 tokens, of which three fit. Only for engines with a `tight_config`. An
        engine that declares `lora` can load adapters meanwhile, but has none.
        """
        if not self.tight_config:
            pytest.skip(f"{self.name} has no tight_config")
        tight = setup.with_(strategy_config={**setup.strategy_config, **self.tight_config})
        engine = self._unpublished(engine_of, self._with_adapters(setup) if self.can.lora else tight)
        requests = [ask(self.prompt(4 + i), n=2, max_new_tokens=260 + 4 * i) for i in range(4)]
        assert sum(2 * request.params.max_new_tokens for request in requests) > 2 * TIGHT
        completions = engine.generate(*requests)
        self.check_logprobs(setup, oracle, requests, completions)
        for request, completion in zip(requests, completions, strict=True):
            sizes = [len(output.token_ids) for output in completion.outputs]
            assert sizes == [request.params.max_new_tokens] * 2, (
                f"{request.params.max_new_tokens} tokens were requested twice, found {sizes}"
            )
