"""Local executor: every worker in this process, arguments and results by reference; debuggers work.

Environment variables belong to the process. From `start` to `close`, all roles see the union of their variables. Two
roles that need different values of one variable cannot run here. Variables of a worker's identity (`RANK` and others)
are not set, because the driver would see them too.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from roll_core import openmp
from roll_core.errors import UnsupportedError
from roll_core.host import hostname
from roll_core.runtime.cluster.executors.base import Executor, Member, Peers, WorkerGroup, collect
from roll_core.runtime.cluster.executors.host import WorkerHost
from roll_core.runtime.cluster.placement import check_local
from roll_core.runtime.cluster.platform import EnvironmentChange, values_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from roll_core.errors import WorkerDiedError
    from roll_core.runtime.cluster.executors.base import GroupSpec
    from roll_core.spec.platform import Platform

CLOSE_S = 10.0
"""Seconds that `close` waits for a busy worker."""


class LocalExecutor(Executor):
    """Executor whose workers are objects of this process.

    Each worker has a thread for its sync methods. Async methods run on the caller's event loop.
    """

    def __init__(self, platform: Platform, slots_per_node: int) -> None:
        super().__init__(platform, slots_per_node)
        self._hosts: list[WorkerHost] = []
        self._environment = EnvironmentChange()

    async def start(self, specs: Sequence[GroupSpec]) -> dict[str, WorkerGroup]:
        """See `Executor.start`. Roles are started one after the other, in order."""
        for spec in specs:
            self._check_places(spec)
        self._environment.make(environment_of_all(specs, self.platform))
        try:
            return {spec.role: await self._start_group(spec) for spec in specs}
        except BaseException:
            await self.close()
            raise

    async def watch(self) -> NoReturn:
        """Never returns: workers live exactly as long as this process."""
        while True:
            await asyncio.sleep(3600)

    async def close(self) -> None:
        """See `Executor.close`. Waits up to `CLOSE_S` seconds for busy workers."""
        hosts, self._hosts = self._hosts, []
        await asyncio.gather(*(host.close(CLOSE_S) for host in hosts))
        self._environment.undo()

    async def _start_group(self, spec: GroupSpec) -> WorkerGroup:
        members = [
            Member(rank=place.rank, host=hostname(), pid=os.getpid(), node=0, slots=place.slots)
            for place in spec.places
        ]
        hosts = []
        for place, member in zip(spec.places, members, strict=True):
            host = WorkerHost(spec.role, place.rank)
            hosts.append(host)
            self._hosts.append(host)
            constructing = asyncio.ensure_future(host.construct(spec.target, place, Peers(), spec.args))
            await collect(spec.role, "start", {member: constructing}, spec.timeout_s)
        return LocalGroup(spec, members, hosts)

    def _check_places(self, spec: GroupSpec) -> None:
        if spec.environment is not None:
            raise UnsupportedError(
                f"{spec.role} has its own Python environment, but the local executor runs every worker in this process:"
                " remove executor"
            )
        check_local(spec.role, spec.kind, spec.places, self.platform, self.slots_per_node)


class LocalGroup(WorkerGroup):
    """Workers in this process."""

    def __init__(self, spec: GroupSpec, members: Sequence[Member], hosts: Sequence[WorkerHost]) -> None:
        super().__init__(spec, members)
        self._hosts = tuple(hosts)
        self._error: WorkerDiedError | None = None
        """Error of an unresponsive worker. Its thread cannot be killed, so all later calls raise this error."""

    async def stack(self, rank: int) -> str:
        """See `WorkerGroup.stack`."""
        return self._hosts[rank].stack()

    def terminate(self, rank: int, error: WorkerDiedError) -> None:
        """See `WorkerGroup.terminate`."""
        self._error = error

    def begin(self, rank: int, method: str, arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        """See `WorkerGroup.begin`."""
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        # The caller's thread is idle while the worker computes.
        openmp.rest()
        return self._hosts[rank].begin(method, arguments)


def environment_of_all(specs: Sequence[GroupSpec], platform: Platform) -> dict[str, str]:
    """Environment variables of all roles together. Raises `UnsupportedError` if two roles contradict each other.

    Values of the config take precedence over those of the platform. If two platform values differ, the first one is
    used.
    """
    union: dict[str, str] = {}
    set_by: dict[str, str] = {}
    for spec in specs:
        for name, value in spec.env.items():
            if union.setdefault(name, value) != value:
                raise UnsupportedError(
                    f"system_envs: {set_by[name]} sets {name}={union[name]} and {spec.role} sets {name}={value}, but"
                    " with the local executor all roles share one process: choose another executor, or use one value"
                )
            set_by.setdefault(name, spec.role)
    for spec in specs:
        for place in spec.places:
            for name, value in values_of(platform.environment(spec.kind, place.local_indices)).items():
                union.setdefault(name, value)
    return union
