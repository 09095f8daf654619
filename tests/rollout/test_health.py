"""Replicas that hang, in virtual time: only a timeout ends them, and their responses resume on others."""

import asyncio

import pytest
from rollout_fleet import PROMPT, ask, engine, in_virtual_time, length_of, request, right_tokens

from roll_core.errors import WorkerDiedError, WorkerHungError
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.replicas import HealthTimeouts
from roll_testing.errors import mentions
from shared_tests.simulation import SimulatedEngine, Speed

FOR_EVER = 1e9


class Deaf(SimulatedEngine):
    """From `hang` on it answers nothing that it is asked."""

    deaf = False

    def hang(self):
        self.deaf = True
        self.stall(FOR_EVER)

    async def abort(self, ids):
        if self.deaf:
            await asyncio.Event().wait()
        await super().abort(ids)

    async def progress(self):
        if self.deaf:
            await asyncio.Event().wait()
        return await super().progress()


class Silent(SimulatedEngine):
    """Does not tell what it has drawn."""

    async def progress(self):
        return None


def made(kind, name, **speed):
    return kind(name, Speed(**({"max_rows": 8} | speed)), length_of, prompt_tokens=len(PROMPT))


def fleet(replicas, tokens_s=10.0, answers_s=30.0, progress_s=0.5):
    return RequestQueue(replicas, progress_s=progress_s, timeouts=HealthTimeouts(token_s=tokens_s, result_s=answers_s))


async def answers(queue, asked):
    """Of all requests, each once."""
    found = {}

    def answered(id, outcome):
        assert id not in found
        found[id] = outcome

    ask(queue, asked, answered)
    while queue.num_pending:
        await asyncio.sleep(0.5)
    assert found.keys() == {each.id for each in asked}
    return found


def check(found):
    for id, completion in found.items():
        for index, output in enumerate(completion.outputs):
            assert output.token_ids.tolist() == right_tokens(id, index)


@pytest.mark.parametrize("kind", [SimulatedEngine, Silent])
def test_busy_engine_is_not_timed_out_however_long_its_queue(kind):
    async def main():
        queue = fleet([made(kind, "0", max_rows=1)])
        check(await answers(queue, [request(f"r{i}", n=2) for i in range(40)]))
        assert asyncio.get_running_loop().time() > 10 * 30
        assert queue.num_lost_replicas == 0
        await queue.close()

    in_virtual_time(main)


@pytest.mark.parametrize("kind", [SimulatedEngine, Deaf])
def test_responses_of_a_hung_replica_resume_elsewhere(kind):
    async def main():
        first, second = made(kind, "0", max_rows=64), engine("1", max_rows=64)
        queue = fleet([first])
        waiting = asyncio.ensure_future(answers(queue, [request(f"r{i}") for i in range(10)]))
        await asyncio.sleep(3.1)
        queue.add(second)
        first.hang() if kind is Deaf else first.stall(FOR_EVER)
        check(await waiting)
        # Silent since 3.1 s at the earliest, given up 10 s later; the longest answer takes 9 s more.
        assert 13 < asyncio.get_running_loop().time() < 13 + 4 + 9
        told_by = 2.99 / (0.02 + 0.0001 * 10)
        assert second.tokens <= sum(max(0, len(right_tokens(f"r{i}", 0)) - int(told_by)) for i in range(10))
        assert queue.finished == {"completed": 10}
        assert queue.num_lost_replicas == 1
        assert first.dead
        assert not second.dead
        await queue.close()

    in_virtual_time(main)


def test_hung_replica_does_not_block_progress_of_others():
    async def main():
        deaf, dying, last = made(Deaf, "0"), engine("1"), engine("2")
        queue = fleet([deaf, dying], tokens_s=1000.0)
        waiting = asyncio.ensure_future(answers(queue, [request("a"), request("b")]))
        deaf.hang()
        await asyncio.sleep(2.1)
        queue.add(last)
        (lost,) = dying._requests
        dying.kill()
        check(await waiting)
        # What it told until 2 s is not drawn again; the other hung from the start.
        whole = {id: len(right_tokens(id, 0)) for id in ("a", "b")}
        assert last.tokens <= sum(whole.values()) - int(1.99 / 0.0201)
        assert whole[lost] > int(1.99 / 0.0201)
        await queue.close()

    in_virtual_time(main)


def test_slow_progress_is_requested_less_often():
    class Slow(SimulatedEngine):
        polls = 0

        async def progress(self):
            self.polls += 1
            await asyncio.sleep(1.0)
            return await super().progress()

    async def main():
        replica = made(Slow, "0", max_rows=1)
        queue = fleet([replica], tokens_s=400.0)
        check(await answers(queue, [request(f"r{i}", n=2) for i in range(20)]))
        # Half a second, and from then on a second every 21.
        assert abs(asyncio.get_running_loop().time() / 21 + 1 - replica.polls) < 2
        await queue.close()

    in_virtual_time(main)


