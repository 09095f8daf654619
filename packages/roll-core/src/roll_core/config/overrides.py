"""`key=value` overrides of the command line, in Hydra's grammar."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from roll_core.config.written import COMMAND_LINE
from roll_core.errors import ConfigProblem

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from roll_core.config.source import KeyPath


@dataclass(frozen=True, slots=True)
class Override:
    """One override. `set` may also add a key that the file does not have; the schema decides which keys exist."""

    text: str
    key: str
    action: Literal["set", "add", "delete"]
    value: Any

    @property
    def path(self) -> KeyPath:
        """The key as a path."""
        return tuple(step for step in re.split(r"[.\[\]]+", self.key) if step)


def parse_overrides(
    texts: Sequence[str], choices: Collection[str], problems: list[ConfigProblem]
) -> tuple[list[Override], list[str]]:
    """Parse overrides into values to set and selections of fragments. Hydra handles the selections.

    `choices` are the keys of the config's defaults list. Unreadable overrides are added to `problems`.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    values: list[Override] = []
    fragments: list[str] = []
    parser = OverridesParser.create()
    for text in texts:
        parsed = _parse(parser, text)
        if isinstance(parsed, ConfigProblem):
            problems.append(parsed)
            continue
        if parsed.get_key_element().lstrip("+~") in choices:
            fragments.append(text)
        elif parsed.package is not None or "/" in parsed.key_or_group:
            problems.append(
                ConfigProblem(
                    COMMAND_LINE,
                    text,
                    f"{parsed.key_or_group!r} is not among the fragments of the file's defaults list",
                    code="ROLL-C025",
                )
            )
        else:
            action: Literal["set", "add", "delete"] = (
                "delete" if parsed.is_delete() else "add" if parsed.is_add() else "set"
            )
            values.append(Override(text, parsed.key_or_group, action, _plain(parsed.value())))
    return values, fragments


def _parse(parser: Any, text: str) -> Any:
    """Hydra's parsed override, or a `ConfigProblem`."""
    from hydra.errors import HydraException

    key, equals, value = text.partition("=")
    if not equals and not text.startswith("~"):
        return ConfigProblem(
            COMMAND_LINE, text, "is not an override", "an override is written key=value", code="ROLL-C025"
        )
    if not key.strip("+~ "):
        return ConfigProblem(COMMAND_LINE, text, "has no key", "an override is written key=value", code="ROLL-C025")
    candidates = [text]
    if key.endswith("device_mapping"):
        # Hydra's grammar reads list(range(0,8)) as a call and range(0,8) as a sweep; our parser reads the text.
        quoted = value.replace("\\", "\\\\").replace("'", "\\'")
        candidates.append(f"{key}='{quoted}'")
    failure = ""
    for candidate in candidates:
        try:
            parsed = parser.parse_override(candidate)
            if parsed.is_sweep_override():
                failure = "names several values; a run takes one"
                continue
            parsed.value()
            return parsed
        except (HydraException, ValueError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            failure = f"cannot be read: {lines[0] if lines else type(error).__name__}"
    hint = f"put quotes around the value: \"{key}='…'\"" if "cannot be read" in failure else ""
    return ConfigProblem(COMMAND_LINE, text, failure, hint, code="ROLL-C025")


def _plain(value: Any) -> Any:
    """Convert Hydra's own types to plain values."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, str):
        return str(value)
    return value
