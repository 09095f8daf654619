"""The checks of these tests can fail: a queue that loses or doubles requests is found, and so is a wrong transition."""

import asyncio
import itertools

import numpy as np
import pytest
from rollout_fleet import check_requests, engine, in_virtual_time, plan, request

from roll_core.errors import RollError
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.requests import TRANSITIONS, PendingRequest, RequestState
from roll_core.runtime.rollout.scheduler import RolloutScheduler
from roll_core.types import GenerateRequest, SamplingParams


class Losing(RequestQueue):
    """Drops the sub-requests of a replica that is lost."""

    def _lost(self, subs):
        pass


class Doubling(RequestQueue):
    """Continues the sub-requests of a replica that is lost twice."""

    def _lost(self, subs):
        super()._lost([*subs, *subs])


@pytest.mark.parametrize(("kind", "places"), [(Losing, 0), (Doubling, 2)])
def test_requests_that_a_lost_replica_loses_or_doubles_are_found(kind, places):
    async def main():
        first = engine("0")
        queue = kind([first], max_running=8)
        pending = [queue.submit(request("a")), queue.submit(request("b", n=2))]
        await asyncio.sleep(1)
        check_requests(queue, pending)
        async with queue.paused(in_flight=True):
            queue.add(engine("1"))
            first.kill()
            with pytest.raises(AssertionError, match=f"output 0 of a is in {places} places"):
                check_requests(queue)
        queue.cancel(pending)
        check_requests(queue, [])

    in_virtual_time(main)


def test_a_request_that_no_caller_waits_for_is_found():
    async def main():
        queue = RequestQueue([engine("0")])
        scheduler = RolloutScheduler(plan(ahead=1.0, concurrent=True), queue, None, seed=1)
        await scheduler.batch(0)
        check_requests(queue, scheduler)
        other = queue.submit(request("other"))
        with pytest.raises(AssertionError):
            check_requests(queue, scheduler)
        check_requests(queue, scheduler, [other])
        queue.cancel([other])
        await scheduler.close()

    in_virtual_time(main)


def test_an_evaluation_beside_a_scheduler_is_accounted_for():
    async def main():
        queue = RequestQueue([engine("0"), engine("1")])
        scheduler = RolloutScheduler(plan(ahead=1.0, concurrent=True), queue, None, seed=1)
        evaluation = [queue.submit(request(f"v{i}", n=2)) for i in range(20)]
        for step in range(2):
            await scheduler.batch(step)
            check_requests(queue, scheduler, evaluation)
        await asyncio.gather(*[each.done for each in evaluation])
        check_requests(queue, scheduler, evaluation)
        await scheduler.close()
        check_requests(queue, scheduler, evaluation)
        assert queue.num_pending == 0

    in_virtual_time(main)


@pytest.mark.parametrize(("before", "after"), [*itertools.product(RequestState, RequestState)])
def test_only_the_transitions_of_the_diagram_are_possible(before, after):
    """A finished request never runs again, and one that is paused runs only after it was queued."""
    allowed = {
        "queued": {"running", "paused", "finished"},
        "running": {"queued", "pausing", "finished"},
        "pausing": {"paused", "running", "finished"},
        "paused": {"queued", "finished"},
        "finished": set(),
    }
    assert set(TRANSITIONS) == set(RequestState)

    async def main():
        made = GenerateRequest(id="r", prompt_ids=np.arange(3), params=SamplingParams(max_new_tokens=4))
        pending = PendingRequest(made, 0, [], asyncio.get_running_loop().create_future(), state=before)
        if after.value in allowed[before.value]:
            pending.move(after)
            assert pending.state is after
        else:
            with pytest.raises(RollError, match="internal"):
                pending.move(after)
            assert pending.state is before

    asyncio.run(main())
