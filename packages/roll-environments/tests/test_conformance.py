"""The environments of the package under their kit, and a class as TRL's users write it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from helpers_environments import call

from roll_core.spec.environment import Reply
from roll_environments.local_search import LocalSearch
from roll_environments.math_with_python import MathWithPython
from roll_environments.python_tools import PythonTools
from roll_environments.text_game import TextGame
from roll_testing import EnvironmentConformance, EnvironmentIntegrity


def oracle(environment: Any, seed: int, tool: str = "") -> list[str | Reply]:
    asyncio.run(environment.reset({}, seed))
    return [each if isinstance(each, str) else call(tool, **each) for each in environment.oracle()]


class TestMathWithPython(EnvironmentIntegrity, EnvironmentConformance):
    def create(self) -> MathWithPython:
        return MathWithPython(num_operations=3, digits=3)

    def replies(self, seed: int) -> Sequence[str | Reply]:
        return oracle(self.create(), seed, "python")


class TestLocalSearch(EnvironmentIntegrity, EnvironmentConformance):
    def create(self) -> LocalSearch:
        return LocalSearch(num_results=3)

    def replies(self, seed: int) -> Sequence[str | Reply]:
        return oracle(self.create(), seed, "search")


class TestTextGame(EnvironmentIntegrity, EnvironmentConformance):
    def create(self) -> TextGame:
        return TextGame(rooms=6)

    def replies(self, seed: int) -> Sequence[str | Reply]:
        return oracle(self.create(), seed)


class TestTools(EnvironmentConformance):
    varies = False  # TRL's classes get no seed
    blocked_s = 30.0  # the first episode imports transformers

    def create(self) -> PythonTools:
        return PythonTools(target="helpers_environments:Counter")

    def create_failing(self) -> PythonTools:
        return PythonTools(target="helpers_environments:Faulty", options={"at": "reset"})

    def replies(self, seed: int) -> Sequence[str | Reply]:
        return [call("add", number=1), call("add", number=2), "done"]
