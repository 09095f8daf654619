"""No exception in a callback or a thread of the executor leaves a run hanging."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from roll_core.runtime.cluster.concurrency import background
from roll_core.runtime.cluster.executors import worker_process
from roll_core.runtime.cluster.executors.worker_process import ProcessEndedError
from roll_core.runtime.run.stopping import StopSignals
from roll_executor_ray.executor import RayExecutor  # noqa: F401 - callbacks of its package end a run from now on
from roll_executor_ray.worker import RayWorker


class Boom(Exception):
    """Injected."""


def boom(*args, **given):
    raise Boom


async def boom_async(*args, **given):
    raise Boom


def test_an_exception_in_a_callback_of_a_call_ends_the_run():
    async def main():
        worker = object.__new__(RayWorker)
        worker._pending = SimpleNamespace(pop=boom)
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(worker._forget)
        future.set_result(None)
        await asyncio.Event().wait()

    with pytest.raises(Boom):
        StopSignals(0.0).run(main())


def test_failure_to_read_a_ray_result_is_an_error_of_the_call():
    """Ray calls back from a thread of its own, and swallows what is raised there."""

    class Cancelled:
        def add_done_callback(self, callback):
            threading.Thread(target=callback, args=(self,)).start()

        def result(self):
            raise asyncio.CancelledError

    async def main():
        worker = object.__new__(RayWorker)
        worker._loop = asyncio.get_running_loop()
        told = worker._loop.create_future()
        worker._when_done(
            SimpleNamespace(future=Cancelled), lambda answer, error: told.set_result((answer, type(error)))
        )
        return await asyncio.wait_for(told, 30)

    assert asyncio.run(main()) == (None, asyncio.CancelledError)


def test_calls_of_a_process_whose_answers_cannot_be_read_fail(monkeypatch):
    monkeypatch.setattr(worker_process, "read_frame", boom_async)
    killed = []

    async def main():
        process = worker_process.WorkerProcess({"role": "actor_infer", "rank": 0})
        process._process = SimpleNamespace(kill=lambda: killed.append(True), wait=lambda timeout=None: -9)
        process._writer = SimpleNamespace(write=lambda data: None, close=lambda: None)
        call = process.request("stack")
        background(process._read(asyncio.StreamReader()), name="answers")
        with pytest.raises(ProcessEndedError):
            await asyncio.wait_for(call, 30)

    asyncio.run(main())
    assert killed == [True]
