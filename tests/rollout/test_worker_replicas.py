"""Queue, replicas and workers together, with messages that take their time: every response is what it should be."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from rollout_fleet import PROMPT, check_requests, in_virtual_time, length_of, request, right_tokens

from roll_core.errors import WorkerDiedError, WorkerHungError
from roll_core.runtime.cluster.executors.base import CallFailed, Failure, GroupSpec, Member, Peers, Place, WorkerGroup
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.replicas import HealthTimeouts, WorkerReplica
from roll_core.runtime.workers.infer import InferWorker
from roll_core.spec.config import StrategyConfig
from roll_core.spec.model import ModelSpec
from roll_core.spec.providers import InferProvider
from roll_core.types import Completion, CompletionOutput
from roll_testing.errors import raises_error

TOKEN_S = 0.02


class Engine:
    """Continues a prompt of p tokens with p, p + 1, ..., one token of each output at a time."""

    def __init__(self, config):
        self.running = {}

    async def generate(self, request):
        assert request.id not in self.running
        base, _, suffix = request.id.partition("#")
        indices = [int(suffix.partition(".")[0])] if suffix else range(request.n)
        ends = [length_of(base, index) - (len(request.prompt_ids) - len(PROMPT)) for index in indices]
        aborted = asyncio.Event()
        self.running[request.id] = request, ends, asyncio.get_running_loop().time(), aborted
        try:
            await asyncio.wait([asyncio.ensure_future(aborted.wait())], timeout=max(ends) * TOKEN_S)
            return self.completion(request.id)
        finally:
            aborted.set()
            del self.running[request.id]

    def completion(self, id):
        request, ends, begun, _ = self.running[id]
        num = int((asyncio.get_running_loop().time() - begun) / TOKEN_S + 1e-6)
        outputs = []
        for end in ends:
            ids = np.arange(len(request.prompt_ids), len(request.prompt_ids) + min(num, end))
            logprobs, versions = np.full(len(ids), -1, np.float32), np.zeros(len(ids), np.int32)
            reason = "stop" if num >= end else "abort"
            outputs.append(CompletionOutput(token_ids=ids, logprobs=logprobs, versions=versions, finish_reason=reason))
        return Completion(id=id, outputs=tuple(outputs))

    async def abort(self, ids):
        for id in ids:
            if id in self.running:
                self.running[id][-1].set()

    async def progress(self):
        return [self.completion(id) for id in self.running]


class Delayed(WorkerGroup):
    """Workers in this process. Calls arrive late in their order, cancellations and results late in any order."""

    lost = frozenset()
    survives_all = True

    def __init__(self, size, rng):
        places = tuple(Place(rank=rank, world_size=size) for rank in range(size))
        members = [Member(rank=rank, host="here", pid=rank, node=0) for rank in range(size)]
        super().__init__(GroupSpec(role="actor_infer", kind="generate", target="", places=places), members)
        self.rng = rng
        self.workers = [self.worker(place) for place in places]
        self.calls = [set() for _ in places]
        self.arrives = [0.0] * size

    def worker(self, place):
        return InferWorker(
            place=place,
            peers=Peers(),
            role=self.role,
            provider=InferProvider(
                name="acme", target=f"{__name__}:Engine", summary="", config="roll_core.spec.config:StrategyConfig"
            ),
            strategy_config=StrategyConfig().model_dump(),
            model=ModelSpec(random_init={"model_type": "bigram", "vocab_size": 1000}),
            backend="gloo",
            timeout_s=1.0,
            owner="acme",
        )

    def delay_s(self):
        return self.rng.choice([0, 0, 0.001, 0.02, 0.3])

    def begin(self, rank, method, arguments):
        loop, worker = asyncio.get_running_loop(), self.workers[rank]
        found = loop.create_future()
        if rank in self.lost:
            loop.call_soon(self.end, found, self.death(rank))
            return found
        self.calls[rank].add(found)
        self.arrives[rank] = max(loop.time() + self.delay_s(), self.arrives[rank] + 1e-6)

        def arrive():
            if worker is self.workers[rank] and rank not in self.lost:
                task = loop.create_task(getattr(worker, method)(*arguments))
                task.add_done_callback(lambda task: loop.call_later(self.delay_s(), reply, task))
                found.add_done_callback(
                    lambda found: found.cancelled() and loop.call_later(self.delay_s(), task.cancel)
                )

        def reply(task):
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            self.end(found, task.result() if error is None else CallFailed(Failure.of(error)))

        found.add_done_callback(self.calls[rank].discard)
        loop.call_at(self.arrives[rank], arrive)
        return found

    @staticmethod
    def end(future, outcome):
        if not future.done():
            (future.set_exception if isinstance(outcome, BaseException) else future.set_result)(outcome)

    def death(self, rank):
        return WorkerDiedError(self.role, rank, "here", "result", "it was killed", "")

    def terminate(self, rank, error):
        self.lost |= {rank}
        for call in list(self.calls[rank]):
            self.end(call, error)

    async def replace(self, rank):
        await asyncio.sleep(0.5)
        for each in self.workers[rank].running.values():
            each.task.cancel()
        self.workers[rank] = self.worker(self.spec.places[rank])
        self.members = tuple(replace(each) if each.rank == rank else each for each in self.members)
        self.lost -= {rank}


@pytest.mark.parametrize("seed", range(8))
def test_late_messages_change_no_response_and_leave_no_request(seed):
    """Requests are cancelled and submitted again under the same id, paused, and lose their replicas."""

    async def asked(queue, rng, id):
        made = request(id, n=rng.randint(1, 3))
        await asyncio.sleep(rng.uniform(0, 6))
        for _ in range(rng.choice([0, 1, 2])):
            cancelled = asyncio.ensure_future(queue.generate([made]))
            await asyncio.sleep(rng.choice([0, 0.001, 0.01, 0.1, 1]))
            cancelled.cancel()
            await asyncio.wait([cancelled])
            await asyncio.sleep(rng.choice([0, 0, 0.001, 0.01]))
        (found,) = await queue.generate([made])
        tokens = [output.token_ids.tolist() for output in found.outputs]
        assert tokens == [right_tokens(id, index) for index in range(made.n)]

    async def replace_lost(queue, group, replicas):
        while True:
            await asyncio.sleep(0.7)
            for rank in sorted(group.lost):
                queue.remove(replicas[rank])
                await group.replace(rank)
                replicas[rank] = WorkerReplica(group, rank)
                queue.add(replicas[rank])

    async def main():
        rng = random.Random(seed)
        group = Delayed(rng.choice([1, 2, 3]), rng)
        replicas = [WorkerReplica(group, rank) for rank in range(group.world_size)]
        queue = RequestQueue(
            replicas,
            progress_s=rng.choice([0.3, 0.0]),
            timeouts=HealthTimeouts(token_s=5.0),
            max_running=rng.choice([None, 4]),
            routing=rng.choice(["least_loaded", "prompt_affinity", "sticky"]),
            survives_all=lambda: True,
        )
        replacing = asyncio.ensure_future(replace_lost(queue, group, replicas))
        asking = asyncio.gather(*[asked(queue, rng, f"r{at}") for at in range(8)])
        for _ in range(10):
            await asyncio.sleep(rng.uniform(0, 1.5))
            if rng.random() < 0.3:
                rank = rng.randrange(group.world_size)
                group.terminate(rank, group.death(rank))
            else:
                async with queue.paused(in_flight=rng.random() < 0.4):
                    await asyncio.sleep(rng.uniform(0, 0.2))
        await asyncio.wait_for(asking, 1000)
        await asyncio.sleep(5)
        check_requests(queue, [])
        for worker in group.workers:
            assert not worker.running
            assert not worker.strategy.running
        replacing.cancel()
        await asyncio.wait([replacing])
        await queue.close()

    in_virtual_time(main)


def test_replacement_is_not_killed_for_its_predecessor():
    """Reading the stacks of a worker that hangs takes seconds, in which it may exit and be replaced."""

    class Silent(Delayed):
        async def stack(self, rank):
            await asyncio.sleep(100)
            return ""

    async def main():
        group = Silent(1, random.Random(0))
        killing = asyncio.ensure_future(group.kill(0, "it waited too long for a token"))
        await asyncio.sleep(0.1)
        group.terminate(0, group.death(0))
        await group.replace(0)
        assert isinstance(await killing, WorkerHungError)
        assert not group.lost
        await group.kill(0, "now the replacement hangs")
        assert group.lost == {0}

    in_virtual_time(main)


def test_hung_worker_is_the_error_if_it_cannot_be_killed():
    class Unkillable(Delayed):
        terminate = WorkerGroup.terminate

    async def main():
        with raises_error(WorkerHungError, "actor_infer rank 0"):
            await Unkillable(1, random.Random(0)).kill(0, "it waited too long for a token")

    in_virtual_time(main)
