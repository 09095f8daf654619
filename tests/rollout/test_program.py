"""Programs of several turns on the scheduler of single turns, in virtual time: nothing is lost, doubled or repeated."""

import asyncio
import json
import math
import random

import numpy as np
import pytest
from rollout_fleet import PROMPT, check_requests, engine, in_virtual_time, length_of, plan

from roll_core.errors import ContractError
from roll_core.runtime.cluster.concurrency import gather
from roll_core.runtime.rollout.program import GreedyBaseline, GroupTerms, run_groups
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.scheduler import RolloutScheduler
from roll_core.spec.rollout import RolloutProgram
from roll_core.types import Group, Reward, Sample
from roll_testing.errors import raises_error

TURNS = 3
OBSERVED = 2
"""Tokens that the environment adds after each turn but the last."""
RESTORED = []
"""States that programs were restored from."""


class Episodes(RolloutProgram):
    """`n` episodes side by side, whose environment takes its time."""

    def snapshot(self):
        return {}

    async def run(self, context, prompt):
        episodes = [self.episode(context, prompt, index) for index in range(context.n)]
        return await context.score(Group(id=prompt.id, samples=tuple(await asyncio.gather(*episodes))))

    async def episode(self, context, prompt, index):
        ids, mask, versions = list(prompt.tokens), [], []
        for turn in range(TURNS):
            if turn:
                await asyncio.sleep(random.Random(f"{prompt.id}/{index}/{turn}").uniform(0, 4))
                ids += range(len(ids), len(ids) + OBSERVED)
                mask += [False] * OBSERVED
                versions += [versions[-1]] * OBSERVED
            (output,) = (await context.generate(np.array(ids), key=f"{index}-{turn}")).outputs
            ids += output.token_ids.tolist()
            mask += [True] * len(output.token_ids)
            versions += output.versions.tolist()
        return Sample(
            id=f"{prompt.id}/{index}",
            group_id=prompt.id,
            prompt_ids=prompt.tokens,
            response_ids=np.array(ids[len(prompt.tokens) :]),
            logprobs=np.zeros(len(mask), np.float32),
            loss_mask=np.array(mask),
            versions=np.array(versions, np.int32),
            finish_reason="stop",
        )


class Unsaved(Episodes):
    """Cannot be saved in the middle."""

    def snapshot(self):
        return None


class Counting(Episodes):
    """Has a state of its own, and notes when it is restored."""

    def snapshot(self):
        return {"name": "counting"}

    def restore(self, state):
        RESTORED.append(state["name"])


def right_mask(id, index):
    """Of an episode: an engine samples up to a length that depends on the turn, counted from the prompt's end."""
    mask = []
    for turn in range(TURNS):
        mask += [False] * OBSERVED if turn else []
        mask += [True] * max(1, length_of(f"{id}:{index}-{turn}", 0) - len(mask))
    return mask


def check(groups):
    for group in groups:
        for index, sample in enumerate(group.samples):
            mask = right_mask(group.id, index)
            assert sample.loss_mask.tolist() == mask
            assert sample.response_ids.tolist() == list(range(len(PROMPT), len(PROMPT) + len(mask)))
            assert sample.reward.value == 1.0


