"""The interfaces of checks, which `roll-core doctor` runs, and of known errors, each with a remedy.

A check is a function that a `CheckProvider` refers to. It may read files, query drivers and start programs with a
timeout; it must not change anything. An exception that it raises is shown as its result.

A plugin lists the errors of its engine in a tuple that a `KnownErrorsProvider` refers to. If a run ends with an
exception that is not one of ROLL's own, the runtime looks up its first cause and prints the remedy.
docs/troubleshooting.md has a section for each known error of the core and of the plugins in this repository.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from roll_core.spec.config import EnvironmentConfig, RunConfig
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
            raise ValueError(f"a check found {self.found!r} ({self.level}) without a remedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleEnvironment:
    """Python environment of a role that has one of its own, and what the role needs in it."""

    config: EnvironmentConfig
    """The role's `environment` in the config."""
    package: str
    """Distribution of the strategy or reward that the role's workers run."""
    needs: tuple[str | tuple[str, ...], ...] = ()
    """`Provider.needs` of that strategy or reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """Input of a check."""

    platform: Platform | None
    """Platform that a run would select; None if there is none."""
    config: RunConfig | None = None
    """Config of the run to start, if one was given."""
    environments: Mapping[str, RoleEnvironment] = field(default_factory=dict)
    """Python environments of the config's roles that have one of their own, by role."""


Check = Callable[[CheckContext], Iterable[CheckResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownError:
    """One known error, identified by its text."""

    id: str
    """Heading of its section in the docs."""
    pattern: str
    """Regular expression, searched for in `Type: first line of the message` of the exception and of each of its
    causes."""
    cause: str
    """The cause, in one sentence."""
    remedy: str
    """Steps to try, in order. Config keys are given by name."""
    during: tuple[str, ...] = ()
    """Worker methods in which the error has this meaning, for example `generate` or `forward_backward`; empty means
    anywhere. If several entries match, an entry that names the method takes precedence."""

    def __post_init__(self) -> None:
        re.compile(self.pattern)


document_fields(__name__)
