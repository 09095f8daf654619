"""The proof of a publish: the sender's manifest against what each receiver says that it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.errors import (
    CorruptTensorError,
    MissingTensorError,
    StaleWeightsError,
    UnexpectedTensorError,
    WeightsUnchangedError,
    WeightSyncError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.types import WeightManifest, WeightReceipt

NAMED = 5
"""Tensors that a message names before it counts the rest."""


def verify(manifest: WeightManifest, receipt: WeightReceipt, previous: WeightManifest | None = None) -> None:
    """Raise the `WeightSyncError` that tells best how `receipt` differs from `manifest`; return if it does not.

    `previous` is the manifest of the publish before: tensors that still have its digests were not updated.
    """
    who = f"{receipt.role} rank {receipt.rank}"
    if receipt.version != manifest.version:
        raise StaleWeightsError(
            f"{who} holds weight version {receipt.version}, published was {manifest.version}: it ignored the update"
        )
    expected = {entry.name: entry.digest for entry in manifest.tensors}
    held = receipt.digests
    wrong = [name for name, digest in expected.items() if name in held and held[name] != digest]
    # What was put in another's place explains the rest, so it is looked for first.
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
    """Raise `WeightsUnchangedError` if a new version has the very values of the one before."""
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
