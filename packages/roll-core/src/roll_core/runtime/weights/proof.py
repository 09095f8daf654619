"""The proof of a publish: the sender's manifest compared with the receipt of each receiver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from roll_core.errors import (
    CorruptTensorError,
    MissingTensorError,
    StaleWeightsError,
    UnexpectedTensorError,
    WeightsUnchangedError,
    WeightSyncError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from roll_core.types import TensorEntry, WeightManifest, WeightReceipt

NAMED = 5
"""Number of tensors that a message names."""
SAMPLE_BYTES = 16 << 20
"""Bytes that `sample_fingerprint` reads; smaller models are read completely."""
_PAGE = 64 << 10


def verify(manifest: WeightManifest, receipt: WeightReceipt, previous: WeightManifest | None = None) -> None:
    """Raise the most specific `WeightSyncError` if `receipt` differs from `manifest`.

    `previous`: manifest of the publish before. Tensors that still have its digests were not updated.
    """
    who = f"{receipt.role} rank {receipt.rank}"
    if receipt.version != manifest.version:
        raise StaleWeightsError(
            f"{who} has weight version {receipt.version}, expected {manifest.version}: it ignored the update"
        )
    sent = {entry.name: entry.digest for entry in manifest.tensors}
    loaded = receipt.digests
    wrong = [entry for entry in manifest.tensors if loaded.get(entry.name, entry.digest) != entry.digest]
    # A tensor in the place of another explains other differences, so it is checked first.
    if wrong:
        raise _wrong_digests(who, manifest.version, sent, loaded, wrong, previous)
    if missing := [name for name in sent if name not in loaded]:
        raise MissingTensorError(
            f"{who} did not load {_names(missing)} of weight version {manifest.version}"
            f" (it loaded {len(loaded)} of {len(sent)} tensors)"
        )
    if extra := [name for name in loaded if name not in sent]:
        raise UnexpectedTensorError(
            f"{who} loaded {_names(extra)}, which weight version {manifest.version} does not contain: both sides must"
            " run the same model"
        )


def _wrong_digests(
    who: str,
    version: int,
    sent: Mapping[str, str],
    loaded: Mapping[str, str],
    wrong: Sequence[TensorEntry],
    previous: WeightManifest | None,
) -> WeightSyncError:
    """The cause of digests that differ: an ignored update, swapped tensors, or other bytes."""
    names = [entry.name for entry in wrong]
    before = {entry.name: entry.digest for entry in previous.tensors} if previous else {}
    if previous is not None and all(loaded[name] == before.get(name) for name in names):
        return StaleWeightsError(
            f"{who} confirmed weight version {version}, but has the values of version {previous.version} in"
            f" {_names(names)}"
        )
    owner = {sent[name]: name for name in names}
    partners = ((name, owner.get(loaded[name], name)) for name in names)
    swapped = [(a, b) for a, b in partners if a < b and loaded[b] == sent[a]]
    if swapped:
        pairs = ", ".join(f"{a} and {b}" for a, b in swapped[:NAMED])
        return CorruptTensorError(f"{who} has the values of {pairs} swapped, in weight version {version}")
    first = wrong[0]
    others = f", and {len(wrong) - 1} others: {_names(names[1:])}" if len(wrong) > 1 else ""
    return CorruptTensorError(
        f"{who} loaded other bytes than were sent for {first.name} ({first.dtype} {list(first.shape)}) in weight"
        f" version {version}: digest {loaded[first.name]}, sent was {first.digest}{others}"
    )


def require_change(manifest: WeightManifest, previous: WeightManifest, *, role: str, rank: int) -> None:
    """Raise `WeightsUnchangedError` if a new version has the same values as the one before."""
    before = {entry.name: entry.digest for entry in previous.tensors}
    steps = manifest.version - previous.version
    if steps <= 0 or any(before.get(entry.name) != entry.digest for entry in manifest.tensors):
        return
    raise WeightsUnchangedError(
        f"{role} rank {rank} did {steps} optimizer step{'s' if steps > 1 else ''} with a non-zero gradient since weight"
        f" version {previous.version}, but version {manifest.version} has the same values in all"
        f" {len(manifest.tensors)} tensors ({manifest.tensors[0].name}, ...): the learning rate is 0 or too small for"
        " the dtype, or the strategy exported a stale copy"
    )


def _names(names: Sequence[str]) -> str:
    rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + rest


def sample_fingerprint(tensors: Sequence[tuple[str, Tensor]], sample_bytes: int = SAMPLE_BYTES) -> str:
    """Hash of the names and a sample of the bytes: the first page of each tensor and every k-th page.

    k is the smallest number for which about `sample_bytes` are read. Different fingerprints prove that a value differs.
    Equal fingerprints prove equality only if all pages are read. An optimizer step that changes no sampled page of any
    tensor has almost surely changed no value.
    """
    total = sum(tensor.nbytes for _, tensor in tensors)
    every = max(1, -(-total // sample_bytes))
    running = xxhash.xxh3_128()
    for name, tensor in tensors:
        running.update(f"\0{name}\0".encode())
        for page in _pages(tensor, every):
            running.update(page.numpy().data)
    return running.hexdigest()


def _pages(tensor: Tensor, every: int) -> Iterator[Tensor]:
    """Every `every`-th page of the tensor's bytes, on the host."""
    import torch

    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if every == 1:
        yield flat.cpu()
        return
    for start in range(0, flat.numel(), _PAGE * every):
        yield flat[start : start + _PAGE].cpu()
