"""Batches in virtual time: which groups they hold, how old these are, and what a resumed run makes of it."""

import asyncio
import gc
import json
import math
import random
import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_fleet import PROMPT, check_requests, engine, in_virtual_time, length_of, plan, prompt, right_tokens

from roll_core.errors import CheckpointMismatchError
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.recording import array_from
from roll_core.runtime.rollout.scheduler import RolloutScheduler
from roll_core.types import Group, Reward, SamplingParams
from roll_testing.errors import raises_error
from shared_tests.simulation import SimulatedEngine, Speed


def fleet(count=3, **given):
    return RequestQueue([engine(str(i)) for i in range(count)], **given)


def ids(groups):
    return [group.id for group in groups]


def check(groups):
    for group in groups:
        for index, sample in enumerate(group.samples):
            assert sample.id == f"{group.id}/{index}"
            assert sample.response_ids.tolist() == right_tokens(group.id, index)


async def train(queue, seconds=3.0, in_flight=False):
    """What happens between two batches: training, then new weights."""
    await asyncio.sleep(seconds)
    async with queue.paused(in_flight=in_flight):
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("ahead", [0.0, 0.5, 1.0, 2.5])
@pytest.mark.parametrize("concurrent", [True, False])
@pytest.mark.parametrize("keep_partials", [True, False])
def test_batches_are_in_prompt_order_within_the_staleness_bound(ahead, concurrent, keep_partials):
    async def main():
        queue = fleet()
        scheduler = RolloutScheduler(
            plan(counts={"a": 6, "b": 2}, ahead=ahead, concurrent=concurrent, keep_partials=keep_partials),
            queue,
            None,
            seed=1,
        )
        for step in range(6):
            groups, facts = await scheduler.batch(step)
            check(groups)
            assert ids(groups) == [f"a{6 * step + i}" for i in range(6)] + [f"b{2 * step + i}" for i in range(2)]
            assert max(facts.ages) <= math.ceil(ahead)
            assert facts.surplus == (math.floor(6 * ahead) + math.floor(2 * ahead))
            assert facts.stale == 0
            assert (queue.num_running == 0) or concurrent
            await train(queue)
        if ahead >= 1 and concurrent:
            assert min(facts.ages) >= 1  # all of it was begun while others were trained on
        await scheduler.close()
        assert queue.num_pending == queue.num_running == 0
        check_requests(queue, scheduler)

    in_virtual_time(main)


@pytest.mark.parametrize(
    ("ahead", "concurrent", "first_ready"),
    [(0.0, False, False), (0.5, False, True), (1.0, True, False), (2.5, True, False)],
)
def test_fractional_tag_shares_respect_the_staleness_bound(ahead, concurrent, first_ready):
    means = {"a": 5.25, "b": 0.5, "c": 0.25}
    expected = ["aaaaab", "aaaaaa", "aaaaac", "aaaaab"]  # due after step 2: 15.75 - 11 of a, 1.5 - 1 of b, 0.75 of c

    async def main():
        queue, tags = fleet(), []
        chosen = plan(counts=means, ahead=ahead, concurrent=concurrent, first_ready=first_ready)
        scheduler = RolloutScheduler(chosen, queue, None, seed=1)
        for step in range(20):
            groups, facts = await scheduler.batch(step)
            check(groups)
            tags.append("".join(group.id[0] for group in groups))
            assert max(facts.ages) <= math.ceil(ahead)
            assert facts.stale == 0
            if step in (4, 11):  # a run that resumes here has the same batches
                state, _ = scheduler.state(), await scheduler.close()
                scheduler = RolloutScheduler(chosen, queue, None, seed=1)
                scheduler.load_state(state)
            await train(queue)
        await scheduler.close()
        assert ["".join(sorted(each)) for each in tags] == expected * 5
        check_requests(queue, scheduler)

    in_virtual_time(main)


