"""Which replica a request goes to, against the plainest way to choose one."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_fleet import ask, engine, in_virtual_time, plan, prompt, request

from roll_core.pipelines.prompt_order import PromptOrder
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.replicas import ReplicaSlot, Router
from roll_core.runtime.rollout.scheduler import RolloutScheduler


def seats(router, count):
    made = [ReplicaSlot(replica=None, number=number) for number in range(count)]
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
            living.append(ReplicaSlot(replica=None, number=added))
            added += 1
            router.add(living[-1])
        elif act == "remove" and seat is not None:
            living.remove(seat)
            router.remove(seat)
        with_room = [each for each in living if most is None or each.load < most]
        assert router.choose("any") is min(with_room, key=lambda each: (each.load, each.number), default=None)


def test_affinity_returns_a_prompt_unless_the_replica_is_full():
    router = Router("prompt_affinity", 4)
    first, second = seats(router, 2)
    assert router.choose("p") is first
    router.change(first, 3)
    assert router.choose("p") is first
    assert router.choose("other") is second
    router.change(first, 1)
    assert router.choose("p") is second
    router.change(first, -4)
    assert router.choose("p") is second  # where it was last
    router.remove(second)
    assert router.choose("p") is first


@pytest.mark.parametrize(
    ("load", "other", "stays"), [(64, 0, True), (65, 0, False), (264, 200, True), (300, 200, True), (301, 200, False)]
)
def test_affinity_leaves_a_far_busier_replica(load, other, stays):
    """64 outputs more than the idlest, and half as many again."""
    router = Router("prompt_affinity", None)
    first, second = seats(router, 2)
    assert router.choose("p") is first
    router.change(first, load)
    router.change(second, other)
    assert router.choose("p") is (first if stays else second)


def test_sticky_prompt_stays_on_a_busy_replica():
    router = Router("sticky", None)
    first, _ = seats(router, 2)
    assert router.choose("p") is first
    router.change(first, 10_000)
    assert router.choose("p") is first


def test_sticky_prompt_waits_while_its_replica_is_alive():
    router = Router("sticky", 4)
    first, second = seats(router, 2)
    assert router.choose("p") is first
    router.change(first, 4)
    assert router.choose("p") is first
    assert not router.has_capacity(first)
    assert router.choose("other") is second
    router.remove(first)
    assert router.choose("p") is second


def places(replicas):
    """By prompt, the replicas that were ever asked for something of it."""
    found = {}
    for replica in replicas:
        for id in replica.begun:
            found.setdefault(id.partition("#")[0].rpartition("/")[2], set()).add(replica.name)
    return found


@pytest.mark.parametrize(("routing", "stays"), [("sticky", True), ("prompt_affinity", True), ("least_loaded", False)])
def test_unfinished_synchronous_requests_resume_in_place(routing, stays):

    async def main():
        replicas = [engine(str(i)) for i in range(3)]
        queue = RequestQueue(replicas, routing=routing)
        scheduler = RolloutScheduler(plan(ahead=0.9), queue, None, seed=1)
        for step in range(6):
            await scheduler.batch(step)
        assert queue.num_continued > 10
        assert all(len(names) == 1 for names in places(replicas).values()) == stays
        await scheduler.close()
        await queue.close()

    in_virtual_time(main)


@pytest.mark.parametrize(("routing", "stays"), [("sticky", True), ("prompt_affinity", True), ("least_loaded", False)])
def test_a_row_goes_where_it_was_in_the_pass_before(routing, stays):
    async def main():
        replicas = [engine(str(i)) for i in range(3)]
        queue = RequestQueue(replicas, routing=routing)
        order = PromptOrder([prompt("a", i) for i in range(8)], size=4, shares={}, seed=0)
        chosen = plan(counts=order.counts, prompt=order.prompt)
        scheduler = RolloutScheduler(chosen, queue, None, seed=1)
        asked = {}
        for step in range(6):  # three passes
            before = [len(replica.begun) for replica in replicas]
            for group in (await scheduler.batch(step))[0]:
                row, _, _ = group.id.partition("/")
                for replica, known in zip(replicas, before, strict=True):
                    if any(f"/{group.id}" in id for id in replica.begun[known:]):
                        asked.setdefault(row, []).append(replica.name)
        assert sorted(map(len, asked.values())) == [3] * 8
        assert all(len(set(names)) == 1 for names in asked.values()) == stays
        await queue.close()

    in_virtual_time(main)


@pytest.mark.parametrize(("routing", "others"), [("sticky", 0), ("prompt_affinity", 2), ("least_loaded", 2)])
def test_answers_of_a_prompt_stay_together_only_where_they_stick(routing, others):
    """Four answers, room for two on each replica: the second one is idle."""

    async def main():
        replicas = [engine(str(i)) for i in range(2)]
        queue = RequestQueue(replicas, routing=routing, max_running=2)
        ask(queue, [request("r", n=4)], lambda id, outcome: None)
        await asyncio.sleep(0)
        running = [len(each._requests) for each in replicas]
        assert running == [2, others]
        while queue.num_pending:
            await asyncio.sleep(1)
        assert (replicas[1].ended > 0) == (others > 0)

    in_virtual_time(main)
