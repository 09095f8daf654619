"""The transport `shm`: a few slots of anonymous shared memory, filled in turn while receivers read those filled before.

    sender     fill slot 0 | fill slot 1 | ... | wait until all have taken slot 0 | fill slot 0 | ...
    receivers              | read slot 0 | read slot 1 | ...

The memory has no name. Receivers get its file descriptor over a Unix socket, which also carries "filled" and "taken",
and whose end tells each side that the other is gone. So nothing can stay in /dev/shm, whoever is killed when.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import selectors
import socket
import struct
import sys
import tempfile
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.errors import WeightSyncError
from roll_core.runtime.weight_sync.buckets import fill, nothing_left, plan_buckets, view
from roll_core.runtime.weight_sync.channel import ReceiversLostError, ReceivingEnd, SenderLostError, SendingEnd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from roll_core.runtime.weight_sync.buckets import Bucket
    from roll_core.runtime.weight_sync.plan import Deadline
    from roll_core.types import TensorEntry, WeightManifest

PIPELINE_BYTES = 2 << 20
"""Buckets are no larger than this unless a tensor is, so that what is in all slots fits into a last-level cache."""
NUM_SLOTS = (8, 4, 2)
"""As many as `SPARE_BYTES` allow: the more, the less one end waits for the other."""
SPARE_BYTES = 64 << 20
"""What slots may take together beyond two of the largest bucket."""
_SHORTEST_S = 1e-3
"""A socket's timeout of 0 would mean something else."""
_HELLO_S = 1.0
"""Receivers say who they are as soon as they are connected."""
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"!{_TOKEN_BYTES}si")
_NUMBER = struct.Struct("!q")


