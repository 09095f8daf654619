"""The transport `collective`: broadcasts in buckets, between processes on any hosts.

The transport creates its own process group from its own store: gloo on the host, or the platform's library (nccl, hccl)
between devices. It does not use the strategies' default process group.

The endpoints register in the store before the group is made, so that errors can name a missing endpoint. Receivers
write their progress into it, so that a timeout can name the slow ones:

    receivers   here/<rank> (or disconnected/<rank>)   wait go    broadcasts ...   read/<n>/<rank>   all-reduce
    sender      wait here/*                    go         broadcasts ...                     all-reduce
    driver                                                off, if an endpoint has failed
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.errors import UnsupportedError, WeightSyncError
from roll_core.spec.platform import HOST_BACKEND, HOST_DEVICE
from roll_core.spec.transport import (
    ReceiverEndpoint,
    ReceiversLostError,
    Route,
    SenderEndpoint,
    SenderLostError,
    WeightTransport,
)
from roll_weight_transports.bucket_plan import fill, plan_buckets, require_exhausted, views
from roll_weight_transports.digests import use_compiled_digests

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed import Store, Work  # type: ignore[attr-defined]

    from roll_core.spec.transport import Deadline, ReceiverSetup, RoleFacts, SenderSetup
    from roll_core.types import TensorEntry, WeightManifest
    from roll_weight_transports.bucket_plan import Bucket
    from roll_weight_transports.rendezvous import HostedStore, RemoteStore

BUCKET_BYTES = 32 << 20
"""Upper bound of a bucket, unless a tensor is larger: enough to saturate a network."""
LOOPBACK = "127.0.0.1"
SENDER = 0
"""Rank of the sender in the group; receiver r has rank r + 1."""
OFF = "off"
"""Key of the store: the publish has failed on another worker."""
POLL_S = 0.002
"""Seconds between polls of the store, and of an operation on a device."""
EARLY_S = 0.005
"""An operation that fails this close to the deadline timed out: libraries round timeouts down to milliseconds."""
CHECK_OFF_S = 0.25
"""Seconds between checks whether the publish was called off. The checks also detect a lost sender."""
WATCHDOGS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING")
"""Environment variables read when a group is made. Unless 0, the group's watchdog kills the process if a peer is lost
or slow. They are set to 0, because a trainer must survive the exit of an engine."""
_NEVER = timedelta(days=1)
"""Timeout for libraries that kill the process on their own timeout; the publish's deadline expires first."""


class CollectiveTransport(WeightTransport):
    """Broadcasts between any processes. Self-tests a device backend first and falls back to gloo if it fails."""

    @override
    def available(self, sender: RoleFacts, receiver: RoleFacts) -> str | None:
        return None

    @override
    def routes(self, sender: RoleFacts, receiver: RoleFacts) -> Sequence[Route]:
        backend, note = device_backend(sender, receiver)
        host = Route(options={"backend": HOST_BACKEND}, note=note)
        if not backend:
            return (host,)
        return (Route(label=backend, options={"backend": backend}, self_test=True), host)

    @override
    def sender(self, setup: SenderSetup) -> CollectiveSender:
        return CollectiveSender(setup)

    @override
    def receiver(self, setup: ReceiverSetup) -> CollectiveReceiver:
        return CollectiveReceiver(setup)

    @override
    def cancel_transfer(self, address: str, options: Mapping[str, str]) -> None:
        """Set the key `OFF`: for a sender whose receivers have not all connected, and for a device backend, which does
        not detect closed connections. If the driver cannot reach the store, endpoints block until their deadline."""
        from torch.distributed import DistError

        # DistError: the sender is lost, which receivers detect on their own.
        with (
            contextlib.suppress(DistError),
            contextlib.closing(connect(address, timedelta(seconds=CHECK_OFF_S))) as store,
        ):
            store.set(OFF, "")


