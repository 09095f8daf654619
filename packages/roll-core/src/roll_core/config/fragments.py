"""Config fragments of plugins: where their files are, and errors for configs that name a missing one.

A config's own folder takes precedence: a user's file replaces a plugin's file of the same name.
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
    """Fragment files of all plugins, by name."""

    registry: Registry
    files: dict[str, Path]
    absent: dict[str, PluginLoadError]
    """Errors of fragments whose files are missing. Raised only for a config that names the fragment."""

    @classmethod
    def of(cls, registry: Registry) -> PluginFragments:
        """Collect the fragments of all plugins in `registry`. If several offer the same name, the first is used."""
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
        """Folders with fragments, without duplicates."""
        return list(dict.fromkeys(file.parent for file in self.files.values()))

    def name_of(self, file: Path) -> str:
        """Name of the fragment in `file`; empty for a user's file. Raises `ProviderConflictError` if several packages
        offer the name."""
        if self.files.get(file.stem) != file:
            return ""
        self.registry.find(FragmentProvider, file.stem)
        return file.stem

    def why_not(self, name: str) -> str:
        """Why there is no fragment `name`, if the reason involves plugins; otherwise empty."""
        bare = name.rpartition("/")[2]
        if bare in self.absent:
            return str(self.absent[bare])
        if bare in self.files:
            return f"{bare} is a fragment of a plugin: write it without a folder"
        try:
            self.registry.find(FragmentProvider, bare)
        except PluginError as error:
            return next((line.strip() for line in str(error).splitlines() if "pip install" in line), "")
        return ""
