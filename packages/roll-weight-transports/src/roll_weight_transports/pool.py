"""Shared base of `shm` and `cuda_ipc`: a buffer that a sender shares with receivers on its host.

    sender     fill 0 | fill 1 | fill 2 | ... | no room: wait until all have read 0 | fill 8 | ...
    receivers         | read 0 | read 1 | ...

A bucket is placed in the first gap that is large enough. If receivers keep up, the same memory is reused; while they
read a large tensor, the sender fills the rest of the buffer.

A Unix socket carries the handle of the buffer and the messages "filled" and "read". Each side detects the loss of the
other by the closed socket.
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
from roll_core.spec.transport import (
    ReceiverEndpoint,
    ReceiversLostError,
    SenderEndpoint,
    SenderLostError,
    WeightTransport,
)
from roll_weight_transports.bucket_plan import ALIGNMENT, fill, plan_buckets, require_exhausted, views
from roll_weight_transports.digests import use_compiled_digests

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.transport import Deadline, ReceiverSetup, SenderSetup
    from roll_core.types import TensorEntry, WeightManifest
    from roll_weight_transports.bucket_plan import Bucket

_MIN_TIMEOUT_S = 1e-3
"""A socket's timeout of 0 would make it non-blocking."""
_HELLO_S = 1.0
"""Time in which a connected receiver must send its token and rank."""
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"!{_TOKEN_BYTES}si")
_CANCEL = -1
"""Sent instead of a rank: the publish has failed, and missing receivers will not connect."""
_FILLED = struct.Struct("!qq")
"""Message: number of a bucket and its offset. For a new buffer: its negated size and the length of the handle that
follows."""
_READ = b"."
"""The receiver has read its oldest unread bucket."""
_RECV_BYTES = 4096
"""More than the number of buckets in flight."""


class SharedMemory(ABC):
    """How a transport allocates, shares and opens its buffer, a flat uint8 tensor."""

    bucket_bytes: int
    """Upper bound of a bucket, unless a tensor is larger."""
    keeps_buffer: ClassVar[bool]
    """Keep the buffer from publish to publish."""

    @abstractmethod
    def buffer_bytes(self, largest: int) -> int:
        """Size of the buffer for a largest bucket of `largest` bytes, a multiple of `ALIGNMENT`."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate the sender's buffer. Raises `WeightSyncError`."""

    @abstractmethod
    def share(self, buffer: Tensor) -> tuple[bytes, Sequence[int]]:
        """Handle with which one receiver opens the buffer: bytes, and file descriptors valid until `release`."""

    @abstractmethod
    def open(self, num_bytes: int, handle: bytes, descriptors: Sequence[int]) -> Tensor:
        """Open the sender's buffer. The caller closes the descriptors. Raises `WeightSyncError`."""

    def synchronize(self) -> None:
        """Wait until this process's reads and writes are done, for devices that work asynchronously."""
        return

    @abstractmethod
    def release(self) -> None:
        """Free what `allocate` allocated, after the sender dropped the tensor. Idempotent."""


class PooledTransport(WeightTransport):
    """Base of `shm` and `cuda_ipc`."""

    @override
    def cancel_transfer(self, address: str, options: Mapping[str, str]) -> None:
        """End the wait of a sender for receivers that have not connected. Connected endpoints detect closed sockets.

        A driver on another host cannot reach the sender, which then waits until its deadline.
        """
        with contextlib.suppress(OSError), _connect(address, _HELLO_S, _CANCEL):
            pass


