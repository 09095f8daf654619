"""What the machine can do at best: how fast bytes get from one place to another where nothing else is done."""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from pathlib import Path

import numpy as np

NUM_BYTES = 192 << 20


class Limits:
    """Bytes per second of a copy from memory to memory, of a connection to oneself, of a file written and read."""

    def __init__(self, directory: str) -> None:
        self._source, self._target = np.ones(NUM_BYTES, np.uint8), np.ones(NUM_BYTES, np.uint8)
        self._path = Path(directory) / "limit"
        self._seen: dict[str, list[float]] = {}

    def measure(self, *names: str) -> None:
        """Once more."""
        for name in names:
            begun = time.perf_counter()
            getattr(self, f"_{name}")()
            self._seen.setdefault(name, []).append(NUM_BYTES / (time.perf_counter() - begun))

    def take(self) -> dict[str, dict[str, float]]:
        """Median and best of each since the last call."""
        seen, self._seen = self._seen, {}
        return {name: {"median": statistics.median(each), "best": max(each)} for name, each in seen.items()}

    def _memcpy(self) -> None:
        np.copyto(self._target, self._source)

    def _loopback(self) -> None:
        """Python's threads let each other run while they wait for the system."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            server, _ = listener.accept()
        sending = threading.Thread(target=client.sendall, args=(self._source.data,))
        sending.start()
        room, at = self._target.data, 0
        with server, client:
            while at < NUM_BYTES:
                at += server.recv_into(room[at:])
            sending.join()

    def _file(self) -> None:
        """Through the system's cache, as `disk` goes."""
        with self._path.open("wb", buffering=0) as file:
            at = 0
            while at < NUM_BYTES:
                at += file.write(self._source.data[at:])
        with self._path.open("rb", buffering=0) as file:
            at = 0
            while at < NUM_BYTES:
                at += file.readinto(self._target.data[at:])
        os.unlink(self._path)
