"""Writes configs as YAML that loads to an equal config."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from roll_core.config.source import FLOAT

if TYPE_CHECKING:
    from roll_core.spec.config import RunConfig


class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # the C dumper if available
    """Quotes text that our loader would not read back as text, for example 1e-6."""


Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))


def dump(config: RunConfig) -> str:
    """The complete config as YAML: with defaults, without `defaults:` lists and interpolations."""
    text: str = yaml.dump(plain_values(config), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def plain_values(config: RunConfig) -> dict[str, Any]:
    """Keys and values of the config, as they are read from the YAML of `dump`."""
    values: dict[str, Any] = _plain(config.model_dump(mode="python", serialize_as_any=True, warnings=False))
    return values


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys. Lists stay values."""
    if not isinstance(value, dict) or (not value and prefix):
        return {prefix: value}
    return {
        key: leaf
        for name, inner in value.items()
        for key, leaf in flat(inner, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return escape(value) if isinstance(value, str) else value


def escape(text: str) -> str:
    """Escape `${` for OmegaConf, so that it is read literally."""
    if "${" not in text:
        return text
    escaped = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)
    # Backslashes at the very end would also be read as escapes when the text is parsed for interpolations.
    tail = len(escaped) - len(escaped.rstrip("\\"))
    return escaped + "\\" * tail