class ShmSender(SendingEnd):
    """Owns the memory, listens, and fills slots."""

    def __init__(self, num_receivers: int, bucket_bytes: int) -> None:
        self._bucket_bytes = min(bucket_bytes, PIPELINE_BYTES)
        self._num_receivers = num_receivers
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener, where = _listen()
        self.address = f"{self._token.hex()}:{where}"
        self._receivers: dict[int, socket.socket] = {}
        self._memory: Tensor | None = None

    @override
    def send(
        self, manifest: WeightManifest, exported: Iterator[tuple[str, Tensor]], deadline: Deadline
    ) -> list[TensorEntry]:
        buckets = plan_buckets(manifest, self._bucket_bytes)
        self._accept(deadline)
        slots = plan_slots(buckets)
        memory = self._make_room(slots[-1].stop)
        sent: list[TensorEntry] = []
        for number, bucket in enumerate(buckets):
            if number >= len(slots):
                self._wait_taken(number - len(slots), buckets, deadline)
            sent += fill(memory[slots[number % len(slots)]], bucket, exported)
            self._tell(number, bucket)
        nothing_left(exported)
        for number in range(max(0, len(buckets) - len(slots)), len(buckets)):
            self._wait_taken(number, buckets, deadline)
        return sent

    @override
    def close(self) -> None:
        for connection in self._receivers.values():
            connection.close()
        self._receivers.clear()
        self._listener.close()
        self._memory = None
        path = self.address.partition(":")[2]
        if path.startswith("/"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                os.rmdir(os.path.dirname(path))

    def _accept(self, deadline: Deadline) -> None:
        while len(self._receivers) < self._num_receivers:
            self._listener.settimeout(max(deadline.left, _SHORTEST_S))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                missing = set(range(self._num_receivers)) - self._receivers.keys()
                raise ReceiversLostError("the first tensor", silent=tuple(sorted(missing))) from None
            try:
                connection.settimeout(_HELLO_S)
                token, rank = _HELLO.unpack(_read(connection, _HELLO.size))
            except (EOFError, OSError):
                token, rank = b"", -1
            if secrets.compare_digest(token, self._token):
                self._receivers[rank] = connection
            else:
                connection.close()  # whoever it was; a receiver that is missing is found by the deadline

    def _make_room(self, num_bytes: int) -> Tensor:
        """Memory of at least `num_bytes`, which every receiver knows."""
        if self._memory is None or self._memory.numel() < num_bytes:
            with _anonymous_file(num_bytes) as descriptor:
                self._memory = _map(descriptor, num_bytes)
                for rank, connection in self._receivers.items():
                    try:
                        socket.send_fds(connection, [_NUMBER.pack(-num_bytes)], [descriptor])
                    except OSError:
                        raise ReceiversLostError("the first tensor", gone=(rank,)) from None
        return self._memory

    def _tell(self, number: int, bucket: Bucket) -> None:
        for rank, connection in self._receivers.items():
            try:
                connection.sendall(_NUMBER.pack(number))
            except OSError:
                raise ReceiversLostError(bucket.first, gone=(rank,)) from None

    def _wait_taken(self, number: int, buckets: list[Bucket], deadline: Deadline) -> None:
        with selectors.DefaultSelector() as waiting:
            for rank, connection in self._receivers.items():
                waiting.register(connection, selectors.EVENT_READ, rank)
            while waiting.get_map():
                ready = waiting.select(deadline.left)
                if not ready:
                    silent = tuple(sorted(key.data for key in waiting.get_map().values()))
                    raise ReceiversLostError(buckets[number].first, silent=silent)
                for key, _ in ready:
                    self._take_note(self._receivers[key.data], key.data, number, buckets)
                    waiting.unregister(key.fileobj)

    def _take_note(self, connection: socket.socket, rank: int, number: int, buckets: list[Bucket]) -> None:
        """Read that a receiver has taken bucket `number`."""
        connection.settimeout(_HELLO_S)
        try:
            (taken,) = _NUMBER.unpack(_read(connection, _NUMBER.size))
        except (EOFError, OSError):
            raise ReceiversLostError(buckets[number].first, gone=(rank,)) from None
        if taken != number:
            raise WeightSyncError(f"receiver {rank} took bucket {taken} where {number} was due")


class ShmReceiver(ReceivingEnd):
    """Maps the sender's memory and reads slots in turn."""

    def __init__(self, address: str, rank: int, bucket_bytes: int, deadline: Deadline) -> None:
        self.address = address
        self._bucket_bytes = min(bucket_bytes, PIPELINE_BYTES)
        self._memory: Tensor | None = None
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        token, _, where = address.partition(":")
        try:
            self._sender.settimeout(max(deadline.left, _SHORTEST_S))
            self._sender.connect(where if where.startswith("/") else f"\0{where}")
            self._sender.sendall(_HELLO.pack(bytes.fromhex(token), rank))
        except OSError as error:
            self._sender.close()
            raise SenderLostError(f"the sender's shared memory cannot be reached: {error}") from error

    @override
    def receive(self, manifest: WeightManifest, deadline: Deadline) -> Iterator[tuple[str, Tensor]]:
        buckets = plan_buckets(manifest, self._bucket_bytes)
        slots = plan_slots(buckets)
        for number, bucket in enumerate(buckets):
            memory = self._wait_filled(number, deadline)[slots[number % len(slots)]]
            for piece in bucket.pieces:
                yield piece.entry.name, view(memory, piece)
            try:
                self._sender.sendall(_NUMBER.pack(number))
            except OSError as error:
                raise SenderLostError(f"the sender hung up after bucket {number}") from error

    @override
    def close(self) -> None:
        self._sender.close()
        self._memory = None

    def _wait_filled(self, number: int, deadline: Deadline) -> Tensor:
        """The memory, once bucket `number` lies in its slot."""
        while True:
            self._sender.settimeout(max(deadline.left, _SHORTEST_S))
            try:
                message, descriptors, _, _ = socket.recv_fds(self._sender, _NUMBER.size, 1)
            except TimeoutError:
                raise SenderLostError(f"the sender had not filled bucket {number} when the deadline passed") from None
            except OSError as error:
                raise SenderLostError(f"the sender hung up before bucket {number}: {error}") from error
            if not message:
                raise SenderLostError(f"the sender hung up before bucket {number}")
            (filled,) = _NUMBER.unpack(message)
            if descriptors:
                try:
                    self._memory = _map(descriptors[0], -filled)
                finally:
                    os.close(descriptors[0])
            elif filled == number and self._memory is not None:
                return self._memory
            else:
                raise WeightSyncError(f"the sender filled bucket {filled} where {number} was due")


def plan_slots(buckets: list[Bucket]) -> list[slice]:
    """Where in the memory slots lie, one after the other; bucket b uses slot b modulo their number.

    Each is as large as its largest bucket, so that one large tensor makes one slot large and not all of them.
    """
    largest = max((bucket.num_bytes for bucket in buckets), default=0)
    slots: list[slice] = []
    for count in NUM_SLOTS:
        slots, end = [], 0
        for at in range(count):
            num_bytes = max((bucket.num_bytes for bucket in buckets[at::count]), default=0)
            begin, end = end, end + -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
            slots.append(slice(begin, end))
        if end <= 2 * largest + SPARE_BYTES:
            break
    return slots


def _listen() -> tuple[socket.socket, str]:
    """A listening Unix socket and its address: without a name in the file system where the system has such."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"roll-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        if sys.platform == "linux":
            where = name
            listener.bind(f"\0{where}")
        else:
            where = os.path.join(tempfile.mkdtemp(prefix=f"{name}-"), "weights")
            listener.bind(where)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener, where


def _map(descriptor: int, num_bytes: int) -> Tensor:
    """The memory as a flat uint8 tensor. The mapping lives as long as the tensor, or one on it, does."""
    import torch

    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


@contextlib.contextmanager
def _anonymous_file(num_bytes: int) -> Iterator[int]:
    """A file descriptor of shared memory that has no name, or whose name is already gone."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(f"roll-{os.getpid()}-weights")
    else:
        with tempfile.TemporaryFile(prefix=f"roll-{os.getpid()}-") as file:
            descriptor = os.dup(file.fileno())
    try:
        os.truncate(descriptor, num_bytes)
        yield descriptor
    finally:
        os.close(descriptor)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        more = connection.recv(num_bytes - len(found))
        if not more:
            raise EOFError
        found += more
    return found
