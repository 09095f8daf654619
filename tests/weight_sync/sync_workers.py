"""A trainer and an engine that misbehave when they are told to, and processes to run them in."""

from __future__ import annotations

import asyncio
import inspect
import math
import multiprocessing
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import msgpack

from roll_core.errors import MissingTensorError, WeightSyncError, WorkerDiedError
from roll_core.runtime.cluster.executors.base import CallFailed, Failure, GroupSpec, Member, Place, WorkerGroup
from roll_core.runtime.weights.plan import device_facts
from roll_core.runtime.weights.transfer import ReceivingWorker, SendingWorker, WeightReceiver, WeightSender
from roll_core.spec.providers import WeightTransportProvider
from roll_core.spec.transport import DeviceFacts
from roll_core.spec.weights import copy_digested, make_receipt
from roll_core.types import DataRank, WeightReceipt
from roll_weight_transports import device_memory
from roll_weight_transports.comparing import unsent_digests

WEIGHTS = "roll_core.runtime.weights"
IMPORTS = (
    f"{WEIGHTS}.transports.collective",
    f"{WEIGHTS}.transports.store",
    f"{WEIGHTS}.sender",
    f"{WEIGHTS}.receiver",
    "roll_core.runtime.cluster.executors.base",
    "roll_weight_transports.device_memory",
    "roll_testing.publishing",
)
"""What a process imports before its first call: once for all of them."""


def record_of(transport: str) -> WeightTransportProvider:
    """A weight transport of our packages, or that of `roll-core new transport`, which is not installed here."""
    from roll_transport_acme.plugin import roll_weight_transports

    from roll_testing.publishing import transport_record

    return {each.name: each for each in roll_weight_transports()}.get(transport) or transport_record(transport)


def parameters() -> dict[str, Any]:
    """Tensors of every awkward kind; `left` and `right` are alike in dtype and shape."""
    import torch

    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return {
        "embed": draw(300, 256),
        "left": draw(64, 96),
        "right": draw(64, 96),
        "transposed": draw(40, 30).t(),
        "half": draw(1000, 33).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 8),
        "counts": torch.arange(17, dtype=torch.int8),
        "bias": draw(5),
    }


class Trainer:
    """Stands in for a train strategy: named tensors that an optimizer step moves in place."""

    def __init__(self) -> None:
        self.tensors = parameters()
        self.data_rank = DataRank()
        self.fault = ""
        self.frozen: tuple[str, ...] = ()
        self.stale = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def step(self, learning_rate: float) -> None:
        for name, tensor in self.tensors.items():
            if tensor.is_floating_point() and name not in self.frozen:
                tensor -= learning_rate * (tensor.abs() + 1)

    def export_weights(self) -> Any:
        for name, tensor in self.tensors.items():
            if self.fault in ("nothing", f"skip:{name}"):
                continue
            known = f"layers.0.{name}.weight" if self.fault == "in_layers" else name
            yield known, self.stale[name] if self.fault == "stale" else tensor
            if self.fault == f"die:{name}":
                os.kill(os.getpid(), signal.SIGKILL)

    def export_buffers(self) -> Any:
        return iter(())

    def frozen_weights(self) -> Any:
        return self.frozen


