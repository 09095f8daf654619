"""The contract of checks, which `roll-core doctor` runs: each looks at one thing and says what to do about it.

A check is a function that a `CheckProvider` names. It may read files, ask drivers and start programs with a deadline;
it changes nothing. What it raises is shown as its result.
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
"""Good; good to know; runs may fail or be slow; runs will fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What a check saw."""

    level: Level
    found: str
    wanted: str = ""
    remedy: str = ""
    """What to do. Warnings and errors have one."""
    subject: str = ""
    """What of several things it was, `cuda:1` or `rewards.math`; empty where there is but one."""

    def __post_init__(self) -> None:
        if self.level in ("warning", "error") and not self.remedy:
            raise ValueError(f"a check found {self.found!r} ({self.level}) and says no remedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is examined."""

    platform: Platform | None
    """The one that a run would take; None if there is none."""
    config: RunConfig | None = None
    """Of the run that shall start, if one was named."""


Check = Callable[[Situation], Iterable[CheckResult]]


document_fields(__name__)
