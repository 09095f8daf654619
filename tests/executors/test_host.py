"""The host of one worker, without an executor around it."""

import asyncio
import gc

import pytest

from roll_core.runtime.cluster.executors.host import WorkerHost
from roll_core.runtime.cluster.placement import Place


@pytest.mark.filterwarnings("error")
def test_a_call_that_is_cancelled_before_it_begins_leaves_nothing() -> None:
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
