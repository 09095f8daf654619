"""Reward workers: failed samples are retried on another worker, and a run survives a worker that exits."""

import asyncio
from types import SimpleNamespace

import pytest

from roll_core.errors import WorkerDiedError
from roll_core.runtime.rollout import scoring
from roll_core.runtime.rollout.scoring import RewardRole
from roll_core.spec.config import RewardConfig
from roll_core.types import Reward
from roll_testing.errors import raises_error

FAILURE = Reward(value=None, failure="offline")


class Workers:
    """A group whose ranks answer by a table: `answers(rank, request, time asked)`."""

    def __init__(self, world_size, answers, survives=True):
        self.world_size, self.answers, self.survives = world_size, answers, survives
        self.lost = frozenset()
        self.asked, self.times = [], {}
        self.replaced, self.started = [], []

    async def call(self, method, calls, deadline_s=None):
        await asyncio.sleep(0)
        ((rank, args),) = calls.items()
        if method == "start":
            self.started.append(rank)
            return [None]
        (requests,) = args
        self.asked.append((rank, list(requests)))
        found = []
        for request in requests:
            self.times[request] = self.times.get(request, -1) + 1
            found.append(self.answers(rank, request, self.times[request]))
        if "dies" in found:
            self.lost |= {rank} if self.survives else set()
            raise WorkerDiedError("rewards.math", rank, "here", "score", "it was killed", "")
        return [found]

    async def replace(self, rank):
        await asyncio.sleep(0)
        self.replaced.append(rank)
        self.lost -= {rank}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(scoring, "RETRY_S", 0.0)


def role_of(workers, **config):
    return RewardRole("rewards.math", RewardConfig(reward="any", **config), workers)


def value(number):
    return Reward(value=float(number))


def test_only_failed_samples_are_rescored_by_another_worker():
    workers = Workers(2, lambda rank, request, time: FAILURE if request == "b" and time == 0 else value(time))
    role = role_of(workers)
    found = asyncio.run(role.score(["a", "b", "c"]))
    assert found == [value(0), value(1), value(0)]
    assert workers.asked == [(0, ["a", "b", "c"]), (1, ["b"])]
    assert role.retries == 1


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_repeated_failure_is_reported_after_max_retries(retries):
    workers = Workers(1, lambda rank, request, time: Reward(value=None, failure=f"offline {time}"))
    role = role_of(workers, max_retries=retries)
    assert asyncio.run(role.score(["a"])) == [Reward(value=None, failure=f"offline {retries}")]
    assert len(workers.asked) == 1 + retries
    assert role.retries == retries


def test_dead_worker_is_replaced_and_its_samples_move_elsewhere():
    workers = Workers(2, lambda rank, request, time: "dies" if rank == 0 and not workers.replaced else value(rank))
    role = role_of(workers)

    async def main():
        found = await role.score(["a", "b"])
        await asyncio.sleep(0.01)
        later = [await role.score([name]) for name in "cd"]
        await role.close()
        return found, later

    found, later = asyncio.run(main())
    assert found == [value(1), value(1)]
    assert workers.replaced == workers.started == [0]
    assert sorted(each[0].value for each in later) == [0.0, 1.0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_samples_queued_for_a_dead_worker_are_no_failures(world_size):
    """A sample that ends its worker costs those that are with it, not all that wait for it."""

    class Slow(Workers):
        async def call(self, method, calls, deadline_s=None):
            await asyncio.sleep(0.001)
            if self.lost & calls.keys():
                raise WorkerDiedError("rewards.math", min(calls), "here", "score", "it is gone", "")
            return await super().call(method, calls)

        async def replace(self, rank):
            await asyncio.sleep(0.01)
            await super().replace(rank)

    async def main():
        workers = Slow(world_size, lambda rank, request, time: "dies" if request == 0 else value(request))
        role = role_of(workers, max_retries=0)
        found = await asyncio.gather(*[role.score([number]) for number in range(100)])
        await role.close()
        return workers, [reward for (reward,) in found]

    workers, found = asyncio.run(main())
    assert workers.replaced == [0]
    failed = {number for number, reward in enumerate(found) if reward.failed}
    assert 0 in failed
    assert len(failed) <= scoring.GROUPS_AT_ONCE
    assert all(reward.value == number for number, reward in enumerate(found) if number not in failed)


def test_scoring_pauses_until_a_worker_is_replaced():
    workers = Workers(2, lambda rank, request, time: "dies" if len(workers.replaced) < 2 else value(7))
    assert asyncio.run(role_of(workers).score(["a"])) == [value(7)]
    assert sorted(workers.replaced) == [0, 1]


def test_a_death_that_ends_the_run_is_not_a_failure_of_a_sample():
    workers = Workers(1, lambda rank, request, time: "dies", survives=False)
    with raises_error(WorkerDiedError, "killed"):
        asyncio.run(role_of(workers).score(["a"]))


def test_irreplaceable_worker_gets_no_more_calls_and_last_raises():
    async def refuse(rank):
        await asyncio.sleep(0)
        raise WorkerDiedError("rewards.math", rank, "here", "start", "no memory", "")

    workers = Workers(2, lambda rank, request, time: "dies")
    workers.replace = refuse
    with raises_error(WorkerDiedError, "memory"):
        asyncio.run(role_of(workers, max_retries=5).score(["a"]))
    assert sorted(rank for rank, _ in workers.asked) == [0, 1]


def test_judges_count_the_retries_of_all_domains():
    roles = {name: SimpleNamespace(retries=number) for name, number in (("math", 2), ("code", 3))}
    assert scoring.RewardRouter(roles, {}).retries == 5


def test_queued_groups_are_not_sent_to_the_worker_yet():
    """There a deadline counts, which is for judging and not for waiting."""
    most = []

    class Slow(Workers):
        busy = 0

        async def call(self, method, calls, deadline_s=None):
            self.busy += 1
            most.append(self.busy)
            await asyncio.sleep(0.001)
            self.busy -= 1
            return await super().call(method, calls)

    async def main():
        role = role_of(Slow(1, lambda rank, request, time: value(request)))
        return await asyncio.gather(*[role.score([number]) for number in range(100)])

    assert [reward.value for (reward,) in asyncio.run(main())] == list(range(100))
    assert max(most) == scoring.GROUPS_AT_ONCE
