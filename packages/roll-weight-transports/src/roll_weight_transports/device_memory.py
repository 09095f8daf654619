"""Device memory shared between processes on the same device: CUDA IPC through torch, without pickles.

    owner       memory = kind.allocate(num_bytes, device)    kind.share(memory) --- bytes ---.
    user                                                     kind.open(bytes, device) -> the same memory

`reduce_tensor` of `torch.multiprocessing` returns a function and arguments with which another process opens a tensor.
Only the arguments are sent, by name and type. The receiver always calls the same function, so no received code runs.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgpack
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from roll_core.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from roll_core.spec.model import MeshInfo

ALLOCATOR_OPTIONS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with options of torch's allocator; the first one set takes effect."""
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


class CudaHandle(BaseModel):
    """Handle of CUDA memory: the `cudaIpcMemHandle_t` of its allocation, and torch's bookkeeping.

    The fields are the arguments of `rebuild_cuda_tensor` that the receiver does not know.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    device_uuid: str
    num_bytes: NonNegativeInt
    """Size of the tensor. Its storage and the allocation that contains the storage may be larger."""
    tensor_offset: NonNegativeInt
    storage_handle: bytes
    storage_size_bytes: NonNegativeInt
    storage_offset_bytes: NonNegativeInt
    ref_counter_handle: bytes
    ref_counter_offset: NonNegativeInt
    event_handle: bytes
    event_sync_required: bool

    def packed(self) -> bytes:
        """Serialise to bytes."""
        message: bytes = msgpack.packb(self.model_dump())
        return message

    @classmethod
    def unpacked(cls, data: bytes) -> CudaHandle:
        """Inverse of `packed`. Raises `WeightSyncError` for invalid data."""
        try:
            handle = cls.model_validate(msgpack.unpackb(data))
        except (ValueError, msgpack.UnpackException) as error:
            raise WeightSyncError(f"received an invalid handle of device memory: {error}") from error
        if handle.tensor_offset + handle.num_bytes > handle.storage_size_bytes:
            raise WeightSyncError(
                f"received an invalid handle of device memory: {handle.num_bytes} bytes at offset"
                f" {handle.tensor_offset}, but the storage has {handle.storage_size_bytes}"
            )
        return handle


class DeviceMemory:
    """Sharing of memory on devices of torch's type `cuda`, including AMD's. Memory is a flat uint8 tensor."""

    def uuid(self, device: str) -> str:
        """Id of the device, equal in all processes of the host; empty if torch does not provide it."""
        return str(getattr(_cuda().get_device_properties(device), "uuid", ""))

    def allocate(self, num_bytes: int, device: str) -> Tensor:
        """Allocate memory that can be shared."""
        import torch

        with fixed_segments(_cuda().memory._set_allocator_settings):
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def share(self, memory: Tensor) -> bytes:
        """Create a handle with which one other process opens the memory; each process needs its own.

        The memory stays allocated until every process that opened it has released it, even if the owner releases it
        first.
        """
        from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

        rebuild, arguments = reduce_tensor(memory)  # type: ignore[no-untyped-call]
        if rebuild is not rebuild_cuda_tensor:
            raise WeightSyncError(
                f"memory on {memory.device} cannot be shared by CUDA IPC: torch shares it by {rebuild.__name__}"
            )
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

    def open(self, handle: bytes, device: str) -> Tensor:
        """Open another process's memory. Releasing the tensor closes it.

        Raises `WeightSyncError` for an invalid handle, or one of another device.
        """
        import torch
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        opened = CudaHandle.unpacked(handle)
        if opened.device_uuid != self.uuid(device):
            raise WeightSyncError(
                f"the memory is on device {opened.device_uuid}, but this process uses device {self.uuid(device)}"
            )
        memory: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
            torch.Tensor,
            (opened.num_bytes,),
            (1,),
            opened.tensor_offset,
            torch.storage.TypedStorage,
            torch.uint8,
            torch.device(device).index or 0,
            opened.storage_handle,
            opened.storage_size_bytes,
            opened.storage_offset_bytes,
            False,  # requires_grad
            opened.ref_counter_handle,
            opened.ref_counter_offset,
            opened.event_handle,
            opened.event_sync_required,
        )
        return memory

    def synchronize(self, device: str) -> None:
        """Wait until all work queued on the device is complete."""
        _cuda().synchronize(device)

    def collect(self) -> None:
        """Free memory that other processes have released."""
        _cuda().ipc_collect()


def _cuda() -> Any:
    """Torch's module for these devices."""
    import torch

    return torch.get_device_module("cuda")


KINDS: dict[str, DeviceMemory] = {"cuda": DeviceMemory()}
"""Implementations by torch's device type."""


def slot_devices(mesh: MeshInfo, num_slots: int = 0) -> tuple[str, ...]:
    """Devices of all slots of a worker, as numbered in its process.

    Accelerator numbers start at the worker's first device. On the host every slot is the same device.
    """
    kind, _, first = mesh.device.partition(":")
    numbers = range(int(first or 0), int(first or 0) + (num_slots or mesh.num_slots))
    return tuple(f"{kind}:{number}" if first else kind for number in numbers)


def device_memory(device: str) -> DeviceMemory | None:
    """Memory sharing for the device's kind; None if its memory cannot be shared."""
    return KINDS.get(device.partition(":")[0])


@contextmanager
def fixed_segments(set_options: Callable[[str], None]) -> Iterator[None]:
    """Allocate from cudaMalloc memory inside this context, even with `expandable_segments` enabled.

    torch shares expandable segments through `pidfd_getfd`, which containers and Yama's ptrace_scope forbid between
    unrelated processes. Its allocator skips free blocks of expandable segments while the option is off. All options are
    set at once, because some versions reset options that are not given.
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
