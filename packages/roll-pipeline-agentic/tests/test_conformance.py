"""The environments of this package under the kit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from roll_core.spec.environment import Reply
from roll_pipeline_agentic.environments.frozen_lake import FrozenLake
from roll_pipeline_agentic.environments.guess_number import GuessNumber
from roll_pipeline_agentic.environments.nim import Nim
from roll_pipeline_agentic.environments.sokoban import Sokoban
from roll_testing import EnvironmentConformance, EnvironmentIntegrity
from shared_tests.binary_search import BinarySearch

if TYPE_CHECKING:
    from collections.abc import Sequence


class TestGuessNumber(EnvironmentIntegrity, EnvironmentConformance):
    def create(self) -> GuessNumber:
        return GuessNumber(low=1, high=30)

    def replies(self, seed: int) -> Sequence[str]:
        async def search() -> list[str]:
            environment, oracle, said = self.create(), BinarySearch(low=1, high=30), [""]
            opening = await environment.reset({}, seed)
            message = opening.messages[0]["content"]
            while True:
                said.append(oracle.reply(message))
                turn = await environment.step(Reply(text=said[-1]))
                if turn.done:
                    return said[1:]
                message = turn.messages[0]["content"]

        return asyncio.run(search())


class TestFrozenLake(EnvironmentIntegrity, EnvironmentConformance):
    def create(self) -> FrozenLake:
        return FrozenLake(size=5, holes=0.3)

    def replies(self, seed: int) -> Sequence[str]:
        environment = self.create()
        asyncio.run(environment.reset({}, seed))
        return environment.oracle()


class TestSokoban(EnvironmentIntegrity, EnvironmentConformance):
    def create(self) -> Sokoban:
        return Sokoban(rows=6, columns=6, boxes=1)

    def replies(self, seed: int) -> Sequence[str]:
        environment = self.create()
        asyncio.run(environment.reset({}, seed))
        return environment.oracle()


class TestNim(EnvironmentIntegrity, EnvironmentConformance):
    def create(self) -> Nim:
        return Nim(low=5, high=21)

    def replies(self, seed: int) -> Sequence[str]:
        async def play() -> list[str]:
            environment, replies = self.create(), []
            await environment.reset({}, seed)
            while environment.stones:
                replies += environment.oracle()
                await environment.step(Reply(text=replies[-1]))
            return replies

        return asyncio.run(play())
