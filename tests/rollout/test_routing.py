"""Which replica a request goes to, against the plainest way to choose one."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_fleet import engine, in_virtual_time, request

from roll_core.runtime.rollout.dispatcher import Dispatcher
from roll_core.runtime.rollout.routing import Router, Seat


def seats(router, count):
    made = [Seat(replica=None, number=number) for number in range(count)]
    for each in made:
        router.add(each)
    return made


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "end", "add", "remove"]), st.integers(0, 30), st.integers(1, 4)),
        max_size=200,
    ),
    st.sampled_from([None, 6]),
)
@settings(max_examples=100)
def test_the_least_loaded_is_chosen_and_of_equals_the_first(acts, most):
    router = Router("least_loaded", most)
    living, added = seats(router, 3), 3
    for act, which, size in acts:
        seat = living[which % len(living)] if living else None
        if act == "begin" and seat is not None:
            router.change(seat, size)
        elif act == "end" and seat is not None and seat.load >= size:
            router.change(seat, -size)
        elif act == "add":
            living.append(Seat(replica=None, number=added))
            added += 1
            router.add(living[-1])
        elif act == "remove" and seat is not None:
            living.remove(seat)
            router.remove(seat)
        with_room = [each for each in living if most is None or each.load < most]
        assert router.choose("any") is min(with_room, key=lambda each: (each.load, each.number), default=None)


def test_with_affinity_a_prompt_goes_where_it_was_unless_that_is_full():
    router = Router("prompt_affinity", 4)
    first, second = seats(router, 2)
    assert router.choose("p") is first
    router.change(first, 3)
    assert router.choose("p") is first
    assert router.choose("other") is second
    router.change(first, 1)
    assert router.home("p") is None  # it need not wait
    assert router.choose("p") is second
    router.change(first, -4)
    assert router.choose("p") is second  # where it was last
    router.remove(second)
    assert router.choose("p") is first


def test_what_sticks_waits_for_its_replica_as_long_as_that_lives():
    router = Router("sticky", 4)
    first, second = seats(router, 2)
    assert router.choose("p") is first
    router.change(first, 4)
    assert router.choose("p") is None
    assert router.home("p") is first
    assert router.home("other") is None
    assert router.choose("other") is second
    router.remove(first)
    assert router.home("p") is None
    assert router.choose("p") is second


@pytest.mark.parametrize(("routing", "others"), [("sticky", 0), ("prompt_affinity", 2), ("least_loaded", 2)])
def test_answers_of_a_prompt_stay_together_only_where_they_stick(routing, others):
    """Four answers, room for two on each replica: the second one is idle."""

    async def main():
        replicas = [engine(str(i)) for i in range(2)]
        dispatcher = Dispatcher(replicas, routing=routing, max_running=2)
        dispatcher.ask([request("r", n=4)], lambda id, outcome: None)
        running = [len(each._requests) for each in replicas]
        assert running == [2, others]
        while dispatcher.num_open:
            await asyncio.sleep(1)
        assert (replicas[1].ended > 0) == (others > 0)

    in_virtual_time(main)
