"""Ray actor of a worker whose role has its own Python environment.

    RayWorker ── Ray ──► RayIsolatedEnvHost ══ socket ══► the worker's process, under its own interpreter

The actor runs in the driver's environment, so versions of Ray never conflict, and the process does not need Ray at all.
The actor finds or installs the environment on its own host, and passes bytes through.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from roll_core.host import hostname
from roll_core.plugins.requirements import INSTALL_VARIABLE
from roll_core.runtime.cluster.executors.calls import Failure
from roll_core.runtime.cluster.executors.codecs import PICKLED, encode_failure, encode_result
from roll_core.runtime.cluster.executors.isolated_env_process import IsolatedEnvProcess, ProcessEndedError
from roll_core.runtime.cluster.executors.ray_host import CallOrder, greeting, settle
from roll_core.runtime.cluster.python_environments.prepare import environment_of, install_command, prepare

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from roll_core.runtime.cluster.python_environments.spec import EnvironmentSpec


class RayIsolatedEnvHost:
    """Actor with the methods of `RayHost`, and `prepare`, which is called before them."""

    def __init__(
        self,
        role: str,
        rank: int,
        env: Mapping[str, str],
        level: int,
        crash_file: str,
        spec: EnvironmentSpec,
    ) -> None:
        self._name = settle(role, rank, env, level)
        self._role, self._given, self._spec = role, env, spec
        settings = {"role": role, "rank": rank, "level": level, "crash_file": crash_file, "reported": spec.reported}
        self._process = IsolatedEnvProcess(settings)
        self._turns = CallOrder()
        self._running: dict[int, asyncio.Future[bytes]] = {}
        self._python: Path

    def __repr__(self) -> str:
        """Prefix that Ray puts in front of each line that the process prints."""
        return self._name

    async def prepare(self) -> bytes:
        """Find or install the environment on this host; may take minutes. Returns bytes of `codecs.PICKLED`."""
        try:
            self._python = await asyncio.to_thread(prepare, self._spec, f"{self._role} on {hostname()}")
        except Exception as error:
            return encode_failure(PICKLED, Failure.of(error))
        return encode_result(PICKLED, None)

    async def greet(self) -> bytes:
        """Start the process. Returns a `Greeting` as bytes of `codecs.PICKLED`."""
        given = {name: value for name, value in self._given.items() if name != "PATH"}  # has the environment's folder
        env = environment_of(self._python, os.environ) | given
        env[INSTALL_VARIABLE] = install_command(self._python, ())
        try:
            hello = await self._process.start(self._python, env)
        except Exception as error:
            return encode_failure(PICKLED, Failure.of(error))
        return encode_result(PICKLED, greeting(hello["host"], hello["pid"], hello["fingerprint"]))

    async def lifeline(self) -> None:
        """Never returns. Raises when the process exits; Ray raises when this actor exits."""
        raise ProcessEndedError(await self._process.ended())

    async def make(self, payload: bytes) -> bytes:
        """Construct the worker. Returns bytes of `codecs.WIRE`."""
        return await self._process.make(payload)

    async def call(self, number: int, method: str, payload: bytes) -> bytes:
        """Run call `number` of this worker, in order of the numbers. Returns bytes of `codecs.WIRE`."""
        await self._turns.wait_for(number)
        try:
            future = self._running[number] = self._process.begin(method, payload)
        finally:
            self._turns.done(number)
        try:
            return await future
        finally:
            del self._running[number]

    async def cancel(self, number: int) -> None:
        """Cancel a call without a waiting caller, if its method is async."""
        if number in self._running:
            self._running[number].cancel()

    async def stack(self) -> str:
        """Current stacks of the worker's threads."""
        return await self._process.stack()

    async def close(self, timeout_s: float) -> None:
        """Close the worker and end its process."""
        await self._process.close(timeout_s)
