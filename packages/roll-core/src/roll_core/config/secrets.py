"""Redacts secrets from everything that a run writes: record, config, log and report.

A value is a secret because of its key (`api_key`, `HF_TOKEN`) or its form (`sk-…`, `https://user:password@…`). A value
that appeared under such a key is also a secret anywhere else, for example in a message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REDACTED = "<redacted>"
"""Replacement of secrets. A plain scalar in YAML, too, so that a redacted config still loads."""

_MIN_KNOWN = 8
"""Minimum length of known secrets to search for in text: with `test` as a password, every other word would be
redacted."""

_ALWAYS = re.compile("passw(or)?d|passphrase|pwd|secrets?|credentials?|apikey|authorization|bearer|cookie")
_KEY_OF_A_LOCK = re.compile("api|access|account|private|secret|signing|encryption|ssh|auth|service|deploy")
_KEY_OF_DATA = re.compile(
    "chosen|rejected|prompt|response|answer|question|query|image|video|audio|text|label|primary|foreign|sort|group"
    "|cache|hash|dict|row|column|data|input|output|reward|score|metric|cross|attention"
)
_TOKEN_OF_TEXT = re.compile(
    "pad|eos|bos|unk|sep|cls|mask|special|start|end|stop|begin|think|image|video|audio|next|last|first|added|prefix"
    "|suffix|middle|max|min|num|per|by|n|new|decoder|forced|separator"
)
_WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")

# Lengths are bounded, so that time is linear in a text without blanks: base64 in a log line can be long.
_URL_CREDENTIALS = re.compile(r"\b([a-zA-Z][a-zA-Z0-9+.-]{0,20}://)[^\s/@:?#]*(?::[^\s/@]*)?@")
_FORMS = re.compile(
    r"\b(?:"
    r"sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}"
    r")"
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_ASSIGNMENT = re.compile(r"""(?<!\w)(?P<key>[A-Za-z_][\w.-]{0,100})(?P<sign>["']?\s{0,20}[=:]\s{0,20})""")
_VALUE = re.compile(r"""(?P<quote>["'])(?P<quoted>[^"']*)(?P=quote)|(?P<bare>[^\s"',;&}\])]+)""")
_MOST_JUDGED = 1000
"""Maximum number of characters of a value that are examined."""
_LIKE_A_SECRET = "0123abcd4567efgh"


def is_secret(key: str, value: object) -> bool:
    """True if `key` (its last dotted part) indicates that `value` is a secret."""
    if value is None or isinstance(value, bool) or value == "":
        return False
    words = [word.lower() for word in _WORDS.findall(key.rsplit(".", 1)[-1])]
    if not words:
        return False
    if any(_ALWAYS.fullmatch(word) for word in words):
        return True
    if isinstance(value, (int, float)):
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "key":
        return bool(_KEY_OF_A_LOCK.fullmatch(before)) or (not _KEY_OF_DATA.fullmatch(before) and _looks_random(value))
    if last == "keys":
        return bool(_KEY_OF_A_LOCK.fullmatch(before))
    if last == "token":
        return not _TOKEN_OF_TEXT.fullmatch(before) and not _is_special_token(value)
    return last == "tokens" and before in {"auth", "access", "api"}


def _looks_random(value: object) -> bool:
    """True if a value looks like a secret. A bare `key` is more often a data column than a secret."""
    if not isinstance(value, str):
        return False
    return len(value) >= _MIN_KNOWN and " " not in value and bool(re.search(r"\d", value) and re.search(r"\D", value))


def _is_special_token(value: object) -> bool:
    return isinstance(value, str) and (len(value) < 4 or (value[0] in "<[" and value[-1] in ">]"))


@dataclass(frozen=True, slots=True)
class Redactor:
    """Removes secrets from values and text. `known` are secrets found before."""

    known: frozenset[str] = frozenset()

    @classmethod
    def of(cls, *sources: Mapping[str, Any]) -> Redactor:
        """Redactor for every secret in `sources`, such as the resolved config and the environment."""
        secrets: set[str] = set()
        for source in sources:
            _collect(source, secrets)
        return cls(frozenset(secrets))

    def value(self, value: Any) -> Any:
        """Copy of plain data (mappings, sequences, scalars) without its secrets."""
        if isinstance(value, Mapping):
            return {k: REDACTED if is_secret(str(k), v) else self.value(v) for k, v in value.items()}
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
            return [self.value(item) for item in value]
        return value

    def text(self, text: str) -> str:
        """`text` without known secrets, credentials in URLs, and values in assignments such as `secret_key=value`."""
        for secret in sorted(self.known, key=len, reverse=True):
            text = text.replace(secret, REDACTED)
        text = _URL_CREDENTIALS.sub(rf"\g<1>{REDACTED}@", text)
        text = _BEARER.sub(rf"\g<1> {REDACTED}", text)
        text = _FORMS.sub(REDACTED, text)
        return _redact_assignments(text)


def _redact_assignments(text: str) -> str:
    """Redact assignments such as `api_key=…`, also inside other values: `url=https://host?api_key=…`."""
    parts, done, position = [], 0, 0
    while match := _ASSIGNMENT.search(text, position):
        position = match.end()
        if not is_secret(match["key"], _LIKE_A_SECRET):
            continue
        glimpse = _VALUE.match(text, position, position + _MOST_JUDGED) or _VALUE.match(text, position)
        value = glimpse["bare"] or glimpse["quoted"] if glimpse else ""
        if value == REDACTED or _is_number(value) or not is_secret(match["key"], value):
            continue
        match_to_end = _VALUE.match(text, position) or glimpse
        if match_to_end is not None:
            start, position = match_to_end.span("bare" if match_to_end["bare"] else "quoted")
            parts += [text[done:start], REDACTED]
            done = position
    return "".join([*parts, text[done:]])


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"[-+]?[\d_]*\.?\d+(?:[eE][-+]?\d+)?|null|None|true|false|True|False", text))


def _is_everyday(value: str) -> bool:
    """True for words and paths (`SECRETS=disabled`, `SECRETS_DIR=/home/me`). Redacting them would hide half of a
    log."""
    return (value.isalpha() and len(value) < 2 * _MIN_KNOWN) or (value[0] in "/~." and os.path.exists(value))


def _collect(value: Any, secrets: set[str], inside: bool = False) -> None:
    if isinstance(value, Mapping):
        for k, v in value.items():
            _collect(v, secrets, inside or is_secret(str(k), v))
    elif isinstance(value, str):
        if inside and len(value) >= _MIN_KNOWN and not _is_everyday(value):
            secrets.add(value)
    elif isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        for item in value:
            _collect(item, secrets, inside)
