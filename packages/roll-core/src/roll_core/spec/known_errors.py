"""Known errors of libraries and machines, each with a remedy.

A plugin lists the errors of its engine in a tuple that a `KnownErrorsProvider` refers to. If a run ends with an
exception that is not one of ROLL's own, the runtime looks up its first cause and prints the remedy.
docs/troubleshooting.md has a section for each known error of the core and of the plugins in this repository.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from roll_core.field_docs import document_fields


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
