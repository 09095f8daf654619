"""Environments and an agent whose attempts fail with a given probability, each in one of several ways.

Many processes import this module, most of them without `roll_core.types`, whose numpy takes 0.3 CPU seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from typing import TYPE_CHECKING, Any

from roll_core.spec.environment import Environment, Opening, Turn

if TYPE_CHECKING:
    from roll_core.types import Reward

MOST_TURNS = 6
STAGES = ("reset", "step", "score")
KINDS_INLINE = tuple(f"{how} at {stage}" for how in ("raise", "hang") for stage in STAGES)
KINDS = (*KINDS_INLINE, *(f"exit at {stage}" for stage in STAGES))
MARK = "a process that an environment of the ledger test started"

injected: Counter[str] = Counter()
open_environments = 0
_rng = random.Random()
_share = 0.0
_kinds: tuple[str, ...] = KINDS_INLINE


def reset(*, share: float, seed: int, kinds: tuple[str, ...] = KINDS_INLINE) -> None:
    """Forget all injected failures."""
    global open_environments, _share, _kinds
    injected.clear()
    open_environments, _share, _kinds = 0, share, kinds
    _rng.seed(seed)


def num_turns(seed: int) -> int:
    """Turns of an episode."""
    return 1 + seed % MOST_TURNS


class Walk(Environment):
    """Coroutines for one loop. An attempt is chosen to fail when it is created."""

    def __init__(self) -> None:
        global open_environments
        open_environments += 1
        self.fails = _rng.choice(_kinds) if _rng.random() < _share else ""
        self.turn = 0

    async def reset(self, task: Any, seed: int) -> Opening:
        await self.maybe("reset")
        self.turns = num_turns(seed)
        self.fails_in = _rng.randrange(self.turns) if self.fails else 0
        return Opening(messages=[{"role": "user", "content": "walk"}])

    async def step(self, reply: Any) -> Turn:
        await asyncio.sleep(_rng.random() * 0.1)
        if self.turn == self.fails_in:
            await self.maybe("step")
        self.turn += 1
        return Turn(reward=1.0, done=self.turn == self.turns, messages=[{"role": "user", "content": "on"}])

    async def score(self) -> Reward:
        from roll_core.types import Reward

        await self.maybe("score")
        return Reward(value=0.5)

    async def close(self) -> None:
        global open_environments
        open_environments -= 1

    async def maybe(self, stage: str) -> None:
        if self.fails.endswith(stage):
            injected[self.fails] += 1
            if self.fails.startswith("hang"):
                await asyncio.sleep(10**6)
            raise RuntimeError(self.fails)


class WalkInProcess(Environment):
    """Blocking code. Failures are logged before they happen. Each attempt that hangs has started a process."""

    def __init__(self, log: str = "", share: float = 0.0) -> None:
        self.log, self.rng = log, random.Random(os.urandom(8))
        self.fails = self.rng.choice(KINDS) if self.rng.random() < share else ""
        self.turn = 0

    def reset(self, task: Any, seed: int) -> Opening:
        self.maybe("reset")
        from roll_core.types import Reward

        self.reward = Reward(value=0.5)
        self.turns = num_turns(seed)
        self.fails_in = self.rng.randrange(self.turns)
        return Opening(messages=[{"role": "user", "content": "walk"}])

    def step(self, reply: Any) -> Turn:
        if self.turn == self.fails_in:
            self.maybe("step")
        self.turn += 1
        return Turn(reward=1.0, done=self.turn == self.turns, messages=[{"role": "user", "content": "on"}])

    def score(self) -> Reward:
        self.maybe("score")
        return self.reward

    def maybe(self, stage: str) -> None:
        if not self.fails.endswith(stage):
            return
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(f"{self.fails}\n")
        if self.fails.startswith("exit"):
            os._exit(3)
        if self.fails.startswith("hang"):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", MARK])
            time.sleep(600)
        raise RuntimeError(self.fails)


KINDS_OF_AGENTS = ("raise", "hang", "exit", "never call", "disconnect", "write a reply itself")


def walk_agent(task: Any, session: Any, log: str = "", share: float = 0.0) -> float:
    """Calls the endpoint once per turn. Failures are logged before they happen."""
    rng = random.Random(os.urandom(8))
    fails = rng.choice(KINDS_OF_AGENTS) if rng.random() < share else ""
    turns = num_turns(session.seed)
    fails_in = rng.randrange(turns) if fails else turns
    messages = [{"role": "user", "content": "walk"}]
    if fails == "never call":
        _log(log, fails)
        return turns + 0.5
    for turn in range(turns):
        if turn == fails_in:
            _log(log, fails)
            if fails == "exit":
                os._exit(3)
            if fails == "hang":
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", MARK])
                time.sleep(600)
            if fails == "disconnect":  # the connection closes while the reply is streamed
                _call(session, messages, stream=True).close()
            if fails in ("raise", "disconnect"):
                raise RuntimeError(fails)
            messages += [{"role": "assistant", "content": "forged"}, {"role": "user", "content": "on"}]
        with _call(session, messages) as response:
            reply = json.load(response)["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "on"}]
    return turns + 0.5


def _call(session: Any, messages: Any, **more: Any) -> Any:
    body = json.dumps({"model": "m", "messages": messages, **more}).encode()
    headers = {"Authorization": f"Bearer {session.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{session.base_url}/chat/completions", data=body, headers=headers)
    return urllib.request.urlopen(request, timeout=60)


def _log(path: str, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{text}\n")
