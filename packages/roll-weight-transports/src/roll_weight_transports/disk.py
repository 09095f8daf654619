"""The transport `disk`: buckets as files in a folder, or below a URL that fsspec reads, which both sides reach.

    <directory>/roll-weights-<host>-<pid>-<token>/
        open                            removed when the sender closes, or the driver calls the publish off
        <number of the publish>/
            bucket-0, bucket-1, ...     by the sender, each complete as soon as it is visible
            read-<rank>, disconnected-<rank>    by receivers: have read everything, or have closed early

For roles whose hosts cannot connect to each other. Both sides poll, at growing intervals. The sender removes a publish
once all receivers have read it, and its whole folder when it closes. The driver removes the folder if an endpoint
cannot. The next sender on the same host removes folders that a killed run left on a file system.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.errors import WeightSyncError
from roll_core.host import hostname
from roll_core.spec.transport import (
    ReceiverEndpoint,
    ReceiversLostError,
    Route,
    SenderEndpoint,
    SenderLostError,
    WeightTransport,
)
from roll_weight_transports.bucket_plan import fill, plan_buckets, require_exhausted, views
from roll_weight_transports.digests import use_compiled_digests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.transport import Deadline, ReceiverSetup, RoleFacts, SenderSetup
    from roll_core.types import TensorEntry, WeightManifest
    from roll_weight_transports.bucket_plan import Bucket

BUCKET_BYTES = 64 << 20
"""Upper bound of a bucket, unless a tensor is larger: receivers read one while the next is written."""
FIRST_POLL_S = 0.002
LONGEST_POLL_S, LONGEST_LOCAL_POLL_S = 0.5, 0.02
"""Longest interval between polls; object stores charge for each request, file systems do not."""
PREFIX = "roll-weights-"
OPEN = "open"


class DiskTransport(WeightTransport):
    """Transfers buckets as files through `model_update_dir`, which its provider record requires."""

    @override
    def available(self, sender: RoleFacts, receiver: RoleFacts) -> str | None:
        return None

    @override
    def routes(self, sender: RoleFacts, receiver: RoleFacts) -> Sequence[Route]:
        return (Route(options={"directory": sender.directory}),)

    @override
    def sender(self, setup: SenderSetup) -> DiskSender:
        return DiskSender(setup)

    @override
    def receiver(self, setup: ReceiverSetup) -> DiskReceiver:
        return DiskReceiver(setup)

    @override
    def cancel_transfer(self, address: str, options: Mapping[str, str]) -> None:
        with contextlib.suppress(OSError):
            Folder(address).remove()


class Folder:
    """A folder on a file system of fsspec, without its caches: other processes write there too."""

    def __init__(self, url: str) -> None:
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        self.url = url.rstrip("/")
        self._files, self._path = fsspec.core.url_to_fs(self.url)
        self.is_local = isinstance(self._files, LocalFileSystem)

    def wait(self, there: Callable[[], bool], deadline: Deadline) -> bool:
        """Poll until `there()` is true. Returns False if the deadline passes first."""
        pause_s = FIRST_POLL_S
        while not there():
            if deadline.left == 0:
                return False
            time.sleep(min(pause_s, max(deadline.left, FIRST_POLL_S)))
            pause_s = min(2 * pause_s, LONGEST_LOCAL_POLL_S if self.is_local else LONGEST_POLL_S)
        return True

    def write(self, name: str, data: object) -> None:
        """Write a file that becomes visible when it is complete: by a rename, or by closing it in an object store."""
        path = f"{self._path}/{name}"
        part = f"{path}.part-{secrets.token_hex(4)}" if self.is_local else path
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._files.open(part, "wb") as file:
            file.write(data)
        if part != path:
            os.replace(part, path)

    def read_into(self, name: str, memory: memoryview) -> None:
        """Read `len(memory)` bytes of a file. Raises `EOFError` if it has fewer."""
        with self._files.open(f"{self._path}/{name}", "rb") as file:
            offset = 0
            while offset < len(memory):
                num_bytes = file.readinto(memory[offset:])
                if not num_bytes:
                    raise EOFError(f"{name} ends after {offset} of {len(memory)} bytes")
                offset += num_bytes

    def names(self, folder: str = "") -> frozenset[str]:
        """Names of the files in this folder, or in the subfolder `folder`; empty if it does not exist."""
        path = f"{self._path}/{folder}".rstrip("/")
        self._files.invalidate_cache(path)
        try:
            return frozenset(
                path_below.rstrip("/").rpartition("/")[2] for path_below in self._files.ls(path, detail=False)
            )
        except FileNotFoundError:
            return frozenset()

    def remove(self, folder: str = "") -> None:
        """Remove this folder, or the subfolder `folder`, with all files."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(f"{self._path}/{folder}".rstrip("/"), recursive=True)


