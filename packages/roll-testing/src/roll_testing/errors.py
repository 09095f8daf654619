"""Expected errors in tests, matched by code, place and facts instead of by prose.

with raises_error("ROLL-C010", at="run.yaml:5:5", key="actor_train.learning_rte"):
    load(file, [], registry)

with raises_error(DataError, "rows.jsonl", "row 3"):
    list(rows)
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from roll_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLACE = re.compile(r"\b(?:ranks?|rows?|steps?|versions?|slots?|lines?|columns?|layers?|tokens?|sequences?) -?\d")
_PLAIN_WORD = re.compile(r"[a-z]{2,}[,;:]?")


def is_prose(text: str) -> bool:
    """True if `text` has two plain words in a row; `judge rank 3` and `step 4` are places."""
    plain = [_PLAIN_WORD.fullmatch(word) is not None for word in _PLACE.sub("0", text).split()]
    return any(one and other for one, other in pairwise(plain))


@contextmanager
def raises_error(
    kind: str | type[BaseException] | tuple[type[BaseException], ...], *facts: object, at: str = "", key: str = ""
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Require that the block raises an error of a code or class that names every fact.

    A fact is what the reader needs to find the place: a key, a rank, a path, a number, a package. `at` and `key` select
    one problem in a `ConfigError`. Raises `ValueError` for a fact that is prose.
    """
    mentions("", *facts)
    expected = BaseException if isinstance(kind, str) else kind
    with pytest.raises(expected) as caught:
        yield caught
    check_error(caught.value, kind, *facts, at=at, key=key)


def check_error(error: BaseException, kind: object, *facts: object, at: str = "", key: str = "") -> None:
    """Raise `AssertionError` unless `error` is what `raises_error` expects."""
    if isinstance(error, ConfigError):
        for problem in error.problems:
            right = not isinstance(kind, str) or problem.code == kind
            if right and at in ("", problem.where) and key in ("", problem.key) and mentions(str(problem), *facts):
                return
        expected = " ".join(filter(None, (at, str(kind), key)))
        raise AssertionError(f"no problem is {expected} and names {facts}:\n{error}") from error
    if isinstance(kind, str) and getattr(error, "code", "") != kind:
        raise AssertionError(f"{getattr(error, 'code', type(error).__name__)} was raised, expected {kind}: {error}")
    if not mentions(str(error), *facts):
        missing = [fact for fact in facts if not _names(str(error), str(fact))]
        raise AssertionError(f"{type(error).__name__} does not name {missing}: {error}") from error


def mentions(text: str, *facts: object) -> bool:
    """True if `text` contains each fact as a separate word or number: `rank 1` does not match `rank 12`.

    Facts that are only numbers must be on one line, with another fact: a screen contains most numbers by chance.
    Raises `ValueError` for a fact that is prose.
    """
    for fact in facts:
        if is_prose(str(fact)):
            raise ValueError(f"{str(fact)!r} is prose: match the code and what it names")
    numbers = [fact for fact in facts if re.fullmatch(r"[\d.,]+", str(fact))]
    others = [fact for fact in facts if fact not in numbers]
    return all(_names(text, str(fact)) for fact in others) and (
        not numbers
        or any(
            all(_names(line, str(number)) for number in numbers)
            and (not others or any(_names(line, str(fact)) for fact in others))
            for line in text.splitlines()
        )
    )


def _names(text: str, fact: str) -> bool:
    before = r"(?<!\w)" if fact[:1].isalnum() or fact[:1] == "_" else ""
    after = r"(?!\w)" if fact[-1:].isalnum() or fact[-1:] == "_" else ""
    return re.search(before + re.escape(fact) + after, text) is not None
