"""Parser for `device_mapping`: a list of slots, or an expression over ranges. Expressions are parsed, never evaluated.

mapping := term ("+" term)*
term    := "list" "(" (range | slots) ")" | range | slots
slots   := "[" [int ("," int)* [","]] "]"
range   := "range" "(" int ["," int ["," int]] ")"
"""

from __future__ import annotations

import re

MAX_SLOTS = 1_000_000
_TOKEN = re.compile(r"\s*(?:(?P<int>-?[0-9]{1,9})|(?P<word>[A-Za-z_]\w*)|(?P<sign>[()\[\],+]))")


def parse_device_mapping(value: object) -> tuple[int, ...]:
    """Slots of a mapping, in order. Raises `ValueError` with the reason and the position in the expression."""
    if isinstance(value, str):
        slots = _Parser(value).mapping()
    elif isinstance(value, (list, tuple)):
        for slot in value:
            if isinstance(slot, bool) or not isinstance(slot, int):
                raise ValueError(f"device_mapping has {slot!r}, expected slot numbers")
        slots = list(value)
    else:
        raise ValueError("device_mapping must be a list of slot numbers or an expression such as list(range(0,8))")
    if not slots:
        raise ValueError("device_mapping names no slot; remove it for a role on the host's CPU")
    negative = [slot for slot in slots if slot < 0]
    if negative:
        raise ValueError(f"device_mapping names slot {negative[0]}; slots are counted from 0")
    seen: set[int] = set()
    for slot in slots:
        if slot in seen:
            raise ValueError(f"device_mapping names slot {slot} twice")
        seen.add(slot)
    return tuple(slots)


class _Parser:
    """Recursive-descent parser of the grammar above."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        at = 0
        while at < len(text.rstrip()):
            match = _TOKEN.match(text, at)
            if match is None or match.lastgroup is None:
                begin = at + len(text[at:]) - len(text[at:].lstrip())
                raise self._error(begin, "is not part of a mapping")
            self.tokens.append((match.lastgroup, match[match.lastgroup], match.start(match.lastgroup)))
            at = match.end()
        self.at = 0

    def mapping(self) -> list[int]:
        slots = self._term()
        while self._take("+"):
            slots += self._term()
            if len(slots) > MAX_SLOTS:
                raise ValueError(f"{self.text[:80]!r}: more than the {MAX_SLOTS} slots allowed")
        if self.at < len(self.tokens):
            raise self._error(self.tokens[self.at][2], "was not expected here")
        return slots

    def _term(self) -> list[int]:
        if self._take("list"):
            self._need("(")
            slots = self._slots("is not range(…) or [slot, …]")
            self._need(")")
            return slots
        return self._slots("is not list(range(…)), range(…) or [slot, …]")

    def _slots(self, problem: str) -> list[int]:
        if self._take("range"):
            return self._range()
        if not self._take("["):
            raise self._error(self._position(), problem)
        slots = []
        while not self._take("]"):
            slots.append(self._int())
            if not self._take(","):
                self._need("]")
                break
        return slots

    def _range(self) -> list[int]:
        self._need("(")
        bounds = [self._int()]
        while len(bounds) < 3 and self._take(","):
            bounds.append(self._int())
        self._need(")")
        if len(bounds) == 3 and bounds[2] == 0:
            raise ValueError(f"{self.text[:80]!r}: a range's step is not 0")
        numbers = range(*bounds)
        if len(numbers) > MAX_SLOTS:
            raise ValueError(f"{self.text[:80]!r}: {len(numbers)} slots are more than the {MAX_SLOTS} allowed")
        return list(numbers)

    def _int(self) -> int:
        if self.at < len(self.tokens) and self.tokens[self.at][0] == "int":
            self.at += 1
            return int(self.tokens[self.at - 1][1])
        raise self._error(self._position(), "is not a number")

    def _take(self, word: str) -> bool:
        if self.at < len(self.tokens) and self.tokens[self.at][1] == word:
            self.at += 1
            return True
        return False

    def _need(self, word: str) -> None:
        if not self._take(word):
            raise self._error(self._position(), f"should be {word!r}")

    def _position(self) -> int:
        return self.tokens[self.at][2] if self.at < len(self.tokens) else len(self.text)

    def _error(self, at: int, problem: str) -> ValueError:
        found = self.text[at : at + 12].split("\n")[0]
        subject = repr(found) if found else "the end"
        return ValueError(f"{self.text[:80]!r}: {subject} at character {at + 1} {problem}")