def device_backend(sender: RoleFacts, receiver: RoleFacts) -> tuple[str, str]:
    """Device backend with which the sending rank and all receivers can form a group; empty, with the reason, if none.

    A platform's own backend carries only tensors on its devices, and allows one rank per device.
    """
    leaders = (
        rank for rank, worker in enumerate(sender.workers) if worker.device.is_leader and worker.device.replica == 0
    )
    leader = next(leaders, None)
    if leader is None or sender.workers[leader].device.backend == HOST_BACKEND:
        return "", ""
    backend = sender.workers[leader].device.backend
    taken = {sender.workers[leader].slots[:1]: f"rank {leader} of {sender.role}"}
    for rank, worker in enumerate(receiver.workers):
        who = f"rank {rank} of {receiver.role}"
        if worker.device.backend != backend:
            return "", f"not {backend}: {who} receives weights on {worker.device.device}"
        slot = worker.slots[:1]
        if slot in taken:
            return "", f"not {backend}: {who} is on the device of {taken[slot]}"
        taken[slot] = who
    return backend, ""


class _Endpoint:
    """The group, which is created at the first publish, and its store."""

    _store: HostedStore | RemoteStore

    def __init__(self, setup: SenderSetup | ReceiverSetup) -> None:
        self._bucket_bytes = min(setup.bucket_bytes, BUCKET_BYTES)
        self._backend, self._device = setup.options.get("backend", HOST_BACKEND), setup.device
        self._group: BroadcastGroup | None = None
        self._number = 0

    def _join(self, rank: int, size: int, host: str, deadline: Deadline) -> BroadcastGroup:
        self._group = make_group(self._backend, self._device, self._store, rank, size, host, deadline)
        return self._group

    def close(self) -> None:
        """Leave the group and close the store. Idempotent."""
        if self._group is not None:
            self._group.abort()
            self._group = None
        self._store.close()


class CollectiveSender(_Endpoint, SenderEndpoint):
    """Sending endpoint; first rank of the process group and host of its store."""

    def __init__(self, setup: SenderSetup) -> None:
        from roll_weight_transports.rendezvous import HostedStore

        super().__init__(setup)
        use_compiled_digests()
        self._num_receivers, self._host = len(setup.receivers), setup.host
        secret = secrets.token_hex(16)
        self._store = HostedStore(setup.host, secret)
        self.address = f"{secret}@{setup.host}:{self._store.port}"

    @override
    def send(
        self, manifest: WeightManifest, exported: Iterator[tuple[str, Tensor]], deadline: Deadline
    ) -> list[TensorEntry]:
        self._number += 1
        buckets = plan_buckets(manifest, self._bucket_bytes)
        names = [bucket.first for bucket in buckets] or [""]
        sent: list[TensorEntry] = []
        with self._finding_lost(names[0], deadline):
            group = self._group or self._meet(names[0], deadline)
            memory = _buffers(group, buckets)
        running: list[Work] = []
        for number, bucket in enumerate(buckets):
            if number >= 2:
                with self._finding_lost(names[number - 2], deadline):
                    group.wait(running[number - 2], deadline)
            sent += fill(memory[number % 2], bucket, exported)
            with self._finding_lost(names[max(0, number - 2)], deadline):
                running.append(group.broadcast(memory[number % 2][: bucket.num_bytes], deadline))
        require_exhausted(exported)
        with self._finding_lost(names[-1], deadline):
            for work in running[-2:]:
                group.wait(work, deadline)
            group.all_done(deadline)
        return sent

    @contextlib.contextmanager
    def _finding_lost(self, tensor_name: str, deadline: Deadline) -> Iterator[None]:
        """Raise errors of the group or the store as `ReceiversLostError`. Errors of the export stay as they are."""
        try:
            yield
        except WeightSyncError:
            raise
        except RuntimeError as error:
            unread = self._without(f"read/{self._number}")
            if deadline.left < EARLY_S:
                raise ReceiversLostError(tensor_name, timed_out=unread) from error
            raise ReceiversLostError(tensor_name, disconnected=self._with("disconnected") or unread) from error

    def _meet(self, tensor_name: str, deadline: Deadline) -> BroadcastGroup:
        here = [f"here/{rank}" for rank in range(self._num_receivers)]
        while not self._store.check(here):
            if disconnected := self._with("disconnected"):
                raise ReceiversLostError(tensor_name, disconnected=disconnected)
            if self._store.check([OFF]):
                raise ReceiversLostError(tensor_name, disconnected=self._without("here"))
            if deadline.left == 0:
                raise ReceiversLostError(tensor_name, timed_out=self._without("here"))
            time.sleep(POLL_S)
        self._store.set("go", "")
        return self._join(SENDER, self._num_receivers + 1, self._host, deadline)

    def _with(self, key: str) -> tuple[int, ...]:
        """Receivers that have set `key`."""
        return tuple(rank for rank in range(self._num_receivers) if self._store.check([f"{key}/{rank}"]))

    def _without(self, key: str) -> tuple[int, ...]:
        return tuple(sorted({*range(self._num_receivers)} - {*self._with(key)}))


