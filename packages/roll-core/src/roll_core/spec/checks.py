"""The interface of checks, which `roll-core doctor` runs. Each check examines one thing and suggests a remedy.

A check is a function that a `CheckProvider` refers to. It may read files, query drivers and start programs with a
timeout; it must not change anything. An exception that it raises is shown as its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from roll_core.spec.config import RunConfig
    from roll_core.spec.platform import Platform

Level = Literal["ok", "note", "warning", "error"]
"""Severity: `ok`; `note`: worth knowing; `warning`: runs may fail or be slow; `error`: runs will fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Finding of a check."""

    level: Level
    found: str
    wanted: str = ""
    remedy: str = ""
    """What to do. Required for warnings and errors."""
    subject: str = ""
    """Object that was examined if there are several, for example `cuda:1` or `rewards.math`; otherwise empty."""

    def __post_init__(self) -> None:
        if self.level in ("warning", "error") and not self.remedy:
            raise ValueError(f"a check found {self.found!r} ({self.level}) and says no remedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """Input of a check."""

    platform: Platform | None
    """Platform that a run would select; None if there is none."""
    config: RunConfig | None = None
    """Config of the run to start, if one was given."""


Check = Callable[[CheckContext], Iterable[CheckResult]]


document_fields(__name__)
