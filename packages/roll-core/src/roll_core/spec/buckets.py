"""How tensors lie in buckets: both ends compute the same layout from the manifest alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_core.errors import MissingTensorError, UnexpectedTensorError, WeightSyncError
from roll_core.spec.weights import copy_digested, digest, entry_bytes, tensor_entry, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from roll_core.types import TensorEntry, WeightManifest

ALIGNMENT = 64
"""Bytes; a cache line, and enough for every dtype."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A whole tensor in a bucket."""

    entry: TensorEntry
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors of a manifest, at least one."""

    pieces: tuple[Piece, ...]
    num_bytes: int

    @property
    def first(self) -> str:
        """Name of the first tensor."""
        return self.pieces[0].entry.name


def plan_buckets(manifest: WeightManifest, bucket_bytes: int) -> list[Bucket]:
    """The manifest's tensors in order, in buckets of at most `bucket_bytes` that are filled one after the other.

    A tensor is never cut: a larger one has a bucket of its own.
    """
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    end = 0
    for entry in manifest.tensors:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        num_bytes = entry_bytes(entry)
        if pieces and offset + num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(pieces), end))
            pieces, offset = [], 0
        pieces.append(Piece(entry, offset, num_bytes))
        end = offset + num_bytes
    if pieces:
        buckets.append(Bucket(tuple(pieces), end))
    return buckets


def view(memory: Tensor, piece: Piece) -> Tensor:
    """The tensor that `piece` describes, in `memory` (flat uint8)."""
    flat = memory[piece.offset : piece.offset + piece.num_bytes]
    return flat.view(torch_dtype(piece.entry.dtype)).view(piece.entry.shape)


def fill(memory: Tensor, bucket: Bucket, exported: Iterator[tuple[str, Tensor]]) -> list[TensorEntry]:
    """Copy the next tensors into their places; returns their entries with digests.

    Raises `WeightSyncError` subclasses where the tensors are not the ones that were offered.
    """
    sent = []
    for piece in bucket.pieces:
        name, tensor = next_offered(piece.entry, exported)
        target = view(memory, piece)
        if target.dtype == tensor.dtype:
            found = copy_digested(target, tensor)
        else:
            target.copy_(tensor.detach())
            found = digest(target)
        sent.append(tensor_entry(name, target, found))
    return sent


def next_offered(entry: TensorEntry, exported: Iterator[tuple[str, Tensor]]) -> tuple[str, Tensor]:
    """The next exported tensor, which must be the one that `entry` offered."""
    name, tensor = next(exported, ("", None))
    if tensor is None:
        raise MissingTensorError(f"the export ended before {entry.name}, which it had offered")
    if name != entry.name:
        raise WeightSyncError(
            f"the export yielded {name} where it had offered {entry.name}: its order must be the same every time"
        )
    if tuple(tensor.shape) != entry.shape:
        raise WeightSyncError(f"the export yielded {name} of shape {tuple(tensor.shape)}, offered was {entry.shape}")
    return name, tensor


def nothing_left(exported: Iterator[tuple[str, Tensor]]) -> None:
    """Raise `UnexpectedTensorError` if the export has more tensors than were offered."""
    name, tensor = next(exported, ("", None))
    if tensor is not None:
        raise UnexpectedTensorError(f"the export yielded {name}, which it had not offered")
