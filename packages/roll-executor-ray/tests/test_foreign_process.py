"""A worker under another interpreter, as its actor sees it; the process is real, Ray is not needed."""

import asyncio
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
from other_pythons import WITHOUT_TORCH, environment_that_shows_all, environment_with

from roll_core.builtin.cpu import CpuPlatform
from roll_core.errors import PythonEnvironmentError
from roll_core.runtime.cluster.executors.base import CallFailed, Peers, Place
from roll_core.runtime.cluster.executors.worker_process import ProcessEndedError, WorkerProcess
from roll_core.runtime.cluster.executors.worker_server import WIRE, decode
from roll_core.runtime.cluster.placement import place_roles
from roll_core.spec.config import RewardConfig
from roll_core.spec.rollout import RewardRequest
from roll_core.types import Sample
from roll_executor_ray.python_environments.prepare import environment_of
from roll_rewards.plugin import roll_rewards
from roll_testing.errors import mentions, raises_error

HERE = str(Path(__file__).parents[3] / "tests" / "executors")
T = TypeVar("T")
Run = Callable[[Awaitable[T]], T]
PLACE: Place = place_roles({"rewards.r": RewardConfig(reward="r")}, CpuPlatform(), 1)["rewards.r"][0]


def settings(folder: Path, role: str = "reward") -> dict[str, Any]:
    crash = str(folder / "crash")
    return {"role": role, "rank": 0, "level": logging.INFO, "crash_file": crash, "reported": ["msgpack"]}


