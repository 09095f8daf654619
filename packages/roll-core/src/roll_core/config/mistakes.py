"""Finds every mistake in a value, by one schema, in one call.

    validate ─► mistakes ─► set them aside ─► validate the rest ─► further mistakes ─► ...

pydantic runs a mapping's validators only if all its fields are valid. Therefore mistakes are removed and the rest is
validated again. Messages about removed keys are not repeated.
"""

from __future__ import annotations

import re
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from roll_core.config.explain import Finding, findings
from roll_core.config.schema import members, paths, schema_at
from roll_core.config.unknown_keys import MAX_SUGGESTIONS, meant, suggest_key
from roll_core.errors import PluginLoadError, one_line

if TYPE_CHECKING:
    from collections.abc import Collection

    from roll_core.config.source import KeyPath

M = TypeVar("M", bound=BaseModel)
MAX_ROUNDS = 8


def validate_all(
    schema: type[M], data: dict[Any, Any], owner: str, broken: Collection[KeyPath] = ()
) -> tuple[M | None, list[Finding]]:
    """The validated config, or every mistake in it. Keys in `broken` were removed before.

    Raises `PluginLoadError` if the schema itself fails; `owner` names the plugin.
    """
    rest = deepcopy(data)
    mistakes: list[Finding] = []
    touched: set[str] = {path[-1] for path in broken}
    taken: set[KeyPath] = set(broken)
    for round_number in range(MAX_ROUNDS):
        try:
            valid = schema.model_validate(rest)
        except ValidationError as error:
            errors = error.errors(include_url=False)
        except Exception as error:  # a validator of a plugin's schema that raises anything but ValueError
            if round_number:
                return None, mistakes
            raise PluginLoadError(f"{owner}: its config schema raised {one_line(error)}") from error
        else:
            return (None, mistakes) if mistakes or broken else (valid, [])
        new = findings(errors, rest)
        mistakes += [finding for finding in new if finding.path not in taken and not _mentions(finding, touched)]
        known = sorted({place[-1] for place in paths(schema)})
        suggestions = 0
        prunable = [finding for finding in new if finding.path and finding.kind != "value_error"]
        prunable += [finding for finding in new if finding.kind == "value_error" and _is_leaf(rest, finding.path)]
        if not prunable:
            return None, mistakes
        for finding in prunable:
            touched.add(finding.path[-1])
            if len(finding.path) > 1 and schema_at(schema, finding.path[:-1]) is None:
                touched.add(finding.path[-2])  # a mapping with free keys has one key less now
            if finding.kind == "extra_forbidden" and suggestions < MAX_SUGGESTIONS:
                suggestions += 1
                touched.add(suggest_key(finding.path, known, ())[1])
                touched |= meant(finding.path, value_at(rest, finding.path))
            if not _set_aside(schema, rest, finding):
                return None, mistakes
            taken.add(finding.path)
    return None, mistakes


def _mentions(finding: Finding, names: set[str]) -> bool:
    if finding.kind != "value_error":
        return False
    return any(name and re.search(rf"\b{re.escape(name)}\b", finding.message) for name in names)


def subject_of(finding: Finding, data: Any) -> KeyPath:
    """Path that a mistake in `data` is located at. A rule about several keys concerns a whole mapping. It is located at
    the first key that the message names and the mapping contains."""
    for words in re.findall(r"[A-Za-z_][\w.]*", finding.message) if finding.kind == "value_error" else ():
        path = (*finding.path, *words.rstrip(".").split("."))
        parent = value_at(data, path[:-1])
        if isinstance(parent, dict) and path[-1] in parent:
            return path
    return finding.path


def _is_leaf(data: Any, path: KeyPath) -> bool:
    return bool(path) and not isinstance(value_at(data, path), (dict, BaseModel))


def value_at(data: Any, path: KeyPath) -> Any:
    """The value at `path`; None if there is none."""
    for step in path:
        data = _child(data, step)
    return data


def _child(data: Any, step: str) -> Any:
    if isinstance(data, dict):
        key = _key_of(data, step)
        return None if key is None else data[key]
    if isinstance(data, list) and step.isdigit() and int(step) < len(data):
        return data[int(step)]
    return None


def _key_of(data: dict[Any, Any], step: str) -> Any:
    """The key whose text is `step`; None if there is none."""
    return step if step in data else next((key for key in data if str(key) == step), None)


def take_out(data: Any, path: KeyPath) -> bool:
    """Remove the value at `path`; if it is an item of a list, the whole list. False if there is none."""
    parent: Any = None
    key: Any = None
    for step in path:
        if isinstance(data, dict):
            parent, key = data, _key_of(data, step)
        data = _child(data, step)
    if parent is None or key is None:
        return False
    del parent[key]
    return True


def _set_aside(schema: type[BaseModel], data: dict[Any, Any], finding: Finding) -> bool:
    """Remove a mistake from `data`, or insert a placeholder for a missing required value. False if neither is
    possible."""
    if finding.kind != "missing":
        return take_out(data, finding.path)
    above, step = finding.path[:-1], finding.path[-1]
    parent, container = value_at(data, above), schema_at(schema, above)
    if not isinstance(parent, dict) or container is None or step not in container.model_fields:
        return False
    parent[step] = _placeholder(container.model_fields[step].annotation)
    return parent[step] is not None


def _placeholder(annotation: Any) -> Any:
    for member, is_mapping in members(annotation):
        return {} if is_mapping else member.model_construct()
    return {str: "", int: 1, float: 1.0, bool: False}.get(annotation)
