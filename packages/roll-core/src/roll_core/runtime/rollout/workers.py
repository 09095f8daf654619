"""A replica that is a worker of a role, behind any executor."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.errors import RollError
from roll_core.runtime.concurrency import background
from roll_core.runtime.executors.calls import retrieve
from roll_core.runtime.rollout.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.errors import WorkerDiedError
    from roll_core.runtime.executors.base import WorkerGroup
    from roll_core.runtime.rollout.replica import Answered
    from roll_core.types import Completion, GenerateRequest

log = logging.getLogger(__name__)

FOR_EVER = math.inf
"""A busy engine queues what it is given: whether it lives its signs of life say, and no deadline of a call."""


class WorkerReplica(Replica):
    """One rank of a group of `InferWorker`s."""

    def __init__(self, group: WorkerGroup, rank: int) -> None:
        self.name = f"{group.role} rank {rank}"
        self._group, self._rank = group, rank
        self._entering: set[asyncio.Future[None]] = set()
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._forgetting: set[asyncio.Task[None]] = set()

    @override
    def begin(self, requests: Sequence[GenerateRequest], answered: Answered) -> None:
        entering = asyncio.ensure_future(
            self._group.call_rank(self._rank, "submit", list(requests), deadline_s=FOR_EVER)
        )
        self._entering.add(entering)
        entering.add_done_callback(self._entering.discard)
        entering.add_done_callback(retrieve)
        for request in requests:
            waiting = self._wait(entering, request.id, answered)
            self._waiting[request.id] = background(waiting, name=f"{self.name}: result of {request.id}")

    async def _wait(self, entering: asyncio.Future[None], id: str, answered: Answered) -> None:
        outcome: Completion | BaseException
        try:
            await asyncio.shield(entering)
            outcome = await self._group.call_rank(self._rank, "result", id, deadline_s=FOR_EVER)
        except Exception as error:  # whoever asked decides what it means
            outcome = error
        if self._waiting.get(id) is asyncio.current_task():
            del self._waiting[id]
        answered(id, outcome)

    @override
    async def abort(self, ids: Sequence[str]) -> None:
        if self._entering:
            await asyncio.wait(list(self._entering))
        await self._group.call_rank(self._rank, "abort", list(ids), deadline_s=FOR_EVER)

    @override
    async def progress(self) -> list[Completion] | None:
        found: list[Completion] | None = await self._group.call_rank(self._rank, "progress", deadline_s=FOR_EVER)
        return found

    @override
    async def give_up(self, why: str) -> WorkerDiedError:
        death = await self._group.give_up(self._rank, why)
        waiting, self._waiting = self._waiting, {}
        for task in (*waiting.values(), *self._entering):
            task.cancel()
        return death

    @override
    def forget(self, ids: Sequence[str]) -> None:
        for id in ids:
            task = self._waiting.pop(id, None)
            if task is not None:
                task.cancel()
        task = background(self._forget(list(ids)), name=f"{self.name}: forget")
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def _forget(self, ids: Sequence[str]) -> None:
        try:
            if self._entering:
                await asyncio.wait(list(self._entering))
            await self._group.call_rank(self._rank, "forget", ids)
        except RollError as error:  # it dies, or the run ends: nobody waits for them there either
            log.debug("%s: %s", self.name, error)
