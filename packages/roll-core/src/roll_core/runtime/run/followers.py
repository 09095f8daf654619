"""Workers on the further nodes of a role's replicas. They start and end together with the replica's own worker."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from roll_core.errors import WorkerDiedError, WorkerTimeoutError
from roll_core.runtime.cluster.concurrency import background, cancel_all, gather
from roll_core.runtime.cluster.executors.base import WorkerStub
from roll_core.runtime.records.tracking import TRACE
from roll_core.runtime.workers.infer import FollowerWorker, InferWorker
from roll_core.spec.model import ReplicaPart

if TYPE_CHECKING:
    from roll_core.runtime.cluster.executors.base import WorkerGroup

CHECK_S = 1.0
"""Seconds between two checks whether all parts of a replica are alive."""
REPLY_S = 60.0
"""Seconds for the reply to a check. A follower does nothing else, so that only a stopped process or host exceeds it."""


class Followers:
    """The followers of each replica: a failure of one part ends all parts, which would block on it forever."""

    def __init__(self, leaders: WorkerGroup, group: WorkerGroup) -> None:
        """`leaders` are the replicas' own workers; `group` has the same number of followers for each, in order."""
        self._leaders, self._group = leaders, group
        self._workers = WorkerStub[FollowerWorker](group)
        self._watching: dict[int, asyncio.Task[None]] = {}

    async def start(self, rank: int) -> None:
        """Start the engine of a replica on all of its nodes."""
        leader, mine = self._leaders.members[rank], self._ranks_of(rank)
        members = [leader, *(self._group.members[i] for i in mine)]
        calls = WorkerStub[InferWorker](self._leaders)
        port, seed = await calls(InferWorker.free_port).at(rank), secrets.randbits(63)
        first, *others = [
            ReplicaPart(
                node_rank=node_rank,
                num_nodes=len(members),
                master_addr=leader.address,
                master_port=port,
                address=member.address,
                sampling_seed=seed,
            )
            for node_rank, member in enumerate(members)
        ]
        starting = [self._workers(FollowerWorker.start).at(i, part) for i, part in zip(mine, others, strict=True)]
        await gather([calls(InferWorker.start).at(rank, first), *starting])
        self._watching[rank] = background(self._watch(rank), name=f"{self._group.role}: checks for rank {rank}")

    async def replace(self, rank: int) -> None:
        """Replace the followers of a replica whose worker exited. `start` starts them."""
        if rank in self._watching:
            await cancel_all([self._watching.pop(rank)])
        self._end(rank)
        await gather([self._group.replace(i) for i in self._ranks_of(rank)])

    async def close(self) -> None:
        """Stop the checks."""
        await cancel_all(self._watching.values())

    def _ranks_of(self, rank: int) -> range:
        number = self._group.world_size // self._leaders.world_size
        return range(rank * number, (rank + 1) * number)

    async def _watch(self, rank: int) -> None:
        """Check the parts of a replica until one exits, and then end the others."""
        TRACE.set(None)  # the checks are no spans of the run
        mine = self._ranks_of(rank)
        check = self._workers(FollowerWorker.check, REPLY_S)
        while rank not in self._leaders.lost:
            await asyncio.sleep(CHECK_S)
            try:
                await gather([check.at(i) for i in mine])
            except (WorkerDiedError, WorkerTimeoutError) as error:
                _kill(self._leaders, rank, f"its part on another node failed: {error}")
        self._end(rank)

    def _end(self, rank: int) -> None:
        """Kill the followers of a replica whose worker exited."""
        for i in self._ranks_of(rank):
            _kill(self._group, i, f"{self._leaders.role} rank {rank} on {self._leaders.members[rank].host} exited")


def _kill(group: WorkerGroup, rank: int, cause: str) -> None:
    if rank not in group.lost:
        group.terminate(rank, WorkerDiedError(group.role, rank, group.members[rank].host, "", cause))
