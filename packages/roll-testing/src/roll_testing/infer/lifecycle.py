"""Test group *lifecycle*: requests that are aborted, that run during a weight update, or that follow a sleep."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from roll_core.errors import UnsupportedError, WeightSyncError
from roll_core.spec.weights import make_manifest
from roll_testing.infer.engine import ask
from roll_testing.infer.interrupting import result, until_interrupted, was_whole
from roll_testing.infer.kit import FIRST_ORDINARY, InferKit
from roll_testing.infer.models import moved

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.infer import InferStrategy
    from roll_core.types import Completion, CompletionOutput, GenerateRequest, TokenIds
    from roll_testing.infer.engine import Engine, Setup
    from roll_testing.infer.models import Oracle

LONG = 400
"""Tokens of a response that is interrupted."""
SHORT = 6
"""Tokens of a second response. Once it is complete, the long one is running."""
ASK_S = 0.002
"""Seconds between two polls of progress."""
HELD_S = 0.2
"""Seconds in which an engine that wrongly generates after a failed update would generate tokens."""
ENDING = 40
"""One in this many tokens ends an output: lengths differ by tens of tokens."""
GROUPS = 40
"""Maximum number of groups until some outputs are seen to finish before others. An engine may generate all outputs
between two polls, on a busy host many times in a row."""
SILENT = 4
"""Number of groups without any report after which an engine does not report: on a busy host, the polls of a group may
all come after its end."""


class LifecycleTests(InferKit):
    """A short request beside a long one shows when the long one is running."""

    def test_an_aborted_request_keeps_its_tokens(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """`abort` and `generate` must return the same tokens generated so far, with correct logprobs.

        `finish_reason` must be `abort`.
        """

        def fresh() -> Attempt:
            request = ask(self.prompt(5), n=2, max_new_tokens=LONG)
            return Attempt(request, lambda: engine.strategy.abort([request.id]))

        request, returned, completion = self._interrupted(engine, fresh)
        assert [aborted.id for aborted in returned] == [request.id], (
            f"abort returned {[aborted.id for aborted in returned]}; expected {[request.id]}"
        )
        self.check_logprobs(setup, oracle, [request, request], [completion, returned[0]])
        for output, again in zip(completion.outputs, returned[0].outputs, strict=True):
            assert output.token_ids.tolist() == again.token_ids.tolist(), (
                f"abort returned {len(again.token_ids)} tokens, generate returned {len(output.token_ids)}; they must be"
                " the same"
            )
            assert output.finish_reason == "abort", f"an aborted output ended by {output.finish_reason!r}"
            assert len(output.token_ids), (
                f"an aborted output has no tokens; another request generated {SHORT} meanwhile"
            )

    def test_aborting_harms_no_other(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """Aborting a request must not affect another one that runs beside it."""
        others: list[GenerateRequest] = []
        beside: list[asyncio.Task[Completion]] = []

        def fresh() -> Attempt:
            request = ask(self.prompt(5), max_new_tokens=LONG)
            return Attempt(request, lambda: engine.strategy.abort([request.id]), begin)

        def begin() -> None:
            others.append(ask(self.prompt(7), max_new_tokens=60))
            beside.append(asyncio.create_task(engine.strategy.generate(others[-1])))

        self._interrupted(engine, fresh)
        completions = [engine.run(partial(result, other)) for other in beside]
        for completion in completions:
            assert len(completion.outputs[0].token_ids) == 60, (
                f"a request next to an aborted one has {len(completion.outputs[0].token_ids)} of 60 tokens"
            )
        self.check_logprobs(setup, oracle, others, completions)

    def test_unknown_and_finished_ids_are_ignored(self, engine: Engine) -> None:
        """`abort` must ignore unknown and finished ids, and return nothing for them."""
        done = ask(self.prompt(3))
        engine.generate(done)
        returned = engine.run(lambda: engine.strategy.abort([done.id, "nobody"]))
        assert not returned, f"aborting a finished and an unknown request returned {returned}"

    def test_requests_continue_under_new_weights(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """With `in_flight_update`, a running request must continue to its full length under new weights.

        Each token must have the version under which it was sampled. Tokens before the update must have the old weights'
        logprobs. Later requests must use the new weights.
        """
        self.need(self.can.in_flight_update, "in_flight_update")
        weights = self.published(moved(self.stored(setup), 21), setup.model)

        async def update() -> list[Completion]:
            await _update(engine, weights)
            return []

        request, _, completion = self._updated(engine, setup, update)
        old, new = engine.version - 1, engine.version
        olds = [self._num_old(output, old, new) for output in completion.outputs]
        self.check_logprobs(setup, oracle, [request], [completion], until=min(olds))  # one may start a step later
        self.check_outputs(engine, setup, oracle, weights)

    def test_nothing_is_generated_between_a_failed_update_and_the_next(
        self, engine: Engine, setup: Setup, oracle: Oracle
    ) -> None:
        """With `in_flight_update`, an engine must not generate between a failed update and the next one.

        Half of the tensors arrive, then an error, which the caller must get. Running requests must continue after the
        next update. A request submitted in between must use only the new weights, or end if it is aborted.
        """
        self.need(self.can.in_flight_update, "in_flight_update")
        weights = self.published(moved(self.stored(setup), 24), setup.model)

        async def update() -> list[Completion]:
            late, dropped = ask(self.prompt(4), max_new_tokens=SHORT), ask(self.prompt(3), max_new_tokens=LONG)
            engine.version, engine.pristine = engine.version + 1, False
            new = engine.version
            manifest = make_manifest(new, weights.items())
            with pytest.raises(_BrokeOffError):
                await engine.strategy.update_weights(new, manifest, _half(weights))
            entering = asyncio.create_task(engine.strategy.generate(late))
            ending = asyncio.create_task(engine.strategy.generate(dropped))
            await asyncio.wait([entering], timeout=HELD_S)
            await engine.strategy.progress()
            await engine.strategy.abort([dropped.id])
            ended = await ending
            await engine.strategy.update_weights(new, manifest, iter(weights.items()))
            return [await entering, ended]

        request, (entered, ended), completion = self._updated(engine, setup, update)
        old, new = engine.version - 1, engine.version
        if other_versions := set(entered.outputs[0].versions.tolist()) - {new}:
            raise AssertionError(
                f"after a failed update to version {new}, tokens were generated with versions {other_versions}"
            )
        if len(ended.outputs[0].token_ids) or ended.outputs[0].finish_reason != "abort":
            raise AssertionError(
                f"a request that was submitted after a failed update, and aborted, has"
                f" {len(ended.outputs[0].token_ids)} tokens, ended by {ended.outputs[0].finish_reason!r}"
            )
        olds = [self._num_old(output, old, new) for output in completion.outputs]
        self.check_logprobs(setup, oracle, [request], [completion], until=min(olds))
        self.check_outputs(engine, setup, oracle, weights)

    def test_progress_reports_generated_tokens(self, engine: Engine) -> None:
        """`progress` must return growing prefixes of what `generate` returns in the end.

        It must show which outputs of a group have finished. Only for engines that report progress.
        """
        self._need_progress(engine)
        ends = tuple(range(FIRST_ORDINARY, self.vocab_size, ENDING))

        async def act() -> tuple[list[Completion], list[Completion], list[Completion]]:
            before = await _progress(engine.strategy)
            long = ask(self.prompt(5), max_new_tokens=LONG)
            group = ask(self.prompt(7), n=8, max_new_tokens=LONG, ignore_eos=False, stop_token_ids=ends)
            running = [asyncio.create_task(engine.strategy.generate(request)) for request in (long, group)]
            reports = await _reports_of(engine.strategy, running)
            return before, reports, [task.result() for task in running]

        grows = False
        for attempt in range(GROUPS):
            before, reports, completions = engine.run(act)
            assert not before, f"progress() reported {[report.id for report in before]} although no request is running"
            assert reports or attempt < SILENT, "progress() did not report a running request"
            parts = [_beginnings(reports, completion) for completion in completions]
            sizes = {len(part.outputs[0].token_ids) for part in parts[0]}
            if max(sizes, default=0) > LONG or len(completions[0].outputs[0].token_ids) != LONG:
                raise AssertionError(f"of a request with {LONG} tokens, progress() reported {sorted(sizes)} tokens")
            grows = grows or len(sizes - {0}) >= 2
            ended = [{output.finish_reason != "abort" for output in part.outputs} for part in parts[1]]
            if grows and {True, False} in ended:
                return
        assert grows, f"of a request with {LONG} tokens, progress() reported {sorted(sizes)} tokens"
        raise AssertionError("progress() reported no finished output of a group while others of the group were running")

    def test_progress_reports_versions_during_an_update(self, engine: Engine, setup: Setup) -> None:
        """`progress` must return prefixes of the final tokens, logprobs and versions, even during a weight update.

        Only for engines with `in_flight_update` that report progress.
        """
        self.need(self.can.in_flight_update, "in_flight_update")
        self._need_progress(engine)
        weights = self.published(moved(self.stored(setup), 23), setup.model)
        reports: list[Completion] = []
        telling: list[asyncio.Task[None]] = []

        def fresh() -> Attempt:
            return Attempt(ask(self.prompt(5), n=2, max_new_tokens=LONG), update, begin)

        async def ask_once() -> list[Completion]:
            progress = await _progress(engine.strategy)
            reports.extend(progress)
            return progress

        async def tell() -> None:
            while True:
                await ask_once()
                await asyncio.sleep(ASK_S)

        def begin() -> None:
            telling.append(asyncio.create_task(tell()))

        async def update() -> list[Completion]:
            await ask_once()
            await _update(engine, weights)
            return await ask_once()

        try:
            request, updated, completion = self._interrupted(engine, fresh)
        finally:
            engine.run(lambda: _cancelled(telling))
        parts = _beginnings(reports, completion)
        assert parts, "progress() did not report a running request"
        mine = [report for report in updated if report.id == request.id]
        for index, output in enumerate(output for report in mine for output in report.outputs):
            num = len(output.token_ids)
            assert num >= LONG or any(len(part.outputs[index].token_ids) > num for part in parts), (
                f"{LONG - num} tokens were generated after the update, but progress() reported none of them"
            )

    def test_numbers_are_the_same_after_a_sleep(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """Tokens and logprobs must be the same after `sleep`, `wake` and a publish of the same weights.

        The test repeats this once. `sleep` and `wake` must be idempotent.
        """
        self.need(self.can.sleeps, "sleeps")
        weights = self.published(self.stored(setup), setup.model)
        request = [ask(self.prompt(40), temperature=0.0, max_new_tokens=24) for _ in range(3)]
        before = engine.generate(request[0])[0].outputs[0]
        for again in request[1:]:
            for act in (engine.strategy.sleep, engine.strategy.sleep, engine.strategy.wake, engine.strategy.wake):
                engine.run(act)
            engine.publish(weights)
            after = engine.generate(again)[0].outputs[0]
            assert after.token_ids.tolist() == before.token_ids.tolist(), (
                f"greedy tokens were {before.token_ids.tolist()} before a sleep, {after.token_ids.tolist()} after"
            )
            if not np.allclose(after.logprobs, before.logprobs, atol=self.bound(setup)):
                off = float(np.abs(after.logprobs - before.logprobs).max())
                raise AssertionError(f"logprobs differ by up to {off:.3g} after a sleep")
        self.check_outputs(engine, setup, oracle)

    def test_a_sleeping_engine_keeps_no_shared_tensors(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """A sleeping engine must keep no reference to shared tensors, so that the trainer can free their memory."""
        self.need(self.can.sleeps and "shared" in self.can.weight_transports, "sleeps and the transport shared")
        weights = self.published(moved(self.stored(setup), 22), setup.model)
        alive: set[str] = set()
        shared = {}
        for name, tensor in weights.items():
            memory = tensor.view(torch.uint8 if tensor.ndim else tensor.dtype).numpy().copy()
            alive.add(name)
            weakref.finalize(memory, alive.discard, name)
            shared[name] = torch.from_numpy(memory).view(tensor.dtype)
            del memory
        engine.publish(shared, shared=True)
        self.check_outputs(engine, setup, oracle, weights)
        engine.run(engine.strategy.sleep)
        shared.clear()
        if alive:  # reference cycles may still hold it; collecting always would be slow
            gc.collect()
        left = sorted(alive)
        engine.run(engine.strategy.wake)
        assert not left, f"a sleeping engine keeps the memory of {len(left)} shared tensors, of {left[0]} first"

    def test_sleeping_frees_memory(self, engine: Engine, setup: Setup) -> None:
        """`sleep` must return at least as many bytes to other processes as the weights have, and `wake` use them again.

        The platform counts the bytes: memory that an allocator keeps reserved is not returned. Skipped if slots have no
        memory of their own, or if the platform cannot measure it.
        """
        self.need(self.can.sleeps, "sleeps")
        platform = self.platform_here()
        if platform.slots_share_cores:
            pytest.skip(f"slots of platform {platform.name} have no memory of their own")

        def used() -> int:
            gc.collect()
            return int(platform.memory(0)["used"])

        weights = self.published(self.stored(setup), setup.model)
        num_bytes = sum(tensor.nbytes for tensor in weights.values())
        engine.generate(ask(self.prompt(40)))
        try:
            awake = used()
        except UnsupportedError as error:
            pytest.skip(str(error))
        engine.run(engine.strategy.sleep)
        asleep = used()
        engine.run(engine.strategy.wake)
        engine.publish(weights)
        engine.generate(ask(self.prompt(40)))
        again = used()
        assert awake - asleep >= num_bytes, (
            f"the weights have {num_bytes:,} bytes, but other processes got only {awake - asleep:,} by sleep"
        )
        assert again - asleep >= num_bytes, f"after wake only {again - asleep:,} bytes more are used: memory() is wrong"

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _num_old(self, output: CompletionOutput, old: int, new: int) -> int:
        """Return the number of tokens before an update; fail unless all others of `LONG` came after it."""
        versions: list[int] = output.versions.tolist()
        if len(versions) != LONG or output.finish_reason != "length":
            raise AssertionError(f"{len(versions)} of {LONG} tokens were generated, ended by {output.finish_reason!r}")
        num_old = versions.count(old)
        if versions != [old] * num_old + [new] * (LONG - num_old) or not 0 < num_old < LONG:
            changes = [i for i in range(1, LONG) if versions[i] != versions[i - 1]]
            raise AssertionError(
                f"tokens have the versions {sorted(set(versions))}, changing at {changes}; expected some of"
                f" version {old} and then all of {new}"
            )
        return num_old

    def _need_progress(self, engine: Engine) -> None:
        if engine.run(engine.strategy.progress) is None:
            pytest.skip(f"{self.name} does not report progress")

    def _updated(
        self, engine: Engine, setup: Setup, update: Callable[[], Awaitable[list[Completion]]]
    ) -> tuple[GenerateRequest, list[Completion], Completion]:
        """Interrupt a request by `update`, starting from the stored weights; see `_interrupted`."""

        def fresh() -> Attempt:
            self._restore(engine, setup)
            return Attempt(ask(self.prompt(5), n=2, max_new_tokens=LONG), update)

        return self._interrupted(engine, fresh)

    def _interrupted(
        self, engine: Engine, fresh: Callable[[], Attempt]
    ) -> tuple[GenerateRequest, list[Completion], Completion]:
        """Repeat an attempt until its request is running when it is interrupted.

        Return the request, the result of `act`, and the request's own completion.
        """

        def once() -> tuple[GenerateRequest, list[Completion], Completion] | None:
            attempt = fresh()
            old.append(engine.version)
            attempted = engine.run(lambda: _attempted(engine.strategy, attempt, self.prompt(2)))
            return attempted and (attempt.request, *attempted)

        old: list[int] = []
        attempted = until_interrupted(once, lambda result: result is None or was_whole(result[2], LONG, old[-1]))
        if attempted is None:
            pytest.skip(f"{self.name} generates {LONG} tokens before {SHORT} others: no request can be interrupted")
        return attempted


class _BrokeOffError(WeightSyncError):
    """Error of a sender that is lost during an update."""


def _half(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield half of the tensors, then raise the error."""
    names = list(weights)
    for name in names[: len(names) // 2]:
        yield name, weights[name]
    raise _BrokeOffError("half of the tensors have been sent")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to interrupt a request."""

    request: GenerateRequest
    act: Callable[[], Awaitable[Sequence[Completion]]]
    """Interrupts the request."""
    begin: Callable[[], object] = lambda: None
    """Called once the request is submitted."""


async def _attempted(
    strategy: InferStrategy, attempt: Attempt, prompt: TokenIds
) -> tuple[list[Completion], Completion] | None:
    """Return the result of `act` and the completion; None if the request finished before `act` was called."""
    running = asyncio.create_task(strategy.generate(attempt.request))
    attempt.begin()
    await strategy.generate(ask(prompt, max_new_tokens=SHORT))
    await asyncio.sleep(0)  # a strategy that never yields may have finished before the task started
    if running.done():
        await running  # raises if the request failed
        return None
    returned = await attempt.act()
    return list(returned), await running


async def _update(engine: Engine, weights: Mapping[str, Tensor]) -> None:
    engine.version, engine.pristine = engine.version + 1, False
    manifest = make_manifest(engine.version, weights.items())
    await engine.strategy.update_weights(engine.version, manifest, iter(weights.items()))


async def _progress(strategy: InferStrategy) -> list[Completion]:
    completions = await strategy.progress()
    assert completions is not None, "progress() returned a list before, but None while requests run"
    return completions


async def _reports_of(strategy: InferStrategy, running: Sequence[asyncio.Task[Completion]]) -> list[Completion]:
    """Return all reports of progress until all requests have finished."""
    reports: list[Completion] = []
    while not all(task.done() for task in running):
        reports += await _progress(strategy)
        await asyncio.wait(running, timeout=ASK_S, return_when=asyncio.ALL_COMPLETED)
    return reports


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


def _beginnings(reports: Sequence[Completion], completion: Completion) -> list[Completion]:
    """Return the reports of this request; fail unless each output is a prefix of the final one."""
    beginnings = [report for report in reports if report.id == completion.id]
    for beginning in beginnings:
        assert len(beginning.outputs) == len(completion.outputs), (
            f"progress() reported {len(beginning.outputs)} outputs, expected {len(completion.outputs)}"
        )
        for part, output in zip(beginning.outputs, completion.outputs, strict=True):
            _check_beginning(part, output)
    return beginnings


def _check_beginning(part: CompletionOutput, complete: CompletionOutput) -> None:
    num = len(part.token_ids)
    for name in ("token_ids", "logprobs", "versions"):
        reports, right = getattr(part, name).tolist(), getattr(complete, name)[:num].tolist()
        assert reports == right, f"progress() reported {name} {reports[:8]}…, the final output has {right[:8]}…"
    if part.finish_reason == "abort":
        return
    assert (num, part.finish_reason, part.stop) == (len(complete.token_ids), complete.finish_reason, complete.stop), (
        f"progress() reported an end by {part.finish_reason!r} with stop {part.stop!r} after {num} tokens; it ended"
        f" by {complete.finish_reason!r} with {complete.stop!r} after {len(complete.token_ids)}"
    )
