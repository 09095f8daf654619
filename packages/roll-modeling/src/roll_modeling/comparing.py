"""Checks a weight manifest against an engine's model, before the engine changes any weight.

engine's processes   compare(...)  compares names and shapes with each process's part of the model
worker               refuse(...)   raises for the first mismatch
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from roll_core.errors import CorruptTensorError, MissingTensorError, UnexpectedTensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from roll_core.types import WeightManifest


class EngineTensor(Protocol):
    """Location of a Hugging Face model's tensor in an engine."""

    @property
    def key(self) -> Hashable:
        """Identity of the tensor; equal for two names of one tensor (tied embeddings)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, over all ranks."""


def entries(manifest: WeightManifest) -> list[tuple[str, list[int]]]:
    """Names and shapes of the manifest's tensors, as plain values to send to the engine's processes."""
    return [(entry.name, list(entry.shape)) for entry in manifest.tensors]


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
        covered.add(part.key)
        if part.shape != tuple(shape):
            shapes[name] = list(part.shape)
    missing = [name for name, part in held if part.key not in covered]
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
