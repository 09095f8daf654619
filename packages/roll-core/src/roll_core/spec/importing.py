"""The contract of importers, which rewrite another framework's config for `roll-core import NAME FILE`.

An importer is a function that an `ImporterProvider` names. It reads the file and says what became of each of its keys;
the command writes the new config, checks it and shows the report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from pathlib import Path

ImportStatus = Literal["kept", "differs", "renamed", "changed", "added", "not needed", "dead", "unsupported", "unknown"]
"""What became of a key. `differs`: same name and value, another result. `added`: the other framework has another
default. `dead`: no effect in the other framework. `unknown`: known to neither."""
IMPORT_STATUSES: tuple[ImportStatus, ...] = get_args(ImportStatus)


@dataclass(frozen=True, slots=True)
class ImportedKey:
    """What became of one key."""

    where: str
    """`file:line:column`; empty for an added key."""
    key: str
    """Dotted, as the file has it."""
    status: ImportStatus
    to: tuple[str, ...] = ()
    """Dotted keys of the new config that replace it."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class ImportedConfig:
    """The new config, and every key of the old one."""

    pipeline: str
    config: dict[str, Any]
    keys: tuple[ImportedKey, ...]


class Importer(Protocol):
    """Rewrites one file."""

    def __call__(self, path: Path, registry: Any) -> ImportedConfig:
        """Raises `ConfigError` for a file that cannot be read, `UnsupportedError` for a pipeline without equivalent.

        `registry` is the `roll_core.plugins.registry.Registry` of the installed parts.
        """


document_fields(__name__)
