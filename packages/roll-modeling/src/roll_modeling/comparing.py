"""A manifest held against the model of an engine, before anything of it is touched.

engine's processes   compare(...)  names and shapes, by what each process finds in its model
worker               refuse(...)   the first thing that is wrong, in words
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from roll_core.errors import CorruptTensorError, MissingTensorError, UnexpectedTensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from roll_core.types import WeightManifest


class Held(Protocol):
    """Where an engine has a tensor of the Hugging Face model."""

    @property
    def key(self) -> Hashable:
        """The same for two names of one tensor (tied embeddings)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor, over all ranks."""


def entries(manifest: WeightManifest) -> list[tuple[str, list[int]]]:
    """Names and shapes, as plain values that cross to the engine's processes."""
    return [(entry.name, list(entry.shape)) for entry in manifest.tensors]


def compare(
    announced: Iterable[tuple[str, Sequence[int]]],
    locate: Callable[[str], Held | None],
    held: Iterable[tuple[str, Held]],
) -> dict[str, Any]:
    """What of the announced tensors this process has otherwise, does not have, and misses; plain values.

    `locate` finds a tensor by name: None where another process has it, `KeyError` where none can. `held` is everything
    that an update has to bring.
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
    """Raise for the first thing that is wrong in the answers of `compare`: `UnexpectedTensorError`,
    `CorruptTensorError`, `MissingTensorError`."""
    sent = dict(entries(manifest))
    for answer in answers:
        if unknown := answer["unknown"]:
            raise UnexpectedTensorError(
                f"{who}: was sent {unknown[0]}, which {engine}'s model does not have, or holds in a form that cannot be"
                f" read back ({len(unknown)} such tensors)"
            )
        for name, shape in answer["shapes"].items():
            raise CorruptTensorError(f"{who}: {name} is {sent[name]} in the manifest, and {shape} in {engine}'s model")
        if missing := answer["missing"]:
            raise MissingTensorError(
                f"{who}: {missing[0]} is not in the manifest of version {manifest.version}"
                f" ({len(missing)} such tensors)"
            )