async def score(prompt, group):
    return Group(id=group.id, samples=tuple(sample.with_reward(Reward(value=1.0)) for sample in group.samples))


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("ahead", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_episodes_are_unaffected_by_updates_deaths_and_batches(ahead, concurrent, seed):
    async def main():
        rng = random.Random(seed)
        replicas = [engine(str(i)) for i in range(3)]
        queue = RequestQueue(replicas, progress_s=rng.choice([0.0, 0.5]), max_running=rng.choice([None, 6]))
        chosen = plan(ahead=ahead, concurrent=concurrent, program=Episodes)
        scheduler = RolloutScheduler(chosen, queue, score, seed=1)
        for step in range(5):
            groups, facts = await scheduler.batch(step)
            check(groups)
            assert [group.id for group in groups] == [f"a{6 * step + i}" for i in range(6)]
            assert max(facts.ages) <= math.ceil(ahead)
            assert concurrent or queue.num_running == 0
            check_requests(queue, scheduler)
            await asyncio.sleep(rng.uniform(0, 10))
            async with queue.paused(in_flight=rng.random() < 0.5):
                if step in (1, 2):
                    queue.add(engine(f"new{step}"))
                    replicas[step].kill()
                await asyncio.sleep(1.0)
        await scheduler.close()
        await queue.close()
        assert queue.num_pending == queue.num_running == 0

    in_virtual_time(main)


@pytest.mark.parametrize("concurrent", [False, True])
def test_resumed_episodes_repeat_no_finished_turn(concurrent):
    async def main():
        finished = set()
        RESTORED.clear()
        state, chosen = {}, plan(ahead=1.0, concurrent=concurrent, program=Counting)
        for step in range(6):
            replicas = [engine("0"), engine("1")]
            queue = RequestQueue(replicas)
            scheduler = RolloutScheduler(chosen, queue, score, seed=1)
            scheduler.load_state(state)
            groups, facts = await scheduler.batch(step)
            check(groups)
            assert [group.id for group in groups] == [f"a{6 * step + i}" for i in range(6)]
            assert facts.restarted == 0
            await asyncio.sleep(2.0)
            begun = {id.partition("#")[0].rpartition("/")[2] for replica in replicas for id in replica.begun}
            assert not begun & finished
            state = json.loads(json.dumps(scheduler.state()))
            for entry in state["a"]["kept"]:
                for key, (output,) in entry.get("calls", {}).items():
                    if output is not None and output["finish_reason"] == "stop":
                        finished.add(f"a{entry['position']}:{key}")
            await scheduler.close()
            await queue.close()
        assert len(finished) > 20
        assert len(RESTORED) > 5
        assert set(RESTORED) == {"counting"}

    in_virtual_time(main)


@pytest.mark.parametrize("ahead", [0.0, 1.0])
def test_greedy_responses_are_scored_and_survive_a_checkpoint(ahead):
    async def score_all(prompt, group):
        rewards = range(len(group.samples))
        samples = (each.with_reward(Reward(value=float(r))) for each, r in zip(group.samples, rewards, strict=True))
        return Group(id=group.id, samples=tuple(samples))

    async def main():
        state, chosen = {}, plan(ahead=ahead, program=GreedyBaseline)
        for step in range(4):
            replica = engine("0")
            queue = RequestQueue([replica])
            scheduler = RolloutScheduler(chosen, queue, score_all, seed=1)
            scheduler.load_state(state)
            groups, facts = await scheduler.batch(step)
            assert [group.id for group in groups] == [f"a{6 * step + i}" for i in range(6)]
            for group in groups:
                assert [each.id for each in group.samples] == [f"{group.id}/{i}" for i in range(chosen.n)]
                assert group.baseline.id == f"{group.id}/greedy"
                assert group.baseline.reward.value == chosen.n
                assert len(group.baseline.response_ids) == max(1, length_of(f"{group.id}:greedy", 0))
            assert facts.rewards.scored % (chosen.n + 1) == 0
            await asyncio.sleep(3.0)
            state = json.loads(json.dumps(scheduler.state()))
            await scheduler.close()
            await queue.close()

    in_virtual_time(main)


def test_programs_that_cannot_be_saved_restart_and_are_counted():
    async def main():
        chosen = plan(ahead=1.0, program=Unsaved)
        queue = RequestQueue([engine("0")])
        scheduler = RolloutScheduler(chosen, queue, score, seed=1)
        await scheduler.batch(0)
        state = json.loads(json.dumps(scheduler.state()))
        running = [each["position"] for each in state["a"]["kept"] if each["group"] is None]
        assert running
        assert all("calls" not in each for each in state["a"]["kept"])
        restarted = sum("restarts" in each for each in state["a"]["kept"])
        await scheduler.close()
        resumed = RolloutScheduler(chosen, RequestQueue([engine("0")]), score, seed=1)
        resumed.load_state(state)
        groups, facts = await resumed.batch(1)
        check(groups)
        assert 0 < facts.restarted == restarted <= len(running)
        assert (await resumed.batch(2))[1].restarted == 0
        await resumed.close()

    in_virtual_time(main)


class OneKeyTwice(RolloutProgram):
    async def run(self, context, prompt):
        await context.generate(prompt.tokens)
        await context.generate(prompt.tokens)


class OneKeyTwiceAfterAPause(RolloutProgram):
    async def run(self, context, prompt):
        context.hold()
        asyncio.get_running_loop().call_later(1, context.release)
        await gather([context.generate(prompt.tokens) for _ in range(2)])


class TooFew(RolloutProgram):
    async def run(self, context, prompt):
        return Group(id=prompt.id, samples=())


class NoGroup(RolloutProgram):
    async def run(self, context, prompt):
        return None


class CancelsItself(RolloutProgram):
    """Awaits a task that something else cancels, as libraries with task groups of their own do."""

    async def run(self, context, prompt):
        own = asyncio.ensure_future(context.generate(prompt.tokens))
        asyncio.get_running_loop().call_later(0.1, own.cancel)
        return await own


@pytest.mark.parametrize("program", [OneKeyTwice, OneKeyTwiceAfterAPause, TooFew, NoGroup, CancelsItself])
@pytest.mark.parametrize("evaluates", [False, True])
def test_program_that_breaks_the_contract_ends_the_batch(program, evaluates):
    async def main():
        queue = RequestQueue([engine("0")])
        chosen = plan(program=program)
        scheduler = RolloutScheduler(chosen, queue, score, seed=1)
        terms = GroupTerms(params=chosen.params, n=chosen.n, seed_of=None)
        groups = run_groups(queue, [chosen.prompt("a", 0)], terms, score, program) if evaluates else scheduler.batch(0)
        with raises_error(ContractError, f"{program.__module__}.{program.__name__}"):
            await asyncio.wait_for(groups, 1000)
        assert queue.num_pending == 0

    in_virtual_time(main)


def test_a_program_that_is_cancelled_is_no_failure():
    async def main():
        queue = RequestQueue([engine("0")])
        scheduler = RolloutScheduler(plan(program=Episodes), queue, score, seed=1)
        batch = asyncio.ensure_future(scheduler.batch(0))
        await asyncio.sleep(0.1)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        assert scheduler._failure is None
        assert queue.num_pending == 0

    in_virtual_time(main)
