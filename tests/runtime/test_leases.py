"""Leases of slots: which roles offload, onload and wait, and the state that an interrupted lease leaves."""

import asyncio
from contextlib import contextmanager

import pytest

from roll_core.runtime.cluster.leases import SlotLeases
from roll_testing.errors import raises_error

TRAINED = frozenset({"weights", "grads", "optimizer"})
WEIGHTS = frozenset({"weights"})
ENGINE = frozenset({"engine"})


class Role:
    """Writes down what it is told, and refuses what makes no sense."""

    def __init__(self, journal, name, slots, movable):
        self.journal, self.name, self.slots, self.movable = journal, name, frozenset(slots), frozenset(movable)
        self.hanging: asyncio.Event | None = None

    async def start(self):
        self.journal.append(f"{self.name} starts")

    async def offload(self, parts):
        await self._move("offloads", parts)

    async def onload(self, parts):
        await self._move("onloads", parts)

    async def _move(self, what, parts):
        assert parts
        assert parts <= self.movable
        self.journal.append(f"{self.name} {what} {'+'.join(sorted(parts))}")
        if self.hanging is not None:
            await self.hanging.wait()


class House:
    """Roles that have started, and what has happened since."""

    def __init__(self, **roles):
        self.journal = []
        self.stages = []
        self.turns = SlotLeases(self._stage)
        self.roles = {name: Role(self.journal, name, slots, movable) for name, (slots, movable) in roles.items()}

    @contextmanager
    def _stage(self, name):
        self.stages.append(name)
        yield

    async def open(self):
        for role in self.roles.values():
            await self.turns.start(role)
        started = list(self.journal)
        self.journal.clear()
        self.stages.clear()
        return started

    async def work(self, what, **needs):
        async with self.turns.take(needs):
            self.journal.append(what)

    def since(self):
        seen = list(self.journal)
        self.journal.clear()
        return seen


def colocated():
    return House(train=([0], TRAINED), infer=([0], ENGINE), reference=([0], WEIGHTS))


def test_every_role_starts_alone_on_its_slots():
    assert asyncio.run(colocated().open()) == [
        "train starts",
        "train offloads grads+optimizer+weights",
        "infer starts",
        "infer offloads engine",
        "reference starts",
    ]


def test_rl_step_moves_only_states_that_a_phase_does_not_need():
    async def steps():
        house = colocated()
        await house.open()
        seen = []
        for _ in range(2):
            await house.work("publish", train=WEIGHTS, infer=ENGINE)
            await house.work("generate", infer=ENGINE)
            await house.work("score", train=WEIGHTS)
            await house.work("score reference", reference=WEIGHTS)
            await house.work("update", train=TRAINED)
            seen.append(house.since())
        return seen

    first, second = asyncio.run(steps())
    rest = [
        "infer onloads engine",
        "publish",
        "train offloads weights",
        "generate",
        "infer offloads engine",
        "train onloads weights",
        "score",
        "train offloads weights",
        "reference onloads weights",
        "score reference",
        "reference offloads weights",
        "train onloads grads+optimizer+weights",
        "update",
    ]
    assert first == ["reference offloads weights", "train onloads weights", *rest]
    assert second == ["train offloads grads+optimizer", *rest]


def test_shared_weights_stay_until_their_user_has_offloaded():
    async def act():
        house = colocated()
        await house.open()
        await house.work("publish", train=WEIGHTS, infer=ENGINE)
        house.turns.share("train", WEIGHTS, "infer")
        house.since()
        await house.work("generate", infer=ENGINE)
        await house.work("score reference", reference=WEIGHTS)
        await house.work("generate", infer=ENGINE)  # nothing is shared any more: the weights stay offloaded
        return house.since()

    assert asyncio.run(act()) == [
        "generate",
        "infer offloads engine",
        "train offloads weights",
        "reference onloads weights",
        "score reference",
        "reference offloads weights",
        "infer onloads engine",
        "generate",
    ]


def test_weights_shared_with_a_role_that_never_offloads_stay():
    async def act():
        house = House(train=([0], TRAINED), infer=([0], ()), reference=([0], WEIGHTS))
        await house.open()
        await house.work("publish", train=WEIGHTS, infer=ENGINE)
        house.turns.share("train", WEIGHTS, "infer")
        house.since()
        await house.work("score reference", reference=WEIGHTS)
        return house.since()

    assert asyncio.run(act()) == ["reference onloads weights", "score reference"]


@pytest.mark.parametrize(
    "roles",
    [
        {"train": ([0, 1], TRAINED), "infer": ([2, 3], ENGINE)},  # on slots of their own
        {"train": ([], TRAINED), "infer": ([], ENGINE)},  # on no slots
        {"train": ([0], ()), "infer": ([0], ())},  # on the same, but nothing can be moved
    ],
)
def test_nothing_is_moved_without_shared_slots(roles):
    async def act():
        house = House(**roles)
        started = await house.open()
        await house.work("publish", train=WEIGHTS, infer=ENGINE)
        await house.work("update", train=TRAINED)
        return started, house.since(), house.stages

    assert asyncio.run(act()) == (["train starts", "infer starts"], ["publish", "update"], [])


