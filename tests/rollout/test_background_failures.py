"""No exception in a background task, a callback or a thread leaves a run hanging: it ends with that exception."""

import ast
import asyncio
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from rollout_fleet import ask, engine, plan, request

import roll_core.runtime
from roll_core import openmp
from roll_core.runtime.cluster.concurrency import background
from roll_core.runtime.cluster.executors import isolated_env_process
from roll_core.runtime.cluster.executors.calls import CallFailed
from roll_core.runtime.cluster.executors.host import WorkerThread
from roll_core.runtime.cluster.executors.ray_worker import RayWorker
from roll_core.runtime.cluster.executors.worker_process import ProcessEndedError
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.replicas import HealthTimeouts, WorkerReplica
from roll_core.runtime.rollout.scheduler import RolloutScheduler
from roll_core.runtime.run.stopping import StopSignals
from roll_core.types import Group

RUNTIME = Path(roll_core.runtime.__file__).parent

TASKS = {
    ("records/checkpoints.py", "_in_thread"),
    ("cluster/concurrency.py", "background"),
    ("cluster/concurrency.py", "gather"),
    ("cluster/executors/base.py", "_stacks"),
    ("cluster/executors/host.py", "begin"),
    ("cluster/executors/local.py", "_start_group"),
    ("run/loop.py", "_watched"),
    ("run/roles.py", "_is_done"),
    ("run/roles.py", "served"),
    ("rollout/queue.py", "_abort_pausing"),
    ("rollout/replicas.py", "submit"),
    ("rollout/scoring.py", "_scored"),
    ("run/saving.py", "_save"),
    ("run/stopping.py", "unless_requested"),
    ("weights/broadcaster.py", "_transfer"),
    ("workers/infer.py", "submit"),
}
"""Functions that start tasks by themselves. Every other task is `background`; of these each is awaited, by the function
itself or by whoever it is handed to."""
THREADS = {
    ("cluster/concurrency.py", "in_daemon_thread"): "the exception is the result of the one who awaits it",
    ("cluster/doctor.py", "guarded"): "waits with a limit of its own",
    ("cluster/executors/isolated_env_main.py", "main"): "ends the process",
    ("cluster/executors/host.py", "__init__"): "exceptions are answers: see below",
    ("records/manifest.py", "_in_parallel"): "map raises in the caller",
    ("weights/transports/store.py", "__init__"): "its clients lose their connection, or wait up to their timeout",
    ("weights/transports/store.py", "_accept"): "its client loses its connection",
    ("workers/reward_process.py", "main"): "in a child process, whose parent keeps the deadline",
    ("workers/reward_pool.py", "_take"): "see `_make_ready`: the child is discarded",
    ("workers/reward.py", "__init__"): "run_in_executor raises in who awaits",
}
"""Functions that start threads, and what becomes of an exception there."""