class Engine:
    """Stands in for an infer strategy. `fault` says what it does wrong with the next update."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}
        self.version = 0
        self.fault = ""
        self.loaded: dict[str, str] = {}
        """Digests of what it holds; kept tensors are in no other place than `held`."""

    async def update_weights(self, version: int, manifest: Any, tensors: Any, *, shared: bool = False) -> WeightReceipt:
        import torch

        fault, _, what = self.fault.partition(":")
        if fault == "ignore":
            return WeightReceipt(version=self.version, digests=self._digests(manifest))
        if fault == "pretend":
            return WeightReceipt(version=version, digests=self._digests(manifest))
        if fault == "refuse":
            raise MissingTensorError(f"the model has no {what}")
        if fault == "crash":
            raise ZeroDivisionError("a mistake of the engine's")
        if fault == "forget":
            self.loaded = {}
        digests = unsent_digests("the engine", manifest, self.loaded)
        likes = {} if fault == "xxh3" else {entry.name: entry.digest for entry in manifest.tensors}
        first, _, second = what.partition(",")
        for name, tensor in tensors:
            if fault == "sleep" and name == what:
                if shared:
                    await asyncio.sleep(3600)
                time.sleep(3600)
            if fault == "die" and name == what:
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "drop" and name == what:
                self.held.pop(name, None)
                continue
            key = {first: second, second: first}.get(name, name) if fault == "swap" else name
            if shared:
                self.held[key] = tensor.clone() if fault == "clone" else tensor
                continue
            if key not in self.held:
                self.held[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
            digests[key] = copy_digested(self.held[key], tensor, likes.get(name, ""))
        if fault == "flip":
            damaged = self.held[what].clone()
            damaged.view(-1).view(torch.uint8)[0] ^= 16
            self.held[what] = damaged
        if fault == "grow":
            self.held[what] = torch.ones(2)
        self.version = version
        known = not shared and fault in ("", "xxh3")
        self.loaded = digests if known else dict(self._digests(manifest))
        return WeightReceipt(version=version, digests=self.loaded)

    def _digests(self, manifest: Any) -> Any:
        return make_receipt(manifest, self.held.items()).digests


class HostMemory(device_memory.DeviceMemory):
    """Shares the host's memory by torch's own handles for that, as `DeviceMemory` shares a device's."""

    def __init__(self, name: str = "the one device") -> None:
        self.name = name
        self.refuses = ""

    def uuid(self, device: str) -> str:
        return self.name

    def allocate(self, num_bytes: int, device: str) -> Any:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def share(self, memory: Any) -> bytes:
        import torch
        from torch.multiprocessing.reductions import rebuild_storage_filename, reduce_storage

        torch.multiprocessing.set_sharing_strategy("file_system")
        rebuild, (_, manager, name, size) = reduce_storage(memory.untyped_storage())
        assert rebuild is rebuild_storage_filename
        return bytes(msgpack.packb([self.name, manager, name, size]))

    def open(self, handle: bytes, device: str) -> Any:
        import torch
        from torch.multiprocessing.reductions import rebuild_storage_filename

        if self.refuses:
            raise RuntimeError(self.refuses)
        owner, manager, name, size = msgpack.unpackb(handle)
        if owner != self.name:
            raise WeightSyncError(f"the memory is on device {owner}, but this process uses device {self.name}")
        storage = rebuild_storage_filename(torch.UntypedStorage, manager, name, size)
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def synchronize(self, device: str) -> None:
        """Host memory is what it is at once."""

    def collect(self) -> None:
        """It goes with its last tensor."""


class Worker:
    """What both kinds of workers are asked by tests of device memory."""

    strategy: Any

    backend = "gloo"

    def device_facts(self) -> DeviceFacts:
        uuid = device_memory.KINDS["cpu"].uuid("cpu")
        return replace(device_facts("cpu", self.backend), uuid=uuid)

    def use_backend(self, name: str) -> None:
        self.backend = name

    def use_device(self, name: str, refuses: str = "") -> None:
        device_memory.KINDS["cpu"] = kind = HostMemory(name)
        kind.refuses = refuses

    def read_bucket(self, bucket: dict[str, Any]) -> Any:
        from roll_weight_transports.buckets import BucketInfo, read_bucket

        return {name: tensor.tolist() for name, tensor in read_bucket(BucketInfo(**bucket))}

    def opening_failure(self, bucket: dict[str, Any]) -> str:
        from roll_weight_transports.buckets import BucketInfo, opening_failure

        return opening_failure(BucketInfo(**bucket), "cpu")

    def use_stand_in(self) -> None:
        from test_collective_backends import register

        register()