def test_roles_sharing_slots_alternate_without_affecting_others():
    async def act():
        house = House(train=([0, 1], TRAINED), infer=([1, 2], ENGINE), reference=([3], WEIGHTS))
        await house.open()
        await house.work("update", train=TRAINED)
        await house.work("generate", infer=ENGINE)
        await house.work("score reference", reference=WEIGHTS)
        return house.since()

    assert asyncio.run(act()) == [
        "infer offloads engine",
        "train onloads grads+optimizer+weights",
        "update",
        "train offloads grads+optimizer+weights",
        "infer onloads engine",
        "generate",
        "score reference",
    ]


def test_turns_exclude_each_other_only_on_shared_slots():
    async def act():
        house = House(train=([0], TRAINED), infer=([0], ENGINE), reference=([1], WEIGHTS))
        await house.open()
        generating, done = asyncio.Event(), asyncio.Event()

        async def generate():
            async with house.turns.take({"infer": ENGINE}):
                generating.set()
                await done.wait()
                house.journal.append("generated")

        rollout = asyncio.create_task(generate())
        await generating.wait()
        update = asyncio.create_task(house.work("update", train=TRAINED))
        await house.work("score reference", reference=WEIGHTS)
        await house.work("another rollout", infer=ENGINE)
        done.set()
        await asyncio.gather(rollout, update)
        return house.since()

    assert asyncio.run(act()) == [
        "score reference",
        "another rollout",
        "generated",
        "infer offloads engine",
        "train onloads grads+optimizer+weights",
        "update",
    ]


def test_nested_turn_does_not_offload_the_outer_roles():
    async def act():
        house = colocated()
        await house.open()
        async with house.turns.take({"train": WEIGHTS, "infer": ENGINE}):
            house.since()
            await house.work("probe the trainer", train=WEIGHTS)
            await house.work("probe the engine", infer=ENGINE)
        return house.since()

    assert asyncio.run(act()) == ["probe the trainer", "probe the engine"]


def test_task_that_outlives_a_turn_does_not_share_it():
    async def act():
        house = colocated()
        await house.open()
        over = asyncio.Event()

        async def judge():
            await over.wait()
            await house.work("score reference", reference=WEIGHTS)

        async with house.turns.take({"infer": ENGINE}):
            judging = asyncio.create_task(judge())
        house.since()
        over.set()
        await judging
        return house.since()

    assert asyncio.run(act()) == ["infer offloads engine", "reference onloads weights", "score reference"]


@pytest.mark.parametrize("then", ["leave", "enter"])
def test_a_move_that_was_cut_short_is_made_again_whichever_way(then):
    async def act():
        house = colocated()
        await house.open()
        await house.work("generate", infer=ENGINE)
        house.roles["infer"].hanging = asyncio.Event()
        cut = asyncio.create_task(house.work("update", train=TRAINED))
        await asyncio.sleep(0.01)
        cut.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cut
        house.roles["infer"].hanging = None
        house.since()
        if then == "leave":
            await house.work("update", train=TRAINED)
        else:
            await house.work("generate", infer=ENGINE)
        return house.since()

    expected = {
        "leave": ["infer offloads engine", "train onloads grads+optimizer+weights", "update"],
        "enter": ["infer onloads engine", "generate"],
    }
    assert asyncio.run(act()) == expected[then]


def test_after_an_error_in_a_turn_the_next_one_begins():
    async def act():
        house = colocated()
        await house.open()
        with raises_error(ValueError, "broke"):
            async with house.turns.take({"infer": ENGINE}):
                raise ValueError("broke")
        await asyncio.wait_for(house.work("update", train=TRAINED), 60)
        return house.since()

    assert asyncio.run(act())[-1] == "update"


def test_moving_is_accounted_for():
    async def act():
        house = colocated()
        await house.open()
        await house.work("update", train=TRAINED)
        return house.stages

    assert asyncio.run(act()) == ["offload", "onload"]


def test_role_joins_a_lease_taken_for_it_and_awaits_others():
    """A reward model scores beside the engine on its slots, also in a task that is older than the engine's lease."""

    async def act():
        house = House(infer=([0], ENGINE), scorer=([0], WEIGHTS), train=([0], TRAINED))
        await house.open()
        first, second = asyncio.Event(), asyncio.Event()

        async def score(asked):
            await asked.wait()
            async with house.turns.take({"scorer": WEIGHTS}, join=True):
                house.journal.append("score")

        beside, waiting = asyncio.create_task(score(first)), asyncio.create_task(score(second))
        async with house.turns.take({"infer": ENGINE, "scorer": WEIGHTS}):
            house.since()
            first.set()
            await asyncio.wait_for(beside, 60)
        seen = house.since()
        async with house.turns.take({"infer": ENGINE}):
            second.set()
            await asyncio.sleep(0.001)
            assert not waiting.done()
        await waiting
        return seen, house.since()

    assert asyncio.run(act()) == (
        ["score"],
        ["scorer offloads weights", "infer offloads engine", "scorer onloads weights", "score"],
    )