class PooledSender(SenderEndpoint):
    """Owns the buffer, accepts receivers, and fills the buffer."""

    def __init__(self, setup: SenderSetup, memory: SharedMemory) -> None:
        use_compiled_digests()
        self._memory = memory
        self._bucket_bytes = min(setup.bucket_bytes, memory.bucket_bytes)
        self._expected = frozenset(setup.receivers)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener, where = _listen()
        self.address = f"{self._token.hex()}:{where}"
        self._receivers: dict[int, socket.socket] = {}
        self._buffer: Tensor | None = None

    @override
    def send(
        self, manifest: WeightManifest, exported: Iterator[tuple[str, Tensor]], deadline: Deadline
    ) -> list[TensorEntry]:
        buckets = plan_buckets(manifest, self._bucket_bytes)
        self._accept(deadline)
        largest = max((bucket.num_bytes for bucket in buckets), default=0)
        regions = Regions(self._memory.buffer_bytes(aligned(largest)))
        buffer = self._share(regions.num_bytes)
        sent: list[TensorEntry] = []
        with contextlib.closing(_ReadProgress(self._receivers, buckets)) as read:
            for number, bucket in enumerate(buckets):
                read.poll(0)
                while (offset := regions.take(bucket.num_bytes, read.by_all)) is None:
                    read.wait(deadline)
                sent += fill(buffer[offset : offset + bucket.num_bytes], bucket, exported)
                self._memory.synchronize()
                for rank, connection in self._receivers.items():
                    _send_to(rank, connection, _FILLED.pack(number, offset), bucket.first)
            require_exhausted(exported)
            while read.by_all < len(buckets):
                read.wait(deadline)
        if not self._memory.keeps_buffer:
            self._release()
        return sent

    @override
    def close(self) -> None:
        for connection in self._receivers.values():
            connection.close()
        self._receivers.clear()
        self._listener.close()
        self._release()
        path = self.address.partition(":")[2]
        if path.startswith("/"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                os.rmdir(os.path.dirname(path))

    def _release(self) -> None:
        _drop(self._buffer)
        self._buffer = None
        self._memory.release()

    def _accept(self, deadline: Deadline) -> None:
        while missing := self._expected - self._receivers.keys():
            self._listener.settimeout(max(deadline.left, _MIN_TIMEOUT_S))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise ReceiversLostError("the first tensor", timed_out=tuple(sorted(missing))) from None
            try:
                connection.settimeout(_HELLO_S)
                token, rank = _HELLO.unpack(_recv_exactly(connection, _HELLO.size))
            except (EOFError, OSError):
                token, rank = b"", -1
            if not secrets.compare_digest(token, self._token):
                connection.close()  # not one of our receivers; a missing receiver is found by the deadline
            elif rank == _CANCEL:
                connection.close()
                raise ReceiversLostError("the first tensor", disconnected=tuple(sorted(missing)))
            else:
                self._receivers[rank] = connection

    def _share(self, num_bytes: int) -> Tensor:
        """Reuse or allocate a buffer of at least `num_bytes` that every receiver has opened."""
        if self._buffer is None or self._buffer.numel() < num_bytes:
            self._release()
            self._buffer = self._memory.allocate(num_bytes)
            for rank, connection in self._receivers.items():
                handle, descriptors = self._memory.share(self._buffer)
                _send_to(rank, connection, _FILLED.pack(-num_bytes, len(handle)), "the first tensor", descriptors)
                _send_to(rank, connection, handle, "the first tensor")
        return self._buffer


def _send_to(
    rank: int, connection: socket.socket, message: bytes, tensor_name: str, descriptors: Sequence[int] = ()
) -> None:
    """Send a message to a receiver. Raises `ReceiversLostError` with `tensor_name` if it closed its connection."""
    try:
        if descriptors:
            socket.send_fds(connection, [message], descriptors)
        else:
            connection.sendall(message)
    except OSError:
        raise ReceiversLostError(tensor_name, disconnected=(rank,)) from None


class _ReadProgress:
    """Number of buckets of a publish that each receiver has read."""

    def __init__(self, receivers: Mapping[int, socket.socket], buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._read = dict.fromkeys(receivers, 0)
        self._selector = selectors.DefaultSelector()
        for rank, connection in receivers.items() if buckets else ():
            self._selector.register(connection, selectors.EVENT_READ, rank)

    @property
    def by_all(self) -> int:
        """Buckets that every receiver has read."""
        return min(self._read.values())

    def wait(self, deadline: Deadline) -> None:
        """Wait until a receiver has read another bucket."""
        if not self.poll(deadline.left):
            oldest = self.by_all
            timed_out = tuple(sorted(rank for rank, number in self._read.items() if number == oldest))
            raise ReceiversLostError(self._buckets[oldest].first, timed_out=timed_out)

    def poll(self, timeout_s: float) -> bool:
        """Process messages of receivers; True if there were any."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            self._process(key.fileobj, key.data)  # type: ignore[arg-type]
        return bool(ready)

    def close(self) -> None:
        self._selector.close()

    def _process(self, connection: socket.socket, rank: int) -> None:
        try:
            messages = connection.recv(_RECV_BYTES)
        except OSError:
            messages = b""
        if not messages:
            raise ReceiversLostError(self._buckets[self._read[rank]].first, disconnected=(rank,))
        self._read[rank] += len(messages)
        if self._read[rank] >= len(self._buckets):
            self._selector.unregister(connection)  # it may close the connection now


class PooledReceiver(ReceiverEndpoint):
    """Opens the sender's buffer and reads buckets in turn."""

    def __init__(self, setup: ReceiverSetup, memory: SharedMemory) -> None:
        self.address = setup.address
        self._memory = memory
        self._bucket_bytes = min(setup.bucket_bytes, memory.bucket_bytes)
        self._buffer: Tensor | None = None
        try:
            self._sender = _connect(setup.address, max(setup.deadline.left, _MIN_TIMEOUT_S), setup.rank)
        except OSError as error:
            raise SenderLostError(f"cannot connect to the sender: {error}") from error

    @override
    def receive(self, manifest: WeightManifest, deadline: Deadline) -> Iterator[tuple[str, Tensor]]:
        for number, bucket in enumerate(plan_buckets(manifest, self._bucket_bytes)):
            buffer, offset = self._wait_filled(number, deadline)
            yield from views(buffer[offset : offset + bucket.num_bytes], bucket)
            self._memory.synchronize()
            try:
                self._sender.sendall(_READ)
            except OSError as error:
                raise SenderLostError(f"the sender closed the connection after bucket {number}") from error
        if not self._memory.keeps_buffer:
            self._release()

    @override
    def close(self) -> None:
        self._sender.close()
        self._release()

    def _release(self) -> None:
        _drop(self._buffer)
        self._buffer = None

    def _wait_filled(self, number: int, deadline: Deadline) -> tuple[Tensor, int]:
        """Block until bucket `number` is filled. Returns the buffer and the bucket's offset in bytes."""
        while True:
            try:
                self._sender.settimeout(max(deadline.left, _MIN_TIMEOUT_S))
                message, descriptors, _, _ = socket.recv_fds(self._sender, _FILLED.size, 1)
                filled, offset = _FILLED.unpack(message) if message else (0, 0)
                handle = _recv_exactly(self._sender, offset) if filled < 0 else b""
            except TimeoutError:
                raise SenderLostError(f"the sender did not fill bucket {number} before the deadline") from None
            except (OSError, EOFError) as error:
                raise SenderLostError(f"the sender closed the connection before bucket {number}: {error}") from error
            if not message:
                raise SenderLostError(f"the sender closed the connection before bucket {number}")
            if filled < 0:
                self._release()
                try:
                    self._buffer = self._memory.open(-filled, handle, descriptors)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
            elif filled == number and self._buffer is not None:
                return self._buffer, offset
            else:
                raise WeightSyncError(f"the sender filled bucket {filled}, expected {number}")


class Regions:
    """Regions of a buffer that hold unread buckets."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._used: deque[tuple[int, int]] = deque()
        """Begin and end of each used region, the oldest first."""
        self._num_freed = 0

    def take(self, num_bytes: int, num_free: int) -> int | None:
        """Offset of the first gap of `num_bytes`, or None if there is none. Frees the first `num_free` regions that
        were ever taken."""
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
    """`num_bytes` rounded up to a multiple of `ALIGNMENT`, at least one."""
    return -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT


def _drop(buffer: Tensor | None) -> None:
    """Drop the memory of a buffer, even while a traceback refers to the tensor."""
    if buffer is not None:
        buffer.set_()  # type: ignore[call-overload]


def _listen() -> tuple[socket.socket, str]:
    """A listening Unix socket and its address; on Linux without a name in the file system."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if sys.platform == "linux":
            where = f"roll-{os.getpid()}-{secrets.token_hex(8)}"
            listener.bind(f"\0{where}")
        else:  # addresses have about 100 characters, most of which the temporary folder may need
            where = os.path.join(tempfile.mkdtemp(prefix="roll-"), "weights")
            listener.bind(where)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener, where


def _connect(address: str, timeout_s: float, rank: int) -> socket.socket:
    """Connect to the sender at `address` as receiver `rank`. Raises `OSError`."""
    token, _, where = address.partition(":")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(where if where.startswith("/") else f"\0{where}")
        connection.sendall(_HELLO.pack(bytes.fromhex(token), rank))
    except OSError:
        connection.close()
        raise
    return connection


def _recv_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        more = connection.recv(num_bytes - len(received))
        if not more:
            raise EOFError
        received += more
    return received
