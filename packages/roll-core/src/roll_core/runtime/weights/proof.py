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
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from roll_core.types import WeightManifest, WeightReceipt

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
            f"{who} holds weight version {receipt.version}, published was {manifest.version}: it ignored the update"
        )
    expected = {entry.name: entry.digest for entry in manifest.tensors}
    held = receipt.digests
    wrong = [name for name, digest in expected.items() if name in held and held[name] != digest]
    # A tensor in the place of another explains other differences, so it is checked first.
    if wrong:
        raise _wrong_digests(who, manifest, expected, receipt, wrong, previous)
    if missing := [name for name in expected if name not in held]:
        raise MissingTensorError(
            f"{who} does not hold {_names(missing)} of weight version {manifest.version}"
            f" ({len(held)} of {len(expected)} tensors arrived)"
        )
    if extra := [name for name in held if name not in expected]:
        raise UnexpectedTensorError(
            f"{who} holds {_names(extra)}, which weight version {manifest.version} does not have:"
            " the two sides do not run the same model"
        )


def _wrong_digests(
    who: str,
    manifest: WeightManifest,
    expected: dict[str, str],
    receipt: WeightReceipt,
    wrong: Sequence[str],
    previous: WeightManifest | None,
) -> WeightSyncError:
    held = receipt.digests
    before = {entry.name: entry.digest for entry in previous.tensors} if previous else {}
    if previous is not None and all(held[name] == before.get(name) for name in wrong):
        return StaleWeightsError(
            f"{who} says weight version {manifest.version} but {_names(wrong)}"
            f" still {'has' if len(wrong) == 1 else 'have'} the values of version {previous.version}"
        )
    owner = {expected[name]: name for name in wrong}
    partners = ((name, owner.get(held[name], name)) for name in wrong)
    swapped = [(a, b) for a, b in partners if a < b and held[b] == expected[a]]
    if swapped:
        pairs = ", ".join(f"{a} and {b}" for a, b in swapped[:NAMED])
        return CorruptTensorError(f"{who} holds the values of {pairs} swapped, in weight version {manifest.version}")
    name = wrong[0]
    entry = next(entry for entry in manifest.tensors if entry.name == name)
    others = f" (and so do {len(wrong) - 1} others: {_names(wrong[1:])})" if len(wrong) > 1 else ""
    return CorruptTensorError(
        f"{who} holds other bytes than were sent for {name} ({entry.dtype} {list(entry.shape)}){others},"
        f" in weight version {manifest.version}: digest {held[name]}, sent was {entry.digest}"
    )


def require_change(manifest: WeightManifest, previous: WeightManifest, *, role: str, rank: int) -> None:
    """Raise `WeightsUnchangedError` if a new version has the same values as the one before."""
    before = {entry.name: entry.digest for entry in previous.tensors}
    steps = manifest.version - previous.version
    if steps <= 0 or any(before.get(entry.name) != entry.digest for entry in manifest.tensors):
        return
    raise WeightsUnchangedError(
        f"{role} rank {rank} did {steps} optimizer step{'s' if steps > 1 else ''} since weight version"
        f" {previous.version}, but none of the {len(manifest.tensors)} tensors of version {manifest.version}, from"
        f" {manifest.tensors[0].name} on, differs, though the gradient was not zero: the learning rate was 0 or"
        " vanishes in the dtype's rounding, or a stale copy was exported"
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
