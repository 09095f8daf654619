"""Source positions of the values of a composed config. Files are layers, in the order of merging."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll_core.config.source import KeyPath, Mark, Source

COMMAND_LINE = "command line"


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
        found: Any = self.source.data
        for step in self.inside:
            found = found[step]
        return found if isinstance(found, dict) else {}

    def place(self, index: int, path: KeyPath, *, key: bool) -> KeyLocation | None:
        """Position at which this layer writes the key or the value of `path`; None if it does not."""
        depth = len(self.package)
        if path[:depth] != self.package:
            return None
        below = path[depth:]
        at = self.inside + below
        mark: Mark | None = self.source.key_mark(at) if key else self.source.value_mark(at)
        if mark is None or not below:
            return None
        return KeyLocation(index, mark.line, mark.column, self.source.name)


@dataclass(frozen=True, slots=True)
class OverrideLayer:
    """A `key=value` of the command line."""

    path: KeyPath
    value: Any

    def place(self, index: int, path: KeyPath, *, key: bool) -> KeyLocation | None:
        """The command line, if the override writes `path` or a mapping that contains it."""
        depth = len(self.path)
        if path[:depth] != self.path:
            return None
        value = self.value
        for step in path[depth:]:
            if isinstance(value, dict):
                if step not in {str(each) for each in value}:
                    return None
                value = next(each for name, each in value.items() if str(name) == step)
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


@dataclass(slots=True)
class Written:
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
        layers = (each.path for each in self.layers if isinstance(each, OverrideLayer))
        overridden = max((len(each) for each in layers if path[: len(each)] == each), default=0)
        for length in range(len(path), overridden - 1, -1):
            found = self.interpolations.get(path[:length])
            if found is not None:
                target = None if found.target is None else self._exact(found.target + path[length:], key=False)
                return found, target
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
            place = self._exact(path[:length], key=key or length < len(path))
            if place is not None:
                return place
        return KeyLocation(0, 0, 0, self.name)

    def _exact(self, path: KeyPath, *, key: bool) -> KeyLocation | None:
        for index in range(len(self.layers) - 1, -1, -1):
            place = self.layers[index].place(index, path, key=key)
            if place is not None:
                return place
        return None
