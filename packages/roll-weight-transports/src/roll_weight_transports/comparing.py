"""Checks a manifest of weights or of an adapter against an engine's model, before the engine changes any weight.

engine's processes   compare, compare_adapter    compare names and shapes with each process's part of the model
worker               refuse, refuse_adapter      raise for the first mismatch

Shapes: I inputs and O outputs of a layer, R rank; A [R, I], B [O, R] already scaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from roll_core.errors import CorruptTensorError, MissingTensorError, UnexpectedTensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from roll_core.spec.model import LoraSpec
    from roll_core.types import WeightManifest

SIDES = ("lora_A.weight", "lora_B.weight")
"""Name suffixes of A and B of an adapter."""


class EngineTensor(Protocol):
    """Location of a Hugging Face model's tensor in an engine."""

    @property
    def keys(self) -> Iterable[Hashable]:
        """Identities of what the tensor contains; equal for two names of one tensor (tied embeddings)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, over all ranks."""


def entries(manifest: WeightManifest) -> list[tuple[str, list[int]]]:
    """Names and shapes of all tensors of the manifest, as plain values to send to the engine's processes."""
    return [(entry.name, list(entry.shape)) for entry in manifest.loaded]


def unsent_digests(who: str, manifest: WeightManifest, loaded: Mapping[str, str]) -> dict[str, str]:
    """Digests of the manifest's unsent tensors, from those with which the engine loaded its tensors.

    Raises `MissingTensorError` if the engine has not loaded one of them.
    """
    if missing := [entry.name for entry in manifest.unsent if entry.name not in loaded]:
        raise MissingTensorError(
            f"{who}: version {manifest.version} does not contain {missing[0]}, and the engine has not loaded it before"
            f" ({len(missing)} such tensors)"
        )
    return {entry.name: loaded[entry.name] for entry in manifest.unsent}


def compare(
    announced: Iterable[tuple[str, Sequence[int]]],
    locate: Callable[[str], EngineTensor | None],
    held: Iterable[tuple[str, EngineTensor]],
) -> dict[str, Any]:
    """Compare announced tensors with the model of this process; returns plain values.

    The result has `unknown` names, `shapes` that differ (this process's shape by name) and `missing` names. `locate`
    finds a tensor by name. It returns None if another process has the tensor, and raises `KeyError` if no process can
    have it. `held` lists every tensor that an update must contain.
    """
    unknown: list[str] = []
    shapes: dict[str, list[int]] = {}
    covered: set[Hashable] = set()
    for name, shape in announced:
        try:
            part = locate(name)
        except KeyError:
            unknown.append(name)
            continue
        if part is None:
            continue
        covered.update(part.keys)
        if part.shape != tuple(shape):
            shapes[name] = list(part.shape)
    missing = [name for name, part in held if not covered.issuperset(part.keys)]
    return {"unknown": unknown, "shapes": shapes, "missing": missing}


def refuse(who: str, engine: str, manifest: WeightManifest, answers: Iterable[Mapping[str, Any]]) -> None:
    """Raise for the first mismatch in the results of `compare` or `compare_adapter`.

    Raises `UnexpectedTensorError`, `CorruptTensorError` or `MissingTensorError`.
    """
    sent = dict(entries(manifest))
    for answer in answers:
        if unknown := answer["unknown"]:
            raise UnexpectedTensorError(
                f"{who}: received {unknown[0]}, which {engine} has no place for or cannot read back"
                f" ({len(unknown)} such tensors)"
            )
        for name, shape in answer["shapes"].items():
            raise CorruptTensorError(f"{who}: {name} is {sent[name]} in the manifest, and {shape} in {engine}'s model")
        if missing := answer.get("missing"):
            raise MissingTensorError(
                f"{who}: {missing[0]} is not in the manifest of version {manifest.version}"
                f" ({len(missing)} such tensors)"
            )


def compare_adapter(
    announced: Iterable[tuple[str, Sequence[int]]], room: Callable[[str], Sequence[int]]
) -> dict[str, Any]:
    """Compare announced tensors with the adapter slots of this process; returns plain values for `refuse_adapter`.

    The result has `unknown` names and `shapes` that do not fit (the slot's shape by name). `room` returns the shape of
    a tensor's slot, whose rank may be larger, and raises `KeyError` if there is no slot.
    """
    unknown: list[str] = []
    shapes: dict[str, list[int]] = {}
    for name, shape in announced:
        try:
            slot_shape = room(name)
        except KeyError:
            unknown.append(name)
            continue
        if not _fits(slot_shape, name, shape):
            shapes[name] = list(slot_shape)
    return {"unknown": unknown, "shapes": shapes}


def refuse_adapter(
    who: str, engine: str, manifest: WeightManifest, lora: LoraSpec, answers: Iterable[Mapping[str, Any]]
) -> None:
    """Raise for the first mismatch in the results of `compare_adapter`.

    Also raises if A or B of a layer is not announced, or has another rank than in `lora`. The errors are those of
    `refuse`.
    """
    refuse(who, engine, manifest, answers)
    sent = dict(entries(manifest))
    for name, shape in sent.items():
        layer, _, side = name.rpartition(".lora_")
        other = f"{layer}.lora_{'B' if side.startswith('A') else 'A'}.weight"
        if other not in sent:
            raise MissingTensorError(f"{who}: {other} is not in the manifest, but {name} is")
        sent_rank, rank = shape[rank_dim(name)], lora.rank_of(layer)
        if sent_rank != rank:
            raise CorruptTensorError(f"{who}: {name} has rank {sent_rank}, the adapter {rank}")


def _fits(room: Sequence[int], name: str, shape: Sequence[int]) -> bool:
    """True if `shape` equals the slot's shape, except that its rank may be smaller."""
    if len(shape) != 2:
        return False
    rank = rank_dim(name)
    return shape[rank] <= room[rank] and shape[1 - rank] == room[1 - rank]


def rank_dim(name: str) -> int:
    """Index of the rank dimension."""
    return 0 if name.endswith(SIDES[0]) else 1
