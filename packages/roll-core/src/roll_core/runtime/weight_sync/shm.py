"""The transport `shm`: anonymous shared memory, into which buckets are copied while receivers read those before.

    sender     fill 0 | fill 1 | fill 2 | ... | no room: wait until all have taken 0 | fill 8 | ...
    receivers         | read 0 | read 1 | ...

A bucket lies in the first gap that is large enough: where receivers keep up the same few MiB are used again and again,
which stay in the processor's cache, and a large tensor that takes long to be read leaves the sender room to go on.

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
from collections import deque
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.errors import WeightSyncError
from roll_core.runtime.weight_sync.buckets import ALIGNMENT, fill, nothing_left, plan_buckets, view
from roll_core.runtime.weight_sync.channel import ReceiversLostError, ReceivingEnd, SenderLostError, SendingEnd

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from roll_core.runtime.weight_sync.buckets import Bucket
    from roll_core.runtime.weight_sync.plan import Deadline
    from roll_core.types import TensorEntry, WeightManifest

PIPELINE_BYTES = 2 << 20
"""Buckets are no larger than this unless a tensor is."""
ROOM_BYTES = 16 << 20
"""Of the memory, or twice the largest bucket: what is under way fits into a last-level cache."""
_SHORTEST_S = 1e-3
"""A socket's timeout of 0 would mean something else."""
_HELLO_S = 1.0
"""Receivers say who they are as soon as they are connected."""
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"!{_TOKEN_BYTES}si")
_FILLED = struct.Struct("!qq")
"""Number of a bucket and where it begins; or, beside the memory's descriptor, minus its size and 0."""
_TAKEN = b"."
"""Of the oldest bucket that was not."""
_NOTES = 4096
"""Bytes that are read at a time; more than there are buckets under way."""


class ShmSender(SendingEnd):
    """Owns the memory, listens, and fills it."""

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
        room = Room(buckets)
        memory = self._make_room(room.num_bytes)
        sent: list[TensorEntry] = []
        with contextlib.closing(_Takings(self._receivers, buckets)) as taken:
            for number, bucket in enumerate(buckets):
                taken.look(0)
                while (at := room.take(bucket.num_bytes, taken.by_all)) is None:
                    taken.wait(deadline)
                sent += fill(memory[at : at + bucket.num_bytes], bucket, exported)
                self._tell(number, at, bucket)
            nothing_left(exported)
            while taken.by_all < len(buckets):
                taken.wait(deadline)
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
                        socket.send_fds(connection, [_FILLED.pack(-num_bytes, 0)], [descriptor])
                    except OSError:
                        raise ReceiversLostError("the first tensor", gone=(rank,)) from None
        return self._memory

    def _tell(self, number: int, at: int, bucket: Bucket) -> None:
        for rank, connection in self._receivers.items():
            try:
                connection.sendall(_FILLED.pack(number, at))
            except OSError:
                raise ReceiversLostError(bucket.first, gone=(rank,)) from None


class _Takings:
    """How many buckets of a publish each receiver has taken."""

    def __init__(self, receivers: Mapping[int, socket.socket], buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._taken = dict.fromkeys(receivers, 0)
        self._selector = selectors.DefaultSelector()
        for rank, connection in receivers.items() if buckets else ():
            self._selector.register(connection, selectors.EVENT_READ, rank)

    @property
    def by_all(self) -> int:
        """That every receiver has taken."""
        return min(self._taken.values())

    def wait(self, deadline: Deadline) -> None:
        """Until somebody has taken another."""
        if not self.look(deadline.left):
            oldest = self.by_all
            silent = tuple(sorted(rank for rank, number in self._taken.items() if number == oldest))
            raise ReceiversLostError(self._buckets[oldest].first, silent=silent)

    def look(self, timeout_s: float) -> bool:
        """Read what receivers have said; whether they have said anything."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            self._take_note(key.fileobj, key.data)  # type: ignore[arg-type]
        return bool(ready)

    def close(self) -> None:
        self._selector.close()

    def _take_note(self, connection: socket.socket, rank: int) -> None:
        try:
            notes = connection.recv(_NOTES)
        except OSError:
            notes = b""
        if not notes:
            raise ReceiversLostError(self._buckets[self._taken[rank]].first, gone=(rank,))
        self._taken[rank] += len(notes)
        if self._taken[rank] >= len(self._buckets):
            self._selector.unregister(connection)  # it may hang up now


class ShmReceiver(ReceivingEnd):
    """Maps the sender's memory and reads buckets in turn."""

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
        for number, bucket in enumerate(plan_buckets(manifest, self._bucket_bytes)):
            memory = self._wait_filled(number, bucket, deadline)
            for piece in bucket.pieces:
                yield piece.entry.name, view(memory, piece)
            try:
                self._sender.sendall(_TAKEN)
            except OSError as error:
                raise SenderLostError(f"the sender hung up after bucket {number}") from error

    @override
    def close(self) -> None:
        self._sender.close()
        self._memory = None

    def _wait_filled(self, number: int, bucket: Bucket, deadline: Deadline) -> Tensor:
        """The memory of bucket `number`, once it is there."""
        while True:
            self._sender.settimeout(max(deadline.left, _SHORTEST_S))
            try:
                message, descriptors, _, _ = socket.recv_fds(self._sender, _FILLED.size, 1)
            except TimeoutError:
                raise SenderLostError(f"the sender had not filled bucket {number} when the deadline passed") from None
            except OSError as error:
                raise SenderLostError(f"the sender hung up before bucket {number}: {error}") from error
            if not message:
                raise SenderLostError(f"the sender hung up before bucket {number}")
            filled, at = _FILLED.unpack(message)
            if descriptors:
                try:
                    self._memory = _map(descriptors[0], -filled)
                finally:
                    os.close(descriptors[0])
            elif filled == number and self._memory is not None:
                return self._memory[at : at + bucket.num_bytes]
            else:
                raise WeightSyncError(f"the sender filled bucket {filled} where {number} was due")


class Room:
    """Where in the memory buckets lie."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        largest = max((bucket.num_bytes for bucket in buckets), default=0)
        self.num_bytes = max(ROOM_BYTES, 2 * _aligned(largest))
        self._used: deque[tuple[int, int]] = deque()
        """Begin and end of each bucket that is not free, the oldest first."""
        self._num_freed = 0

    def take(self, num_bytes: int, num_free: int) -> int | None:
        """Where the first gap of so many bytes begins; None while there is none. All that was taken before the
        `num_free`-th time, counted from 0, is free again."""
        while self._num_freed < num_free:
            self._used.popleft()
            self._num_freed += 1
        begin = 0
        for used_begin, used_end in sorted(self._used):
            if begin + num_bytes <= used_begin:
                break
            begin = used_end
        if begin + num_bytes > self.num_bytes:
            return None
        self._used.append((begin, begin + _aligned(num_bytes)))
        return begin


def _aligned(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT


def _listen() -> tuple[socket.socket, str]:
    """A listening Unix socket and its address: without a name in the file system where the system has such."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if sys.platform == "linux":
            where = f"roll-{os.getpid()}-{secrets.token_hex(8)}"
            listener.bind(f"\0{where}")
        else:  # addresses have about 100 characters, most of which the folder for temporary files may take
            where = os.path.join(tempfile.mkdtemp(prefix="roll-"), "weights")
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
