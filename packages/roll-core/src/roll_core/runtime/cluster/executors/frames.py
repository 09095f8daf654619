"""What the two ends of a foreign process say to each other: a kind, the number of the call, and bytes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import StreamReader

HELLO, MAKE, CALL, CANCEL, STACK, CLOSE, ANSWER = range(7)
"""`HELLO` comes first, from the process; `ANSWER` has the number of the call that it answers."""
_HEAD = struct.Struct("!BQQ")


def frame(kind: int, number: int, body: bytes = b"") -> bytes:
    """Of one message."""
    return _HEAD.pack(kind, number, len(body)) + body


async def read_frame(reader: StreamReader) -> tuple[int, int, bytes]:
    """The next message. Raises `EOFError` where the other end is gone, in whatever way."""
    try:
        kind, number, num_bytes = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        return kind, number, await reader.readexactly(num_bytes)
    except ConnectionError as error:
        raise EOFError from error
