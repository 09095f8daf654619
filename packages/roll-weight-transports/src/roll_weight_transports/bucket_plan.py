"""Buckets of tensors for weight transports. Sender and receiver compute the same layout from the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_core.errors import MissingTensorError, UnexpectedTensorError, WeightSyncError
from roll_core.spec.weights import Digests, digest_function, entry_bytes, tensor_entry, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from roll_core.types import TensorEntry, WeightManifest

ALIGNMENT = 64
"""Alignment of tensors in a bucket, in bytes: one cache line, and sufficient for every dtype."""


@dataclass(frozen=True, slots=True)
class BucketSlice:
    """Position of one whole tensor within a bucket."""

    entry: TensorEntry
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors of a manifest, at least one."""

    slices: tuple[BucketSlice, ...]
    num_bytes: int

    @property
    def first(self) -> str:
        """Name of the first tensor."""
        return self.slices[0].entry.name


def plan_buckets(manifest: WeightManifest, bucket_bytes: int) -> list[Bucket]:
    """Assign the manifest's tensors, in order, to buckets of at most `bucket_bytes`.

    A tensor is never split: a larger tensor gets a bucket of its own.
    """
    buckets: list[Bucket] = []
    slices: list[BucketSlice] = []
    end = 0
    for entry in manifest.tensors:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        num_bytes = entry_bytes(entry)
        if slices and offset + num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(slices), end))
            slices, offset = [], 0
        slices.append(BucketSlice(entry, offset, num_bytes))
        end = offset + num_bytes
    if slices:
        buckets.append(Bucket(tuple(slices), end))
    return buckets


def views(memory: Tensor, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a bucket stored at the beginning of `memory` (flat uint8). The tensors are views."""
    for piece in bucket.slices:
        yield piece.entry.name, _view(memory, piece)


def fill(memory: Tensor, bucket: Bucket, exported: Iterator[tuple[str, Tensor]]) -> list[TensorEntry]:
    """Copy the next exported tensors into `memory` (flat uint8); returns their entries with digests.

    Raises `WeightSyncError` subclasses if the tensors differ from those in the manifest.
    """
    targets: dict[str, Tensor] = {}
    digests = Digests()
    for piece in bucket.slices:
        name, tensor = _next_tensor(piece.entry, exported)
        target, like = _view(memory, piece), piece.entry.digest
        if digest_function(like):  # of the source: the receiver's digest then proves a copy to the host, too
            tensor = tensor.detach().to(target.dtype)
            target.copy_(tensor)
            digests.add(name, tensor, like)
        else:
            digests.copy(name, target, tensor)
        targets[name] = target
    digest_of = digests.read()
    return [tensor_entry(name, target, digest_of[name]) for name, target in targets.items()]


def require_exhausted(exported: Iterator[tuple[str, Tensor]]) -> None:
    """Raise `UnexpectedTensorError` if the export has more tensors than the manifest."""
    name, tensor = next(exported, ("", None))
    if tensor is not None:
        raise UnexpectedTensorError(f"the export yielded {name}, which is not in the manifest")


def _view(memory: Tensor, part: BucketSlice) -> Tensor:
    flat = memory[part.offset : part.offset + part.num_bytes]
    return flat.view(torch_dtype(part.entry.dtype)).view(part.entry.shape)


def _next_tensor(entry: TensorEntry, exported: Iterator[tuple[str, Tensor]]) -> tuple[str, Tensor]:
    """The next exported tensor. Raises a `WeightSyncError` subclass unless name and shape match `entry`."""
    name, tensor = next(exported, ("", None))
    if tensor is None:
        raise MissingTensorError(f"the export ended before {entry.name}, which is in the manifest")
    if name != entry.name:
        raise WeightSyncError(
            f"the export yielded {name}, expected {entry.name}: the order of tensors must be the same every time"
        )
    if tuple(tensor.shape) != entry.shape:
        raise WeightSyncError(f"the export yielded {name} of shape {tuple(tensor.shape)}, expected {entry.shape}")
    return name, tensor