def test_generation_ahead_uses_idle_engine_time():
    async def seconds(**given):
        queue = fleet()
        scheduler = RolloutScheduler(plan(counts={"a": 12}, **given), queue, None, seed=1)
        for step in range(12):
            await scheduler.batch(step)
            await train(queue, 5.0, in_flight=True)
        await scheduler.close()
        return asyncio.get_running_loop().time()

    spent = {}

    def run(name, **given):
        async def main():
            spent[name] = await seconds(**given)

        in_virtual_time(main)

    run("sync")
    run("surplus", ahead=0.5)
    run("first ready", ahead=0.5, first_ready=True)
    run("async", ahead=1.0, concurrent=True)
    assert spent["surplus"] < 0.95 * spent["sync"]
    assert spent["first ready"] < spent["surplus"]
    assert spent["async"] < 0.75 * spent["sync"]


def judged(dispatcher_rng):
    """A judge that takes its time, and gives the position of the prompt as the reward."""

    async def judge(prompt, group):
        await asyncio.sleep(dispatcher_rng.uniform(0, 4))
        value = float(int(prompt.id[1:]))
        return Group(id=group.id, samples=tuple(sample.with_reward(Reward(value=value)) for sample in group.samples))

    return judge


@given(st.sets(st.integers(0, 60)), st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.booleans(), st.integers(0, 5))
@settings(max_examples=25)
def test_batch_has_the_first_prompts_that_pass_the_filter(unwanted, ahead, concurrent, seed):
    async def main():
        queue = fleet()
        chosen = plan(
            ahead=ahead,
            concurrent=concurrent,
            max_tries=1000,
            keep=lambda group: group.samples[0].reward.value not in unwanted,
        )
        scheduler = RolloutScheduler(chosen, queue, judged(random.Random(seed)), seed=1)
        wanted = (position for position in range(1000) if position not in unwanted)
        left_out = 0
        for step in range(4):
            groups, facts = await scheduler.batch(step)
            assert ids(groups) == [f"a{next(wanted)}" for _ in range(6)]
            assert max(facts.ages) <= math.ceil(ahead)
            check(groups)
            left_out += facts.left_out
            await train(queue, 1.0)
        if not ahead:
            last = int(groups[-1].id[1:])
            assert left_out == len([each for each in unwanted if each <= last])
        await scheduler.close()
        check_requests(queue, scheduler)

    in_virtual_time(main)


@given(
    st.sets(st.integers(0, 60)),
    st.sampled_from([0.34, 0.5, 0.9]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 5),
)
@settings(max_examples=25)
def test_prompts_passed_over_are_in_the_next_batch(unwanted, ahead, concurrent, keep_partials, seed):
    async def main():
        queue = fleet()
        chosen = plan(
            ahead=ahead,
            concurrent=concurrent,
            keep_partials=keep_partials,
            first_ready=True,
            max_tries=1000,
            keep=lambda group: group.samples[0].reward.value not in unwanted,
        )
        scheduler = RolloutScheduler(chosen, queue, judged(random.Random(seed)), seed=1)
        seen: list[int] = []
        for step in range(6):
            waiting = {entry["position"] for entry in scheduler.state()["a"]["kept"]}
            groups, facts = await scheduler.batch(step)
            check(groups)
            positions = [int(group.id[1:]) for group in groups]
            assert positions == sorted(positions) == list(facts.positions)
            assert len(positions) == 6
            left = {entry["position"] for entry in scheduler.state()["a"]["kept"]}
            assert waiting - unwanted <= set(positions)
            assert facts.passed_over == sum(each < max(positions) for each in left)
            assert max(facts.ages) <= 1
            seen += positions
            # Whoever was asked is trained on, left out, or still there: nobody is lost and nobody counts twice.
            assert len(seen) == len(set(seen))
            asked = scheduler.state()["a"]["next"]
            assert {*seen, *left, *unwanted} >= set(range(asked))
            await train(queue, 1.0)
        await scheduler.close()
        check_requests(queue, scheduler)

    in_virtual_time(main)


