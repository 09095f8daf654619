"""HTTP requests with one deadline for all of it: connection, TLS, headers and body.

The timeout of a socket limits each wait. A server that sends a byte now and then never exceeds it, so a timer ends the
connection at the deadline.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
import urllib.request
from typing import TYPE_CHECKING, Any

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def open_within(request: urllib.request.Request, timeout_s: float) -> Iterator[http.client.HTTPResponse]:
    """Send a request and give its reply. Raises `TimeoutError` at the deadline, also while the caller reads the body.

    Raises as `urllib.request.urlopen` does. A redirect is an error: it would send keys to another host.
    """
    deadline = _Deadline(timeout_s)
    opener = urllib.request.build_opener(_NoRedirect, _Http(deadline), _Https(deadline))
    try:
        with opener.open(request, timeout=timeout_s) as reply:
            yield reply
            deadline.check()  # the end of the connection looks like the end of a body without a length
    except (OSError, http.client.HTTPException):
        deadline.check()
        raise
    finally:
        deadline.close()


class _Deadline:
    """Shuts the connections of a request down once its time is over."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._is_over = timeout_s, False
        self._end_s = time.monotonic() + timeout_s
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True
        self._timer.start()

    def connect(self, *arguments: Any, **options: Any) -> socket.socket:
        """Connect as `socket.create_connection`."""
        connection = socket.create_connection(*arguments, **options)
        with self._lock:
            self._sockets.append(connection.dup())  # TLS takes the socket over
            if self._is_over:
                _shut_down(self._sockets[-1])
        return connection

    def check(self) -> None:
        """Raise `TimeoutError` if the time is over."""
        if self._is_over or time.monotonic() >= self._end_s:  # the timer's thread may be late
            raise TimeoutError(f"the reply took longer than {self._timeout_s:g} s")

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()
        with self._lock:
            for connection in self._sockets:
                connection.close()
            self._sockets.clear()

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            for connection in self._sockets:
                _shut_down(connection)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the server has closed it
        connection.shutdown(socket.SHUT_RDWR)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    @override
    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        return None


class _Http(urllib.request.HTTPHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    @override
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection, req)

    def _connection(self, *arguments: Any, **options: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(*arguments, **options)
        connection._create_connection = self._deadline.connect  # type: ignore[attr-defined]
        return connection


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    @override
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection, req)

    def _connection(self, *arguments: Any, **options: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPSConnection(*arguments, **options)
        connection._create_connection = self._deadline.connect  # type: ignore[attr-defined]
        return connection
