"""Errors of libraries and machines that people meet, and what to do about each.

A plugin lists those of its engine in a tuple that a `KnownErrorsProvider` names. When a run ends by an exception that
is not ROLL's own, its first cause is looked up there, and the remedy is told beside it. docs/troubleshooting.md has a
section for each of the core's and of our plugins'.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from roll_core.field_docs import document_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownError:
    """One error, by the text that it comes with."""

    id: str
    """Its heading in the docs."""
    pattern: str
    """Regular expression, searched for in `Type: first line of the message` of the exception and of each of its
    causes."""
    cause: str
    """What is wrong, in one sentence."""
    remedy: str
    """What to do, in the order in which to try it; keys of the config by their names."""
    during: tuple[str, ...] = ()
    """Methods of a worker in which it means this, `generate` or `forward_backward`; empty is anywhere. Of entries that
    match alike, one with the method counts more."""

    def __post_init__(self) -> None:
        re.compile(self.pattern)


document_fields(__name__)
