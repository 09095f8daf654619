"""Where each value of a composed config was written: files are layers, laid over each other in the order of merging."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll_core.config.source import KeyPath, Mark, Source

COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True, order=True)
class KeyLocation:
    """A place, in the order in which problems are reported."""

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
    """What of the file was merged, where that is not all of it."""

    @property
    def data(self) -> dict[Any, Any]:
        """What was merged."""
        found: Any = self.source.data
        for step in self.inside:
            found = found[step]
        return found if isinstance(found, dict) else {}

    def place(self, index: int, path: KeyPath, *, key: bool) -> KeyLocation | None:
        """Where this layer writes the key or the value of `path`, if it does."""
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
        """The command line, if the override writes `path` or what it is part of."""
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
    """What it refers to, if that is a place in the config."""
    from_environment: bool


@dataclass(slots=True)
class Written:
    """Answers where a key or a value was written; the last layer that wrote it wins, as in merging."""

    name: str
    """Of the config; stands for what was written nowhere."""
    layers: list[FileLayer | OverrideLayer] = field(default_factory=list)
    interpolations: dict[KeyPath, Interpolation] = field(default_factory=dict)

    def value(self, path: KeyPath) -> KeyLocation:
        """Where the value of `path` was written; of what contains it if it was written nowhere."""
        return self._nearest(path, key=False)

    def key(self, path: KeyPath) -> KeyLocation:
        """Where the key of `path` was written; of what contains it if it was written nowhere."""
        return self._nearest(path, key=True)

    def through(self, path: KeyPath) -> tuple[Interpolation, KeyLocation | None] | None:
        """The interpolation that gave `path` its value, and where what it refers to was written."""
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
                # Nobody wrote this, but somebody wrote what is in it.
                if isinstance(layer, OverrideLayer) and layer.path[: len(path)] == path:
                    return KeyLocation(index, 0, 0, COMMAND_LINE)
                if isinstance(layer, FileLayer) and layer.package[: len(path)] == path:
                    return KeyLocation(index, 1, 1, layer.source.name)
        for length in range(len(path), 0, -1):
            # What contains a path is named by its key: its value begins a line further down.
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