class DiskSender(SenderEndpoint):
    """Sending endpoint; writes buckets as files."""

    def __init__(self, setup: SenderSetup) -> None:
        use_compiled_digests()
        self._bucket_bytes = min(setup.bucket_bytes, BUCKET_BYTES)
        self._num_receivers = len(setup.receivers)
        directory = setup.options["directory"]
        if "://" not in directory:
            directory = os.path.abspath(directory)
        name = f"{PREFIX}{hostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._folder = Folder(f"{directory.rstrip('/')}/{name}")
        self.address = self._folder.url
        self._number = 0
        with _writing(directory):
            _remove_orphans(Folder(directory))
            self._folder.write(OPEN, b"")

    @override
    def send(
        self, manifest: WeightManifest, exported: Iterator[tuple[str, Tensor]], deadline: Deadline
    ) -> list[TensorEntry]:
        self._number += 1
        buckets = plan_buckets(manifest, self._bucket_bytes)
        memory = _host_buffer(buckets)
        sent: list[TensorEntry] = []
        for number, bucket in enumerate(buckets):
            sent += fill(memory, bucket, exported)
            with _writing(self.address):
                self._folder.write(f"{self._number}/bucket-{number}", memory[: bucket.num_bytes].numpy().data)
                self._all_have_read(bucket.first)
        require_exhausted(exported)
        first = buckets[0].first if buckets else ""
        with _writing(self.address):
            if not self._folder.wait(lambda: self._all_have_read(first), deadline):
                raise ReceiversLostError(first, timed_out=self._without("read"))
            self._folder.remove(str(self._number))
        return sent

    @override
    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._folder.remove()

    def _all_have_read(self, first: str) -> bool:
        """True if every receiver has read everything. Raises `ReceiversLostError` if one has closed."""
        if disconnected := self._with("disconnected"):
            raise ReceiversLostError(first, disconnected=disconnected)
        if OPEN not in self._folder.names():  # called off by the driver
            raise ReceiversLostError(first, disconnected=self._without("read"))
        return not self._without("read")

    def _with(self, what: str) -> tuple[int, ...]:
        names = self._folder.names(str(self._number))
        return tuple(rank for rank in range(self._num_receivers) if f"{what}-{rank}" in names)

    def _without(self, what: str) -> tuple[int, ...]:
        return tuple(sorted({*range(self._num_receivers)} - {*self._with(what)}))


class DiskReceiver(ReceiverEndpoint):
    """Receiving endpoint; reads buckets from files."""

    def __init__(self, setup: ReceiverSetup) -> None:
        self.address, self._rank = setup.address, setup.rank
        self._bucket_bytes = min(setup.bucket_bytes, BUCKET_BYTES)
        self._folder = Folder(setup.address)
        self._number = 0
        self._is_reading = False

    @override
    def receive(self, manifest: WeightManifest, deadline: Deadline) -> Iterator[tuple[str, Tensor]]:
        self._number += 1
        self._is_reading = True
        buckets = plan_buckets(manifest, self._bucket_bytes)
        memory = _host_buffer(buckets)
        try:
            for number, bucket in enumerate(buckets):
                name = f"bucket-{number}"
                self._wait_for(name, deadline)
                self._folder.read_into(f"{self._number}/{name}", memory[: bucket.num_bytes].numpy().data)
                yield from views(memory, bucket)
            self._is_reading = False
            self._report("read")
        except (OSError, EOFError) as error:
            raise SenderLostError(f"weights cannot be read from {self.address}: {error}") from error

    @override
    def close(self) -> None:
        if self._is_reading:
            self._is_reading = False
            with contextlib.suppress(OSError):  # otherwise the driver calls the publish off
                self._report("disconnected")

    def _report(self, what: str) -> None:
        if OPEN in self._folder.names():
            self._folder.write(f"{self._number}/{what}-{self._rank}", b"")

    def _wait_for(self, name: str, deadline: Deadline) -> None:
        def is_there() -> bool:
            if OPEN not in self._folder.names():
                raise SenderLostError(f"the sender closed before it wrote {name}")
            return name in self._folder.names(str(self._number))

        if not self._folder.wait(is_there, deadline):
            raise SenderLostError(f"the sender did not write {name} before the deadline")


def _host_buffer(buckets: list[Bucket]) -> Tensor:
    import torch

    return torch.empty(max((bucket.num_bytes for bucket in buckets), default=0), dtype=torch.uint8)


def _remove_orphans(directory: Folder) -> None:
    """Remove folders of processes of this host that no longer exist. Folders of other users stay."""
    import psutil

    if not directory.is_local:
        return
    for name in directory.names():
        host, _, pid = name.removeprefix(PREFIX).rpartition("-")[0].rpartition("-")
        if name.startswith(PREFIX) and host == hostname() and pid.isdigit() and not psutil.pid_exists(int(pid)):
            with contextlib.suppress(OSError):
                directory.remove(name)


@contextlib.contextmanager
def _writing(where: str) -> Iterator[None]:
    """Raise errors of the file system as `WeightSyncError`."""
    try:
        yield
    except OSError as error:
        raise WeightSyncError(f"weights cannot be written to {where} (model_update_dir): {error}") from error
