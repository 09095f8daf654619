"""Writes configs as YAML that loads to an equal config."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from roll_core.config.source import FLOAT

if TYPE_CHECKING:
    from roll_core.spec.config import RunConfig


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # the C dumper if available
    """Quotes text that our loader would not read back as text, for example 1e-6."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))


class _CompactDumper(_Dumper):
    """Writes lists and mappings of scalars on one line, except at the top level."""

    def serialize(self, node: yaml.Node) -> None:
        if isinstance(node, yaml.CollectionNode):
            node.flow_style = False
        super().serialize(node)


class Verbatim(str):
    """Text that is written unchanged: an interpolation to be resolved when the config is loaded."""


def dump(config: RunConfig) -> str:
    """The complete config as YAML: with defaults, without `defaults:` lists and interpolations."""
    return to_yaml(_values(config))


def plain_values(config: RunConfig) -> dict[str, Any]:
    """Keys and values of the config, as they are read from the YAML of `dump`."""
    found: dict[str, Any] = _plain(_values(config))
    return found


def to_yaml(values: Any, *, compact: bool = False) -> str:
    """Values as YAML that loads to the same values. `compact` puts lists and mappings of scalars on one line."""
    text: str = yaml.dump(
        _plain(values),
        Dumper=_CompactDumper if compact else _Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=120,
        default_flow_style=None if compact else False,
    )
    return text


def _values(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="python", serialize_as_any=True, warnings=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Verbatim):
        return str(value)
    if isinstance(value, str):
        return _escape(value)
    return value


def _escape(text: str) -> str:
    """Escape `${` for OmegaConf, so that it is read literally."""
    if "${" not in text:
        return text
    escaped = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", text)
    # Backslashes at the very end would also be read as escapes when the text is parsed for interpolations.
    tail = len(escaped) - len(escaped.rstrip("\\"))
    return escaped + "\\" * tail
