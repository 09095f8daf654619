"""Finds the keys of an imported `strategy_config` that the schema of the strategy's plugin refuses."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from roll_core.config.explain import findings
from roll_core.config.mistakes import subject_of
from roll_core.config.unknown_keys import suggest_key
from roll_migrate.rules import value_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.config.explain import Finding
    from roll_core.config.source import KeyPath
    from roll_core.spec.config import StrategyConfig

MAX_ROUNDS = 100
"""Maximum number of validations. Several are needed, because a schema's own validators report one error at a time."""


def refusals(schema: type[StrategyConfig], keys: Mapping[str, Any]) -> dict[KeyPath, str]:
    """Find the paths to remove so that the rest is valid, each with the schema's reason.

    The result is incomplete if the schema's errors name no key that could be removed.
    """
    rest: dict[str, Any] = deepcopy(dict(keys))
    refused: dict[KeyPath, str] = {}
    for _ in range(MAX_ROUNDS):
        try:
            schema.model_validate(rest)
        except ValidationError as failure:
            errors = findings(failure.errors(include_url=False), rest)
        else:
            return refused
        named = {_subject(error, rest): error for error in errors}
        named.pop((), None)
        if not named:
            return refused
        for path, error in named.items():
            if value_at(rest, path[:-1]) is not None and path[-1] in value_at(rest, path[:-1]):
                refused[path] = _reason(error, path, schema)
                del value_at(rest, path[:-1])[path[-1]]
    return refused


def _subject(error: Finding, rest: Mapping[str, Any]) -> KeyPath:
    """Path of the key at fault."""
    return subject_of(error, rest) if error.kind == "value_error" else _of_mappings(error.path, rest)


def _of_mappings(path: KeyPath, rest: Mapping[str, Any]) -> KeyPath:
    """Longest prefix of a path that leads through mappings: an item of a list is reduced to its list."""
    data: Any = rest
    for length, step in enumerate(path):
        if not isinstance(data, dict):
            return path[:length]
        data = data.get(step)
    return path


def _reason(error: Finding, path: KeyPath, schema: type[StrategyConfig]) -> str:
    if error.kind == "extra_forbidden":
        hint = suggest_key(path, sorted(schema.model_fields), ())[0] if len(path) == 1 else ""
        return f"no such key{f'; {hint}' if hint.startswith('did you mean') else ''}"
    return error.message
