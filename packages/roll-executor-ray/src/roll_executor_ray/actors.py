"""Ray actors: one for each worker, and one that holds the devices of a node.

If a role has its own Python environment, its actors still run in the driver's, each in front of a worker process. So
versions of Ray never conflict, and the worker's environment does not need Ray at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import psutil
import ray

from roll_core.host import free_port, hostname
from roll_core.runtime.cluster.executors.base import Failure
from roll_core.runtime.cluster.executors.worker_main import prepare_process
from roll_core.runtime.cluster.executors.worker_process import ProcessEndedError, WorkerProcess
from roll_core.runtime.cluster.executors.worker_server import WorkerServer, encode_failure
from roll_core.spec.platform import visible_devices
from roll_executor_ray.python_environments.prepare import environment_of, prepare
from roll_executor_ray.worker import PICKLED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from roll_executor_ray.python_environments.spec import EnvironmentSpec

RETRY_S = 0.1
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable of gloo for its network interface.

Without it gloo resolves the host's own name, which is 127.0.1.1 on many hosts.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """Identity and address of a worker's process."""

    host: str
    pid: int
    address: str
    port: int
    """A port that was free on its host at that time."""
    interface: str = ""
    """Network interface with this address; empty if the user sets one for gloo, or if none has the address."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """Interpreter and package versions of its Python environment; empty if it uses the driver's environment."""


class RayHost(WorkerServer):
    """Actor with one worker."""

    def __init__(self, role: str, rank: int, env: Mapping[str, str], level: int, crash_file: str) -> None:
        self._name = _prepare_actor(role, rank, env, level, crash_file)
        super().__init__(role, rank, PICKLED)

    def __repr__(self) -> str:
        """Prefix that Ray puts in front of each line that the worker prints."""
        return self._name

    async def process_info(self) -> bytes:
        """`ProcessInfo` of this process, pickled."""
        return PICKLED.dumps((True, _info(hostname(), os.getpid())))

    async def lifeline(self) -> None:
        """Never returns. The pending call fails when this process exits, which notifies the caller."""
        await asyncio.Event().wait()


class RayIsolatedEnvHost:
    """Actor in front of a worker under its own interpreter, with the methods of `RayHost` and `prepare`."""

    def __init__(
        self, role: str, rank: int, env: Mapping[str, str], level: int, crash_file: str, spec: EnvironmentSpec
    ) -> None:
        self._name = _prepare_actor(role, rank, env, level)
        self._role, self._given, self._spec = role, env, spec
        settings = {"role": role, "rank": rank, "level": level, "crash_file": crash_file, "reported": spec.reported}
        self._process = WorkerProcess(settings)
        self._python: Path

    def __repr__(self) -> str:
        """Prefix that Ray puts in front of each line that the process prints."""
        return self._name

    async def prepare(self) -> bytes:
        """Find or install the environment on this host; may take minutes. Returns the pickled outcome."""
        try:
            self._python = await asyncio.to_thread(prepare, self._spec, f"{self._role} on {hostname()}")
        except Exception as error:
            return encode_failure(PICKLED, Failure.of(error))
        return PICKLED.dumps((True, None))

    async def process_info(self) -> bytes:
        """Start the process. Returns its `ProcessInfo`, pickled."""
        variables = {
            name: value for name, value in self._given.items() if name != "PATH"
        }  # has the environment's folder
        env = environment_of(self._python, os.environ) | variables
        try:
            facts = await self._process.start(self._python, env)
        except Exception as error:
            return encode_failure(PICKLED, Failure.of(error))
        return PICKLED.dumps((True, _info(facts["host"], facts["pid"], facts["fingerprint"])))

    async def lifeline(self) -> None:
        """Never returns. Raises when the process exits; Ray raises when this actor exits."""
        raise ProcessEndedError(await self._process.ended())

    async def construct(self, payload: bytes) -> bytes:
        """See `WorkerServer.construct`."""
        outcome: bytes = await self._process.request("construct", payload)
        return outcome

    async def call(self, number: int, method: str, payload: bytes) -> bytes:
        """See `WorkerServer.call`."""
        outcome: bytes = await self._process.request("call", number, method, payload)
        return outcome

    async def cancel(self, number: int) -> None:
        """See `WorkerServer.cancel`."""
        with contextlib.suppress(ProcessEndedError):
            await self._process.request("cancel", number)

    async def stack(self) -> str:
        """See `WorkerServer.stack`."""
        stack: str = await self._process.request("stack")
        return stack

    async def close(self, timeout_s: float) -> None:
        """Close the worker and end its process."""
        await self._process.close(timeout_s)


class SlotHolder:
    """Actor that reserves a node's devices, so that roles can share them, and knows their ids."""

    def __init__(self) -> None:
        self._claims: dict[str, socket.socket] = {}

    async def device_ids(self, resource: str, variable: str, count: int) -> list[str]:
        """Ids of `count` devices of the node, by local slot index; another number if Ray or the node has another one.

        Ray assigns ids only for resources of vendors that it knows, and merely counts all others. Of these, this actor
        claims devices that `variable` shows on the node. Blocks until enough of them are unclaimed.
        """
        context = ray.get_runtime_context()
        assigned: Mapping[str, Sequence[str]] = context.get_accelerator_ids()
        if resource in assigned:
            return [str(device) for device in assigned[resource]]
        (node,) = (node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        devices = visible_devices(os.environ.get(variable), int(node["Resources"][resource]))
        if len(devices) < count:
            return list(devices)
        while True:
            for device in devices:
                if len(self._claims) < count:
                    self._claim(resource, device)
            if len(self._claims) == count:
                return [device for device in devices if device in self._claims]
            await asyncio.sleep(RETRY_S)  # Ray frees a resource before the process that used it has ended

    def _claim(self, resource: str, device: str) -> None:
        """Claim a device until this process ends, unless a process of this host has claimed it."""
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0roll-{resource}-{device}")  # Linux removes an abstract socket with its process
        except OSError:
            claim.close()
        else:
            self._claims[device] = claim


def _prepare_actor(role: str, rank: int, env: Mapping[str, str], level: int, crash_file: str = "") -> str:
    """Set up an actor's process. Returns its name in the log."""
    os.environ.update(env)
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # Ctrl-C in the terminal goes only to the driver, which then ends its workers in order
    name = f"{role}[{rank}]"
    prepare_process(name, level, crash_file)
    return name


def _info(host: str, pid: int, fingerprint: Mapping[str, str] = MappingProxyType({})) -> ProcessInfo:
    address = ray.util.get_node_ip_address()
    interface = "" if GLOO_INTERFACE in os.environ else interface_of(address)
    return ProcessInfo(
        host=host, pid=pid, address=address, port=free_port(), interface=interface, fingerprint=dict(fingerprint)
    )


def interface_of(address: str) -> str:
    """Name of the network interface with this IP address; empty if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        # IPv6 link-local addresses contain their interface: fe80::1%eth0.
        if any(interface_address.address.partition("%")[0] == address for interface_address in addresses):
            return name
    return ""
