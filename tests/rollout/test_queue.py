"""Requests over replicas in virtual time: every output is what it would have been, however often it was cut short."""

import asyncio
import gc
import random
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from rollout_fleet import PROMPT, ask, check_requests, engine, in_virtual_time, length_of, request, right_tokens

from roll_core.data.media import image_media
from roll_core.errors import DataError, RollError, UnsupportedError, WorkerDiedError
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.replicas import HealthTimeouts
from roll_core.runtime.rollout.requests import FINISHED, PAUSED
from roll_core.types import Completion
from roll_testing.errors import raises_error
from shared_tests.simulation import SimulatedEngine, Speed


def check(completion, n):
    assert [output.token_ids.tolist() for output in completion.outputs] == [
        right_tokens(completion.id, index) for index in range(n)
    ]
    assert all(output.finish_reason == "stop" for output in completion.outputs)


@pytest.mark.parametrize("routing", ["least_loaded", "prompt_affinity", "sticky"])
@pytest.mark.parametrize("max_running", [None, 1, 6])
def test_every_request_is_answered_in_order(routing, max_running):
    async def main():
        queue = RequestQueue([engine(str(i)) for i in range(3)], routing=routing, max_running=max_running)
        found = await queue.generate([request(f"r{i}", n=i % 4 + 1) for i in range(20)])
        assert [completion.id for completion in found] == [f"r{i}" for i in range(20)]
        for i, completion in enumerate(found):
            check(completion, i % 4 + 1)
        assert queue.num_running == 0
        assert queue.finished == {"completed": 20}

    in_virtual_time(main)


def test_images_need_an_engine_that_reads_them():
    async def main():
        picture = replace(request("p"), media=(image_media(Image.new("RGB", (2, 2))),))
        queue = RequestQueue([engine("0")], media=())
        check((await queue.generate([request("t")]))[0], 1)
        with raises_error(UnsupportedError, "p", "images"):
            await queue.generate([picture])
        assert queue.num_running == 0
        reading = RequestQueue([engine("1")])
        check((await reading.generate([picture]))[0], 1)

    in_virtual_time(main)


def test_replica_capacity_holds_and_rows_are_scheduled_singly():
    async def main():
        replicas = [engine(str(i)) for i in range(2)]
        queue = RequestQueue(replicas, max_running=8)
        ask(queue, [request(f"r{i}", n=4) for i in range(48)], lambda id, outcome: None)
        most = 0
        while queue.num_pending:
            most = max(most, *(sum(len(each.rows) for each in replica._requests.values()) for replica in replicas))
            await asyncio.sleep(0.05)
        assert most == 8
        # Graham's bound of list scheduling on 16 rows: no row is idle while anything waits.
        lengths = [len(right_tokens(f"r{i}", index)) for i in range(48) for index in range(4)]
        steps = sum(lengths) / 16 + max(lengths)
        assert asyncio.get_running_loop().time() <= steps / replicas[0].speed.tokens_per_s(8) + 1

    in_virtual_time(main)


def test_affinity_resumes_in_place_and_sticky_awaits_capacity():
    async def places(routing):
        replicas = [engine(str(i)) for i in range(3)]
        queue = RequestQueue(replicas, routing=routing, max_running=2)
        ask(queue, [request(f"r{i}", n=2) for i in range(3)], lambda id, outcome: None)
        await asyncio.sleep(0)
        before = {id.partition("#")[0]: replica.name for replica in replicas for id in replica._requests}
        async with queue.paused(in_flight=False):
            pass
        ask(queue, [request("other", n=2)], lambda id, outcome: None)
        await asyncio.sleep(0)
        after = {id.partition("#")[0]: replica.name for replica in replicas for id in replica._requests}
        await queue.close()
        return before, after

    async def main():
        for routing in ("prompt_affinity", "sticky"):
            before, after = await places(routing)
            assert after == before

    in_virtual_time(main)


