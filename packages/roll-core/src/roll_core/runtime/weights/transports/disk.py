"""The transport `disk`: buckets as files in a folder, or below a URL that fsspec reads, which both sides reach.

    <directory>/roll-weights-<host>-<pid>-<token>/
        open                            as long as the sender is; gone when it, or the driver, has given up
        <number of the publish>/
            bucket-0, bucket-1, ...     by the sender, each complete as soon as it can be seen
            taken-<rank>, gone-<rank>   by receivers: have everything, or hung up

For roles between whose hosts no connection can be made. Nobody is told of anything, so both ends look, ever less often.
The sender removes a publish once all have taken it, and its whole folder when it closes; the driver does where an end
cannot. What a killed run has left on a file system of its own host is removed by the next sender there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from typing import TYPE_CHECKING

import fsspec
import psutil
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override

from roll_core.errors import WeightSyncError
from roll_core.runtime.host import hostname
from roll_core.spec.buckets import fill, nothing_left, plan_buckets, view
from roll_core.spec.transport import ReceiversLostError, ReceivingEnd, SenderLostError, SendingEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from roll_core.runtime.weights.plan import Deadline
    from roll_core.spec.buckets import Bucket
    from roll_core.types import TensorEntry, WeightManifest

BUCKET_BYTES = 64 << 20
"""Buckets are no larger than this unless a tensor is: receivers read one while the next is written."""
FIRST_LOOK_S = 0.002
LONGEST_LOOK_S, LONGEST_LOCAL_LOOK_S = 0.5, 0.02
"""Between two looks; stores that are asked over a network charge for each, file systems do not."""
PREFIX = "roll-weights-"
OPEN = "open"


class Folder:
    """A folder on whatever fsspec reads, without its caches: others write there too."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._files, self._path = fsspec.core.url_to_fs(self.url)
        self.is_local = isinstance(self._files, LocalFileSystem)

    def wait(self, there: Callable[[], bool], deadline: Deadline) -> bool:
        """Look, ever less often, until it is there; false where the deadline passes first."""
        pause_s = FIRST_LOOK_S
        while not there():
            if deadline.left == 0:
                return False
            time.sleep(min(pause_s, max(deadline.left, FIRST_LOOK_S)))
            pause_s = min(2 * pause_s, LONGEST_LOCAL_LOOK_S if self.is_local else LONGEST_LOOK_S)
        return True

    def write(self, name: str, data: object) -> None:
        """A file that is seen complete or not at all: stores show what is closed, file systems what is renamed."""
        path = f"{self._path}/{name}"
        part = f"{path}.part-{secrets.token_hex(4)}" if self.is_local else path
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._files.open(part, "wb") as file:
            file.write(data)
        if part != path:
            os.replace(part, path)

    def read_into(self, name: str, memory: memoryview) -> None:
        """The file's bytes, which must be as many. Raises `EOFError` where they are not."""
        with self._files.open(f"{self._path}/{name}", "rb") as file:
            at = 0
            while at < len(memory):
                num_bytes = file.readinto(memory[at:])
                if not num_bytes:
                    raise EOFError(f"{name} ends after {at} of {len(memory)} bytes")
                at += num_bytes

    def names(self, folder: str = "") -> frozenset[str]:
        """Of what lies in it, or in a folder below."""
        path = f"{self._path}/{folder}".rstrip("/")
        self._files.invalidate_cache(path)
        try:
            return frozenset(each.rstrip("/").rpartition("/")[2] for each in self._files.ls(path, detail=False))
        except FileNotFoundError:
            return frozenset()

    def remove(self, folder: str = "") -> None:
        """With everything in it."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(f"{self._path}/{folder}".rstrip("/"), recursive=True)


class DiskSender(SendingEnd):
    """Writes buckets."""

    def __init__(self, num_receivers: int, bucket_bytes: int, directory: str) -> None:
        self._bucket_bytes = min(bucket_bytes, BUCKET_BYTES)
        self._num_receivers = num_receivers
        if "://" not in directory:
            directory = os.path.abspath(directory)
        remove_what_the_dead_left(Folder(directory))
        name = f"{PREFIX}{hostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._folder = Folder(f"{directory.rstrip('/')}/{name}")
        self.address = self._folder.url
        self._number = 0
        try:
            self._folder.write(OPEN, b"")
        except OSError as error:
            raise _unwritable(directory, error) from error

    @override
    def send(
        self, manifest: WeightManifest, exported: Iterator[tuple[str, Tensor]], deadline: Deadline
    ) -> list[TensorEntry]:
        self._number += 1
        try:
            return self._send(plan_buckets(manifest, self._bucket_bytes), exported, deadline)
        except ReceiversLostError:
            raise
        except OSError as error:
            raise _unwritable(self.address, error) from error

    def _send(
        self, buckets: list[Bucket], exported: Iterator[tuple[str, Tensor]], deadline: Deadline
    ) -> list[TensorEntry]:
        import torch

        memory = torch.empty(max((bucket.num_bytes for bucket in buckets), default=0), dtype=torch.uint8)
        sent: list[TensorEntry] = []
        for number, bucket in enumerate(buckets):
            sent += fill(memory, bucket, exported)
            self._folder.write(f"{self._number}/bucket-{number}", memory[: bucket.num_bytes].numpy().data)
            self._all_have_taken(bucket.first)
        nothing_left(exported)
        first = buckets[0].first if buckets else ""
        if not self._folder.wait(lambda: self._all_have_taken(first), deadline):
            raise ReceiversLostError(first, silent=self._without("taken"))
        self._folder.remove(str(self._number))
        return sent

    @override
    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._folder.remove()

    def _all_have_taken(self, first: str) -> bool:
        """Raises `ReceiversLostError` where one has hung up."""
        if gone := self._with("gone"):
            raise ReceiversLostError(first, gone=gone)
        if OPEN not in self._folder.names():  # the driver knows why
            raise ReceiversLostError(first, gone=self._without("taken"))
        return not self._without("taken")

    def _with(self, what: str) -> tuple[int, ...]:
        names = self._folder.names(str(self._number))
        return tuple(rank for rank in range(self._num_receivers) if f"{what}-{rank}" in names)

    def _without(self, what: str) -> tuple[int, ...]:
        there = self._with(what)
        return tuple(rank for rank in range(self._num_receivers) if rank not in there)


class DiskReceiver(ReceivingEnd):
    """Reads buckets."""

    def __init__(self, address: str, rank: int, bucket_bytes: int) -> None:
        self.address = address
        self._rank = rank
        self._bucket_bytes = min(bucket_bytes, BUCKET_BYTES)
        self._folder = Folder(address)
        self._number = 0
        self._is_reading = False

    @override
    def receive(self, manifest: WeightManifest, deadline: Deadline) -> Iterator[tuple[str, Tensor]]:
        import torch

        self._number += 1
        self._is_reading = True
        buckets = plan_buckets(manifest, self._bucket_bytes)
        memory = torch.empty(max((bucket.num_bytes for bucket in buckets), default=0), dtype=torch.uint8)
        try:
            for number, bucket in enumerate(buckets):
                name = f"bucket-{number}"
                self._wait_for(name, deadline)
                self._folder.read_into(f"{self._number}/{name}", memory[: bucket.num_bytes].numpy().data)
                for piece in bucket.pieces:
                    yield piece.entry.name, view(memory, piece)
            self._is_reading = False
            self._say("taken")
        except (OSError, EOFError) as error:
            raise SenderLostError(f"weights cannot be read from {self.address}: {error}") from error

    @override
    def close(self) -> None:
        if self._is_reading:
            self._is_reading = False
            with contextlib.suppress(OSError):  # the sender learns it from the driver then
                self._say("gone")

    def _say(self, what: str) -> None:
        if OPEN in self._folder.names():
            self._folder.write(f"{self._number}/{what}-{self._rank}", b"")

    def _wait_for(self, name: str, deadline: Deadline) -> None:
        def is_there() -> bool:
            if OPEN not in self._folder.names():
                raise SenderLostError(f"the sender hung up before {name}")
            return name in self._folder.names(str(self._number))

        if not self._folder.wait(is_there, deadline):
            raise SenderLostError(f"the sender had not written {name} when the deadline passed")


def call_off(address: str) -> None:
    """End a publish that has failed, for ends that do not know it; by the driver, if it reaches the folder too."""
    with contextlib.suppress(OSError):
        Folder(address).remove()


def remove_what_the_dead_left(directory: Folder) -> None:
    """Folders that processes of this host made which are gone."""
    if not directory.is_local:
        return
    for name in directory.names():
        host, _, pid = name.removeprefix(PREFIX).rpartition("-")[0].rpartition("-")
        if name.startswith(PREFIX) and host == hostname() and pid.isdigit() and not psutil.pid_exists(int(pid)):
            directory.remove(name)


def _unwritable(where: str, error: OSError) -> WeightSyncError:
    return WeightSyncError(f"weights cannot be written to {where} (model_update_dir): {error}")
