"""Another engine resumes the unfinished outputs of an engine that died: the run's request queue on two real engines.

queue ── group ──► dying: polled for progress until some outputs have finished and others have not; then killed
           ── rest of each unfinished output ──► live
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from roll_core.errors import EngineDiedError, WorkerDiedError
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.replicas import Replica
from roll_core.types import GenerateRequest, SamplingParams
from roll_testing.infer.interrupting import is_open, stopped, until_interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from roll_core.runtime.rollout.replicas import OnResult
    from roll_core.spec.infer import InferStrategy
    from roll_core.types import Completion
    from shared_tests.live_engine import Live

    Outcome = tuple[Completion, RequestQueue, "StrategyReplica", "StrategyReplica"]

LONGEST = 230
SEEN = 65
"""Tokens that the longest unfinished output must have before the engine is killed."""
ASK_S = 0.02
"""Seconds between two polls of progress."""
ARRIVED_S = 0.2
"""Seconds in which messages arrive that were already sent between the processes."""
GROUP = GenerateRequest(
    id="group",
    prompt_ids=np.asarray([5, 6, 7]),
    params=SamplingParams(max_new_tokens=LONGEST, stop_token_ids=(9,), seed=3),
    n=8,
)
"""One of about a hundred similarly likely tokens ends an output, so the first of eight outputs finish early."""


def check_that_it_goes_on(
    live: Live, dying: InferStrategy, processes: Sequence[int], die: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Fail unless outputs that are unfinished when `dying` is killed resume on `live`.

    `dying` runs on the event loop of `live` and in `processes`, and has received no publish. `die` is called while
    these processes are stopped; it kills the engine and returns.
    """

    async def attempt() -> Outcome | None:
        first, second = StrategyReplica("dying", dying), StrategyReplica("live", live.strategy)
        queue = RequestQueue([first, second], progress_s=ASK_S)
        asking = asyncio.create_task(queue.generate([GROUP]))
        dead: asyncio.Task[None] | None = None
        while not (first.is_in_the_middle or asking.done()):
            await asyncio.sleep(ASK_S)
        with stopped(processes):
            if await is_open(asking, ARRIVED_S):
                dead = asyncio.create_task(die())
                await asyncio.wait([dead], timeout=ARRIVED_S)
        if dead:
            await dead
        (completion,) = await asking
        await queue.close()
        return (completion, queue, first, second) if dead else None

    outcome = until_interrupted(lambda: live.run(attempt()), lambda each: each is None)
    assert outcome, "the group was complete before the engine could be killed"
    found, queue, first, second = outcome
    begun = {int(each.id.partition("#")[2].partition(".")[0]): each for each in second.begun}
    parts = first.known[GROUP.id].outputs
    left = [index for index, part in enumerate(parts) if part.finish_reason == "abort"]
    assert sorted(begun) == left
    assert len(second.begun) == len(left)
    assert (queue.num_lost_replicas, queue.num_continued) == (1, len(left))
    for index, (part, output) in enumerate(zip(parts, found.outputs, strict=True)):
        num = len(part.token_ids)
        assert output.token_ids[:num].tolist() == part.token_ids.tolist()
        assert output.logprobs[:num].tolist() == part.logprobs.tolist()
        assert output.versions.tolist() == [0] * num + [live.version] * (len(output.token_ids) - num)
        if index in begun:
            assert begun[index].prompt_ids.tolist() == [*GROUP.prompt_ids, *part.token_ids]
            assert begun[index].params.max_new_tokens == LONGEST - num
        else:
            assert (len(output.token_ids), output.finish_reason) == (num, part.finish_reason)


class StrategyReplica(Replica):
    """A strategy in this process as a `Replica`. If its engine dies, the replica counts as dead."""

    def __init__(self, name: str, strategy: InferStrategy) -> None:
        self.name, self._strategy = name, strategy
        self.begun: list[GenerateRequest] = []
        self.known: dict[str, Completion] = {}
        """Last reported progress, by request id."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_in_the_middle(self) -> bool:
        """True if some outputs are known to have finished, and all others have tokens, the longest at least `SEEN`."""
        outputs = [output for each in self.known.values() for output in each.outputs]
        going_on = [len(output.token_ids) for output in outputs if output.finish_reason == "abort"]
        return 0 < len(going_on) < len(outputs) and min(going_on) > 0 and max(going_on) >= SEEN

    @override
    def submit(self, requests: Sequence[GenerateRequest], on_result: OnResult) -> None:
        self.begun += requests
        for each in requests:
            task = asyncio.create_task(self._answer(each, on_result))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: GenerateRequest, on_result: OnResult) -> None:
        outcome: Completion | BaseException
        try:
            outcome = await self._strategy.generate(request)
        except EngineDiedError as error:
            outcome = WorkerDiedError(self.name, 0, "", "generate", str(error), "")
        on_result(request.id, outcome)

    @override
    async def abort(self, ids: Sequence[str]) -> None:
        await self._strategy.abort(ids)

    @override
    def cancel(self, ids: Sequence[str]) -> None:
        assert not ids, "unexpected cancel"

    @override
    async def terminate(self, why: str) -> WorkerDiedError:
        raise AssertionError(f"{self.name} is terminated: {why}")

    @override
    async def progress(self) -> list[Completion] | None:
        report = await self._strategy.progress()
        self.known |= {each.id: each for each in report or ()}
        return report
