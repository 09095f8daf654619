"""Buckets: reusable shared memory that carries published weights from the worker to the engine's processes.

    worker              fill | wait for the reply | fill | ...
    engine's processes       | copy out, load     |      | ...

Host memory is anonymous. Processes that know the worker's pid and descriptor can map it; Linux permits this to
processes of the same user. The memory is freed when the worker closes it or exits. Tensors on a device stay on it: each
of the engine's devices has a copy of the bucket, and the process there opens it by a handle.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from roll_core.errors import CorruptTensorError, MissingTensorError, RollError, UnexpectedTensorError
from roll_weight_transports.device_memory import device_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from roll_core.types import WeightManifest

log = logging.getLogger(__name__)

ALIGNMENT = 64
"""Alignment of each tensor's first byte, in bytes."""
TRIAL = tuple(range(100))


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Tensor in a bucket."""

    name: str
    dtype: str
    """Dtype in safetensors' spelling."""
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketInfo:
    """Description of a bucket for the engine's processes, as plain values that JSON can represent."""

    num_bytes: int
    tensors: Sequence[Any]
    path: str = ""
    """Path of host memory; empty for device memory."""
    handles: Mapping[str, str] = field(default_factory=dict)
    """Handles of device memory in hex, by the device's UUID."""

    def plain(self) -> dict[str, Any]:
        """Convert to a dictionary."""
        return asdict(self)


