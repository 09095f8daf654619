"""Replicas over several nodes: their parts start, end and are replaced together."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from roll_core.errors import ModelError, WorkerDiedError
from roll_core.runtime.cluster.executors.base import CallFailed, Failure, GroupSpec, Member, Place, WorkerGroup
from roll_core.runtime.run import followers
from roll_core.runtime.run.followers import Followers
from roll_core.runtime.run.roles import GroupInferRole
from roll_core.spec.config import InferWorkerConfig
from roll_testing.errors import raises_error

PORT = 23456


class Parts(WorkerGroup):
    """Workers that record their calls. Those in `lost` have exited."""

    lost = None
    survives_all = True

    def __init__(self, role: str, size: int) -> None:
        places = tuple(Place(rank=rank, world_size=size) for rank in range(size))
        members = [
            Member(rank=rank, host=f"{role}-{rank}", pid=rank, node=rank, address=f"{role}:{rank}")
            for rank in range(size)
        ]
        super().__init__(GroupSpec(role=role, kind="generate", target="", places=places, survives="always"), members)
        self.lost, self.parts, self.broken = set(), defaultdict(list), set()
        self.ended: dict[int, WorkerDiedError] = {}

    def begin(self, rank, method, arguments):
        future = asyncio.get_running_loop().create_future()
        if rank in self.lost:
            future.set_exception(WorkerDiedError(self.role, rank, self.members[rank].host, method, "killed"))
        elif rank in self.broken:
            future.set_exception(CallFailed(Failure.of(ModelError("no such model"))))
        else:
            if method == "start":
                self.parts[rank].append(arguments[0])
            future.set_result(PORT if method == "free_port" else None)
        return future

    def terminate(self, rank, error):
        self.lost.add(rank)
        self.ended.setdefault(rank, error)

    async def replace(self, rank):
        self.lost.discard(rank)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(followers, "CHECK_S", 0.001)


def replicas(per_replica=2):
    """Two replicas of which each has followers on other nodes."""
    leaders, group = Parts("actor_infer", 2), Parts("actor_infer.followers", 2 * per_replica)
    role = GroupInferRole("actor_infer", InferWorkerConfig(), leaders, followers=Followers(leaders, group))
    return leaders, group, role


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_parts_meet_at_the_first_node_of_their_replica():
    leaders, group, role = replicas()

    async def started():
        await role.start()
        await role.close()

    asyncio.run(started())
    for rank in range(2):
        mine = [leaders.parts[rank], group.parts[2 * rank], group.parts[2 * rank + 1]]
        parts = [part for calls in mine for part in calls]
        assert [(part.node_rank, part.num_nodes) for part in parts] == [(0, 3), (1, 3), (2, 3)]
        assert {(part.master_addr, part.master_port) for part in parts} == {(f"actor_infer:{rank}", PORT)}
        assert len({part.sampling_seed for part in parts}) == 1
        assert [part.address for part in parts[1:]] == [f"actor_infer.followers:{2 * rank + i}" for i in range(2)]
    assert leaders.parts[0][0].sampling_seed != leaders.parts[1][0].sampling_seed


@pytest.mark.parametrize("first", ["leader", "follower"])
def test_parts_end_and_are_replaced_together(first):
    leaders, group, role = replicas()

    async def lost_and_replaced():
        await role.start()
        (leaders if first == "leader" else group).lost.add(1 if first == "leader" else 3)
        await until(lambda: leaders.lost == {1} and group.lost == {2, 3})
        await role.revive()
        assert not leaders.lost
        assert not group.lost
        group.lost.add(2)  # the new parts are checked, too
        await until(lambda: leaders.lost == {1} and group.lost == {2, 3})
        await role.close()

    asyncio.run(lost_and_replaced())
    assert [len(leaders.parts[rank]) for rank in range(2)] == [1, 2]
    assert [len(group.parts[rank]) for rank in range(4)] == [1, 1, 2, 2]
    if first == "follower":
        assert "actor_infer.followers rank 3" in str(leaders.ended[1])


def test_a_follower_that_cannot_start_is_named():
    _, group, role = replicas()
    group.broken.add(3)
    with raises_error(ModelError, "actor_infer.followers rank 3"):
        asyncio.run(role.start())
