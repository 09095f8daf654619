"""Queries on pydantic schemas: their keys, the paths of these, and sections of one type."""

from __future__ import annotations

import typing
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.config.source import KeyPath

Schema = type[BaseModel]
M = TypeVar("M", bound=BaseModel)


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


def sections(schema: Schema, data: dict[Any, Any], base: type[M]) -> Iterator[tuple[KeyPath, type[M], dict[Any, Any]]]:
    """Roles, environments and other mappings in `data` whose schema is of type `base`: path, schema and raw values."""
    for name, field in schema.model_fields.items():
        value = data.get(name)
        if not isinstance(value, dict):
            continue
        for member, is_mapping in members(field.annotation):
            mappings: dict[KeyPath, Any] = {(name,): value}
            if is_mapping:
                mappings = {(name, str(key)): entry for key, entry in value.items()}
            for path, section in mappings.items():
                if not isinstance(section, dict):
                    continue
                if issubclass(member, base):
                    yield path, member, section
                for below, inner, values in sections(member, section, base):
                    yield path + below, inner, values


def schema_at(schema: Schema, path: KeyPath) -> Schema | None:
    """Schema of the mapping at `path`; None if its keys are free or there is no such mapping."""
    current: Schema = schema
    steps = list(path)
    while steps:
        field = current.model_fields.get(steps.pop(0))
        if field is None:
            return None
        for member, is_mapping in members(field.annotation):
            if is_mapping and not steps:
                return None
            if is_mapping:
                steps.pop(0)
            current = member
            break
        else:
            return None
    return current


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