class Foreign:
    """A process as its actor calls it."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.process = WorkerProcess(settings(folder))
        self.python = python
        self.hello: dict[str, Any] = {}
        self.numbers = itertools.count()

    async def start(self, target: str = "executor_workers:Recorder", **args: Any) -> None:
        self.hello = await self.process.start(self.python, environment_of(self.python, os.environ))
        payload = WIRE.dumps((target, PLACE, Peers(), args, {"MASTER_PORT": "7"}, [HERE]))
        decode(WIRE, await self.process.request("construct", payload))

    async def call(self, method: str, *args: Any) -> Any:
        return decode(WIRE, await self.process.request("call", next(self.numbers), method, WIRE.dumps(args)))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_that_shows_all(tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def shared(runner: asyncio.Runner, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Foreign]:
    """A process for tests that leave it as it is."""
    found = Foreign(tmp_path_factory.mktemp("scratch"), python)
    runner.run(found.start(greeting="hi"))
    yield found
    runner.run(found.process.close(5))


@pytest.fixture
def fresh(runner: asyncio.Runner, python: Path, tmp_path: Path) -> Iterator[Foreign]:
    """One of its own."""
    found = Foreign(tmp_path, python)
    runner.run(found.start())
    yield found
    runner.run(found.process.close(5))


def test_worker_runs_under_its_own_interpreter(shared: Foreign) -> None:
    command = psutil.Process(shared.hello["pid"]).cmdline()
    assert command[0] == str(shared.python) != sys.executable
    assert shared.hello["fingerprint"]["executable"] == str(shared.python)
    assert shared.hello["fingerprint"]["msgpack"]
    assert shared.hello["fingerprint"]["roll-core"]


def test_calls_answer_with_arrays_of_their_own(runner: asyncio.Runner, shared: Foreign) -> None:
    sent = {"ids": np.arange(300_000), "names": ("ä", None)}
    found = runner.run(shared.call("echo", sent))
    assert np.array_equal(found["ids"], sent["ids"])
    assert found["names"] == ("ä", None)
    assert runner.run(shared.call("greet", "Ann")) == "hi Ann from 0"
    assert runner.run(shared.call("environment", "MASTER_PORT")) == ["7"]


def test_calls_begin_in_order_and_async_ones_overlap(runner: asyncio.Runner, shared: Foreign) -> None:
    async def many() -> tuple[list[int], list[int]]:
        await asyncio.gather(*[shared.call("note", number) for number in range(30)])
        both = await asyncio.gather(shared.call("meet", 2), shared.call("meet", 2))
        return await shared.call("noted"), both

    assert runner.run(many()) == (list(range(30)), [2, 2])


def test_errors_cross_with_class_and_trace(runner: asyncio.Runner, shared: Foreign) -> None:
    with pytest.raises(CallFailed) as ours:
        runner.run(shared.call("corrupt"))
    assert type(ours.value.failure.error).__name__ == "CorruptTensorError"
    with pytest.raises(CallFailed) as builtin:
        runner.run(shared.call("divide"))
    assert isinstance(builtin.value.failure.error, ZeroDivisionError)
    assert "in divide" in builtin.value.failure.trace
    with pytest.raises(CallFailed) as unknown:
        runner.run(shared.call("cannot_travel"))
    assert mentions(unknown.value.failure.summary, "CannotTravel:")
    with raises_error(CallFailed, "_thread.lock"):
        runner.run(shared.call("unsendable"))
    with raises_error(CallFailed, "'absent'"):
        runner.run(shared.call("absent"))


def test_cancelling_a_call_ends_it_over_there(runner: asyncio.Runner, shared: Foreign) -> None:
    async def cancel() -> bool:
        number = next(shared.numbers)
        waiting = shared.process.request("call", number, "wait_forever", WIRE.dumps(()))
        await shared.call("greet", "Ann")
        await shared.process.request("cancel", number)
        with pytest.raises(CallFailed):
            decode(WIRE, await waiting)
        return await asyncio.wait_for(shared.call("until_cancelled"), 60)

    assert runner.run(cancel())


def test_hanging_worker_reports_its_stack(runner: asyncio.Runner, shared: Foreign) -> None:
    async def look() -> str:
        held = asyncio.ensure_future(shared.call("hold", 20.0))
        while "in hold" not in (stack := await shared.process.request("stack")) and not held.done():
            await asyncio.sleep(0.05)
        await shared.call("let_go")
        assert await held
        return stack

    assert "in hold" in runner.run(look())


def test_a_killed_process_fails_the_calls_that_wait(runner: asyncio.Runner, fresh: Foreign) -> None:
    async def kill() -> str:
        waiting = asyncio.ensure_future(fresh.call("wait_forever"))
        await fresh.call("greet", "Ann")
        os.kill(fresh.hello["pid"], signal.SIGKILL)
        with raises_error(ProcessEndedError, "SIGKILL"):
            await waiting
        with pytest.raises(ProcessEndedError):
            await fresh.call("greet", "Ann")
        return await fresh.process.ended()

    assert runner.run(kill()) == "was killed by SIGKILL"


def test_close_ends_the_process(runner: asyncio.Runner, fresh: Foreign) -> None:
    runner.run(fresh.process.close(5))
    assert not psutil.pid_exists(fresh.hello["pid"])


def test_worker_dies_with_its_parent_while_computing(python: Path, tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
sys.path[:0] = [{HERE!r}, {str(Path(__file__).parent)!r}]
from pathlib import Path
from test_foreign_process import Foreign

async def main():
    foreign = Foreign(Path({str(tmp_path)!r}), Path({str(python)!r}))
    await foreign.start()
    asyncio.ensure_future(foreign.call("sleep", 600))
    await asyncio.sleep(0.2)
    print(foreign.hello["pid"], flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        worker = psutil.Process(int(starter.stdout.readline()))
        starter.kill()
        worker.wait(60)


def test_a_reward_is_computed_without_torch(runner: asyncio.Runner, tmp_path: Path) -> None:
    """The role's environment has what rewards need, and neither torch nor Ray."""
    python = environment_with(tmp_path / "light", [*WITHOUT_TORCH, "roll-rewards"])
    (tmp_path / "rewards_of_mine.py").write_text(
        "def score(prompt, response):\n    import sys\n    return 'torch' in sys.modules"
    )
    foreign = Foreign(tmp_path, python)
    sample = Sample(
        id="0/0/0", group_id="0/0", prompt_ids=np.array([1]), response_ids=np.array([2]),
        logprobs=np.zeros(1, np.float32), loss_mask=np.ones(1, bool), versions=np.zeros(1, np.int32),
        finish_reason="stop",
    )  # fmt: skip

    async def scored() -> Any:
        provider = next(each for each in roll_rewards() if each.name == "function")
        config = {"reward": "function", "function": "rewards_of_mine:score", "isolation": "none"}
        foreign.hello = await foreign.process.start(python, environment_of(python, os.environ))
        args = {"role": "rewards.r", "provider": provider, "owner": "reward", "config": config}
        made = ("roll_core.runtime.workers.reward:RewardWorker", PLACE, Peers(), args, {}, [str(tmp_path)])
        decode(WIRE, await foreign.process.request("construct", WIRE.dumps(made)))
        await foreign.call("start")
        answer = await foreign.call("score", [RewardRequest(sample=sample, prompt="p", response="r")])
        await foreign.process.close(5)
        return answer

    rewards = runner.run(scored())
    assert [reward.value for reward in rewards] == [0.0]
    assert "torch" not in foreign.hello["fingerprint"]
    assert "ray" not in foreign.hello["fingerprint"]


def test_environment_without_roll_core_names_missing_packages(runner: asyncio.Runner, tmp_path: Path) -> None:
    python = environment_with(tmp_path / "broken", [name for name in WITHOUT_TORCH if name != "numpy"])
    process = WorkerProcess(settings(tmp_path, "rewards.math"))
    with raises_error(PythonEnvironmentError, "rewards.math", "'numpy'"):
        runner.run(process.start(python, environment_of(python, os.environ)))
    runner.run(process.close(5))  # there is nothing to close, and that is fine


def test_settings_of_another_python_stay_behind(tmp_path: Path) -> None:
    python = environment_that_shows_all(tmp_path)
    given = {"PYTHONPATH": "/elsewhere", "PYTHONHOME": "/h", "VIRTUAL_ENV": "/v", "PATH": "/bin", "HOME": "/root"}
    assert environment_of(python, given) == {
        "PATH": f"{tmp_path / 'bin'}:/bin",
        "HOME": "/root",
        "VIRTUAL_ENV": str(tmp_path),
    }
