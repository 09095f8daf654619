"""Memory of a device that one process lends to others on the same device: CUDA IPC by torch's own machinery, with plain
values in place of its pickles.

    lender      memory = kind.allocate(num_bytes, device)    kind.lend(memory) --- bytes ---.
    borrower                                                 kind.open(bytes, device) -> the same memory

`reduce_tensor` of `torch.multiprocessing` says by which function, with which arguments, another process opens a tensor.
Only the arguments travel, by name and type; the borrower knows the function. So nothing that arrives is run.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import msgpack
from typing_extensions import override

from roll_core.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from roll_core.spec.model import MeshInfo

ALLOCATOR_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables with options of torch's allocator; the first that is set counts."""
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


class DeviceMemory(ABC):
    """What lending needs of one kind of device. Memory is a flat uint8 tensor."""

    @abstractmethod
    def uuid(self, device: str) -> str:
        """Names the device alike in all processes of the host. Empty where torch does not tell."""

    @abstractmethod
    def allocate(self, num_bytes: int, device: str) -> Tensor:
        """Memory that can be lent."""

    @abstractmethod
    def lend(self, memory: Tensor) -> bytes:
        """What one borrower opens it by; to be asked for each. The memory stays until all who opened it let it go, also
        if the lender does before."""

    @abstractmethod
    def open(self, handle: bytes, device: str) -> Tensor:
        """The lender's memory. Letting the tensor go closes it. Raises `WeightSyncError` where the handle is none, or
        of another device."""

    @abstractmethod
    def settle(self, device: str) -> None:
        """Wait until the device has done what it was told."""

    @abstractmethod
    def collect(self) -> None:
        """Take back what borrowers have let go."""


@dataclass(frozen=True, slots=True)
class CudaHandle:
    """An allocation's `cudaIpcMemHandle_t`, and torch's account of it: the arguments of `rebuild_cuda_tensor` that are
    not known beforehand."""

    device_uuid: str
    num_bytes: int
    """Of the tensor; the storage is what it lies in, the allocation what that lies in."""
    tensor_offset: int
    storage_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool

    def packed(self) -> bytes:
        """As bytes."""
        found: bytes = msgpack.packb(asdict(self))
        return found

    @classmethod
    def unpacked(cls, data: bytes) -> CudaHandle:
        """The inverse. Raises `WeightSyncError` for anything else."""
        kinds = {"str": str, "int": int, "bytes": bytes, "bool": bool}
        try:
            values = msgpack.unpackb(data)
        except (ValueError, msgpack.UnpackException) as error:
            raise WeightSyncError(f"what arrived is no handle of device memory: {error}") from error
        expected = {each.name: kinds[str(each.type)] for each in fields(cls)}
        if not isinstance(values, dict) or values.keys() != expected.keys():
            raise WeightSyncError("what arrived is no handle of device memory: it has other fields")
        for name, kind in expected.items():
            value = values[name]
            if type(value) is not kind or (isinstance(value, int) and value < 0):
                raise WeightSyncError(f"what arrived is no handle of device memory: {name} is {value!r}")
        handle = cls(**values)
        if handle.tensor_offset + handle.num_bytes > handle.storage_size_bytes:
            raise WeightSyncError(
                f"what arrived is no handle of device memory: {handle.num_bytes} bytes from {handle.tensor_offset} on,"
                f" of {handle.storage_size_bytes}"
            )
        return handle


class CudaMemory(DeviceMemory):
    """Devices of torch's type `cuda`, which are AMD's too."""

    @override
    def uuid(self, device: str) -> str:
        return str(getattr(_cuda().get_device_properties(device), "uuid", ""))

    @override
    def allocate(self, num_bytes: int, device: str) -> Tensor:
        import torch

        with fixed_segments(_cuda().memory._set_allocator_settings):
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    @override
    def lend(self, memory: Tensor) -> bytes:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

        rebuild, arguments = reduce_tensor(memory)  # type: ignore[no-untyped-call]
        if rebuild is not rebuild_cuda_tensor:
            raise WeightSyncError(f"memory on {memory.device} is not lent by CUDA IPC, but by {rebuild.__name__}")
        offset, (_, handle, size, storage_offset), (counter, counter_offset, event, sync) = (
            arguments[3],
            arguments[6:10],
            arguments[11:15],
        )
        return CudaHandle(
            device_uuid=self.uuid(str(memory.device)),
            num_bytes=memory.numel(),
            tensor_offset=offset,
            storage_handle=handle,
            storage_size_bytes=size,
            storage_offset_bytes=storage_offset,
            ref_counter_handle=counter,
            ref_counter_offset=counter_offset,
            event_handle=event,
            event_sync_required=sync,
        ).packed()

    @override
    def open(self, handle: bytes, device: str) -> Tensor:
        import torch
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        found = CudaHandle.unpacked(handle)
        if found.device_uuid != self.uuid(device):
            raise WeightSyncError(
                f"the memory lies on device {found.device_uuid}, and this process computes on {self.uuid(device)}"
            )
        memory: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
            torch.Tensor,
            (found.num_bytes,),
            (1,),
            found.tensor_offset,
            torch.storage.TypedStorage,
            torch.uint8,
            torch.device(device).index or 0,
            found.storage_handle,
            found.storage_size_bytes,
            found.storage_offset_bytes,
            False,  # requires_grad
            found.ref_counter_handle,
            found.ref_counter_offset,
            found.event_handle,
            found.event_sync_required,
        )
        return memory

    @override
    def settle(self, device: str) -> None:
        _cuda().synchronize(device)

    @override
    def collect(self) -> None:
        _cuda().ipc_collect()


def _cuda() -> Any:
    """torch's module of these devices."""
    import torch

    return torch.get_device_module("cuda")


KINDS: dict[str, DeviceMemory] = {"cuda": CudaMemory()}
"""By torch's device type."""


def slot_devices(mesh: MeshInfo, num_slots: int = 0) -> tuple[str, ...]:
    """Of all slots of a worker, as its process counts them: on a device from its first one on, on the host the host for
    each."""
    kind, _, first = mesh.device.partition(":")
    numbers = range(int(first or 0), int(first or 0) + (num_slots or mesh.num_slots))
    return tuple(f"{kind}:{number}" if first else kind for number in numbers)


def device_memory(device: str) -> DeviceMemory | None:
    """Of the device's kind; None where its memory cannot be lent."""
    return KINDS.get(device.partition(":")[0])


@contextmanager
def fixed_segments(set_options: Callable[[str], None]) -> Iterator[None]:
    """What is allocated meanwhile lies in memory from cudaMalloc, also where `expandable_segments` are switched on.

    torch lends expandable segments, too, but by `pidfd_getfd`, which containers and Yama's ptrace_scope forbid to
    processes that are not related. Its allocator skips their free blocks while the option is off. Options are set as a
    whole, because those that a text leaves out go back to their defaults in some versions.
    """
    options = next((os.environ[name] for name in ALLOCATOR_OPTIONS if os.environ.get(name)), "")
    if not _EXPANDABLE.search(options):
        yield
        return
    set_options(_EXPANDABLE.sub("expandable_segments:False", options))
    try:
        yield
    finally:
        set_options(options)
