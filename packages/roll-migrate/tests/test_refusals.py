"""Which keys must be left out for a strategy's schema to take the rest."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st
from pydantic import model_validator

from roll_core.spec.config import Config, StrategyConfig
from roll_migrate.strategies import refusals


class Inner(Config):
    size: int = 1


class Engine(StrategyConfig):
    mode: Literal["fast", "exact"] = "exact"
    ranks: int = 1
    inner: Inner = Inner()
    names: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data):
        for key in ("overlap", "fusion"):
            if key in data:
                raise ValueError(f"{key} is not supported: no")
        return data

    @model_validator(mode="after")
    def _together(self):
        if self.mode == "fast" and self.ranks == 1:
            raise ValueError("mode fast needs ranks above 1")
        return self


def without(keys, paths):
    rest = {key: dict(value) if isinstance(value, dict) else value for key, value in keys.items()}
    for path in paths:
        parent = rest
        for step in path[:-1]:
            parent = parent[step]
        del parent[path[-1]]
    return rest


def test_refused_keys_have_their_schemas_reason():
    result = refusals(
        Engine, {"overlap": True, "fusion": 1, "rank": 2, "mode": "wild", "inner": {"sise": 1}, "names": ["a", 3]}
    )
    assert result[("overlap",)] == "overlap is not supported: no"
    assert result[("fusion",)] == "fusion is not supported: no"
    assert result[("rank",)] == "no such key; did you mean ranks?"
    assert "'wild'" in result[("mode",)]
    assert set(result) == {("overlap",), ("fusion",), ("rank",), ("mode",), ("inner", "sise"), ("names",)}


def test_rule_about_two_keys_removes_the_first():
    assert set(refusals(Engine, {"mode": "fast"})) == {("mode",)}
    assert refusals(Engine, {"mode": "fast", "ranks": 2}) == {}


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.sampled_from(["fast", "exact", "x"]),
    st.lists(st.sampled_from(["a", 1])),
    st.dictionaries(st.sampled_from(["size", "x"]), st.integers(0, 2)),
)


@given(st.dictionaries(st.sampled_from(["mode", "ranks", "inner", "names", "overlap", "fusion", "other"]), VALUES))
def test_remaining_keys_are_valid(keys):
    left = without(keys, refusals(Engine, keys))
    assert Engine.model_validate(left).model_fields_set == set(left)
