"""Fragments that plugins bring: where they lie, and what a config that names one is told.

A config's own folder comes first, so a file of the user's takes the place of a plugin's of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_core.errors import PluginError, PluginLoadError
from roll_core.plugins.targets import data_file
from roll_core.spec.providers import FragmentProvider

if TYPE_CHECKING:
    from pathlib import Path

    from roll_core.plugins.registry import Registry


@dataclass(frozen=True, slots=True)
class PluginFragments:
    """The files, by the name of each."""

    registry: Registry
    files: dict[str, Path]
    absent: dict[str, PluginLoadError]
    """Those that are not where their records say: an error only for a config that names them."""

    @classmethod
    def of(cls, registry: Registry) -> PluginFragments:
        """Those of every plugin; of a name that several offer, the first."""
        files: dict[str, Path] = {}
        absent: dict[str, PluginLoadError] = {}
        for record in registry.providers(FragmentProvider):
            try:
                files.setdefault(record.name, data_file(record.target, owner=registry.owner(record)))
            except PluginLoadError as error:
                absent[record.name] = error
        return cls(registry, files, absent)

    @property
    def folders(self) -> list[Path]:
        """Where they lie, each once."""
        return list(dict.fromkeys(file.parent for file in self.files.values()))

    def name_of(self, file: Path) -> str:
        """The name under which `file` is offered; empty for a file of the user's. Raises `ProviderConflictError` where
        several packages offer one of that name."""
        if self.files.get(file.stem) != file:
            return ""
        self.registry.find(FragmentProvider, file.stem)
        return file.stem

    def why_not(self, name: str) -> str:
        """What to say where there is no fragment `name`, if plugins have to do with it; else empty."""
        bare = name.rpartition("/")[2]
        if bare in self.absent:
            return str(self.absent[bare])
        if bare in self.files:
            return f"a plugin brings {bare}: name it without a folder"
        try:
            self.registry.find(FragmentProvider, bare)
        except PluginError as error:
            return next((line.strip() for line in str(error).splitlines() if "pip install" in line), "")
        return ""
