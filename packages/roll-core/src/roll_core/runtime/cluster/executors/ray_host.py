"""What runs inside Ray's processes: one generic actor for each worker, and one that holds the slots of a node.

Arguments and results cross as bytes that are pickled here, not by Ray: arrays arrive writable, and what cannot be
pickled is an error of the call that can be attributed.
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
"""Below the range from which systems take ports for outgoing connections, so that none takes ours meanwhile."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""gloo's variable. Without it gloo takes the address of the host's own name, which is 127.0.1.1 on many hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What a worker's process says of itself."""

    host: str
    address: str
    pid: int
    port: int
    """Free on its host just now."""
    interface: str = ""
    """The network interface with this address; empty where the user names one for gloo, or none has it."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """Of its Python environment, where that is not the driver's: the interpreter and versions."""


class RayHost:
    """Actor that holds one worker. All methods are async: they run on the actor's event loop and may overlap."""

    def __init__(self, role: str, rank: int, env: Mapping[str, str], level: int, crash_file: str) -> None:
        self._name = settle(role, rank, env, level)
        if Path(crash_file).parent.is_dir():
            # Open for the life of the process: a crash is written by the signal handler.
            faulthandler.enable(Path(crash_file).open("w"))  # noqa: SIM115
        self._host = WorkerHost(role, rank)
        self._turns = CallOrder()
        self._running: dict[int, asyncio.Future[Any]] = {}

    def __repr__(self) -> str:
        """What Ray puts in front of each line that the worker prints."""
        return self._name

    async def greet(self) -> bytes:
        """Say who is here: a `Greeting`."""
        return encode_result(PICKLED, greeting(hostname(), os.getpid()))

    async def lifeline(self) -> None:
        """Never answers: the caller learns of the death of this process by the end of this call."""
        await asyncio.Event().wait()

    async def make(self, payload: bytes) -> bytes:
        """Make the worker. Answers as `call` does."""
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
        """Call `number` of this worker, begun after all before it. Answers with `codecs.PICKLED`."""
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
        """Nobody waits for this call any more: end it if its method is async."""
        if number in self._running:
            self._running[number].cancel()

    async def stack(self) -> str:
        """Where the worker is right now."""
        return self._host.stack()

    async def close(self, timeout_s: float) -> None:
        """Close the worker."""
        await self._host.close(timeout_s)


class SlotHolder:
    """Actor that holds a node's slots, so that roles can share them, and knows which devices they are."""

    def device_ids(self, resource: str) -> list[str]:
        """What the node calls its slots, by local index."""
        held: Mapping[str, Sequence[str]] = ray.get_runtime_context().get_accelerator_ids()
        return [str(device) for device in held.get(resource, ())]


class CallOrder:
    """Calls begin in the order of their numbers, however they arrive."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def wait_for(self, number: int) -> None:
        """Return when all calls before this one have begun."""
        if number != self._next:
            turn = self._waiting[number] = asyncio.get_running_loop().create_future()
            await turn

    def done(self, number: int) -> None:
        """This one has begun: the next may."""
        self._next = number + 1
        if self._next in self._waiting:
            self._waiting.pop(self._next).set_result(None)


def settle(role: str, rank: int, env: Mapping[str, str], level: int) -> str:
    """Prepare an actor's process: its variables, its log, no ear for the terminal. Returns its name in the log."""
    os.environ.update(env)
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # Ctrl-C in the terminal is for the driver, which then ends its workers in order
    name = f"{role}[{rank}]"
    logging.basicConfig(level=level, format=f"%(levelname)s {name} %(name)s: %(message)s", force=True)
    be_deaf_to(signal.SIGTERM)
    return name


def greeting(host: str, pid: int, fingerprint: Mapping[str, str] = MappingProxyType({})) -> Greeting:
    """Of a worker's process on this node."""
    address = ray.util.get_node_ip_address()
    interface = "" if GLOO_INTERFACE in os.environ else interface_of(address)
    return Greeting(
        host=host, address=address, pid=pid, port=free_port(), interface=interface, fingerprint=dict(fingerprint)
    )


def free_port() -> int:
    """A port of this host that nobody listens on."""
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