@pytest.mark.parametrize(
    ("params", "ends"), [({}, True), ({"ignore_eos": True}, False), ({"min_new_tokens": 400}, False)]
)
def test_stop_string_across_a_pause_ends_the_response(params, ends):
    async def main():
        def find(tokens, seam, stops):
            return seam + 1, stops[0]

        queue = RequestQueue([engine("a")], find_stop=find)
        pending = queue.submit(request("long", stop=("x",), **params))
        await asyncio.sleep(0.4)
        async with queue.paused(in_flight=False):
            seam = pending.outputs[0].num_tokens
        output = (await pending.done).outputs[0]
        assert 0 < seam + 1 < length_of("long", 0)
        assert len(output.token_ids) == (seam + 1 if ends else length_of("long", 0))

    in_virtual_time(main)


def test_streamed_tokens_grow_over_pauses_and_replica_loss():
    async def main():
        replicas = [engine(str(i)) for i in range(2)]
        queue = RequestQueue(replicas)
        seen = []
        pending = queue.submit(request("streamed", n=2), on_progress=seen.append)
        silent = queue.submit(request("silent", n=2))
        await asyncio.sleep(0.4)
        async with queue.paused(in_flight=False):
            pass
        await asyncio.sleep(0.4)
        slot = next(iter(pending.running.values()))
        queue.remove(slot.replica)
        check(await pending.done, 2)
        check(await silent.done, 2)
        await asyncio.sleep(1)
        for index in range(2):
            tokens = [[] if each[index] is None else each[index].token_ids.tolist() for each in seen]
            lengths = [len(each) for each in tokens]
            assert lengths == sorted(lengths)
            assert all(each == right_tokens("streamed", index)[: len(each)] for each in tokens)
        assert len(seen) > 5

    in_virtual_time(main)


def test_failed_request_ends_alone_or_with_its_batch():
    class Fussy(SimulatedEngine):
        def submit(self, requests, on_result):
            bad = [each for each in requests if each.id == "bad"]
            super().submit([each for each in requests if each.id != "bad"], on_result)
            for each in bad:
                asyncio.get_running_loop().call_soon(on_result, each.id, DataError("too long"))

    async def main():
        queue = RequestQueue([Fussy("f", Speed(), lambda id, index: 9, prompt_tokens=10)])
        found = {}
        ask(queue, [request("good"), request("bad")], found.__setitem__)
        await asyncio.sleep(60)
        assert len(found["good"].outputs[0].token_ids) == 9
        assert isinstance(found["bad"], DataError)
        with pytest.raises(DataError, match="too long"):
            await queue.generate([request("good"), request("bad")])
        assert queue.num_pending == queue.num_running == 0
        assert queue.finished == {"completed": 1, "failed": 2, "cancelled": 1}

    in_virtual_time(main)


def test_request_for_one_replica_starts_there_even_if_it_is_full():
    async def main():
        replicas = [engine(str(i)) for i in range(3)]
        queue = RequestQueue(replicas[:2], max_running=1, routing="sticky")
        ask(queue, [request(f"r{i}", n=2) for i in range(2)], lambda id, outcome: None)
        await asyncio.sleep(0)
        queue.add(replicas[2])
        asked = [
            queue.generate([request(f"probe{at}", priority=-2)], replica=replica) for at, replica in enumerate(replicas)
        ]
        for (found,) in await asyncio.gather(*asked):
            check(found, 1)
        assert [replica.begun[:2][-1] for replica in replicas] == ["probe0", "probe1", "probe2"]
        await queue.close()

    in_virtual_time(main)


