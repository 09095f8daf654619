"""The accounts of requests can fail: whatever is lost or counted twice, by whom it may be, is found and named."""

import asyncio

import pytest
from rollout_fleet import engine, in_virtual_time, plan, request

from roll_core.errors import RollError
from roll_core.runtime.rollout.accounts import Accounts
from roll_core.runtime.rollout.dispatcher import Dispatcher
from roll_core.runtime.rollout.scheduler import RolloutScheduler
from roll_core.testing.errors import refused


class Losing(Dispatcher):
    """Forgets what ran on a replica that dies."""

    def _lost(self, pieces):
        self._dispatch()


class Doubling(Dispatcher):
    """Lets what ran on a replica that dies go on twice."""

    def _lost(self, pieces):
        super()._lost([*pieces, *pieces])


class Mute(Dispatcher):
    """Ends a request without telling."""

    def _finish(self, errand):
        self._close(errand, "answered")


def opened(*ids, waited_for):
    accounts = Accounts()
    for id in ids:
        accounts.begin(id)
    accounts.askers += [lambda each=each: each for each in waited_for]
    return accounts


def test_accounts_agree_where_each_open_id_is_waited_for_by_one():
    opened("a", "b", "c", waited_for=[["a"], [], ["c", "b"]]).check()
    opened(waited_for=[]).check()


@pytest.mark.parametrize(
    ("ids", "waited_for", "facts"),
    [
        (["a"], [["a", "b"]], ("b",)),
        (["a", "b"], [["a"]], ("b",)),
        (["a"], [["a"], ["a"]], ("a",)),
        (["z"], [["f", "c", "e", "d"]], ("1",)),
    ],
)
def test_an_id_that_is_lost_abandoned_or_waited_for_twice_is_named(ids, waited_for, facts):
    with refused(RollError, *facts):
        opened(*ids, waited_for=waited_for).check()


def test_one_id_does_not_end_twice():
    accounts = opened("a", waited_for=[])
    accounts.end("a", "answered")
    with refused(RollError, "'a'"):
        accounts.end("a", "answered")


@pytest.mark.parametrize(("kind", "places"), [(Losing, 0), (Doubling, 2)])
def test_what_a_death_loses_or_doubles_is_found(kind, places):
    async def main():
        first = engine("0")
        dispatcher = kind([first], max_running=8)
        waiting = asyncio.ensure_future(dispatcher.generate([request("a"), request("b", n=2)]))
        await asyncio.sleep(1)
        dispatcher.check()
        async with dispatcher.paused(in_flight=True):
            dispatcher.add(engine("1"))
            first.kill()
            with refused(RollError, "0", "a", places):
                dispatcher.check()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        dispatcher.check()

    in_virtual_time(main)


@pytest.mark.parametrize(("kind", "facts"), [(Losing, ("0",)), (Mute, ("train/0/a0",))])
def test_who_waits_for_a_batch_is_told_of_a_lost_request_instead_of_waiting_for_ever(kind, facts):
    async def main():
        first = engine("0")
        dispatcher = kind([first, engine("1")])
        scheduler = RolloutScheduler(plan(), dispatcher, None, seed=1)
        waiting = asyncio.ensure_future(scheduler.batch(0))
        await asyncio.sleep(1)
        first.kill()
        with refused(RollError, *facts):
            await waiting

    in_virtual_time(main)


def test_a_scheduler_that_forgets_what_it_asked_for_is_found_at_the_end_of_its_batch():
    async def main():
        dispatcher = Dispatcher([engine("0")])
        scheduler = RolloutScheduler(plan(ahead=1.0, concurrent=True), dispatcher, None, seed=1)
        batch = asyncio.ensure_future(scheduler.batch(0))
        await asyncio.sleep(0.1)
        forgotten = next(id for id in scheduler._by_request if id.endswith("/a11"))
        del scheduler._by_request[forgotten]
        with refused(RollError, forgotten):
            await batch
        dispatcher.forget([forgotten])
        await scheduler.close()

    in_virtual_time(main)


def test_an_evaluation_beside_a_scheduler_is_accounted_for():
    async def main():
        dispatcher = Dispatcher([engine("0"), engine("1")])
        scheduler = RolloutScheduler(plan(ahead=1.0, concurrent=True), dispatcher, None, seed=1)
        evaluation = asyncio.ensure_future(dispatcher.generate([request(f"v{i}", n=2) for i in range(20)]))
        for step in range(2):
            await scheduler.batch(step)
            dispatcher.check()
        await evaluation
        dispatcher.check()
        await scheduler.close()
        dispatcher.check()
        assert dispatcher.accounts.asked == sum(dispatcher.accounts.ended.values())

    in_virtual_time(main)
