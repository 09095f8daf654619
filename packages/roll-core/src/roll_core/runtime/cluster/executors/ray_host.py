"""Ray actors: a generic one for each worker, and one that holds the devices of a node.

Arguments and results are pickled here, not by Ray. Arrays therefore arrive writable, and a value that cannot be pickled
raises an error that names its call.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import ray

from roll_core.host import hostname, interface_of, usable_cores
from roll_core.runtime.cluster.executors.calls import CallFailed, Failure
from roll_core.runtime.cluster.executors.codecs import PICKLED, answer, encode_failure, encode_result
from roll_core.runtime.cluster.executors.host import WorkerHost
from roll_core.runtime.cluster.executors.sigterm_mask import be_deaf_to

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.runtime.cluster.placement import Place

PORTS = range(20_000, 32_000)
"""Below the usual ranges of ephemeral ports, so that no outgoing connection takes a chosen port."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable of gloo for its network interface.

Without it gloo resolves the host's own name, which is 127.0.1.1 on many hosts.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """Identity and address of a worker's process."""

    host: str
    address: str
    pid: int
    port: int
    """A port that was free on its host at that time."""
    interface: str = ""
    """Network interface with this address; empty if the user sets one for gloo, or if none has the address."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """Interpreter and package versions of its Python environment; empty if it uses the driver's environment."""


class RayHost:
    """Actor with one worker. All methods are async: they run on the actor's event loop and may overlap."""

    def __init__(self, role: str, rank: int, env: Mapping[str, str], level: int, crash_file: str) -> None:
        self._name = settle(role, rank, env, level)
        if Path(crash_file).parent.is_dir():
            # The file stays open for the life of the process: the signal handler writes the crash report to it.
            faulthandler.enable(Path(crash_file).open("w"))  # noqa: SIM115
        self._host = WorkerHost(role, rank)
        self._turns = CallOrder()
        self._running: dict[int, asyncio.Future[Any]] = {}

    def __repr__(self) -> str:
        """Prefix that Ray puts in front of each line that the worker prints."""
        return self._name

    async def greet(self) -> bytes:
        """Return the pickled `Greeting` of this process."""
        return encode_result(PICKLED, greeting(hostname(), os.getpid()))

    async def lifeline(self) -> None:
        """Never returns. The pending call fails when this process exits, which notifies the caller."""
        await asyncio.Event().wait()

    async def make(self, payload: bytes) -> bytes:
        """Construct the worker. Returns bytes as `call` does."""
        return await answer(PICKLED, self._make(payload))

    async def _make(self, payload: bytes) -> None:
        try:
            target, place, peers, args, env, path = PICKLED.loads(payload)
        except Exception as error:
            raise CallFailed(Failure.of(error)) from error
        os.environ.update(env)
        sys.path.extend(entry for entry in path if entry not in sys.path)
        await self._host.make(target, _with_threads_of_this_host(place), peers, args)

    async def call(self, number: int, method: str, payload: bytes) -> bytes:
        """Run call `number` of this worker, in order of the numbers. Returns bytes of `codecs.PICKLED`."""
        await self._turns.wait_for(number)
        try:
            future = self._host.begin(method, PICKLED.loads(payload))
        except Exception as error:
            return encode_failure(PICKLED, Failure.of(error))
        finally:
            self._turns.done(number)
        self._running[number] = future
        try:
            return await answer(PICKLED, future)
        finally:
            del self._running[number]

    async def cancel(self, number: int) -> None:
        """Cancel a call without a waiting caller, if its method is async."""
        if number in self._running:
            self._running[number].cancel()

    async def stack(self) -> str:
        """Current stacks of the worker's threads."""
        return self._host.stack()

    async def close(self, timeout_s: float) -> None:
        """Close the worker."""
        await self._host.close(timeout_s)


class SlotHolder:
    """Actor that reserves a node's devices, so that roles can share them, and knows their ids."""

    def device_ids(self, resource: str) -> list[str]:
        """Ids of the devices on the node, by local slot index."""
        held: Mapping[str, Sequence[str]] = ray.get_runtime_context().get_accelerator_ids()
        return [str(device) for device in held.get(resource, ())]


class CallOrder:
    """Lets calls begin in the order of their numbers, independent of the order of their arrival."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def wait_for(self, number: int) -> None:
        """Wait until all calls before this one have begun."""
        if number != self._next:
            turn = self._waiting[number] = asyncio.get_running_loop().create_future()
            await turn

    def done(self, number: int) -> None:
        """Mark this call as begun, and let the next one begin."""
        self._next = number + 1
        if self._next in self._waiting:
            self._waiting.pop(self._next).set_result(None)


def settle(role: str, rank: int, env: Mapping[str, str], level: int) -> str:
    """Prepare an actor's process: environment variables, logging, process group, SIGTERM.

    Returns its name in the log.
    """
    os.environ.update(env)
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # Ctrl-C in the terminal goes only to the driver, which then ends its workers in order
    name = f"{role}[{rank}]"
    logging.basicConfig(level=level, format=f"%(levelname)s {name} %(name)s: %(message)s", force=True)
    be_deaf_to(signal.SIGTERM)
    return name


def greeting(host: str, pid: int, fingerprint: Mapping[str, str] = MappingProxyType({})) -> Greeting:
    """Create the `Greeting` of a worker process on this node."""
    address = ray.util.get_node_ip_address()
    interface = "" if GLOO_INTERFACE in os.environ else interface_of(address)
    return Greeting(
        host=host, address=address, pid=pid, port=free_port(), interface=interface, fingerprint=dict(fingerprint)
    )


def free_port() -> int:
    """A free port of this host. Raises `OSError` if none of 100 random ports is free."""
    for port in Random().sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between {PORTS.start} and {PORTS.stop}")


def _with_threads_of_this_host(place: Place) -> Place:
    return replace(place, num_threads=place.threads_of(usable_cores()))