def test_batch_only_waits_for_a_long_response_passed_over_before():
    """One group of six takes a hundred times as long as the others."""

    async def main():
        long = {"a1", "a13"}
        lengths = lambda id, index: 1000 if id.rpartition("/")[2] in long else 10  # noqa: E731
        replica = SimulatedEngine("0", Speed(max_rows=256), lengths, prompt_tokens=len(PROMPT))
        scheduler = RolloutScheduler(
            plan(ahead=0.5, concurrent=True, first_ready=True, params=SamplingParams(max_new_tokens=5000)),
            RequestQueue([replica]),
            None,
            seed=1,
        )
        loop, ended, batches, passed = asyncio.get_running_loop(), [], [], []
        for step in range(3):
            groups, facts = await scheduler.batch(step)
            ended.append(loop.time())
            batches.append(ids(groups))
            passed.append(facts.passed_over)
        await scheduler.close()
        assert batches[0] == ["a0", "a2", "a3", "a4", "a5", "a6"]
        assert ended[0] < 10 * 0.05
        assert batches[1] == ["a1", "a7", "a8", "a9", "a10", "a11"]
        assert ended[1] > 1000 * 0.02
        assert passed[:2] == [1, 0]

    in_virtual_time(main)


def test_resumed_scheduler_remembers_passed_over_prompts():
    async def main():
        chosen = plan(ahead=0.5, first_ready=True)
        queue = fleet()
        scheduler = RolloutScheduler(chosen, queue, judged(random.Random(0)), seed=1)
        seen: list[str] = []
        for step in range(8):
            state = json.loads(json.dumps(scheduler.state()))
            await scheduler.close()
            scheduler = RolloutScheduler(chosen, fleet(), judged(random.Random(step)), seed=1)
            scheduler.load_state(state)
            waiting = {f"a{entry['position']}" for entry in state["a"]["kept"]}
            groups, _ = await scheduler.batch(step)
            assert waiting <= set(ids(groups))
            assert len(waiting) == (3 if step else 0)
            seen += ids(groups)
        assert len(set(seen)) == 8 * 6
        await scheduler.close()

    in_virtual_time(main)


def test_synchronous_prompts_are_replaced_round_by_round():
    """What runs together must not depend on who is judged first."""

    def rounds(seed):
        asked = []

        class Recording(SimulatedEngine):
            def submit(self, requests, on_result):
                asked.append([each.id for each in requests])
                super().submit(requests, on_result)

        async def main():
            queue = RequestQueue([Recording("0", Speed(max_rows=8), length_of, prompt_tokens=len(PROMPT))])
            keep = lambda group: int(group.id[1:]) % 3 != 0  # noqa: E731
            scheduler = RolloutScheduler(plan(keep=keep), queue, judged(random.Random(seed)), seed=1)
            await scheduler.batch(0)

        in_virtual_time(main)
        return asked

    assert (
        rounds(0)
        == rounds(1)
        == [
            [f"train/0/a{i}" for i in range(6)],
            ["train/0/a6", "train/0/a7"],
            ["train/0/a8"],
        ]
    )


def test_groups_are_scored_while_others_are_sampled():
    """One group after the other is drawn in a second, and judged in a second."""

    async def main():
        loop, judging = asyncio.get_running_loop(), []

        async def judge(prompt, group):
            judging.append(loop.time())
            await asyncio.sleep(1.0)
            return group

        speed = Speed(base_s=0.1, row_s=0.0, prompt_token_s=0.0, max_rows=4)
        replica = SimulatedEngine("0", speed, lambda id, index: 10, prompt_tokens=len(PROMPT))
        scheduler = RolloutScheduler(plan(), RequestQueue([replica]), judge, seed=1)
        await scheduler.batch(0)
        assert judging == pytest.approx([1, 2, 3, 4, 5, 6], abs=1e-3)
        assert loop.time() == pytest.approx(7, abs=1e-3)

    in_virtual_time(main)


@pytest.mark.parametrize("seed", range(8))
def test_replica_deaths_change_no_batch(seed):
    """Whatever dies when: every batch has its prompts in order, every answer its right tokens, and each counts once."""

    async def main():
        rng = random.Random(seed)
        living = [engine(f"e{i}") for i in range(3)]
        queue = RequestQueue(
            living,
            progress_s=rng.choice([0.0, 0.3]),
            max_running=rng.choice([None, 12]),
            routing=rng.choice(["least_loaded", "prompt_affinity", "sticky"]),
        )
        chosen = plan(ahead=rng.choice([0.0, 0.5, 2.0]), concurrent=rng.random() < 0.5)
        scheduler = RolloutScheduler(chosen, queue, judged(rng), seed=1)

        async def reap():
            for number in range(100):
                await asyncio.sleep(rng.uniform(0, 8))
                living.pop(rng.randrange(len(living))).kill()
                if len(living) < 3:
                    living.append(engine(f"new{number}"))
                    queue.add(living[-1])

        reaper = asyncio.ensure_future(reap())
        for step in range(6):
            groups, facts = await scheduler.batch(step)
            assert ids(groups) == [f"a{6 * step + i}" for i in range(6)]
            check(groups)
            assert max(facts.ages) <= math.ceil(chosen.ahead)
            check_requests(queue, scheduler)
            await train(queue, in_flight=rng.random() < 0.5)
        reaper.cancel()
        await asyncio.gather(reaper, return_exceptions=True)
        await scheduler.close()
        await queue.close()
        assert queue.num_lost_replicas > 2
        assert queue.finished["completed"] >= 36
        assert queue.num_pending == 0

    in_virtual_time(main)


