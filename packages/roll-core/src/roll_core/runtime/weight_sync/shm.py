"""The transport `shm`: two slots of anonymous shared memory, filled in turn while receivers read the other.

    sender     fill slot 0 | fill slot 1 | wait for all | fill slot 0 ...
    receivers              | read slot 0 | read slot 1  | ...

The memory has no name. Receivers get its file descriptor over a Unix socket, which also carries "filled" and "taken",
and whose end tells each side that the other is gone. So nothing can stay in /dev/shm, whoever is killed when.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
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
"""Buckets are no larger than this unless a tensor is: two of them and what they are copied from fit into a last-level
cache, and the pipeline is filled soon."""
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
        self._slot_bytes = 0
        self._slots: list[Tensor] = []

    @override
    def send(
        self, manifest: WeightManifest, exported: Iterator[tuple[str, Tensor]], deadline: Deadline
    ) -> list[TensorEntry]:
        buckets = plan_buckets(manifest, self._bucket_bytes)
        self._accept(deadline)
        self._make_room(max((bucket.num_bytes for bucket in buckets), default=0))
        sent: list[TensorEntry] = []
        for number, bucket in enumerate(buckets):
            if number >= 2:
                self._wait_taken(number - 2, buckets, deadline)
            sent += fill(self._slots[number % 2], bucket, exported)
            self._tell(number, bucket)
        nothing_left(exported)
        for number in range(max(0, len(buckets) - 2), len(buckets)):
            self._wait_taken(number, buckets, deadline)
        return sent

    @override
    def close(self) -> None:
        for connection in self._receivers.values():
            connection.close()
        self._receivers.clear()
        self._listener.close()
        self._slots.clear()
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

    def _make_room(self, num_bytes: int) -> None:
        """Have slots of at least `num_bytes`, and let every receiver know them."""
        if self._slots and num_bytes <= self._slot_bytes:
            return
        self._slot_bytes = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        with _anonymous_file(2 * self._slot_bytes) as descriptor:
            self._slots = _map_slots(descriptor, self._slot_bytes)
            for rank, connection in self._receivers.items():
                try:
                    socket.send_fds(connection, [_NUMBER.pack(-self._slot_bytes)], [descriptor])
                except OSError:
                    raise ReceiversLostError("the first tensor", gone=(rank,)) from None

    def _tell(self, number: int, bucket: Bucket) -> None:
        for rank, connection in self._receivers.items():
            try:
                connection.sendall(_NUMBER.pack(number))
            except OSError:
                raise ReceiversLostError(bucket.first, gone=(rank,)) from None

    def _wait_taken(self, number: int, buckets: list[Bucket], deadline: Deadline) -> None:
        waiting = {connection: rank for rank, connection in self._receivers.items()}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], deadline.left)
            if not ready:
                raise ReceiversLostError(buckets[number].first, silent=tuple(sorted(waiting.values())))
            for connection in ready:
                connection.settimeout(max(deadline.left, _SHORTEST_S))
                try:
                    (taken,) = _NUMBER.unpack(_read(connection, _NUMBER.size))
                except (EOFError, OSError):
                    raise ReceiversLostError(buckets[number].first, gone=(waiting[connection],)) from None
                if taken != number:
                    raise WeightSyncError(f"receiver {waiting[connection]} took bucket {taken} where {number} was due")
                del waiting[connection]


class ShmReceiver(ReceivingEnd):
    """Maps the sender's memory and reads slots in turn."""

    def __init__(self, address: str, rank: int, bucket_bytes: int, deadline: Deadline) -> None:
        self.address = address
        self._bucket_bytes = min(bucket_bytes, PIPELINE_BYTES)
        self._slots: list[Tensor] = []
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
        for number, bucket in enumerate(plan_buckets(manifest, self._bucket_bytes)):
            self._wait_filled(number, deadline)
            for piece in bucket.pieces:
                yield piece.entry.name, view(self._slots[number % 2], piece)
            try:
                self._sender.sendall(_NUMBER.pack(number))
            except OSError as error:
                raise SenderLostError(f"the sender hung up after bucket {number}") from error

    @override
    def close(self) -> None:
        self._sender.close()
        self._slots.clear()

    def _wait_filled(self, number: int, deadline: Deadline) -> None:
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
                    self._slots = _map_slots(descriptors[0], -filled)
                finally:
                    os.close(descriptors[0])
            elif filled == number:
                return
            else:
                raise WeightSyncError(f"the sender filled bucket {filled} where {number} was due")


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


def _map_slots(descriptor: int, slot_bytes: int) -> list[Tensor]:
    """Both slots as flat uint8 tensors. The mapping lives as long as a tensor on it does."""
    import torch

    memory = torch.frombuffer(mmap.mmap(descriptor, 2 * slot_bytes), dtype=torch.uint8)
    return [memory[:slot_bytes], memory[slot_bytes:]]


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
