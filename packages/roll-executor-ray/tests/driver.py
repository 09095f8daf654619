"""A driver for the tests of what is left behind: for each word it starts two littering workers, and ends as told."""

import asyncio
import json
import os
import signal
import sys

import psutil

from roll_core.builtin.cpu import CpuPlatform
from roll_core.errors import RollError
from roll_core.runtime.cluster.executors.base import GroupSpec, WorkerCall
from roll_core.runtime.cluster.placement import place_roles
from roll_core.spec.config import RewardConfig
from roll_executor_ray.executor import RayExecutor


def tell(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def drive(end: str) -> None:
    places = place_roles({"r": RewardConfig(reward="r", world_size=2)}, CpuPlatform(), 1)["r"]
    spec = GroupSpec(role="r", kind="reward", target="executor_workers:Littering", places=places)
    async with RayExecutor(CpuPlatform(), 1) as executor:
        group = (await executor.start([spec]))["r"]
        tell({"driver": os.getpid(), "litter": await WorkerCall(group, "litter").all()})
        if end == "error":
            await WorkerCall(group, "no_such_method").all()
        if end == "wait":
            await WorkerCall(group, "work").all()
        if end == "gcs":
            working = asyncio.create_task(WorkerCall(group, "work").all())
            (gcs,) = (each for each in psutil.Process().children() if each.name() == "gcs_server")
            gcs.kill()
            try:
                await executor.watch()
            finally:
                working.cancel()


# A shell that starts tests in the background has them, and this, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
for end in sys.argv[1:]:
    try:
        asyncio.run(drive(end))
    except RollError as error:
        tell({"error": str(error), "code": error.code})