def test_groups_that_the_filter_rejects_are_not_kept_in_memory():
    rejected = []

    def keep(group):
        if random.Random(group.id).random() < 0.7:
            rejected.extend(weakref.ref(sample.response_ids) for sample in group.samples)
            return False
        return True

    async def main():
        scheduler = RolloutScheduler(plan(keep=keep), fleet(), judged(random.Random(0)), seed=1)
        batch = asyncio.ensure_future(scheduler.batch(0))
        while len(rejected) < 16:
            await asyncio.sleep(1)
        assert not batch.done()
        gc.collect()
        assert sum(each() is not None for each in rejected) <= 4  # of a group that is rejected just now
        _, facts = await batch
        assert facts.left_out == len(rejected) / 4
        assert facts.rewards.scored == 4 * (facts.left_out + 6)

    in_virtual_time(main)


def test_batch_is_smaller_if_the_filter_drops_most_groups():
    async def main():
        queue = fleet()
        tried = []

        def keep(group):
            tried.append(group.id)
            return group.id == "a3"

        scheduler = RolloutScheduler(plan(keep=keep, max_tries=2.5), queue, None, seed=1)
        groups, facts = await scheduler.batch(0)
        assert ids(groups) == ["a3"]
        assert len(tried) == 15
        assert facts.left_out == 14
        groups, _ = await scheduler.batch(1)
        assert groups == []
        assert len(tried) == 30

    in_virtual_time(main)


def test_judge_error_ends_the_batch_and_leaves_nothing_running():
    async def judge(prompt, group):
        if prompt.id == "a2":
            raise ValueError("no such judge")
        return group

    async def main():
        queue = fleet()
        scheduler = RolloutScheduler(plan(ahead=1.0, concurrent=True), queue, judge, seed=1)
        with raises_error(ValueError, "judge"):
            await scheduler.batch(0)
        assert queue.num_running == queue.num_pending == 0

    in_virtual_time(main)


def test_failure_between_batches_ends_the_next_batch():
    """Nobody waits then; the group would be waited for until the end of time."""

    async def judge(prompt, group):
        if prompt.id == "a7":
            raise ValueError("no such judge")
        return group

    async def main():
        queue = fleet()
        scheduler = RolloutScheduler(plan(ahead=1.0, concurrent=True), queue, judge, seed=1)
        await scheduler.batch(0)
        await asyncio.sleep(3600)
        with raises_error(ValueError, "judge"):
            await scheduler.batch(1)
        assert queue.num_running == queue.num_pending == 0

    in_virtual_time(main)