def test_request_for_a_dead_replica_fails_without_rerouting():
    async def main():
        replicas = [engine(str(i)) for i in range(2)]
        queue = RequestQueue(replicas)
        dying = asyncio.ensure_future(queue.generate([request("first")], replica=replicas[0]))
        other = asyncio.ensure_future(queue.generate([request("r", n=2)]))
        await asyncio.sleep(0.1)
        replicas[0].kill()
        with pytest.raises(WorkerDiedError):
            await dying
        with pytest.raises(WorkerDiedError):
            await queue.generate([request("second")], replica=replicas[0])
        check((await other)[0], 2)
        assert not {"first", "second"} & set(replicas[1].begun)
        assert queue.finished == {"completed": 1, "failed": 2}

    in_virtual_time(main)


@pytest.mark.parametrize("routing", ["least_loaded", "prompt_affinity", "sticky"])
def test_requests_resume_on_the_next_replica_after_all_die(routing):
    async def main():
        replicas = [engine(str(i)) for i in range(3)]
        queue = RequestQueue(replicas[:2], routing=routing, progress_s=1.0, survives_all=lambda: True)
        found = {}
        ask(queue, [request(f"r{i}", n=3) for i in range(6)], found.__setitem__)
        await asyncio.sleep(2.5)
        replicas[0].kill()
        await asyncio.sleep(2.5)
        assert not queue.no_replicas.is_set()
        replicas[1].kill()
        await asyncio.sleep(0.1)
        assert queue.no_replicas.is_set()
        before = set(found)
        ask(queue, [request("late")], found.__setitem__)
        await asyncio.sleep(100)
        assert queue.num_running == 0 < queue.num_pending == 7 - len(before) == 7 - len(found)
        replicas[2].version = 1
        queue.add(replicas[2])
        assert not queue.no_replicas.is_set()
        while queue.num_pending:
            await asyncio.sleep(1)
        for id, completion in found.items():
            check(completion, 1 if id == "late" else 3)
        versions = [output.versions.tolist() for id in found.keys() - before for output in found[id].outputs]
        assert all(each == sorted(each) for each in versions)
        assert any(set(each) == {0, 1} for each in versions)  # what was told of is not drawn again
        assert queue.finished == {"completed": 7}
        assert queue.num_lost_replicas == 2
        await queue.close()

    in_virtual_time(main)


@pytest.mark.parametrize("routing", ["least_loaded", "prompt_affinity", "sticky"])
def test_priority_requests_precede_queued_and_sticky_ones(routing):
    async def main():
        replica = engine("0")
        queue = RequestQueue([replica], max_running=1, routing=routing)
        ended = []
        rollouts = [request(f"r{i}", n=2) for i in range(2)]
        ask(queue, rollouts, lambda id, outcome: ended.append(id))
        await asyncio.sleep(0)
        ask(queue, [request("v", n=2, priority=-1)], lambda id, outcome: ended.append(id))
        ask(queue, [request("p", n=2, priority=-2)], lambda id, outcome: ended.append(id))
        while queue.num_pending:
            await asyncio.sleep(1)
        assert ended == ["p", "v", "r0", "r1"]
        assert [id[0] for id in replica.begun] == ["r", "p", "p", "v", "v", "r", "r", "r"]

    in_virtual_time(main)


def test_duplicate_request_id_is_refused():
    async def main():
        queue = RequestQueue([engine("0")])
        ask(queue, [request("r")], lambda id, outcome: None)
        with raises_error(RollError, "'r'"):
            ask(queue, [request("r")], lambda id, outcome: None)
        await queue.close()

    in_virtual_time(main)


@pytest.mark.parametrize("in_flight", [True, False])
def test_no_request_starts_while_weights_are_updated(in_flight):
    async def main():
        replicas = [engine(str(i)) for i in range(2)]
        queue = RequestQueue(replicas)
        found = {}
        ask(queue, [request(f"r{i}", n=3) for i in range(6)], found.__setitem__)
        for version in range(1, 4):
            await asyncio.sleep(2)
            async with queue.paused(in_flight=in_flight):
                running = {id for replica in replicas for id in replica._requests}
                assert in_flight or not running
                ask(queue, [request(f"late{version}")], found.__setitem__)
                await asyncio.sleep(0.1)
                assert {id for replica in replicas for id in replica._requests} <= running
                for replica in replicas:
                    replica.version = version
        while queue.num_pending:
            await asyncio.sleep(1)
        for id, completion in found.items():
            check(completion, 1 if id.startswith("late") else 3)
            for output in completion.outputs:
                assert (np.diff(output.versions) >= 0).all()
        if not in_flight:
            versions = {tuple(sorted(set(out.versions.tolist()))) for each in found.values() for out in each.outputs}
            assert any(len(each) > 1 for each in versions)

    in_virtual_time(main)


