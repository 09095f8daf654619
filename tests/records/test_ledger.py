import asyncio
import contextlib
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_core.runtime.records.ledger import Ledger, process_age_s


class Clock:
    """Goes on only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds


def seconds(ledger: Ledger) -> dict[str, float]:
    return {row.stage: row.seconds for row in ledger.rows()}


def test_nested_stages_count_each_second_once() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    with ledger.stage("rollout"):
        clock.tick(3)
        with ledger.stage("reward"):
            clock.tick(2)
        clock.tick(1)
    clock.tick(0.5)
    assert seconds(ledger) == {"rollout": 4, "reward": 2, "other": 0.5}


def test_a_stage_inside_itself_is_one_row() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    with ledger.stage("evaluation"):
        clock.tick(1)
        with ledger.stage("evaluation"):
            clock.tick(2)
        clock.tick(4)
    assert seconds(ledger) == {"evaluation": 7, "other": 0}


def test_time_before_the_ledger_counts_as_start_up() -> None:
    clock = Clock()
    ledger = Ledger(clock, before_s=2.5)
    with ledger.stage("train"):
        clock.tick(7.5)
    rows = ledger.rows()
    assert {row.stage: (row.seconds, row.share) for row in rows} == {
        "train": (7.5, 0.75), "start-up": (2.5, 0.25), "other": (0, 0),
    }  # fmt: skip
    assert [row.stage for row in rows] == ["train", "start-up", "other"]


def test_an_open_stage_is_counted_until_now() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    stage = ledger.stage("train")
    stage.__enter__()
    clock.tick(2)
    assert seconds(ledger)["train"] == 2
    clock.tick(1)
    stage.__exit__(None, None, None)
    assert seconds(ledger)["train"] == 3


def test_a_stage_that_raises_is_closed() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    with contextlib.suppress(ValueError), ledger.stage("train"):
        clock.tick(1)
        raise ValueError
    clock.tick(5)
    assert seconds(ledger) == {"train": 1, "other": 5}


def test_stages_of_concurrent_tasks_share_the_wall_time() -> None:
    clock = Clock()
    ledger = Ledger(clock)

    async def work(name: str, entered: asyncio.Event, leave: asyncio.Event) -> None:
        with ledger.stage(name):
            entered.set()
            await leave.wait()

    async def main() -> None:
        entered, leave = [asyncio.Event() for _ in range(3)], [asyncio.Event() for _ in range(3)]
        with ledger.stage("step"):
            names = ["reward", "reward", "generate"]
            tasks = [asyncio.create_task(work(*each)) for each in zip(names, entered, leave, strict=True)]
            for event in entered:
                await event.wait()
            clock.tick(4)  # two stages, whatever their number of tasks: 2 s each
            leave[2].set()
            await tasks[2]
            clock.tick(3)  # reward alone
            leave[0].set()
            leave[1].set()
            await asyncio.gather(*tasks)
            clock.tick(1)  # the step itself again

    asyncio.run(main())
    assert seconds(ledger) == {"reward": 5, "generate": 2, "step": 1, "other": 0}


def test_a_task_may_outlive_the_stage_that_started_it() -> None:
    clock = Clock()
    ledger = Ledger(clock)

    async def late(go: asyncio.Event) -> None:
        await go.wait()
        with ledger.stage("late"):
            clock.tick(2)
            await asyncio.sleep(0)

    async def main() -> None:
        go = asyncio.Event()
        with ledger.stage("short"):
            task = asyncio.create_task(late(go))
            await asyncio.sleep(0)
            clock.tick(1)
        go.set()
        await task
        with ledger.stage("after"):
            clock.tick(4)

    asyncio.run(main())
    assert seconds(ledger) == {"short": 1, "late": 2, "after": 4, "other": 0}


def test_stages_of_threads_are_accounted_too() -> None:
    ledger, begin = Ledger(), time.perf_counter()

    def work() -> None:
        for _ in range(200):
            with ledger.stage("digest"), ledger.stage("flush"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    with ledger.stage("save"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows = {row.stage: row for row in ledger.rows()}
    assert rows["digest"].entries == rows["flush"].entries == 800
    assert sum(row.seconds for row in rows.values()) == pytest.approx(time.perf_counter() - begin, rel=0.02, abs=1e-3)


@given(
    st.recursive(
        st.lists(st.integers(0, 5), max_size=3),
        lambda inner: st.lists(st.tuples(st.sampled_from("abc"), inner, st.integers(0, 5)), max_size=4),
        max_leaves=20,
    )
)
def test_rows_always_add_up_to_the_wall_time(plan: list[object]) -> None:
    clock = Clock()
    ledger = Ledger(clock)

    def follow(plan: object) -> None:
        for item in plan if isinstance(plan, list) else []:
            if isinstance(item, tuple):
                name, inner, after = item
                with ledger.stage(name):
                    follow(inner)
                clock.tick(after)
            else:
                clock.tick(item)

    follow(plan)
    rows = ledger.rows()
    assert sum(row.seconds for row in rows) == clock.now - 100.0
    assert sum(row.share for row in rows) == pytest.approx(1.0 if clock.now > 100.0 else 0.0)


def test_step_times_are_those_of_the_step_and_add_up() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    with ledger.stage("train"):
        clock.tick(50)
    ledger.start_step()
    with ledger.stage("rollout"):
        clock.tick(3)
    with ledger.stage("train"):
        clock.tick(2)
    clock.tick(1)
    ledger.count_tokens("train", 500)
    ledger.count_tokens("step", 600)
    assert ledger.step_times() == {
        "time/train": 2, "time/rollout": 3, "time/other": 1, "time/step": 6,
        "tokens_per_s/train": 250, "tokens_per_s/step": 100,
    }  # fmt: skip
    ledger.start_step()
    clock.tick(4)
    assert ledger.step_times() == {"time/other": 4, "time/step": 4}
    assert {row.stage: row.tokens_per_s for row in ledger.rows()}["train"] == 500 / 52


def test_console_receives_the_current_stage() -> None:
    seen: list[str] = []
    ledger = Ledger(on_change=seen.append)
    with ledger.stage("evaluation"):
        with ledger.stage("offload"):
            pass
        with ledger.stage("onload"):
            pass
    assert seen == ["evaluation", "offload", "evaluation", "onload", "evaluation", ""]


def test_process_age_equals_the_clock() -> None:
    first = process_age_s()
    time.sleep(0.05)
    assert process_age_s() - first >= 0.04
    assert first > 0.1  # importing pytest alone takes longer
