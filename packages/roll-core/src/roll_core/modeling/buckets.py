"""Published weights on their way from the worker into the engine's processes: one stretch of host memory, filled again
and again.

    worker              fill | wait for the answer | fill | ...
    engine's processes       | copy out, load      |      | ...

The memory has no name. Whoever knows the worker's process and descriptor can map it, which on Linux are the processes
of the same user; it goes when the worker closes it or ends.
"""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from roll_core.errors import CorruptTensorError, MissingTensorError, UnexpectedTensorError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from roll_core.types import WeightManifest

ALIGNMENT = 64
"""Bytes; each tensor begins at a multiple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A tensor in a bucket."""

    name: str
    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, ...]
    start: int
    """Its first byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketInfo:
    """What an engine's process needs to read a bucket; plain values, because it crosses as JSON does."""

    path: str
    num_bytes: int
    tensors: Sequence[Any]

    def plain(self) -> dict[str, Any]:
        """As a dictionary."""
        return asdict(self)


class BucketWriter:
    """Owns the memory."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._descriptor = -1
        self._memory: Tensor | None = None

    def fill(self, tensors: Iterator[tuple[str, Tensor]], first: tuple[str, Tensor]) -> tuple[BucketInfo, Any]:
        """Pack `first` and what else fits; what did not fit is returned beside the bucket, None at the end."""
        from roll_core.spec.weights import dtype_name

        memory = self._room(max(self._bucket_bytes, first[1].nbytes))
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
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        return BucketInfo(path=path, num_bytes=memory.numel(), tensors=tuple(packed)), following

    def close(self) -> None:
        """Give the memory back. May be called several times."""
        self._memory = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _room(self, num_bytes: int) -> Tensor:
        if self._memory is None or self._memory.numel() < num_bytes:
            self.close()
            self._descriptor = os.memfd_create(f"roll-{os.getpid()}-bucket")
            os.truncate(self._descriptor, num_bytes)
            self._memory = _map(self._descriptor, num_bytes)
        return self._memory


def read_bucket(info: BucketInfo) -> Iterator[tuple[str, Tensor]]:
    """The bucket's tensors, in memory of their own: the engine keeps some until the rest of their layer is there."""
    from roll_core.spec.weights import torch_dtype

    descriptor = os.open(info.path, os.O_RDWR)
    try:
        memory = _map(descriptor, info.num_bytes)
    finally:
        os.close(descriptor)
    for each in info.tensors:
        yield each["name"], view(memory, torch_dtype(each["dtype"]), tuple(each["shape"]), each["start"]).clone()


class Incoming:
    """The sender's tensors, each held against its entry in the manifest."""

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
            raise UnexpectedTensorError(f"{self._who}: was sent {name}, which the manifest does not have, or has once")
        if dtype_name(tensor) != entry.dtype or tuple(tensor.shape) != entry.shape:
            raise CorruptTensorError(
                f"{self._who}: {name} arrived as {dtype_name(tensor)} {list(tensor.shape)}; the manifest says"
                f" {entry.dtype} {list(entry.shape)}"
            )
        return name, tensor

    def refuse_missing(self) -> None:
        """Raise `MissingTensorError` for what did not come."""
        if self._expected:
            raise MissingTensorError(
                f"{self._who}: {min(self._expected)} was not sent of version {self._version}"
                f" ({len(self._expected)} such tensors)"
            )


def view(memory: Tensor, dtype: Any, shape: tuple[int, ...], start: int) -> Tensor:
    """A tensor on some of the bytes of `memory`."""
    num_bytes = dtype.itemsize * math.prod(shape)
    return memory[start : start + num_bytes].view(dtype).view(shape)


def _map(descriptor: int, num_bytes: int) -> Tensor:
    import torch

    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
