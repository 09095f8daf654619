"""No exception in a background task, a callback or a thread leaves a run hanging: it ends with that exception."""

import ast
import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from rollout_fleet import ask, engine, plan, request

import roll_core.runtime
import roll_tools
from roll_core import openmp
from roll_core.runtime.cluster.concurrency import background
from roll_core.runtime.cluster.executors.base import CallFailed
from roll_core.runtime.cluster.executors.host import WorkerThread
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.replicas import HealthTimeouts, WorkerReplica
from roll_core.runtime.rollout.scheduler import RolloutScheduler
from roll_core.runtime.run.stopping import StopSignals
from roll_core.types import Group
from roll_weight_transports import rendezvous

RUNTIME = Path(roll_core.runtime.__file__).parent
PROCESSES = [RUNTIME.parent / "reward_pool.py", RUNTIME.parent / "reward_process.py", Path(rendezvous.__file__)]
TOOLS = Path(roll_tools.__file__).parent

TASKS = {
    ("records/checkpoint_directory.py", "_in_thread"),
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
    ("run/run_saver.py", "_save"),
    ("run/stopping.py", "unless_requested"),
    ("run/checkpoint_store.py", "submit"),
    ("weights/publisher.py", "_transfer"),
    ("workers/infer.py", "submit"),
}
"""Functions that start tasks by themselves. Every other task is `background`; the function
itself or its caller awaits each of these."""
THREADS = {
    ("cluster/concurrency.py", "in_daemon_thread"): "the exception is the result of the one who awaits it",
    ("examination.py", "guarded"): "of `roll-core doctor`: waits with a limit of its own",
    ("cluster/executors/worker_main.py", "main"): "ends the process",
    ("cluster/executors/host.py", "__init__"): "exceptions are answers: see below",
    ("run/stopping.py", "_run_on_a_thread"): "raised in the calling thread",
    ("records/manifest.py", "_in_parallel"): "map raises in the caller",
    ("rendezvous.py", "__init__"): "its clients lose their connection, or wait up to their timeout",
    ("rendezvous.py", "_accept"): "its client loses its connection",
    ("reward_process.py", "main"): "in a child process, whose parent keeps the deadline",
    ("reward_pool.py", "_grow"): "see `_make_ready`: the child is discarded",
    ("workers/reward.py", "__init__"): "run_in_executor raises in who awaits",
}
"""Functions that start threads, and what becomes of an exception there."""


def calls(*names):
    """(file, function) of every call of these names in the runtime, in `PROCESSES` and in roll-tools."""
    found = Counter()
    files = {file: file.relative_to(RUNTIME).as_posix() for file in RUNTIME.rglob("*.py")}
    files |= {file: file.name for file in PROCESSES}
    files |= {file: file.relative_to(TOOLS).as_posix() for file in TOOLS.rglob("*.py")}
    for file, path in files.items():
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                called = node.func if isinstance(node, ast.Call) else None
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                if name in names:
                    found[path, function.name] += 1
    return found


def test_every_task_is_a_background_task_or_awaited():
    assert set(calls("create_task", "ensure_future")) == TASKS


def test_every_thread_is_registered():
    assert set(calls("Thread", "ThreadPoolExecutor")) == set(THREADS)


def test_only_the_core_sets_the_loop_exception_handler():
    assert set(calls("set_exception_handler")) == {("cluster/concurrency.py", "end_on_failure")}


class Boom(Exception):
    """Injected."""


def boom(*args, **given):
    raise Boom


async def boom_async(*args, **given):
    raise Boom


async def dispatch_to_a_replica():
    replica = engine("0")
    replica.submit = boom
    RequestQueue([replica]).submit(request("r1"))


async def answer_of_a_worker():
    replica = WorkerReplica(SimpleNamespace(role="actor_infer", call=lambda *a: asyncio.sleep(0, [None])), 0)
    replica.submit([request("r1")], boom)


async def request_that_a_worker_should_cancel():
    WorkerReplica(SimpleNamespace(role="actor_infer", call=boom_async), 0).cancel(["r1"])


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
    scheduler._changed = SimpleNamespace(set=boom)
    scheduler._begin(0)
    scheduler._admit()


async def background_task():
    background(boom_async(), name="task")


@pytest.mark.parametrize(
    "inject",
    [
        dispatch_to_a_replica,
        answer_of_a_worker,
        request_that_a_worker_should_cancel,
        progress_of_a_replica,
        rewards_of_a_group,
        background_task,
    ],
)
def test_unawaited_exception_ends_the_run(inject):
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


def test_failure_at_the_end_of_a_run_does_not_stop_its_cleanup():
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


class Unprintable(Exception):
    def __str__(self):
        raise Boom


def test_worker_thread_returns_any_error_and_continues(monkeypatch):
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
