"""Source positions of the keys and values of a composed config. Files are layers, in the order of merging."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll_core.config.source import KeyPath, Source

COMMAND_LINE = "command line"
REFERENCE = re.compile(r"\$\{\s*(\.*)([\w/@-]+(?:[.\[\]][\w/@-]*)*)\s*\}")
"""Matches an interpolation that refers to a key: the dots of a relative one, and the key."""


@dataclass(frozen=True, slots=True, order=True)
class KeyLocation:
    """A source position. The sort order is the order in which problems are reported."""

    layer: int
    line: int
    column: int
    name: str

    def __str__(self) -> str:
        return f"{self.name}:{self.line}:{self.column}" if self.line else self.name


@dataclass(frozen=True, slots=True)
class FileLayer:
    """A file whose content was merged under `package`."""

    package: KeyPath
    source: Source
    inside: KeyPath = ()
    """Path of the merged part of the file; empty if all of it was merged."""

    @property
    def data(self) -> dict[Any, Any]:
        """The merged content."""
        data: Any = self.source.data
        for step in self.inside:
            data = data[step]
        return data if isinstance(data, dict) else {}

    def locate(self, index: int, path: KeyPath, *, key: bool) -> KeyLocation | None:
        """Position at which this layer writes the key or the value of `path`; None if it does not."""
        below = path[len(self.package) :]
        if path != self.package + below or not below:
            return None
        mark = self.source.mark(self.inside + below, key=key)
        return None if mark is None else KeyLocation(index, mark.line, mark.column, self.source.name)


@dataclass(frozen=True, slots=True)
class OverrideLayer:
    """A `key=value` of the command line."""

    path: KeyPath
    value: Any

    def locate(self, index: int, path: KeyPath, *, key: bool) -> KeyLocation | None:
        """The command line, if the override writes `path` or a mapping that contains it."""
        below = path[len(self.path) :]
        if path != self.path + below:
            return None
        value = self.value
        for step in below:
            if isinstance(value, dict):
                value = {str(name): entry for name, entry in value.items()}
                if step not in value:
                    return None
                value = value[step]
            elif not isinstance(value, list):
                return None
        return KeyLocation(index, 0, 0, COMMAND_LINE)


@dataclass(frozen=True, slots=True)
class Interpolation:
    """A value that was written as `${…}`."""

    text: str
    target: KeyPath | None
    """Path that it refers to, if that is in the config."""
    from_environment: bool

    @classmethod
    def of(cls, text: str, path: KeyPath) -> Interpolation:
        """The interpolation `text` at `path`."""
        target: KeyPath | None = None
        if match := REFERENCE.search(text):
            dots, reference = match[1], match[2]
            target = path[: len(path) - len(dots)] if dots else ()
            target += tuple(step for step in re.split(r"[.\[\]]+", reference) if step)
        return cls(text, target, "oc.env" in text or "oc.decode" in text)


@dataclass(slots=True)
class Positions:
    """Source positions of keys and values. As in merging, the last layer that writes a path wins."""

    name: str
    """Name of the config, used for values that were not written anywhere."""
    layers: list[FileLayer | OverrideLayer] = field(default_factory=list)
    interpolations: dict[KeyPath, Interpolation] = field(default_factory=dict)

    def value(self, path: KeyPath) -> KeyLocation:
        """Position of the value of `path`; if it was not written, of the mapping that contains it."""
        return self._nearest(path, key=False)

    def key(self, path: KeyPath) -> KeyLocation:
        """Position of the key of `path`; if it was not written, of the mapping that contains it."""
        return self._nearest(path, key=True)

    def through(self, path: KeyPath) -> tuple[Interpolation, KeyLocation | None] | None:
        """The interpolation that produced the value of `path`, and the position of its target."""
        layers = (layer.path for layer in self.layers if isinstance(layer, OverrideLayer))
        overridden = max((len(written) for written in layers if path[: len(written)] == written), default=0)
        for length in range(len(path), overridden - 1, -1):
            interpolation = self.interpolations.get(path[:length])
            if interpolation is not None:
                if interpolation.target is None:
                    return interpolation, None
                return interpolation, self._exact(interpolation.target + path[length:], key=False)
        return None

    def _nearest(self, path: KeyPath, *, key: bool) -> KeyLocation:
        if path and self._exact(path, key=key) is None:
            for index, layer in enumerate(self.layers):
                # No layer wrote `path` itself, but one wrote a part of it.
                if isinstance(layer, OverrideLayer) and layer.path[: len(path)] == path:
                    return KeyLocation(index, 0, 0, COMMAND_LINE)
                if isinstance(layer, FileLayer) and layer.package[: len(path)] == path:
                    return KeyLocation(index, 1, 1, layer.source.name)
        for length in range(len(path), 0, -1):
            # A mapping is located by its key: its value begins one line further down.
            location = self._exact(path[:length], key=key or length < len(path))
            if location is not None:
                return location
        return KeyLocation(0, 0, 0, self.name)

    def _exact(self, path: KeyPath, *, key: bool) -> KeyLocation | None:
        located = (layer.locate(index, path, key=key) for index, layer in reversed(list(enumerate(self.layers))))
        return next((location for location in located if location is not None), None)