@pytest.mark.parametrize("max_running", [None, 8])
def test_paused_requests_continue_from_their_last_token(max_running):
    async def main():
        queue = RequestQueue([engine(str(i)) for i in range(2)], max_running=max_running)
        found = {}
        pending = ask(queue, [request(f"r{i}", n=4) for i in range(8)], found.__setitem__)
        for _ in range(50):
            await asyncio.sleep(1.5)
            await queue.pause(pending)
            assert queue.num_running == 0
            check_requests(queue, [each for each in pending if each.state is not FINISHED])
            others = await queue.generate([request(f"v{i}") for i in range(3)])  # the replicas are free meanwhile
            assert [each.id for each in others] == ["v0", "v1", "v2"]
            assert {each.state for each in pending} <= {PAUSED, FINISHED}
            queue.resume(pending)
            check_requests(queue)
            if not queue.num_pending:
                break
        assert len(found) == 8
        for completion in found.values():
            check(completion, 4)
        assert queue.finished["completed"] >= 8 + 3
        assert queue.num_continued > 8

    in_virtual_time(main)


def test_output_interrupted_at_its_last_token_is_complete():
    # As after a resume with a smaller response_length: another token would be one too many.
    async def main():
        queue = RequestQueue([engine("0")])
        found = {}
        asked = request("r6", n=2, max_new_tokens=1000)
        (pending,) = ask(queue, [asked], found.__setitem__)
        await asyncio.sleep(1.0)
        await queue.pause([pending])
        queue.cancel([pending])
        lengths = {len(output.token_ids) for output in pending.sampled}
        assert lengths == {min(lengths)} != {0}
        ask(queue, [request("r6", n=2, max_new_tokens=min(lengths))], found.__setitem__, {"r6": pending.sampled})
        await asyncio.sleep(100)
        assert [len(output.token_ids) for output in found["r6"].outputs] == [*lengths] * 2
        assert {output.finish_reason for output in found["r6"].outputs} == {"length"}
        check_requests(queue)

    in_virtual_time(main)


def test_abort_that_overtakes_its_request_is_sent_again():
    class Deaf(SimulatedEngine):
        """Does not hear the first abort."""

        heard = 0

        async def abort(self, ids):
            self.heard += 1
            if self.heard > 1:
                await super().abort(ids)

    async def main():
        replica = Deaf("deaf", Speed(), lambda id, index: 10**6, prompt_tokens=10)
        queue = RequestQueue([replica])
        (pending,) = ask(queue, [request("r", max_new_tokens=10**6)], lambda id, outcome: None)
        await asyncio.sleep(1)
        await queue.pause([pending])
        assert replica.heard == 2
        assert pending.sampled[0].finish_reason == "abort"

    in_virtual_time(main)