def calls(*names):
    """(file, function) of every call of these names in the runtime."""
    found = Counter()
    for file in sorted(RUNTIME.rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                called = node.func if isinstance(node, ast.Call) else None
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                if name in names:
                    found[file.relative_to(RUNTIME).as_posix(), function.name] += 1
    return found


def test_every_task_is_a_background_task_or_awaited():
    assert set(calls("create_task", "ensure_future")) == TASKS


def test_every_thread_is_known():
    assert set(calls("Thread", "ThreadPoolExecutor")) == set(THREADS)


def test_nobody_else_handles_what_callbacks_raise():
    assert set(calls("set_exception_handler")) == {("cluster/concurrency.py", "end_on_failure")}


class Boom(Exception):
    """Injected."""


def boom(*args, **given):
    raise Boom


async def boom_async(*args, **given):
    raise Boom


async def completion_that_the_caller_cannot_use():
    task = asyncio.ensure_future(RequestQueue([engine("0")]).generate([request("r1")], boom))
    await asyncio.wait([task])


async def dispatch_to_a_replica():
    replica = engine("0")
    replica.submit = boom
    RequestQueue([replica]).submit(request("r1"))


async def answer_of_a_worker():
    replica = WorkerReplica(SimpleNamespace(role="actor_infer", call_rank=lambda *a, **k: asyncio.sleep(0)), 0)
    replica.submit([request("r1")], boom)


async def request_that_a_worker_should_cancel():
    WorkerReplica(SimpleNamespace(role="actor_infer", call_rank=boom_async), 0).cancel(["r1"])


async def progress_of_a_replica():
    replica = engine("0")
    replica.progress = boom_async
    replica.submit = lambda requests, on_result: None
    queue = RequestQueue([replica], progress_s=0.01, timeouts=HealthTimeouts(token_s=60.0))
    ask(queue, [request("r1")], lambda id, outcome: None)


async def rewards_of_a_group():
    async def score(prompt, group):
        return Group(id="a0", samples=())

    scheduler = RolloutScheduler(plan(), RequestQueue([engine("0", base_s=1e-6)]), score, seed=1)
    scheduler._settle = scheduler._fail = boom
    scheduler._wanted = True
    scheduler._admit()


async def answer_of_an_actor():
    worker = object.__new__(RayWorker)
    worker._pending = SimpleNamespace(pop=boom)
    future = asyncio.get_running_loop().create_future()
    future.add_done_callback(worker._forget)
    future.set_result(None)


async def background_task():
    background(boom_async(), name="task")


@pytest.mark.parametrize(
    "inject",
    [
        completion_that_the_caller_cannot_use,
        dispatch_to_a_replica,
        answer_of_a_worker,
        request_that_a_worker_should_cancel,
        progress_of_a_replica,
        rewards_of_a_group,
        answer_of_an_actor,
        background_task,
    ],
)
def test_an_exception_where_nobody_awaits_ends_the_run(inject):
    closed = []

    async def main():
        try:
            await inject()
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    with pytest.raises(Boom):
        StopSignals(0.0).run(main())
    assert closed == [True]


def test_a_failure_while_the_run_ends_does_not_interrupt_its_cleanup():
    closed = []

    async def main():
        try:
            background(boom_async(), name="first")
            await asyncio.Event().wait()
        finally:
            background(boom_async(), name="second")
            await asyncio.sleep(0.01)
            closed.append(True)

    with pytest.raises(Boom):
        StopSignals(0.0).run(main())
    assert closed == [True]


def test_an_answer_that_cannot_be_had_from_ray_is_an_error_of_the_call():
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


class Unprintable(Exception):
    def __str__(self):
        raise Boom


def test_a_workers_thread_answers_whatever_is_raised_and_goes_on(monkeypatch):
    monkeypatch.setattr(openmp, "rest", boom)

    def unprintable():
        raise Unprintable

    async def main():
        thread = WorkerThread("worker")
        with pytest.raises(CallFailed) as failed:
            await asyncio.wait_for(thread.run(unprintable), 30)
        assert failed.value.failure.summary == "Unprintable"
        assert await asyncio.wait_for(thread.run(lambda: 7), 30) == 7
        thread.stop()

    asyncio.run(main())


def test_calls_of_a_process_whose_answers_cannot_be_read_fail(monkeypatch):
    monkeypatch.setattr(isolated_env_process, "read_frame", boom_async)
    killed = []

    async def main():
        process = isolated_env_process.IsolatedEnvProcess({"role": "actor_infer", "rank": 0})
        process._process = SimpleNamespace(kill=lambda: killed.append(True), wait=lambda timeout=None: -9)
        process._writer = SimpleNamespace(write=lambda data: None, close=lambda: None)
        call = process.request("stack")
        background(process._read(asyncio.StreamReader()), name="answers")
        with pytest.raises(ProcessEndedError):
            await asyncio.wait_for(call, 30)

    asyncio.run(main())
    assert killed == [True]
