"""An OpenEnv server of a user, with a number to guess. `python server_openenv.py text|tools PORT`."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str = ""


class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, high: int = 8, **kwargs: Any) -> Hint:
        self._fail("reset")
        self.number = (seed or 0) % high
        return Hint(hint=f"0 to {high - 1}")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:  # type: ignore[override]
        self._fail("step")
        if action.number == self.number:
            return Hint(hint="right", reward=1.0, done=True)
        return Hint(hint="higher" if action.number < self.number else "lower", reward=False)

    def _fail(self, stage: str) -> None:
        if os.environ.get("FAIL") == stage:
            raise ValueError("no such level")
        if os.environ.get("FAIL") == "exit " + stage:
            os._exit(3)

    @property
    def state(self) -> State:
        return State()


class Lock(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        from fastmcp import FastMCP

        server = FastMCP("lock")

        @server.tool
        def turn(number: int) -> str:
            """Turn the lock to a number."""
            if number < 0:
                raise ValueError("no such number")
            self.open = number == self.number
            return "open" if self.open else "closed"

        self.open = False
        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self.number = (seed or 0) % 10
        return Observation(metadata={"ready": True})

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        found = super().step(action, timeout_s=timeout_s, **kwargs)
        return self._rewarded(found)

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return self._rewarded(await super().step_async(action, timeout_s=timeout_s, **kwargs))

    def _rewarded(self, found: Observation) -> Observation:
        if isinstance(found, CallToolObservation):
            found.reward, found.done = float(self.open), self.open
        return found

    def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError(f"unknown action {action}")

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    if pids := os.environ.get("PIDS"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(pids).write_text(f"{os.getpid()} {child.pid}")
    if sys.argv[1] == "text":
        app = create_fastapi_app(Numbers, Guess, Hint, max_concurrent_envs=8)
    else:
        app = create_fastapi_app(Lock, CallToolAction, CallToolObservation, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error")
