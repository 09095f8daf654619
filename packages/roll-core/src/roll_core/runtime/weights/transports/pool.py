"""Memory that a sender lends to receivers on its host: buckets are copied into it while those before are read.

    sender     fill 0 | fill 1 | fill 2 | ... | no room: wait until all have taken 0 | fill 8 | ...
    receivers         | read 0 | read 1 | ...

A bucket lies in the first gap that is large enough: where receivers keep up the same memory is used again and again,
and a large tensor that takes long to be read leaves the sender room to go on.

Receivers learn of the memory over a Unix socket, which also carries "filled" and "taken", and whose end tells each side
that the other is gone. What kind of memory it is, `shm` and `cuda_ipc` know.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import sys
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from roll_core.errors import WeightSyncError
from roll_core.spec.buckets import ALIGNMENT, fill, nothing_left, plan_buckets, view
from roll_core.spec.transport import ReceiversLostError, ReceivingEnd, SenderLostError, SendingEnd

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from roll_core.runtime.weights.plan import Deadline
    from roll_core.spec.buckets import Bucket
    from roll_core.types import TensorEntry, WeightManifest

_SHORTEST_S = 1e-3
"""A socket's timeout of 0 would mean something else."""
_HELLO_S = 1.0
"""Receivers say who they are as soon as they are connected."""
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"!{_TOKEN_BYTES}si")
_FILLED = struct.Struct("!qq")
"""Number of a bucket and where it begins; or, of new memory, minus its size and the length of its handle, which
follows."""
_TAKEN = b"."
"""Of the oldest bucket that was not."""
_NOTES = 4096
"""Bytes that are read at a time; more than there are buckets under way."""


class Memory(ABC):
    """Memory in the reach of both ends."""

    tensor: Tensor
    """Flat uint8."""

    def settle(self) -> None:
        """Wait until this process has written, or read, what it began to: devices work beside the host."""
        return

    @abstractmethod
    def close(self) -> None:
        """Let it go. Called once or several times."""


class LentMemory(Memory):
    """The sender's."""

    @abstractmethod
    def handle(self) -> tuple[bytes, Sequence[int]]:
        """What one receiver opens it by: bytes, and file descriptors that are good until it is closed."""


