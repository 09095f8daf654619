"""`gymnasium`: environments with gymnasium's `reset` and `step`, such as those of gymnasium and GEM.

    observation, info = reset(seed=…)
    observation, reward, terminated, truncated, info = step(action)

Observations become text, and replies become actions of the action space.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.spec.environment import Environment, Opening, Turn
from roll_environments.targets import WrappedError, calls_to, load
from roll_environments.tool_calls import as_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.environment import Reply, Task

NUMBER = re.compile(r"-?\d{1,18}(?:\.\d{1,18})?(?:[eE][+-]?\d{1,2})?")
MAX_INTEGER = 2**31
"""Bound of numbers that are read as actions of integer spaces."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class GymnasiumAdapter(Environment):
    """One environment. A reply without a valid action does not step it: the policy gets the prompt again."""

    def __init__(
        self,
        *,
        make: str = "gymnasium:make",
        id: str | None = None,
        options: Mapping[str, Any] | None = None,
        prompt: str | None = None,
        actions: Sequence[str] = (),
        observation: str = "text",
        action: str | None = None,
        invalid_reward: float = 0.0,
    ) -> None:
        self.make, self.id, self.options = make, id, dict(options or {})
        self.prompt, self.actions, self.invalid_reward = prompt, actions, invalid_reward
        self.observation, self.action = observation, action
        self.env: Any = None

    @override
    def reset(self, task: Task, seed: int) -> Opening:
        with calls_to(f"{self.make}({self.id or ''})", "make"):
            options = {"render_mode": "ansi", **self.options} if self.observation == "render" else self.options
            self.env = load(self.make)(*([self.id] if self.id else []), **options)
        self.space = getattr(self.env, "action_space", None)
        n = getattr(self.space, "n", None)
        if n is not None and len(self.actions) > n:
            raise WrappedError(f"actions has {len(self.actions)} words, but {self.space} has {n} actions: remove words")
        self.describe = None if self.observation in ("text", "render") else load(self.observation)
        self.parse = None if self.action is None else load(self.action)
        with calls_to(self._inner(), "reset"):
            observation, _ = self.env.reset(seed=seed)
        self.instruction = self.prompt if self.prompt is not None else self._instruction()
        text = "\n".join(each for each in (self.instruction, self._text(observation)) if each)
        return Opening(messages=[{"role": "user", "content": text}])

    @override
    def step(self, reply: Reply) -> Turn:
        action = self._action(reply.text)
        if action is None:
            text = self.instruction or "This is no valid action."
            return Turn(
                messages=[{"role": "user", "content": text}], reward=self.invalid_reward, metrics={"valid": 0.0}
            )
        with calls_to(self._inner(), "step"):
            observation, reward, terminated, truncated, _ = self.env.step(action)
            reward = float(reward)
        return Turn(
            messages=[{"role": "user", "content": self._text(observation)}],
            reward=reward,
            done=bool(terminated),
            truncated=bool(truncated) and not terminated,
            metrics={"valid": 1.0},
        )

    @override
    def close(self) -> None:
        env, self.env = self.env, None
        if callable(close := getattr(env, "close", None)):
            close()

    def _inner(self) -> Any:
        return getattr(self.env, "unwrapped", self.env)

    def _text(self, observation: Any) -> str:
        with calls_to(self._inner(), f"observation: {self.observation}"):
            if self.describe is not None:
                observation = self.describe(observation)
            elif self.observation == "render":
                observation = COLOUR.sub("", str(self.env.render())).strip()
            text = as_text(observation)
        return text

    def _instruction(self) -> str:
        """What the action space expects. Empty for spaces of text."""
        n, shape = getattr(self.space, "n", None), getattr(self.space, "shape", None)
        if self.actions:
            return f"Reply with {', '.join(self.actions[:-1])} or {self.actions[-1]}."
        if shape and self.parse is None:
            return f"Reply with {math.prod(shape)} numbers."
        if n is not None and not shape:
            first = int(getattr(self.space, "start", 0))
            return f"Reply with a number from {first} to {first + int(n) - 1}."
        return ""

    def _action(self, text: str) -> Any:
        """The action of a reply, or None."""
        if self.parse is not None:
            with calls_to(self.action or "", "action"):
                return self.parse(text)
        if self.actions:
            # The longest first: "up left" is no "up".
            longest = sorted(map(re.escape, self.actions), key=len, reverse=True)
            found = re.findall(rf"(?<!\w)(?:{'|'.join(longest)})(?!\w)", text, re.IGNORECASE)
            names = [each.lower() for each in self.actions]
            return names.index(found[-1].lower()) + int(getattr(self.space, "start", 0)) if found else None
        shape, dtype = getattr(self.space, "shape", None), getattr(self.space, "dtype", None)
        if dtype is None or dtype.kind not in "iufb":  # spaces of text, and environments without spaces
            return text
        import numpy as np

        found = NUMBER.findall(text)
        number = int(np.prod(shape)) if shape else 1
        if len(found) < number:
            return None
        values = np.array([float(each) for each in found[-number:]])
        if dtype.kind != "f" and not np.all((values == np.floor(values)) & (np.abs(values) < MAX_INTEGER)):
            return None
        action = values.astype(dtype).reshape(shape) if shape else dtype.type(values[0])
        return action if self.space is None or self.space.contains(action) else None
