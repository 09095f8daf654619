"""Queries on pydantic schemas: their keys, the paths of these, and the roles among them."""

from __future__ import annotations

import typing
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from roll_core.spec.config import CustomEnvConfig, WorkerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.config.source import KeyPath

Schema = type[BaseModel]


def members(annotation: Any) -> Iterator[tuple[Schema, bool]]:
    """Schemas that an annotation accepts, with True if it is the value of a mapping: `X | None`, `dict[str, X]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, False
        return
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is dict:
        for schema, _ in members(arguments[1]):
            yield schema, True
        return
    for argument in arguments:
        if not isinstance(argument, str):
            yield from members(argument)


def roles(schema: Schema, data: dict[Any, Any]) -> Iterator[tuple[KeyPath, type[WorkerConfig], dict[Any, Any]]]:
    """Every role in `data`: its path, its schema and its raw values."""
    for name, field in schema.model_fields.items():
        value = data.get(name)
        if not isinstance(value, dict):
            continue
        for member, is_mapping in members(field.annotation):
            if not issubclass(member, WorkerConfig):
                continue
            if not is_mapping:
                yield (name,), member, value
            else:
                for key, each in value.items():
                    if isinstance(each, dict):
                        yield (name, str(key)), member, each


def environments(schema: Schema, data: dict[Any, Any]) -> Iterator[tuple[KeyPath, dict[Any, Any]]]:
    """Every environment that `data` names: its path and its raw values."""
    for name, field in schema.model_fields.items():
        value = data.get(name)
        found = [member for member, is_mapping in members(field.annotation) if is_mapping]
        if isinstance(value, dict) and any(issubclass(member, CustomEnvConfig) for member in found):
            yield from (((name, str(key)), each) for key, each in value.items() if isinstance(each, dict))


def schema_at(schema: Schema, path: KeyPath) -> Schema | None:
    """Schema of the mapping at `path`; None if its keys are free or there is no such mapping."""
    found: Schema = schema
    steps = list(path)
    while steps:
        field = found.model_fields.get(steps.pop(0))
        if field is None:
            return None
        for member, is_mapping in members(field.annotation):
            if is_mapping and not steps:
                return None
            if is_mapping:
                steps.pop(0)
            found = member
            break
        else:
            return None
    return found


@lru_cache
def paths(schema: Schema) -> tuple[KeyPath, ...]:
    """Paths of all keys of a schema; `*` stands for a free key."""
    return tuple(_paths(schema, (), 6))


def _paths(schema: Schema, prefix: KeyPath, depth: int) -> Iterator[KeyPath]:
    if depth == 0:
        return
    for name, field in schema.model_fields.items():
        yield (*prefix, name)
        for member, is_mapping in members(field.annotation):
            yield from _paths(member, (*prefix, name, "*") if is_mapping else (*prefix, name), depth - 1)
