"""A role whose replicas die, in virtual time: while one waits for what they draw, go to sleep, or are published to."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from rollout_fleet import ask, engine, in_virtual_time, request, right_tokens

from roll_core.errors import WeightSyncError, WorkerDiedError, WorkerTimeoutError
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.replicas import HealthTimeouts
from roll_core.runtime.run.roles import RESTART_ATTEMPTS, GroupInferRole
from roll_core.runtime.run.weight_sync import WeightSyncController
from roll_core.spec.config import WorkerConfig
from roll_core.spec.providers import InferCapabilities
from roll_testing.errors import mentions, raises_error


class NoWorkers:
    """Replicas are added to the queue by hand."""

    role = "actor_infer"
    world_size = 0
    survives_all = True


POLLED = partial(RequestQueue, progress_s=1.0)


class Role(GroupInferRole):
    """Its first replica dies after `life_s`, and so does each of those that it is brought back with."""

    def __init__(self, *lives_s):
        super().__init__("actor_infer", WorkerConfig(), NoWorkers(), queue=POLLED, restart=self.publish_to_a_new_one)
        self.lives_s = iter(lives_s)
        self.brought_back = -1

    async def publish_to_a_new_one(self):
        await asyncio.sleep(30)
        self.brought_back += 1
        replica = engine(str(self.brought_back))
        self.queue.add(replica)
        if (life_s := next(self.lives_s)) is not None:
            asyncio.get_running_loop().call_later(life_s, replica.kill)


@asynccontextmanager
async def started(*lives_s):
    role = Role(*lives_s)
    await role.publish_to_a_new_one()
    yield role
    await role.queue.close()


def check(completions):
    for completion in completions:
        for index, output in enumerate(completion.outputs):
            assert output.token_ids.tolist() == right_tokens(completion.id, index)


REQUESTS = [request(f"r{i}", n=2) for i in range(8)]


@pytest.mark.parametrize("lives_s", [[None], [1.5, None], [1.5, 0.0, 1.5, None]])
def test_responses_are_complete_after_repeated_replica_death(lives_s):
    async def main():
        async with started(*lives_s) as role:
            found = await role.generate(REQUESTS)
            check(found)
            assert [each.id for each in found] == [each.id for each in REQUESTS]
            assert role.brought_back == len(lives_s) - 1

    in_virtual_time(main)


def test_repeatedly_killed_replicas_raise_the_last_error():
    async def main():
        async with started(*[0.5] * 10) as role:
            with raises_error(WorkerDiedError, RESTART_ATTEMPTS, "rank 0"):
                await role.generate(REQUESTS)
            assert role.brought_back == RESTART_ATTEMPTS
            assert role.queue.num_pending == 0

    in_virtual_time(main)


def test_concurrent_callers_restart_a_replica_once():
    async def main():
        async with started(1.5, None) as role:
            both = await asyncio.gather(role.generate(REQUESTS[:4]), role.generate(REQUESTS[4:]))
            for found in both:
                check(found)
            assert role.brought_back == 1

    in_virtual_time(main)


def test_unobserved_replica_death_is_repaired_on_next_request():
    async def main():
        async with started(1.5, None) as role:
            found = {}
            ask(role.queue, REQUESTS[:2], found.__setitem__)
            await asyncio.sleep(100)
            assert role.brought_back == 0
            check(await role.generate(REQUESTS[2:]))
            check(found.values())
            assert len(found) == 2

    in_virtual_time(main)


def test_failed_publish_is_raised_to_the_waiting_caller():
    async def main():
        async with started(1.5) as role:

            async def refuses():
                raise WeightSyncError("not these")

            role._restart = refuses
            with pytest.raises(WeightSyncError, match="not these"):
                await role.generate(REQUESTS)
            assert role.queue.num_pending == 0

    in_virtual_time(main)


def test_cancelled_caller_leaves_no_request():
    async def main():
        async with started(1.5) as role:
            for wait_s in (1.0, 20.0):  # while it is drawn, and while it is brought back
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(role.generate(REQUESTS), wait_s)
                assert role.queue.num_pending == 0

    in_virtual_time(main)


@pytest.mark.parametrize("published", [False, True])
def test_unpublished_replica_loads_its_own_weights(published):
    async def main():
        role = GroupInferRole("judge", WorkerConfig(), NoWorkers(), queue=POLLED)
        replica = engine("0")
        role.queue.add(replica)
        if published:
            role.received(1)

        async def revive():
            await asyncio.sleep(30)
            role.queue.add(engine("1"))

        role.revive = revive
        asyncio.get_running_loop().call_later(1.5, replica.kill)
        if published:
            with pytest.raises(WorkerDiedError):
                await role.generate(REQUESTS)
        else:
            check(await role.generate(REQUESTS))
        await role.queue.close()

    in_virtual_time(main)


def death(rank):
    return WorkerDiedError("actor_infer", rank, "here", "sleep", "it was killed", "")


class Group:
    """Workers that are asked by rank; those of `dying` die over the next call, as far as the group survives it."""

    role = "actor_infer"
    survives_all = False

    def __init__(self, dying, survives=True):
        self.world_size, self.dying, self.survives = 3, dying, survives
        self.lost, self.asked = frozenset(), []

    async def call(self, method, calls, deadline_s=None):
        await asyncio.sleep(0)
        (rank,) = calls
        self.asked.append((rank, method))
        if rank in self.dying:
            self.lost |= {rank} if self.survives else set()
            raise death(rank)
        return [None]


@pytest.mark.parametrize("method", ["offload", "onload"])
def test_replica_death_during_offload_or_onload_is_ignored(method):
    async def main():
        group = Group({1})
        role = GroupInferRole("actor_infer", WorkerConfig(), group)
        await getattr(role, method)(frozenset({"engine"}))
        assert [rank for rank, _ in group.asked] == [0, 1, 2]
        group.dying = {2}
        await getattr(role, method)(frozenset({"engine"}))
        assert [rank for rank, _ in group.asked[3:]] == [0, 2]
        ending = GroupInferRole("actor_infer", WorkerConfig(), Group({1}, survives=False))
        with raises_error(WorkerDiedError, "rank 1"):
            await getattr(ending, method)(frozenset({"engine"}))

    in_virtual_time(main)


class Stopped(Group):
    """Workers of which those of `stopped` reply to nothing before its deadline."""

    def __init__(self, world_size, stopped, *, survives="always", survives_all=True):
        super().__init__(set())
        self.world_size, self.stopped, self.survives_all = world_size, stopped, survives_all
        self.spec, self.killed = SimpleNamespace(survives=survives), []

    async def call(self, method, calls, deadline_s=None):
        (rank,) = calls
        if rank in self.stopped:
            await asyncio.sleep(deadline_s)
            raise WorkerTimeoutError(self.role, method, deadline_s, [rank], ["here"])
        return await super().call(method, calls, deadline_s)

    async def kill(self, rank, cause):
        self.killed.append((rank, cause))
        self.lost |= {rank}
        return death(rank)


@pytest.mark.parametrize("method", ["offload", "onload"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_replica_that_does_not_sleep_or_wake_is_killed(method, world_size):
    async def main():
        group = Stopped(world_size, {world_size - 1})
        queue = partial(RequestQueue, timeouts=HealthTimeouts(token_s=30.0))
        role = GroupInferRole("actor_infer", WorkerConfig(), group, queue=queue)
        await getattr(role, method)(frozenset({"engine"}))
        assert asyncio.get_running_loop().time() == 30
        ((rank, why),) = group.killed
        assert rank == world_size - 1
        assert mentions(why, "30 s", "replica_timeout")

    in_virtual_time(main)


@pytest.mark.parametrize(
    ("world_size", "late", "stopped", "survives_all", "killed"),
    [
        (1, [0], {0}, True, [0]),
        (1, [0], set(), True, []),  # its worker replies: the timeout may be too short
        (1, [0], {0}, False, []),
        (2, [0, 1], {1}, True, [1]),
        (2, [1], set(), False, [1]),
        (2, [], set(), True, []),
    ],
)
def test_the_last_replicas_are_killed_if_they_do_not_reply(world_size, late, stopped, survives_all, killed):
    async def main():
        group = Stopped(world_size, stopped, survives_all=survives_all)
        role = GroupInferRole("actor_infer", WorkerConfig(), group)
        assert await role.give_up(late, "late") == bool(killed)
        assert [rank for rank, _ in group.killed] == killed

    in_virtual_time(main)


class Published:
    """An engine of two replicas, of which the second dies during the first attempt to publish."""

    capabilities = InferCapabilities(in_flight_update=True)

    class group:
        lost = frozenset()

    def __init__(self):
        self.replicas = [engine("0"), engine("1")]
        self.queue = RequestQueue(self.replicas)
        self.revived = []

    async def revive(self):
        await asyncio.sleep(60)
        self.revived.append(self.group.lost)
        self.group.lost = frozenset()

    async def give_up(self, ranks, why):
        return False


class Link:
    def __init__(self, publish):
        self.publisher = self
        self.publish = publish


@pytest.mark.parametrize("error", [WeightSyncError("the sender hung up"), death(1)])
def test_nothing_begins_between_two_attempts_to_publish(error):
    """Whoever was cut off in the first one has a part of the weights."""

    async def main():
        to = Published()
        attempts = []

        async def publish(version, *, changed_at, keeps_weights):
            attempts.append(version)
            await asyncio.sleep(1)
            if len(attempts) == 1:
                to.replicas[1].kill()
                to.group.lost = frozenset({1})
                raise error
            assert to.replicas[0].begun == []
            return "report"

        publishing = asyncio.ensure_future(
            WeightSyncController._publish_to_all(None, to, Link(publish), 3, 3, keeps_weights=False)
        )
        await asyncio.sleep(0.5)
        found = await asyncio.gather(to.queue.generate(REQUESTS), publishing)
        check(found[0])
        assert found[1] == "report"
        assert attempts == [3, 3]
        assert to.revived == [frozenset(), {1}]

    in_virtual_time(main)


def test_a_publish_that_fails_while_all_live_is_not_tried_again():
    async def main():
        to = Published()

        async def publish(version, *, changed_at, keeps_weights):
            raise WeightSyncError("other bytes than were sent")

        with pytest.raises(WeightSyncError, match="other bytes"):
            await WeightSyncController._publish_to_all(None, to, Link(publish), 3, 3, keeps_weights=False)
        assert len(to.revived) == 1

    in_virtual_time(main)
