"""Weight transport `acme`: one TCP connection from the sender to each receiver.

receiver    token, rank          read bucket, "."    read bucket, "."  ...
sender                  bucket              bucket                     ...   wait until all have read all
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
from typing import TYPE_CHECKING

from roll_core.spec.transport import (
    Deadline,
    ReceiverEndpoint,
    ReceiverSetup,
    ReceiversLostError,
    RoleFacts,
    Route,
    SenderEndpoint,
    SenderLostError,
    SenderSetup,
    WeightTransport,
)
from roll_weight_transports.bucket_plan import fill, plan_buckets, require_exhausted, views

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from roll_core.types import TensorEntry, WeightManifest

HELLO = struct.Struct("!16si")
HELLO_S = 1.0
CANCEL = -1
"""Sent by the driver instead of a rank."""


class AcmeTransport(WeightTransport):
    """Between any processes."""

    def available(self, sender: RoleFacts, receiver: RoleFacts) -> str | None:
        """Why it cannot connect two roles; None if it can."""
        return None if len(receiver.workers) <= 16 else "it serves at most 16 receivers"

    def routes(self, sender: RoleFacts, receiver: RoleFacts) -> Sequence[Route]:
        """The ways between the roles, best first."""
        return (Route(self_test=True),)

    def sender(self, setup: SenderSetup) -> AcmeSender:
        """The endpoint of the trainer."""
        return AcmeSender(setup)

    def receiver(self, setup: ReceiverSetup) -> AcmeReceiver:
        """The endpoint of an engine's worker."""
        return AcmeReceiver(setup)

    def cancel_transfer(self, address: str, options: Mapping[str, str]) -> None:
        """End a wait for receivers that never connect."""
        with contextlib.suppress(OSError):
            connect(address, CANCEL, HELLO_S).close()


class AcmeSender(SenderEndpoint):
    """Listens on the address that receivers use."""

    def __init__(self, setup: SenderSetup) -> None:
        self._expected, self._bucket_bytes = frozenset(setup.receivers), setup.bucket_bytes
        self._token = secrets.token_bytes(16)
        self._listener = socket.create_server((setup.host, 0))
        self.address = f"{self._token.hex()}@{setup.host}:{self._listener.getsockname()[1]}"
        self._receivers: dict[int, socket.socket] = {}

    def send(
        self, manifest: WeightManifest, exported: Iterator[tuple[str, Tensor]], deadline: Deadline
    ) -> list[TensorEntry]:
        """Send every tensor to every receiver. Raises `ReceiversLostError`."""
        import torch

        buckets = plan_buckets(manifest, self._bucket_bytes)
        firsts = [bucket.first for bucket in buckets] or [""]
        self._accept(firsts[0], deadline)
        sent: list[TensorEntry] = []
        for bucket in buckets:
            memory = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            sent += fill(memory, bucket, exported)
            for rank, connection in self._receivers.items():
                with self._naming(rank, bucket.first, deadline):
                    connection.sendall(memory.numpy().data)
        require_exhausted(exported)
        for rank, connection in self._receivers.items():
            for first in firsts[: len(buckets)]:
                with self._naming(rank, first, deadline):
                    receive_into(connection, bytearray(1))
        return sent

    def close(self) -> None:
        """Close the connections. May be called more than once."""
        for connection in (self._listener, *self._receivers.values()):
            connection.close()
        self._receivers.clear()

    def _accept(self, stage: str, deadline: Deadline) -> None:
        while missing := self._expected - self._receivers.keys():
            self._listener.settimeout(max(deadline.left, 1e-3))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise ReceiversLostError(stage, timed_out=tuple(sorted(missing))) from None
            hello = bytearray(HELLO.size)
            connection.settimeout(HELLO_S)
            with contextlib.suppress(OSError):
                receive_into(connection, hello)
            token, rank = HELLO.unpack(hello)
            if not secrets.compare_digest(token, self._token):
                connection.close()
            elif rank == CANCEL:
                connection.close()
                raise ReceiversLostError(stage, disconnected=tuple(sorted(missing)))
            else:
                self._receivers[rank] = connection

    @contextlib.contextmanager
    def _naming(self, rank: int, stage: str, deadline: Deadline) -> Iterator[None]:
        """Turn socket errors into the error that names the receiver."""
        self._receivers[rank].settimeout(max(deadline.left, 1e-3))
        try:
            yield
        except TimeoutError:
            raise ReceiversLostError(stage, timed_out=(rank,)) from None
        except OSError:
            raise ReceiversLostError(stage, disconnected=(rank,)) from None


class AcmeReceiver(ReceiverEndpoint):
    """Connects to the sender."""

    def __init__(self, setup: ReceiverSetup) -> None:
        self.address, self._bucket_bytes = setup.address, setup.bucket_bytes
        try:
            self._sender = connect(setup.address, setup.rank, max(setup.deadline.left, 1e-3))
        except OSError as error:
            raise SenderLostError(f"cannot connect to {setup.address.partition('@')[2]}: {error}") from error

    def receive(self, manifest: WeightManifest, deadline: Deadline) -> Iterator[tuple[str, Tensor]]:
        """Tensors in the order of the manifest. Raises `SenderLostError`."""
        import torch

        for bucket in plan_buckets(manifest, self._bucket_bytes):
            memory = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            self._sender.settimeout(max(deadline.left, 1e-3))
            try:
                receive_into(self._sender, memory.numpy().data)
            except OSError as error:
                raise SenderLostError(f"the sender was lost before {bucket.first}: {error}") from error
            yield from views(memory, bucket)
            try:
                self._sender.sendall(b".")
            except OSError as error:
                raise SenderLostError(f"the sender was lost after {bucket.first}: {error}") from error

    def close(self) -> None:
        """Close the connections. May be called more than once."""
        self._sender.close()


def connect(address: str, rank: int, timeout_s: float) -> socket.socket:
    """A connection to the sender that has sent the token and `rank`."""
    token, _, where = address.partition("@")
    host, _, port = where.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=timeout_s)
    connection.sendall(HELLO.pack(bytes.fromhex(token), rank))
    return connection


def receive_into(connection: socket.socket, memory: bytearray | memoryview) -> None:
    """Fill `memory`. Raises `ConnectionError` if the stream ends before."""
    view, received = memoryview(memory), 0
    while received < len(view):
        count = connection.recv_into(view[received:])
        if not count:
            raise ConnectionError(f"the stream ended after {received} of {len(view)} bytes")
        received += count
