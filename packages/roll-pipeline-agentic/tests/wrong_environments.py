"""Environments that fail, each in its own way."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from roll_core.spec.environment import Environment, Opening, Reply, Turn
from roll_core.types import Reward

OPENING = Opening(messages=[{"role": "user", "content": "1"}])


class Echo(Environment):
    """Blocking. The third turn ends the episode with reward 1. Options select what goes wrong."""

    def __init__(self, *, at: str = "", how: str = "", log: str = "") -> None:
        self.at, self.how, self.log, self.turns = at, how, log, 0
        self._fail("init")

    def _fail(self, where: str) -> None:
        if self.log:
            with Path(self.log).open("a") as file:
                file.write(f"{where} {os.getpid()}\n")
        if where != self.at:
            return
        if self.how == "raise":
            raise ValueError("no such level")
        if self.how == "child":
            child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
            Path(self.log).write_text(str(child.pid))
        if self.how in ("hang", "child"):
            time.sleep(3600)
        if self.how == "exit":
            sys.exit(3)
        if self.how == "die":
            os._exit(3)

    def reset(self, task: Any, seed: int) -> Opening:
        self._fail("reset")
        wrong: Any = {
            "tools are None": {"tools": None},
            "tools are texts": {"tools": ["search"]},
            "players are a text": {"players": "ab"},
            "first state is a tuple": {"state": (1, 2)},
            "no UTF-8": {"messages": [{"role": "user", "content": "\ud800"}]},
            "no JSON": {"messages": [{"role": "user", "content": "1", "at": {1}}]},
        }
        return replace(OPENING, **wrong.get(self.how, {}))

    def step(self, reply: Reply) -> Any:
        self._fail("step")
        if self.how == "own timeout":
            raise TimeoutError("the database is away")
        self.turns += 1
        bad: dict[str, Any] = {
            "type": {"reward": 1.0},
            "nan": Turn(reward=float("nan"), done=True),
            "role": Turn(messages=[{"role": "assistant", "content": "0"}]),
            "silent": Turn(),
            "huge reward": Turn(reward=10**400, done=True),
            "metrics are None": Turn(metrics=cast("Any", None), done=True),
            "a metric is None": Turn(metrics=cast("Any", {"right": None}), done=True),
            "rewards are None": Turn(rewards=cast("Any", None), done=True),
            "state is a tuple": Turn(state=cast("Any", (1, 2)), messages=OPENING.messages),
        }
        if self.how in bad:
            return bad[self.how]
        if self.turns == 3:
            return Turn(reward=None if self.how == "no reward" else 1.0, done=True)
        return Turn(messages=[{"role": "user", "content": str(self.turns)}])

    def score(self) -> Reward | None:
        self._fail("score")
        scores: dict[str, Any] = {
            "failed score": Reward(value=None, failure="the judge is away"),
            "nan in detail": Reward(value=1.0, detail={"why": "ok", "bleu": float("nan")}),
            "list in detail": Reward(value=1.0, detail={"bleu": cast("Any", [0.5])}),
            "None in detail": Reward(value=1.0, detail={"bleu": cast("Any", None)}),
            "details": Reward(value=1.0, detail={"why": "ok", "bleu": 0.5, "tests": 3}),
        }
        return scores.get(self.how)

    def close(self) -> None:
        self._fail("close")


class Slow(Environment):
    """Coroutines that never return."""

    async def reset(self, task: Any, seed: int) -> Opening:
        return OPENING

    async def step(self, reply: Reply) -> Turn:
        await asyncio.sleep(3600)
        raise AssertionError


class Counted(Environment):
    """The reward is the largest number of instances in `folder` that an episode saw at the same time."""

    def __init__(self, *, folder: str, number: int) -> None:
        self.folder, self.number = Path(folder), number
        self.file = self.folder / f"open-{id(self)}-{os.getpid()}"

    def reset(self, task: Any, seed: int) -> Opening:
        self.file.touch()
        (self.folder / f"begun-{self.file.name}-{time.monotonic_ns()}").touch()
        return OPENING

    def waits(self) -> bool:
        """True until `number` episodes have begun."""
        return len(list(self.folder.glob("begun-*"))) < self.number

    def seen(self) -> Turn:
        return Turn(reward=float(len(list(self.folder.glob("open-*")))), done=True)

    def step(self, reply: Reply) -> Any:
        while self.waits():
            time.sleep(0.01)
        time.sleep(0.05)
        return self.seen()

    def close(self) -> None:
        self.file.unlink(missing_ok=True)


class CountedInline(Counted):
    """Coroutines."""

    async def reset(self, task: Any, seed: int) -> Opening:  # type: ignore[override]
        return super().reset(task, seed)

    async def step(self, reply: Reply) -> Turn:
        while self.waits():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        return self.seen()
