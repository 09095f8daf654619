"""Early stop of a run: immediately on a failure or Ctrl-C, after a checkpoint on SIGTERM or SIGHUP.

    a background task or callback fails ────────────────────────► the run is cancelled        its exception
    SIGINT ─────────────────────────────────────────────────────► the run is cancelled        RunInterruptedError
    SIGTERM ─► the step in progress ends ─► checkpoint ─► end                                 RunPreemptedError
       └─ a second one, or `grace_s` have passed ───────────────► the run is cancelled        RunInterruptedError

SIGHUP, which a closed terminal sends, has the effect of the first SIGTERM; a second one has none, because both the
kernel and the shell send it. `nohup` still works: an ignored SIGHUP stays ignored.

Before the run, `roll_core.cli.main` handles both. After the run, both are ignored until the record and the report are
written.

A cluster scheduler that preempts a job sends SIGTERM first and SIGKILL later.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import signal
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from roll_core.errors import RunInterruptedError, RunPreemptedError
from roll_core.runtime.cluster.concurrency import cancel_all, end_on_failure
from roll_core.runtime.records.console import detach_closed_output

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

log = logging.getLogger(__name__)
T = TypeVar("T")

_SIGNAL_POLL_S = 0.2
_SAVE = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end the run after a checkpoint."""


class StopSignals:
    """Handles the signals of one run. Lives on the run's event loop."""

    def __init__(self, grace_s: float) -> None:
        """`grace_s`: seconds from SIGTERM until the checkpoint must be complete; 0 treats SIGTERM as Ctrl-C."""
        self.grace_s = grace_s
        self.defer = False
        """True once the run has state to save, so that SIGTERM waits for a checkpoint. Set by the run."""
        self._requested = asyncio.Event()
        self._received: list[signal.Signals] = []
        """SIGTERM and SIGHUP, in the order of their first arrival."""
        self._deadline: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        """The error that the cancelled run raises."""

    @property
    def requested(self) -> bool:
        """True after SIGTERM or SIGHUP: the run saves a checkpoint and ends."""
        return self._requested.is_set()

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine to its end under signal handlers.

        Raises `RunInterruptedError` or `RunPreemptedError` if a signal ended it. Raises the exception of a background
        task or callback that failed. The coroutine always runs its cleanup: an early stop cancels it.

        If this thread runs an event loop already, as in a notebook, the coroutine runs on another thread. This thread
        blocks and passes Ctrl-C on.
        """
        before = {number: _handler(number) for number in (signal.SIGINT, *_SAVE)}
        try:
            if _is_in_a_loop():
                self._run_on_a_thread(main)
            else:
                asyncio.run(self._guarded(main))
        finally:
            for number, handler in before.items():
                _handle(number, handler)

    def saved(self, what: str) -> RunPreemptedError:
        """Cancel the SIGTERM deadline and return the error that ends the run. Call it once the state is saved."""
        self._call_off()
        return RunPreemptedError(f"stopped by {self._received[0].name}; {what}")

    async def unless_requested(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Await optional `work` and return its result. Cancels it and returns None if SIGTERM arrives first."""
        if self.requested:
            work.close()
            return None
        working, requested = asyncio.create_task(work), asyncio.create_task(self._requested.wait())
        try:
            await asyncio.wait({working, requested}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            await cancel_all([working, requested])

    def _run_on_a_thread(self, main: Coroutine[Any, Any, None]) -> None:
        with ThreadPoolExecutor(1, "roll-run") as pool:
            # Notebooks route the output of a thread to its cell by context variables.
            running = pool.submit(contextvars.copy_context().run, asyncio.run, self._guarded(main))
            while not running.done():
                try:
                    # A signal that the system delivers to another thread does not wake this one.
                    wait([running], _SIGNAL_POLL_S)
                except KeyboardInterrupt:
                    with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
                        if self._loop is None:
                            self._on_sigint()
                        else:
                            self._loop.call_soon_threadsafe(self._on_sigint)
            running.result()

    async def _guarded(self, main: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.current_task()
        self._loop = loop = asyncio.get_running_loop()
        if self._error is not None:  # Ctrl-C before the loop ran
            main.close()
            raise self._error
        end_on_failure(self._cancel)
        handled = []
        handlers: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGINT: self._on_sigint,
            **{number: partial(self._on_stop, number) for number in _SAVE if not is_ignored_hangup(number)},
        }
        for number, handler in handlers.items():
            # Only the main thread may handle signals; a run in another thread (notebook, test) has no handlers.
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                loop.add_signal_handler(number, handler)
                handled.append(number)
        try:
            await main
        except asyncio.CancelledError:
            if self._error is not None:
                raise self._error from self._error.__cause__
            raise
        finally:
            self._call_off()
            for number in handled:
                loop.remove_signal_handler(number)

    def _on_sigint(self) -> None:
        self._cancel(RunInterruptedError("stopped by SIGINT"))

    def _on_stop(self, number: signal.Signals) -> None:
        if number is signal.SIGHUP:
            detach_closed_output()
        again = number in self._received
        if not again:
            self._received.append(number)
        name = number.name
        if again and number is signal.SIGTERM:
            self._cancel(RunInterruptedError("stopped by a second SIGTERM, before the checkpoint was complete"))
        elif self.requested:
            pass
        elif not self.grace_s:
            self._cancel(RunInterruptedError(f"stopped by {name}; preemption_timeout is 0, so nothing was saved"))
        elif not self.defer:
            self._cancel(RunPreemptedError(f"stopped by {name} before the first step; there was nothing to save"))
        else:
            log.info("%s: the run writes a checkpoint after this step and ends, within %g s", name, self.grace_s)
            self._deadline = asyncio.get_running_loop().call_later(self.grace_s, self._too_late)
        self._requested.set()

    def _too_late(self) -> None:
        self._cancel(
            RunInterruptedError(
                f"stopped by {self._received[0].name}: the step in progress was not completed and saved within"
                f" preemption_timeout = {self.grace_s:g} s; the run can resume from the previous checkpoint"
            )
        )

    def _cancel(self, error: BaseException) -> None:
        """Cancel the run. Later failures do not interrupt its cleanup; a later signal does."""
        if self._error is not None and not isinstance(error, RunInterruptedError):
            return
        self._error = error
        if self._task is not None:
            self._task.cancel()

    def _call_off(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


@contextlib.contextmanager
def ignoring_stop_signals() -> Iterator[None]:
    """Ignore SIGTERM and SIGHUP in the block, in which a run writes its record and report (about a second)."""
    before = {number: _handler(number) for number in _SAVE}
    for number in _SAVE:
        _handle(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            _handle(number, handler)


def is_ignored_hangup(number: int) -> bool:
    """True for SIGHUP if this process ignores it, as under `nohup`."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def _is_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _handler(number: int) -> Any:
    """The current handler of a signal; None outside the main thread, which may not change handlers."""
    return signal.getsignal(number) if threading.current_thread() is threading.main_thread() else None


def _handle(number: int, handler: Any) -> None:
    if handler is not None and _handler(number) is not None:
        signal.signal(number, handler)
