"""The interface of importers, which convert another framework's config for `roll-core import NAME FILE`.

An importer is a function that an `ImporterProvider` refers to. It reads the file and reports what happened to each key.
The command writes the new config, checks it and prints the report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from pathlib import Path

ImportStatus = Literal["kept", "differs", "renamed", "changed", "added", "not needed", "dead", "unsupported", "unknown"]
"""Result of importing one key. `differs`: same name and value, different effect. `added`: the other framework has a
different default. `dead`: no effect in the other framework. `unknown`: neither framework has the key."""
IMPORT_STATUSES: tuple[ImportStatus, ...] = get_args(ImportStatus)


@dataclass(frozen=True, slots=True)
class ImportedKey:
    """Result of importing one key."""

    where: str
    """`file:line:column`; empty for an added key."""
    key: str
    """Dotted key as in the imported file."""
    status: ImportStatus
    to: tuple[str, ...] = ()
    """Dotted keys of the new config that replace it."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class ImportedConfig:
    """The new config, and a report on every key of the old one."""

    pipeline: str
    config: dict[str, Any]
    keys: tuple[ImportedKey, ...]


class Importer(Protocol):
    """Function that converts one config file."""

    def __call__(self, path: Path, registry: Any) -> ImportedConfig:
        """Convert the file at `path`.

        `registry` is the `roll_core.plugins.registry.Registry` of the installed plugins. Raises `ConfigError` if the
        file cannot be read, and `UnsupportedError` for a pipeline that has no equivalent.
        """


document_fields(__name__)