@pytest.mark.parametrize("aborted_s", [None, 0.1, 1.0])
def test_requests_of_a_pause_that_ends_early_are_resumed(aborted_s, caplog):
    """Whether they were queued, run on, or are aborted before or after the end of the pause: none stays paused."""

    class Slow(SimulatedEngine):
        """Aborts half of the requests after `aborted_s`, or raises."""

        async def abort(self, ids):
            if aborted_s is None:
                raise RollError("no such requests")
            abort = super().abort
            asyncio.get_running_loop().call_later(aborted_s, lambda: asyncio.ensure_future(abort(ids[::2])))

    async def main():
        queue = RequestQueue([Slow("0", Speed(), length_of, prompt_tokens=len(PROMPT))], max_running=5)
        found = {}
        pending = ask(queue, [request(f"r{i}", n=3) for i in range(8)], found.__setitem__)
        await asyncio.sleep(1.5)
        with pytest.raises(RollError if aborted_s is None else TimeoutError):
            async with asyncio.timeout(0.3), queue.paused(in_flight=False):
                raise AssertionError("some requests have not stopped")
        check_requests(queue, [each for each in pending if each.state is not FINISHED])
        await asyncio.sleep(1000)
        assert sorted(found) == [f"r{i}" for i in range(8)]
        for completion in found.values():
            check(completion, 3)
        check_requests(queue, [])

    in_virtual_time(main)
    gc.collect()
    assert not caplog.records


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("replaced", [True, False])
def test_replica_failures_neither_lose_nor_duplicate_outputs(seed, replaced):
    """Every output is drawn to its end exactly once, token by token, and the ledger agrees."""

    async def main():
        rng = random.Random(seed)
        living = [engine(f"e{i}") for i in range(4)]
        made, busy_victims, joining = len(living), 0, []

        async def another():
            nonlocal made
            await asyncio.sleep(rng.uniform(0, 3))
            made += 1
            living.append(engine(f"e{made}"))
            queue.add(living[-1])

        progress_s = rng.choice([0.0, 0.3])
        queue = RequestQueue(
            living,
            progress_s=progress_s,
            timeouts=HealthTimeouts(token_s=5.0),
            max_running=rng.choice([None, 12]),
            routing=rng.choice(["least_loaded", "prompt_affinity", "sticky"]),
        )
        answers: dict[str, list] = {}

        def answered(id, outcome):
            answers.setdefault(id, []).append(outcome)

        asked = [request(f"r{i}", n=rng.randint(1, 6)) for i in range(40)]
        for start in range(0, 40, 10):
            ask(queue, asked[start : start + 10], answered)
            await asyncio.sleep(rng.uniform(0, 1))
            if len(living) > 1:
                victim = living.pop(rng.randrange(len(living)))
                busy_victims += bool(victim._requests)  # one that has nothing to do is not missed
                if progress_s and rng.random() < 0.5:
                    victim.stall(1e9)
                else:
                    victim.kill()
                if replaced:
                    joining.append(asyncio.ensure_future(another()))
            if rng.random() < 0.5:
                async with queue.paused(in_flight=rng.random() < 0.5):
                    await asyncio.sleep(0.1)
        while queue.num_pending:
            await asyncio.sleep(1)
        await asyncio.gather(*joining)
        await queue.close()
        assert sorted(answers) == sorted(each.id for each in asked)
        for each in asked:
            (completion,) = answers[each.id]
            check(completion, each.n)
        check_requests(queue)
        assert queue.finished == {"completed": 40}
        assert queue.num_lost_replicas in range(max(1, busy_victims), 5)
        assert queue.num_pending == 0

    in_virtual_time(main)


def test_reported_tokens_are_not_regenerated_after_a_death():
    async def main():
        first, second = engine("0", max_rows=64), engine("1", max_rows=64)
        queue = RequestQueue([first], progress_s=0.5)
        found = {}
        ask(queue, [request(f"r{i}") for i in range(10)], found.__setitem__)
        await asyncio.sleep(3.1)
        queue.add(second)
        first.kill()
        while queue.num_pending:
            await asyncio.sleep(1)
        await queue.close()
        # Of each that still ran nothing is drawn twice but what came after the last report, at 3 seconds.
        told_by = 2.99 / (0.02 + 0.0001 * 10)
        assert second.tokens <= sum(max(0, len(right_tokens(f"r{i}", 0)) - int(told_by)) for i in range(10))
        for completion in found.values():
            check(completion, 1)

    in_virtual_time(main)


