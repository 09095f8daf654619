"""Frame format between the driver's side and an isolated worker process: a kind, the number of the call, and bytes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import StreamReader

HELLO, MAKE, CALL, CANCEL, STACK, CLOSE, ANSWER = range(7)
"""The process sends `HELLO` first. `ANSWER` has the number of the call that it belongs to."""
_HEAD = struct.Struct("!BQQ")


def frame(kind: int, number: int, body: bytes = b"") -> bytes:
    """Encode one message."""
    return _HEAD.pack(kind, number, len(body)) + body


async def read_frame(reader: StreamReader) -> tuple[int, int, bytes]:
    """Read the next message. Raises `EOFError` if the connection is closed or broken."""
    try:
        kind, number, num_bytes = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        return kind, number, await reader.readexactly(num_bytes)
    except ConnectionError as error:
        raise EOFError from error
