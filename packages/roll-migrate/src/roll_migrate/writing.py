"""Imported configs as files: in the order of our schemas, the run before its roles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_core.config.dump import to_yaml
from roll_core.config.schema import members
from roll_core.spec.config import RunConfig

if TYPE_CHECKING:
    from pydantic import BaseModel


def written(config: dict[str, Any], schema: type[BaseModel], *, heading: str) -> str:
    """`config` as YAML under a comment: the run's keys, those of the algorithm, and each mapping of mappings by itself,
    roles before judges and data."""
    ordered = _ordered(config, schema)
    plain = {name: value for name, value in ordered.items() if not _is_block(value)}
    nested = sorted((name for name in ordered if name not in plain), key=lambda name: RANKS[_declared(name, schema)])
    blocks = [
        {name: value for name, value in plain.items() if _declared(name, schema) == "run"},
        {name: value for name, value in plain.items() if _declared(name, schema) != "run"},
        *({name: ordered[name]} for name in nested),
    ]
    return "\n".join([f"# {heading}\n", *(to_yaml(block, compact=True) for block in blocks if block)])


RANKS = {"run": 0, "pipeline": 1, "shared": 2, "": 3}


def _declared(name: str, schema: type[BaseModel]) -> str:
    """Which schema has a key: every run's, the pipeline's own, or one that pipelines share; empty for none."""
    if name in RunConfig.model_fields:
        return "run"
    if name not in schema.model_fields:
        return ""
    return "pipeline" if name in schema.__annotations__ else "shared"


def _is_block(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(each, dict) for each in value.values())


def _ordered(data: dict[str, Any], schema: type[BaseModel] | None) -> dict[str, Any]:
    """As the schema has its keys; those that it has not come last."""
    fields = list(schema.model_fields) if schema is not None else []
    names = sorted(data, key=lambda name: fields.index(name) if name in fields else len(fields))
    found = {}
    for name in names:
        value = data[name]
        if isinstance(value, dict):
            inner, is_mapping = None, False
            if schema is not None and name in fields:
                inner, is_mapping = next(members(schema.model_fields[name].annotation), (None, False))
            if is_mapping:
                value = {key: _ordered(each, inner) if isinstance(each, dict) else each for key, each in value.items()}
            else:
                value = _ordered(value, inner)
        found[name] = value
    return found