def test_a_batch_that_is_called_off_leaves_nothing_running():
    async def main():
        queue = fleet()
        scheduler = RolloutScheduler(plan(ahead=0.5), queue, None, seed=1)
        waiting = asyncio.ensure_future(scheduler.batch(0))
        await asyncio.sleep(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert queue.num_running == queue.num_pending == 0

    in_virtual_time(main)


@pytest.mark.parametrize("concurrent", [True, False])
@pytest.mark.parametrize("ahead", [0.0, 0.5, 2.0])
def test_resumed_scheduler_continues_with_saved_groups(ahead, concurrent):
    async def main():
        keep = lambda group: int(group.id[1:]) % 4 != 1  # noqa: E731
        wanted = (position for position in range(1000) if position % 4 != 1)
        chosen = plan(ahead=ahead, concurrent=concurrent, keep=keep)
        queue = fleet()
        scheduler = RolloutScheduler(chosen, queue, judged(random.Random(0)), seed=1)
        kept = 0
        for step in range(8):
            groups, facts = await scheduler.batch(step)
            assert ids(groups) == [f"a{next(wanted)}" for _ in range(6)]
            assert max(facts.ages) <= math.ceil(ahead)
            check(groups)
            await asyncio.sleep(1.0)
            state = json.loads(json.dumps(scheduler.state()))
            kept += sum(each["group"] is not None or "calls" in each for each in state["a"]["kept"])
            await scheduler.close()
            queue = fleet()
            scheduler = RolloutScheduler(chosen, queue, judged(random.Random(step)), seed=1)
            scheduler.load_state(state)
        assert bool(kept) == bool(ahead)
        await scheduler.close()

    in_virtual_time(main)


def test_checkpoint_has_partial_tokens_of_a_weight_update():
    async def main():
        queue = fleet()
        scheduler = RolloutScheduler(plan(ahead=2.0, concurrent=True), queue, None, seed=1)
        await scheduler.batch(0)
        async with queue.paused(in_flight=False):
            pass
        await asyncio.sleep(0.5)
        assert queue.num_running > 0
        kept = json.loads(json.dumps(scheduler.state()))["a"]["kept"]
        partial = {f"a{each['position']}" for each in kept if "calls" in each}
        assert len(partial) > 3
        await scheduler.close()
        second = engine("second")
        resumed = RolloutScheduler(plan(ahead=2.0, concurrent=True), RequestQueue([second]), None, seed=1)
        resumed.load_state({"a": {"next": 18, "kept": kept}})
        groups, _ = await resumed.batch(1)
        check(groups)
        # Requests that continue outputs have an id of their own, whole ones that of the group.
        begun = [id.rpartition("/")[2].partition("#") for id in second.begun]
        assert {row for row, mark, _ in begun if mark} == partial
        assert not {row for row, mark, _ in begun if not mark} & partial
        await resumed.close()

    in_virtual_time(main)


@pytest.mark.parametrize("stale", ["drop", "reuse"])
def test_too_stale_groups_are_dropped_or_reused_after_resume(stale):
    async def main():
        queue = fleet()
        before = RolloutScheduler(plan(ahead=3.0, concurrent=True), queue, None, seed=1)
        for step in range(4):
            await before.batch(step)
            await train(queue, 60)
        state = before.state()
        await before.close()
        after = RolloutScheduler(plan(ahead=1.0, concurrent=True, stale=stale), fleet(), None, seed=1)
        after.load_state(state)
        seen, stales, oldest = [], 0, 0
        for step in range(4, 8):
            groups, facts = await after.batch(step)
            check(groups)
            seen += ids(groups)
            stales += facts.stale
            oldest = max(oldest, *facts.ages)
        assert seen == [f"a{i}" for i in range(24, 48)]  # no prompt is lost
        assert (oldest > 1, stales > 0) == ((False, True) if stale == "drop" else (True, False))
        await after.close()

    in_virtual_time(main)


@pytest.mark.parametrize("stale", ["drop", "reuse"])
def test_synchronous_resume_leaves_no_request_paused(stale):
    """Reward models of a synchronous run wait until the engine has none: see `RequestQueue.drained`."""

    async def main():
        before = RolloutScheduler(plan(ahead=3.0, concurrent=True), fleet(), None, seed=1)
        await before.batch(0)
        await asyncio.sleep(3 if stale == "reuse" else 60)
        state = before.state()
        await before.close()
        queue = fleet()
        after = RolloutScheduler(plan(stale=stale), queue, None, seed=1)
        after.load_state(state)
        surplus = 0
        for step in range(1, 5):
            groups, facts = await after.batch(step)
            assert ids(groups) == [f"a{position}" for position in range(step * 6, step * 6 + 6)]
            surplus += facts.surplus
            await asyncio.wait_for(queue.drained(), 1000)
        assert surplus
        await after.close()

    in_virtual_time(main)


@pytest.mark.parametrize("changed", [{"tokens": PROMPT + 1}, {"id": "another"}])
def test_responses_in_a_checkpoint_stay_with_their_prompt(changed, caplog):
    def other(tag, position):
        found = prompt(tag, position)
        return replace(found, **changed) if position == 7 else found

    async def main():
        before = RolloutScheduler(plan(ahead=2.0, concurrent=True), fleet(), None, seed=1)
        await before.batch(0)
        await asyncio.sleep(60)
        state = json.loads(json.dumps(before.state()))
        assert {each["position"] for each in state["a"]["kept"] if each["group"]} >= {6, 7, 8}
        await before.close()
        queue = fleet()
        after = RolloutScheduler(plan(ahead=2.0, prompt=other), queue, None, seed=1)
        after.load_state(state)
        groups, facts = await after.batch(1)
        assert [slot.id for slot in groups] == [other("a", position).id for position in range(6, 12)]
        for group, position, age in zip(groups, facts.positions, facts.ages, strict=True):
            assert all(np.array_equal(each.prompt_ids, other("a", position).tokens) for each in group.samples)
            assert age == (0 if position == 7 else 1)
        assert facts.restarted == len(caplog.records) == 1
        assert other("a", 7).id in caplog.text
        await after.close()

    in_virtual_time(main)


async def state_that_keeps(kept, queue):
    """Of a scheduler after its first batch, with nothing but groups that are whole, or nothing but drawn parts."""
    scheduler = RolloutScheduler(plan(ahead=1.0), queue, None, seed=1)
    await scheduler.batch(0)
    state = scheduler.state()
    await scheduler.close()
    state["a"]["kept"] = [each for each in state["a"]["kept"] if each.get(kept) is not None]
    assert state["a"]["kept"]
    return state


@pytest.mark.parametrize("kept", ["group", "calls"])
def test_checkpoint_with_other_group_size_is_refused(kept):
    async def main():
        queue = fleet()
        state = await state_that_keeps(kept, queue)
        other = RolloutScheduler(plan(ahead=1.0, n=5), queue, None, seed=1)
        with raises_error(CheckpointMismatchError, "4", "5"):
            other.load_state(state)
        with raises_error(CheckpointMismatchError, "'a'"):
            other.load_state({"a": {"next": 3}})

    in_virtual_time(main)


@pytest.mark.parametrize("kept", ["group", "calls"])
def test_checkpoint_with_too_long_responses_is_refused(kept):
    async def main():
        queue = fleet()
        state = await state_that_keeps(kept, queue)
        saved = [each["group"]["samples"] if kept == "group" else each["calls"][""] for each in state["a"]["kept"]]
        tokens = "response_ids" if kept == "group" else "token_ids"
        longest = max(len(array_from(each[tokens])) for answers in saved for each in answers if each)

        def resumed(limit):
            params = SamplingParams(max_new_tokens=limit)
            RolloutScheduler(plan(ahead=1.0, params=params), queue, None, seed=1).load_state(state)

        resumed(longest)
        with raises_error(CheckpointMismatchError, longest - 1, "response_length"):
            resumed(longest - 1)

    in_virtual_time(main)


def test_seeds_depend_only_on_the_step_a_group_started():
    seeds = {}

    class Recording(RequestQueue):
        def submit(self, request, sampled=None, **others):
            seeds.setdefault(self.label, {})[request.id] = request.params.seed
            return super().submit(request, sampled, **others)

    async def main():
        for label in ("one", "other"):
            queue = Recording([engine("0")])
            queue.label = label
            scheduler = RolloutScheduler(plan(), queue, None, seed=7)
            for step in (0, 1) if label == "one" else (1,):
                if label == "other":
                    scheduler.load_state({"a": {"next": 6, "kept": []}})
                await scheduler.batch(step)

    in_virtual_time(main)
    assert seeds["other"].items() <= seeds["one"].items()
    assert len(set(seeds["one"].values())) == 12


@pytest.mark.parametrize("judged", [True, False])
def test_filter_error_reaches_the_caller_of_the_batch(judged):
    async def judge(prompt, group):
        return group

    def broken(group):
        raise ZeroDivisionError(group.id)

    async def main():
        queue = fleet()
        scheduler = RolloutScheduler(plan(keep=broken), queue, judge if judged else None, seed=1)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(scheduler.batch(0), 500)
        assert queue.num_pending == 0

    in_virtual_time(main)