class TrainWorker(Worker, SendingWorker):
    """Sends as the runtime's worker does."""

    def __init__(self, *, place: Place, peers: Any = None) -> None:
        self.rank = place.rank
        self.begin()

    def begin(self) -> None:
        self.strategy = Trainer()
        self.sender = WeightSender(self.strategy, role="actor_train", rank=self.rank)  # type: ignore[arg-type]

    def step(self, learning_rate: float) -> None:
        self.strategy.step(learning_rate)

    def set_fault(self, fault: str) -> None:
        self.strategy.fault = fault

    def freeze(self, *names: str) -> None:
        self.strategy.frozen = names

    def values(self) -> Any:
        return {name: tensor.tolist() for name, tensor in self.strategy.tensors.items()}

    def close(self) -> None:
        self.sender.close()


class InferWorker(Worker, ReceivingWorker):
    """Receives as the runtime's worker does."""

    def __init__(self, *, place: Place, peers: Any = None) -> None:
        self.rank = place.rank
        self.begin()

    def begin(self) -> None:
        self.strategy = Engine()
        self.receiver = WeightReceiver(self.strategy, role="actor_infer", rank=self.rank)  # type: ignore[arg-type]

    def set_fault(self, fault: str) -> None:
        self.strategy.fault = fault

    def values(self) -> Any:
        return {name: tensor.tolist() for name, tensor in self.strategy.held.items()}

    def pointers(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.strategy.held.items()}

    def close(self) -> None:
        self.receiver.close()


WORKERS = {"train": TrainWorker, "generate": InferWorker}


def serve(connection: Any, kind: str, place: Place) -> None:
    """A worker's process: one call after the other until the connection ends."""
    import torch

    os.set_inheritable(connection.fileno(), False)  # torch's manager of shared memory would hold it after our death
    torch.set_num_threads(1)
    device_memory.KINDS["cpu"] = HostMemory()
    worker = WORKERS[kind](place=place)
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            worker.close()
            return
        try:
            result = getattr(worker, method)(*args)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
        except Exception as error:
            connection.send((False, error))
        else:
            connection.send((True, result))


class ProcessGroup(WorkerGroup):
    """A worker group of real processes, one thread each to wait for its answers."""

    def __init__(self, role: str, kind: Any, world_size: int) -> None:
        self.unanswered = 0
        places = tuple(Place(rank=rank, world_size=world_size) for rank in range(world_size))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", *IMPORTS])
        self.processes, self.connections = [], []
        for place in places:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, kind, place), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)
        members = [
            Member(rank=rank, host=socket.gethostname(), pid=process.pid or 0, node=0)
            for rank, process in enumerate(self.processes)
        ]
        spec = GroupSpec(role=role, kind=kind, target="sync_workers", places=places, timeout_s=60.0)
        super().__init__(spec, members)

    def begin(self, rank: int, method: str, arguments: Any) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(error: Exception | None, result: Any) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self.unanswered += 1

        def wait() -> None:
            member = self.members[rank]
            error: Exception | None = None
            result = None
            try:
                self.connections[rank].send((method, arguments))
                fine, result = self.connections[rank].recv()
                if not fine:
                    error = CallFailed(Failure.of(result))
            except (EOFError, OSError):
                error = WorkerDiedError(self.role, rank, member.host, method, "its process was killed")
            else:
                self.unanswered -= 1
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, error, result)

        threading.Thread(target=wait, daemon=True).start()
        return future

    @property
    def usable(self) -> bool:
        """Whether every process lives and waits for a call."""
        return self.unanswered == 0 and all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join()
            process.close()
            connection.close()


def same_values(left: Any, right: Any) -> bool:
    """Nested lists of numbers that are equal, NaN to NaN."""
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same_values, left, right))
    return left == right or (math.isnan(left) and math.isnan(right))