class BucketWriter:
    """Owner of a bucket's memory, which it fills with tensors."""

    def __init__(self, bucket_bytes: int, devices: Sequence[str] = ()) -> None:
        """`devices` are the devices of the engine's processes.

        Without devices, or if their memory cannot be shared, all tensors go through host memory.
        """
        self._bucket_bytes = bucket_bytes
        self._devices = tuple(devices) if devices and device_memory(devices[0]) else ()
        self._tried = False
        self._memory: _Memory | None = None

    def trial(self, tensor: Tensor) -> BucketInfo | None:
        """Bucket with test data, for `opening_failure` in each of the engine's processes.

        Pass their results to `check_trial`. Returns None if tensors like `tensor` do not stay on a device, or if the
        test already ran.
        """
        import torch

        if self._tried or not self._lies_on_device(tensor):
            return None
        self._tried = True
        numbers = torch.tensor(TRIAL, dtype=torch.int32, device=tensor.device)
        try:
            return self.fill(iter(()), ("trial", numbers))[0]
        except (RollError, RuntimeError) as error:
            self.check_trial([str(error)])
            return None

    def check_trial(self, failures: Sequence[str]) -> None:
        """Fall back to host memory if any of the engine's processes reports a failure (a non-empty string)."""
        failure = next((reason for reason in failures if reason), "")
        if failure:
            log.warning("weight updates use host memory, because a test bucket on the devices failed: %s", failure)
            self._devices = ()
            self.close()

    def fill(self, tensors: Iterator[tuple[str, Tensor]], first: tuple[str, Tensor]) -> tuple[BucketInfo, Any]:
        """Pack `first` and further tensors until the bucket is full.

        Returns the bucket and the first tensor that did not fit, or None if all tensors are packed.
        """
        from roll_core.spec.weights import dtype_name

        room = self._room(max(self._bucket_bytes, first[1].nbytes), on_device=self._lies_on_device(first[1]))
        memory = room.tensor
        packed: list[Packed] = []
        end = 0
        following: tuple[str, Tensor] | None = first
        while following is not None:
            name, tensor = following
            start = -(-end // ALIGNMENT) * ALIGNMENT
            if packed and start + tensor.nbytes > memory.numel():
                break
            end = start + tensor.nbytes
            view(memory, tensor.dtype, tuple(tensor.shape), start).copy_(tensor.detach())
            packed.append(Packed(name=name, dtype=dtype_name(tensor), shape=tuple(tensor.shape), start=start))
            following = next(tensors, None)
        path, handles = room.shown(end)
        info = BucketInfo(num_bytes=memory.numel(), tensors=tuple(packed), path=path, handles=handles)
        return info, following

    def release(self) -> None:
        """Free device memory, which other users need between updates. Host memory is kept."""
        if isinstance(self._memory, _DeviceMemory):
            self.close()

    def close(self) -> None:
        """Free the memory. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _lies_on_device(self, tensor: Tensor) -> bool:
        return bool(self._devices) and tensor.device.type == self._devices[0].partition(":")[0]

    def _room(self, num_bytes: int, *, on_device: bool) -> _Memory:
        kind = _DeviceMemory if on_device else _HostMemory
        memory = self._memory
        if not isinstance(memory, kind) or memory.tensor.numel() < num_bytes:
            self.close()
            memory = self._memory = _DeviceMemory(num_bytes, self._devices) if on_device else _HostMemory(num_bytes)
        return memory


class _HostMemory:
    def __init__(self, num_bytes: int) -> None:
        self._descriptor = os.memfd_create(f"roll-{os.getpid()}-bucket")
        os.truncate(self._descriptor, num_bytes)
        self.tensor = _map(self._descriptor, num_bytes)

    def shown(self, num_bytes: int) -> tuple[str, Mapping[str, str]]:
        """Path and handles by which the engine's processes read the first `num_bytes`, which are filled."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}", {}

    def close(self) -> None:
        self.tensor = self.tensor.new_empty(0)
        os.close(self._descriptor)


class _DeviceMemory:
    """Memory on each of the devices. The first is filled and then copied to the others."""

    def __init__(self, num_bytes: int, devices: Sequence[str]) -> None:
        kind = device_memory(devices[0])
        if kind is None:
            raise RuntimeError(f"memory of {devices[0]} cannot be shared with other processes")
        self._kind = kind
        self._on = {device: kind.allocate(num_bytes, device) for device in devices}
        self.tensor = self._on[devices[0]]

    def shown(self, num_bytes: int) -> tuple[str, Mapping[str, str]]:
        for memory in self._on.values():
            if memory is not self.tensor:
                memory[:num_bytes].copy_(self.tensor[:num_bytes])
        for device in self._on:
            self._kind.synchronize(device)
        return "", {self._kind.uuid(device): self._kind.share(memory).hex() for device, memory in self._on.items()}

    def close(self) -> None:
        self.tensor = self.tensor.new_empty(0)
        self._on.clear()
        self._kind.collect()


_Memory = _HostMemory | _DeviceMemory


def read_bucket(info: BucketInfo, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Copies of the bucket's tensors; copies, because the engine keeps some until their layer is complete.

    `device` is the device of this process. After the iterator is exhausted the bucket may be refilled. Raises
    `WeightSyncError` if device memory cannot be opened, and `RuntimeError` if the bucket is on other devices.
    """
    from roll_core.spec.weights import torch_dtype

    kind = device_memory(device) if info.handles else None
    if kind is None:
        descriptor = os.open(info.path, os.O_RDWR)
        try:
            memory = _map(descriptor, info.num_bytes)
        finally:
            os.close(descriptor)
    else:
        uuid = kind.uuid(device)
        if uuid not in info.handles:
            raise RuntimeError(f"the bucket is on {', '.join(info.handles)}, and this process computes on {uuid}")
        memory = kind.open(bytes.fromhex(info.handles[uuid]), device)
    for tensor in info.tensors:
        yield (
            tensor["name"],
            view(memory, torch_dtype(tensor["dtype"]), tuple(tensor["shape"]), tensor["start"]).clone(),
        )
    if kind is not None:
        kind.synchronize(device)


def opening_failure(info: BucketInfo, device: str) -> str:
    """Reason why this process cannot read a bucket of `BucketWriter.trial`; empty if it can."""
    try:
        tensors = dict(read_bucket(info, device))
    except (RollError, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if tuple(tensors["trial"].tolist()) == TRIAL else "other numbers arrive"


class Incoming:
    """Iterator over the sender's tensors that checks each against its manifest entry.

    Raises `UnexpectedTensorError` or `CorruptTensorError` for a tensor that differs.
    """

    def __init__(self, who: str, manifest: WeightManifest, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._who, self._version, self._tensors = who, manifest.version, tensors
        self._expected = {entry.name: entry for entry in manifest.tensors}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        from roll_core.spec.weights import dtype_name

        name, tensor = next(self._tensors)
        entry = self._expected.pop(name, None)
        if entry is None:
            raise UnexpectedTensorError(f"{self._who}: received {name}, which the manifest lacks, or a second time")
        if dtype_name(tensor) != entry.dtype or tuple(tensor.shape) != entry.shape:
            raise CorruptTensorError(
                f"{self._who}: {name} arrived as {dtype_name(tensor)} {list(tensor.shape)}; the manifest has"
                f" {entry.dtype} {list(entry.shape)}"
            )
        return name, tensor

    def refuse_missing(self) -> None:
        """Raise `MissingTensorError` if a tensor of the manifest did not arrive."""
        if self._expected:
            raise MissingTensorError(
                f"{self._who}: {min(self._expected)} is missing in version {self._version}"
                f" ({len(self._expected)} such tensors)"
            )


def view(memory: Tensor, dtype: Any, shape: tuple[int, ...], start: int) -> Tensor:
    """Tensor that views the bytes of `memory` from offset `start`."""
    num_bytes = dtype.itemsize * math.prod(shape)
    return memory[start : start + num_bytes].view(dtype).view(shape)


def _map(descriptor: int, num_bytes: int) -> Tensor:
    import torch

    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