class PooledSender(SendingEnd):
    """Owns the memory, listens, and fills it."""

    keeps_memory: ClassVar[bool]
    """From publish to publish, so that it stays warm."""

    def __init__(self, receivers: Sequence[int], bucket_bytes: int) -> None:
        """`receivers` are the ranks that will come."""
        self._bucket_bytes = bucket_bytes
        self._expected = frozenset(receivers)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener, where = _listen()
        self.address = f"{self._token.hex()}:{where}"
        self._receivers: dict[int, socket.socket] = {}
        self._memory: LentMemory | None = None

    @abstractmethod
    def room_bytes(self, largest: int) -> int:
        """Size of the memory where the largest bucket has so many bytes, which are a multiple of `ALIGNMENT`."""

    @abstractmethod
    def lend(self, num_bytes: int) -> LentMemory:
        """New memory. Raises `WeightSyncError`."""

    @override
    def send(
        self, manifest: WeightManifest, exported: Iterator[tuple[str, Tensor]], deadline: Deadline
    ) -> list[TensorEntry]:
        buckets = plan_buckets(manifest, self._bucket_bytes)
        self._accept(deadline)
        room = Room(self.room_bytes(aligned(max((bucket.num_bytes for bucket in buckets), default=0))))
        memory = self._make_room(room.num_bytes)
        sent: list[TensorEntry] = []
        with contextlib.closing(_Takings(self._receivers, buckets)) as taken:
            for number, bucket in enumerate(buckets):
                taken.look(0)
                while (at := room.take(bucket.num_bytes, taken.by_all)) is None:
                    taken.wait(deadline)
                sent += fill(memory.tensor[at : at + bucket.num_bytes], bucket, exported)
                memory.settle()
                self._tell(number, at, bucket)
            nothing_left(exported)
            while taken.by_all < len(buckets):
                taken.wait(deadline)
        if not self.keeps_memory:
            self._let_go()
        return sent

    @override
    def close(self) -> None:
        for connection in self._receivers.values():
            connection.close()
        self._receivers.clear()
        self._listener.close()
        self._let_go()
        path = self.address.partition(":")[2]
        if path.startswith("/"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                os.rmdir(os.path.dirname(path))

    def _let_go(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _accept(self, deadline: Deadline) -> None:
        while missing := self._expected - self._receivers.keys():
            self._listener.settimeout(max(deadline.left, _SHORTEST_S))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
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

    def _make_room(self, num_bytes: int) -> LentMemory:
        """Memory of at least `num_bytes`, which every receiver knows."""
        if self._memory is None or self._memory.tensor.numel() < num_bytes:
            self._let_go()
            self._memory = self.lend(num_bytes)
            for rank, connection in self._receivers.items():
                handle, descriptors = self._memory.handle()
                try:
                    socket.send_fds(connection, [_FILLED.pack(-num_bytes, len(handle))], descriptors)
                    connection.sendall(handle)
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


class PooledReceiver(ReceivingEnd):
    """Opens the sender's memory and reads buckets in turn."""

    keeps_memory: ClassVar[bool]
    """See `PooledSender`."""

    def __init__(self, address: str, rank: int, bucket_bytes: int, deadline: Deadline) -> None:
        self.address = address
        self._bucket_bytes = bucket_bytes
        self._memory: Memory | None = None
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        token, _, where = address.partition(":")
        try:
            self._sender.settimeout(max(deadline.left, _SHORTEST_S))
            self._sender.connect(where if where.startswith("/") else f"\0{where}")
            self._sender.sendall(_HELLO.pack(bytes.fromhex(token), rank))
        except OSError as error:
            self._sender.close()
            raise SenderLostError(f"the sender's memory cannot be reached: {error}") from error

    @abstractmethod
    def open(self, num_bytes: int, handle: bytes, descriptors: Sequence[int]) -> Memory:
        """The sender's memory. Descriptors are closed afterwards. Raises `WeightSyncError`."""

    @override
    def receive(self, manifest: WeightManifest, deadline: Deadline) -> Iterator[tuple[str, Tensor]]:
        for number, bucket in enumerate(plan_buckets(manifest, self._bucket_bytes)):
            memory, at = self._wait_filled(number, deadline)
            for piece in bucket.pieces:
                yield piece.entry.name, view(memory.tensor[at : at + bucket.num_bytes], piece)
            memory.settle()
            try:
                self._sender.sendall(_TAKEN)
            except OSError as error:
                raise SenderLostError(f"the sender hung up after bucket {number}") from error
        if not self.keeps_memory:
            self._let_go()

    @override
    def close(self) -> None:
        self._sender.close()
        self._let_go()

    def _let_go(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _wait_filled(self, number: int, deadline: Deadline) -> tuple[Memory, int]:
        """The memory and where in it bucket `number` begins, once it is there."""
        while True:
            self._sender.settimeout(max(deadline.left, _SHORTEST_S))
            try:
                message, descriptors, _, _ = socket.recv_fds(self._sender, _FILLED.size, 1)
                filled, at = _FILLED.unpack(message) if message else (0, 0)
                handle = _read(self._sender, at) if filled < 0 else b""
            except TimeoutError:
                raise SenderLostError(f"the sender had not filled bucket {number} when the deadline passed") from None
            except (OSError, EOFError) as error:
                raise SenderLostError(f"the sender hung up before bucket {number}: {error}") from error
            if not message:
                raise SenderLostError(f"the sender hung up before bucket {number}")
            if filled < 0:
                self._let_go()
                try:
                    self._memory = self.open(-filled, handle, descriptors)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
            elif filled == number and self._memory is not None:
                return self._memory, at
            else:
                raise WeightSyncError(f"the sender filled bucket {filled} where {number} was due")


class Room:
    """Where in the memory buckets lie."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
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
        self._used.append((begin, begin + aligned(num_bytes)))
        return begin


def aligned(num_bytes: int) -> int:
    """Rounded up to where another bucket can begin."""
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


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        more = connection.recv(num_bytes - len(found))
        if not more:
            raise EOFError
        found += more
    return found