def test_engine_without_progress_is_alive_by_completions_only():
    async def main():
        first, second = made(Silent, "0"), made(Silent, "1")
        queue = fleet([first, second], tokens_s=1.0, answers_s=30.0)
        waiting = asyncio.ensure_future(answers(queue, [request(f"r{i}", n=4) for i in range(6)]))
        await asyncio.sleep(2)
        first.stall(FOR_EVER)
        await asyncio.sleep(27)
        assert not first.dead
        check(await waiting)
        assert first.dead
        assert not second.dead
        await queue.close()

    in_virtual_time(main)


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        (SimulatedEngine, ("2", "replica_timeout", "10 s")),
        (Silent, ("2", "rpc_timeout", "30 s")),
    ],
)
def test_hang_of_the_only_replica_fails_all_callers_with_facts(kind, facts):
    async def main():
        replica = made(kind, "actor_infer")
        queue = fleet([replica])
        waiting = asyncio.ensure_future(queue.generate([request("a"), request("b"), request("c")]))
        await asyncio.sleep(0.1)
        replica.stall(FOR_EVER)
        with pytest.raises(WorkerHungError) as raised:
            await waiting
        assert mentions(str(raised.value), "actor_infer rank 0", *facts)
        assert queue.finished == {"failed": 3}
        await queue.close()

    in_virtual_time(main)


def test_idle_time_and_weight_updates_do_not_count_as_silence():
    async def main():
        replica = engine("0")
        queue = fleet([replica])
        check(await answers(queue, [request("a")]))
        await asyncio.sleep(100)
        replica.stall(5)
        waiting = asyncio.ensure_future(answers(queue, [request("b", n=8)]))
        await asyncio.sleep(6)
        for in_flight in (True, False):
            async with queue.paused(in_flight=in_flight):
                replica.stall(103)
                await asyncio.sleep(100)
            await asyncio.sleep(4)
        check(await waiting)
        assert queue.num_lost_replicas == 0
        await queue.close()

    in_virtual_time(main)


def test_an_idle_replica_that_stops_replying_is_terminated():
    async def main():
        stopped, silent, running = made(Deaf, "0"), made(Silent, "1"), engine("2")
        queue = fleet([stopped, silent])
        queue.watch()
        queue.add(running)
        await asyncio.sleep(100)
        assert queue.num_lost_replicas == 0
        stopped.hang()
        await asyncio.sleep(9)
        assert queue.num_lost_replicas == 0
        await asyncio.sleep(5)
        assert queue.num_lost_replicas == 1
        assert stopped.dead
        check(await answers(queue, [request(f"r{i}") for i in range(4)]))
        assert not silent.dead
        assert not running.dead
        await queue.close()

    in_virtual_time(main)


def test_an_idle_replica_that_exited_is_not_terminated():
    class Exited(SimulatedEngine):
        async def progress(self):
            raise WorkerDiedError("actor_infer", 0, "here", "progress", "it was killed", "")

        async def terminate(self, why):
            raise AssertionError(why)

    async def main():
        exited, other = made(Exited, "0"), engine("1")
        queue = fleet([exited, other])
        queue.watch()
        await asyncio.sleep(100)
        assert queue.num_lost_replicas == 0
        queue.remove(exited)
        assert queue.num_lost_replicas == 1
        await queue.close()

    in_virtual_time(main)


def test_an_only_idle_replica_that_stops_replying_is_awaited():
    async def main():
        stopped, replacement = made(Deaf, "0"), engine("1")
        queue = RequestQueue(
            [stopped], progress_s=0.5, timeouts=HealthTimeouts(token_s=10.0), survives_all=lambda: True
        )
        queue.watch()
        stopped.hang()
        await asyncio.sleep(20)
        assert queue.no_replicas.is_set()
        waiting = asyncio.ensure_future(answers(queue, [request("a")]))
        await asyncio.sleep(1)
        queue.add(replacement)
        check(await waiting)
        await queue.close()

    in_virtual_time(main)


@pytest.mark.parametrize("how", ["requests", "weights"])
def test_abort_of_a_hung_replica_blocks_until_its_timeout_only(how):
    async def main():
        deaf, other = made(Deaf, "0"), engine("1")
        queue = fleet([deaf, other])
        pending = ask(queue, [request("a", n=4), request("b", n=4)], lambda id, outcome: None)
        await asyncio.sleep(1)
        deaf.hang()
        if how == "requests":
            await queue.pause(pending)
            assert all(len(output.token_ids) for each in pending for output in each.sampled)
        else:
            async with queue.paused(in_flight=False):
                assert queue.num_running == 0
        assert 10 < asyncio.get_running_loop().time() < 15
        assert deaf.dead
        assert not other.dead
        await queue.close()

    in_virtual_time(main)


def test_replica_exiting_during_its_timeout_is_lost_once():
    class Slow(Deaf):
        async def terminate(self, why):
            await asyncio.sleep(3)
            return await super().terminate(why)

    async def main():
        first, second = made(Slow, "0"), engine("1")
        queue = fleet([first, second])
        waiting = asyncio.ensure_future(answers(queue, [request(f"r{i}") for i in range(4)]))
        first.hang()
        await asyncio.sleep(13)
        first.kill()
        check(await waiting)
        assert queue.num_lost_replicas == 1
        await asyncio.sleep(5)
        await queue.close()

    in_virtual_time(main)


@pytest.mark.parametrize("kind", [SimulatedEngine, Silent])
def test_time_in_which_the_machine_stood_still_is_no_silence(kind):
    """Then the driver has asked nobody, and replicas have drawn nothing either."""

    async def main():
        loop, replica = asyncio.get_running_loop(), made(kind, "0")
        queue = fleet([replica])
        waiting = asyncio.ensure_future(answers(queue, [request(f"r{i}", n=2) for i in range(4)]))
        for _ in range(3):
            await asyncio.sleep(1.2)
            replica.stall(61.2)
            loop.now += 60.0
        check(await waiting)
        assert loop.time() > 180
        assert queue.num_lost_replicas == 0
        await queue.close()

    in_virtual_time(main)
