"""Key-value store in which the ranks of a role, or the endpoints of a transport, meet, protected by a secret.

torch's TCPStore listens on every interface and lets any client list and set keys. This store listens on one address. A
connection begins with mutual authentication by a shared secret, which is never sent:

    client  connects                                       host  32 random bytes S
            32 random bytes C, HMAC(secret, "client" S C)        HMAC(secret, "host" S C), or hangs up

Later messages are not encrypted, and neither are the weights that gloo or nccl send.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import DistNetworkError, DistStoreError, HashStore, Store  # type: ignore[attr-defined]
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NONCE_BYTES, MAC_BYTES = 32, 32
GREETING_S = 5.0
"""Seconds within which a client must authenticate."""
WAIT_S = 300.0
"""Default timeout of `wait`, as in torch."""
SLACK_S = 5.0
"""Seconds that a client waits for a reply beyond the timeout that it gave the host."""
RETRY_S = 0.05
"""Seconds between two attempts to connect to a rank 0 that does not listen yet."""
LARGEST = 1 << 24
"""Maximum size of a message part in bytes; keys and values are short (addresses and numbers)."""


class HostedStore(HashStore):
    """The server side, which stores the keys in memory and serves them to clients. `close` stops it."""

    def __init__(self, host: str, secret: str, port: int = 0) -> None:
        super().__init__()
        self._secret = secret.encode()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="roll-weights-store", daemon=True).start()

    def close(self) -> None:
        """Close all connections; clients notice at once. Idempotent."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            self._closed = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="roll-weights-store", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve one client until it disconnects; disconnect it at once if it fails to authenticate."""
        try:
            with connection, contextlib.suppress(OSError, DistNetworkError, ValueError):
                connection.settimeout(GREETING_S)
                ours = secrets.token_bytes(NONCE_BYTES)
                connection.sendall(ours)
                theirs = _read(connection, NONCE_BYTES)
                proof = _read(connection, MAC_BYTES)
                if not hmac.compare_digest(proof, _mac(self._secret, b"client", ours, theirs)):
                    return
                connection.sendall(_mac(self._secret, b"host", ours, theirs))
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while True:
                    _send(connection, self._reply(*_receive(connection)))
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _reply(self, what: bytes, *arguments: bytes) -> list[bytes]:
        key = arguments[0].decode()
        replies: dict[bytes, Callable[[], object]] = {
            b"set": lambda: self.set(key, arguments[1]),  # type: ignore[arg-type]  # torch takes bytes, too
            b"wait": lambda: self.wait([name.decode() for name in arguments[1:]], timedelta(seconds=float(key))),
            b"get": lambda: self.get(key),
            b"check": lambda: self.check([name.decode() for name in arguments]),
            b"add": lambda: self.add(key, int(arguments[1])),
            b"compare_set": lambda: self.compare_set(key, arguments[1], arguments[2]),  # type: ignore[arg-type]
            b"delete_key": lambda: self.delete_key(key),
        }
        try:
            result = replies[what]()
        except DistStoreError as error:
            return [b"timeout", f"{error}: {what.decode()} {b', '.join(arguments).decode()}".encode()]
        return [b"ok", result if isinstance(result, bytes) else str(int(result or 0)).encode()]  # type: ignore[call-overload]


class RemoteStore(Store):
    """A client's side. Raises `DistNetworkError`, also if the host does not accept the secret."""

    def __init__(self, host: str, port: int, secret: str, within: timedelta) -> None:
        super().__init__()
        self._lock = threading.Lock()
        try:
            self._connection = socket.create_connection((host, port), timeout=max(within.total_seconds(), 1e-3))
        except OSError as error:
            raise DistNetworkError(f"{host}:{port}: {error}") from error
        try:
            self._greet(secret.encode())
        except OSError as error:
            self.close()
            raise DistNetworkError(f"{host}:{port}: {error}") from error

    def _greet(self, secret: bytes) -> None:
        connection = self._connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs = _read(connection, NONCE_BYTES)
        ours = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(ours + _mac(secret, b"client", theirs, ours))
        if not hmac.compare_digest(_read(connection, MAC_BYTES), _mac(secret, b"host", theirs, ours)):
            raise ConnectionError("the host has another secret")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    @override
    def set(self, key: str, value: str | bytes) -> None:
        self._request(b"set", key, value)

    @override
    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._request(b"get", key)

    @override
    def check(self, keys: Sequence[str]) -> bool:
        return bool(int(self._request(b"check", *keys)))

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout_s = WAIT_S if timeout is None else timeout.total_seconds()
        self._request(b"wait", str(timeout_s), *keys, within_s=timeout_s)

    @override
    def add(self, key: str, number: int) -> int:
        return int(self._request(b"add", key, str(number)))

    @override
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._request(b"compare_set", key, expected, desired)

    @override
    def delete_key(self, key: str) -> bool:
        return bool(int(self._request(b"delete_key", key)))

    def _request(self, what: bytes, *arguments: str | bytes, within_s: float = 0.0) -> bytes:
        with self._lock:
            try:
                self._connection.settimeout(within_s + SLACK_S)
                _send(self._connection, [what, *map(_bytes, arguments)])
                status, reply = _receive(self._connection)
            except OSError as error:
                self.close()  # the next request would read a late reply as its own
                raise DistNetworkError(f"lost the connection to the store: {error}") from error
        if status != b"ok":
            raise DistStoreError(reply.decode())
        return reply


def open_store(rank: int, host: str, port: int, secret: str, timeout_s: float) -> Store:
    """Open the store of the ranks of a role, which rank 0 hosts. The other ranks block until it listens.

    The store must stay open as long as the process group; then `close` it.
    """
    if rank == 0:
        return HostedStore(host, secret, port)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return RemoteStore(host, port, secret, timedelta(seconds=deadline - time.monotonic()))
        except DistNetworkError:
            if time.monotonic() + RETRY_S > deadline:
                raise
            time.sleep(RETRY_S)


def _mac(secret: bytes, side: bytes, of_host: bytes, of_client: bytes) -> bytes:
    return hmac.digest(secret, side + of_host + of_client, "sha256")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _send(connection: socket.socket, parts: Sequence[bytes]) -> None:
    lengths = struct.pack(f">{len(parts) + 1}I", len(parts), *map(len, parts))
    connection.sendall(lengths + b"".join(parts))


def _receive(connection: socket.socket) -> list[bytes]:
    (count,) = struct.unpack(">I", _read(connection, 4))
    lengths = struct.unpack(f">{count}I", _read(connection, 4 * count))
    return [_read(connection, length) for length in lengths]


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    if num_bytes > LARGEST:
        raise DistNetworkError(f"received a message of {num_bytes} bytes, at most {LARGEST} are allowed")
    message = bytearray()
    while len(message) < num_bytes:
        received = connection.recv(num_bytes - len(message))
        if not received:
            raise ConnectionError("the connection was closed")
        message += received
    return bytes(message)