class CollectiveReceiver(_Endpoint, ReceiverEndpoint):
    """Receiving endpoint; has rank `rank + 1` in the process group."""

    def __init__(self, setup: ReceiverSetup) -> None:
        from torch.distributed import DistError

        super().__init__(setup)
        self.address = setup.address
        self._rank, self._num_receivers = setup.rank, setup.num_receivers
        try:
            self._store = connect(setup.address, timeout(setup.deadline))
        except DistError as error:
            where = setup.address.partition("@")[2]
            raise SenderLostError(f"cannot connect to the sender's store at {where}: {error}") from error

    @override
    def receive(self, manifest: WeightManifest, deadline: Deadline) -> Iterator[tuple[str, Tensor]]:
        self._number += 1
        try:
            group = self._group or self._meet(deadline)
            buckets = plan_buckets(manifest, self._bucket_bytes)
            memory = _buffers(group, buckets)
            running = [group.broadcast(memory[0][: buckets[0].num_bytes], deadline)] if buckets else []
            for number, bucket in enumerate(buckets):
                group.wait(running[number], deadline)
                if number + 1 < len(buckets):
                    following = memory[(number + 1) % 2][: buckets[number + 1].num_bytes]
                    running.append(group.broadcast(following, deadline))
                yield from views(memory[number % 2], bucket)
            self._store.set(f"read/{self._number}/{self._rank}", "")
            group.all_done(deadline)
        except WeightSyncError:
            raise
        except RuntimeError as error:
            how = "the sender timed out" if deadline.left < EARLY_S else "the sender or another receiver disconnected"
            raise SenderLostError(f"{how}: {error}") from error

    @override
    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the sender may have exited, and its store with it
            self._store.set(f"disconnected/{self._rank}", "")
        super().close()

    def _meet(self, deadline: Deadline) -> BroadcastGroup:
        self._store.set(f"here/{self._rank}", "")
        self._store.wait(["go"], timeout(deadline))
        host = self.address.partition("@")[2].rpartition(":")[0]
        return self._join(self._rank + 1, self._num_receivers + 1, host, deadline)


def _buffers(group: BroadcastGroup, buckets: list[Bucket]) -> list[Tensor]:
    num_bytes = max((bucket.num_bytes for bucket in buckets), default=0)
    return [group.memory(num_bytes) for _ in range(2)]


# -- process groups ----------------------------------------------------------------------------------------------------


class BroadcastGroup:
    """The sender and all receivers. Failures are raised as `RuntimeError`."""

    def __init__(self, group: Any, device: str) -> None:
        """`group`: a process group of torch."""
        self._group, self._device = group, device

    def memory(self, num_bytes: int) -> Tensor:
        """A flat uint8 buffer that the group can broadcast."""
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def broadcast(self, memory: Tensor, deadline: Deadline) -> Work:
        """Start a broadcast of `memory` from the sender."""
        work: Work = self._group.broadcast(memory, SENDER, self._limit(deadline))
        return work

    def all_done(self, deadline: Deadline) -> None:
        """Wait for every rank. A broadcast may end on the sender before its bytes have arrived."""
        import torch
        from torch.distributed import AllreduceOptions

        options = AllreduceOptions()
        options.timeout = self._limit(deadline)
        self.wait(self._group.allreduce([torch.zeros(1, device=self._device)], options), deadline)

    def abort(self) -> None:
        """Release all resources, even with operations in flight."""
        self._group.abort()

    def wait(self, work: Work, deadline: Deadline) -> None:
        """Wait until the memory of `work` may be read and written, and this process's other operations are done."""
        work.wait(timeout(deadline))

    def _limit(self, deadline: Deadline) -> timedelta:
        """Timeout of an operation for the library itself."""
        return timeout(deadline)