def test_death_of_the_last_replica_is_raised_to_all_callers():
    async def main():
        replica = engine("0")
        queue = RequestQueue([replica])
        waiting = asyncio.ensure_future(queue.generate([request("a"), request("b")]))
        await asyncio.sleep(0.1)
        replica.kill()
        with raises_error(WorkerDiedError, "rank 0"):
            await waiting
        assert queue.finished == {"failed": 2}
        with pytest.raises(WorkerDiedError):  # nobody is there, so nobody waits for ever
            await queue.generate([request("c")])

    in_virtual_time(main)


def test_cancelled_callers_free_their_requests():
    async def main():
        replica = engine("0", max_rows=2)
        queue = RequestQueue([replica])
        waiting = asyncio.ensure_future(queue.generate([request(f"r{i}", n=2) for i in range(5)]))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.sleep(0.01)
        assert not replica._requests
        assert queue.num_running == 0
        await queue.generate([request("r0", n=2)])

    in_virtual_time(main)


def test_request_for_a_lost_replica_fails_before_a_replacement():
    async def main():
        replicas = [engine(str(i)) for i in range(2)]
        queue = RequestQueue(replicas[:1], survives_all=lambda: True)
        waiting = ask(queue, [request("r")], print)
        await asyncio.sleep(0.1)
        replicas[0].kill()
        await asyncio.sleep(0.1)
        with pytest.raises(WorkerDiedError):
            await asyncio.wait_for(queue.generate([request("probe")], replica=replicas[0]), 1000)
        assert queue.no_replicas.is_set()
        queue.add(replicas[1])
        check(await waiting[0].done, 1)

    in_virtual_time(main)


def test_prompt_logprobs_restart_if_their_replica_is_lost():
    class OfPrompts(SimulatedEngine):
        """Returns prompt logprobs with a result that asks for them, and reports only tokens."""

        def submit(self, requests, on_result):
            asked = {each.id for each in requests if each.prompt_logprobs}

            def done(id, outcome):
                if id in asked and isinstance(outcome, Completion):
                    outcome = replace(outcome, prompt_logprobs=np.zeros(len(PROMPT), np.float32))
                on_result(id, outcome)

            super().submit(requests, done)

    async def main():
        replicas = [OfPrompts(str(i), Speed(base_s=1.0), lambda id, index: 5, prompt_tokens=10) for i in range(2)]
        queue = RequestQueue(replicas, progress_s=0.1)
        asked = queue.submit(replace(request("r", n=2), prompt_logprobs=True))
        await asyncio.sleep(2.5)
        assert all(len(each.token_ids) == 2 for each in asked.reported)
        replicas[0].kill()
        found = await asked.done
        assert found.prompt_logprobs.shape == PROMPT.shape
        assert [each.token_ids.tolist() for each in found.outputs] == [list(range(10, 15))] * 2
        await queue.close()

    in_virtual_time(main)


def test_seeds_of_resumed_requests_are_new_and_repeatable():
    class Recording(SimulatedEngine):
        def submit(self, requests, on_result):
            for each in requests:
                seen.append((each.params.seed, len(each.prompt_ids) - len(PROMPT), each.params.max_new_tokens))
            super().submit(requests, on_result)

    async def main():
        queue = RequestQueue([Recording("0", Speed(), lambda id, index: 100, prompt_tokens=10)])
        waiting = asyncio.ensure_future(queue.generate([request("r", n=2, seed=5)]))
        await asyncio.sleep(1)
        async with queue.paused(in_flight=False):
            pass
        await waiting

    runs = []
    for _ in range(2):
        seen: list[tuple[int, int, int]] = []
        in_virtual_time(main)
        runs.append(seen)
    assert runs[0] == runs[1]
    seeds = [seed for seed, _, _ in runs[0]]
    assert len(set(seeds)) == len(seeds) == 3
    for _, drawn, left in runs[0]:
        assert drawn + left == 500
