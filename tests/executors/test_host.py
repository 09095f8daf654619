"""The host of one worker, without an executor around it."""

import asyncio
import contextlib
import gc
import logging
from collections.abc import Iterator

import pytest

from roll_core.runtime.cluster.executors.base import CallFailed
from roll_core.runtime.cluster.executors.host import WorkerHost
from roll_core.runtime.cluster.placement import Place
from roll_core.spec.pipeline import TraceContext, WorkerSpans


class ListedSpans(WorkerSpans):
    """Spans as lines of a list that the options have."""

    def __init__(self, role: str, rank: int, options: dict[str, list[str]]) -> None:
        self.lines, self.worker = options["lines"], f"{role} {rank}"

    @contextlib.contextmanager
    def call(self, name: str, parent: str) -> Iterator[None]:
        self.lines.append(f"{self.worker}: {name} in {parent}")
        try:
            yield
        finally:
            self.lines.append(f"{name} ends")

    def close(self) -> None:
        self.lines.append("close")


@pytest.mark.filterwarnings("error")
def test_call_cancelled_before_start_leaves_nothing() -> None:
    async def main() -> bool:
        host = WorkerHost("reward", 0)
        place = Place(rank=0, world_size=1)
        await host.construct("executor_workers:Recorder", place, None, {})  # type: ignore[arg-type]
        call = host.begin("meet", (1,))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        gc.collect()
        arrived: int = host._worker.arrived
        await host.close(5)
        return arrived == 0

    assert asyncio.run(main())


@pytest.mark.parametrize("target", [f"{__name__}:ListedSpans", "package_that_is_absent:Spans"])
def test_call_with_trace_context_becomes_a_span(target: str, caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []

    async def main() -> None:
        host = WorkerHost("reward", 1)
        await host.construct("executor_workers:Recorder", Place(rank=1, world_size=2), None, {})  # type: ignore[arg-type]
        trace = TraceContext(parent="the step", target=target, options={"lines": lines})
        assert await host.begin("greet", (trace, "Ann")) == "hello Ann from 1"  # sync
        assert await host.begin("meet", (trace, 1)) == 1  # async
        assert await host.begin("echo", (2,)) == 2
        with pytest.raises(CallFailed):
            await host.begin("greet", (trace,))
        await host.close(5)

    caplog.set_level(logging.WARNING)
    asyncio.run(main())
    if target.startswith("package"):
        assert lines == []
        assert [record.levelname for record in caplog.records] == ["WARNING"]
    else:
        greet = ["reward 1: reward.greet in the step", "reward.greet ends"]
        assert lines == [*greet, "reward 1: reward.meet in the step", "reward.meet ends", *greet, "close"]