class DeviceBroadcastGroup(BroadcastGroup):
    """An asynchronous library that may not detect a lost peer: the host polls the operation, and checks meanwhile
    whether the publish was called off."""

    def __init__(self, group: Any, device: str, store: Store) -> None:
        super().__init__(group, device)
        self._store = store

    @override
    def wait(self, work: Work, deadline: Deadline) -> None:
        import torch

        checked = time.monotonic()
        while not work.is_completed():
            if deadline.left == 0:
                raise RuntimeError("the deadline passed")
            if time.monotonic() - checked >= CHECK_OFF_S:
                checked = time.monotonic()
                if self._store.check([OFF]):
                    raise RuntimeError("the publish was called off")
            time.sleep(POLL_S)
        work.wait(timeout(deadline))  # completed, but raises its error; nccl does so only with a timeout
        torch.get_device_module(torch.device(self._device).type).synchronize(self._device)

    @override
    def _limit(self, deadline: Deadline) -> timedelta:
        return _NEVER


def make_group(
    backend: str, device: str, store: Store, rank: int, size: int, host: str, deadline: Deadline
) -> BroadcastGroup:
    """Create the group; blocks until all ranks call this. `host` is the sender's address, to which gloo connects."""
    if backend == HOST_BACKEND:
        return BroadcastGroup(_gloo_group(store, rank, size, host, deadline), HOST_DEVICE)
    with _watchdogs_off():
        return DeviceBroadcastGroup(_torch_group(backend, store, rank, size), device, store)


def _gloo_group(store: Store, rank: int, size: int, host: str, deadline: Deadline) -> Any:
    """Create a group of gloo, which detects a closed connection at once."""
    from torch.distributed import ProcessGroupGloo

    if host != LOOPBACK:
        return ProcessGroupGloo(store, rank, size, timeout(deadline))
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # The loopback device reaches this host only; a sender with that address has only receivers on its host.
    options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = timeout(deadline)
    return ProcessGroupGloo(store, rank, size, options)


def connect(address: str, within: timedelta) -> RemoteStore:
    """The store of the sender at `address`. Raises `DistError`."""
    from roll_weight_transports.rendezvous import RemoteStore

    secret, _, where = address.partition("@")
    host, _, port = where.rpartition(":")
    return RemoteStore(host, int(port), secret, within)


def timeout(deadline: Deadline) -> timedelta:
    """Time left, at least 1 ms, because some calls interpret 0 as no timeout."""
    return timedelta(seconds=max(deadline.left, 1e-3))


@contextlib.contextmanager
def _watchdogs_off() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in WATCHDOGS}
    os.environ.update(dict.fromkeys(WATCHDOGS, "0"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _torch_group(backend: str, store: Store, rank: int, size: int) -> Any:
    """Create a group of a torch backend, built-in or registered by a package. torch's public functions create groups
    only within the default process group."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _DistributedBackendOptions  # type: ignore[attr-defined]

    group_class = getattr(dist, f"ProcessGroup{backend.upper()}", None)
    if group_class is not None:
        options = group_class.Options()
        options._timeout = _NEVER
        return group_class(store, rank, size, options)
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None:
        raise UnsupportedError(f"this torch has no collective backend {backend}: install the package that registers it")
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, _NEVER)
    described = _DistributedBackendOptions()
    described.store = store
    described.group_rank, described.group_size = rank, size
    described.timeout = _NEVER
    described.group_id = "roll-weights"
    described.global_ranks_in_group = []
    return plugin.creator_fn(described, None)
