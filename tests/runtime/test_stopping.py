"""Signals to this process, while it runs something as a run is run."""

import asyncio
import os
import signal
import time

import pytest

from roll_core.errors import RunInterruptedError, RunPreemptedError
from roll_core.runtime.run.stopping import StopSignals
from roll_testing.errors import raises_error


def signalled(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def test_before_there_is_anything_to_save_sigterm_ends_at_once():
    stop = StopSignals(60.0)

    async def main() -> None:
        signalled(signal.SIGTERM)
        await asyncio.sleep(30)

    with raises_error(RunPreemptedError) as ended:
        stop.run(main())
    assert ended.value.exit_code == 75


def test_sigterm_waits_for_what_is_in_progress():
    stop = StopSignals(60.0)
    seen = []

    async def main() -> None:
        stop.defer = True
        signalled(signal.SIGTERM)
        await asyncio.sleep(0.1)
        seen.append(stop.requested)
        raise stop.saved("step 3 is saved")

    with raises_error(RunPreemptedError, "SIGTERM", "step 3"):
        stop.run(main())
    assert seen == [True]


@pytest.fixture
def heard_sighup():
    """SIGHUP has its default effect, also where `nohup` has started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "numbers", [[signal.SIGHUP], [signal.SIGHUP, signal.SIGHUP], [signal.SIGHUP, signal.SIGTERM]], ids=str
)
def test_sighup_waits_for_work_in_progress_however_often_sent(numbers, heard_sighup):
    stop = StopSignals(60.0)

    async def main() -> None:
        stop.defer = True
        for number in numbers:
            signalled(number)
            await asyncio.sleep(0.05)
        assert stop.requested
        raise stop.saved("step 3 is saved")

    with raises_error(RunPreemptedError, "SIGHUP", "step 3"):
        stop.run(main())


def test_an_ignored_sighup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopSignals(60.0)

    async def main() -> None:
        signalled(signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert not stop.requested

    try:
        stop.run(main())
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("grace_s", "numbers", "facts"),
    [
        (60.0, [signal.SIGTERM, signal.SIGTERM], ("SIGTERM",)),
        (60.0, [signal.SIGTERM, signal.SIGINT], ("SIGINT",)),
        (60.0, [signal.SIGINT], ("SIGINT",)),
        (0.2, [signal.SIGTERM], ("preemption_timeout", "0.2")),
        (0.0, [signal.SIGTERM], ("preemption_timeout", "0")),
    ],
)
def test_immediate_stop_gives_its_reason_and_runs_cleanup(grace_s, numbers, facts):
    stop = StopSignals(grace_s)
    closed = []

    async def main() -> None:
        stop.defer = True
        try:
            for number in numbers:
                signalled(number)
                await asyncio.sleep(0.05)
            await asyncio.sleep(30)
        finally:
            closed.append(True)

    started = time.monotonic()
    with raises_error(RunInterruptedError, *facts) as ended:
        stop.run(main())
    assert ended.value.exit_code == 130
    assert closed == [True]
    assert time.monotonic() - started < 10


def test_optional_work_is_cancelled():
    stop = StopSignals(60.0)
    undone = []

    async def evaluate() -> int:
        try:
            await asyncio.sleep(30)
        finally:
            undone.append(True)
        return 1

    async def quick() -> int:
        return 2

    async def main() -> None:
        stop.defer = True
        assert await stop.unless_requested(quick()) == 2
        asyncio.get_running_loop().call_later(0.1, signalled, signal.SIGTERM)
        assert await stop.unless_requested(evaluate()) is None
        assert await stop.unless_requested(quick()) is None

    stop.run(main())
    assert undone == [True]


def test_error_in_optional_work_is_raised():
    stop = StopSignals(60.0)

    async def broken() -> None:
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        stop.run(stop.unless_requested(broken()))


def test_handlers_are_as_before_when_the_run_is_over():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    async def main() -> None:
        assert signal.getsignal(signal.SIGTERM) != before[0]

    StopSignals(1.0).run(main())
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
