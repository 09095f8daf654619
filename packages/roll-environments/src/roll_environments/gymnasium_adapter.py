"""`gymnasium`: environments with gymnasium's `reset` and `step`, such as those of gymnasium and GEM.

    observation, info = reset(seed=…)
    observation, reward, terminated, truncated, info = step(action)

Observations become text or images, and replies become actions of the action space.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.spec.environment import Environment, Opening, Turn
from roll_environments.targets import WrappedError, calls_to, load
from roll_environments.tool_calls import as_text, is_image, with_images

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.spec.environment import Message, Reply, Task

NUMBER = re.compile(r"[+-]?(?:\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(?:[eE][+-]?\d{1,2})?")
CHUNK = re.compile(r"[\w.+\-/%^°]+")
"""A number with all that stands beside it: `3-5` and `1/2` are no numbers."""
MINUS = str.maketrans(dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-"))
THOUSANDS = re.compile(r"(?<![\w.,])([+-]?\d{1,3})((?:[,'’\u00a0\u2009\u202f]\d{3})+)(?![\d,])")
JOINED = re.compile(r"\d[,'’\u00a0\u2009\u202f]\d")
"""Characters between digits that separate numbers, or thousands, or decimals."""
RENDER_MODES = {"render": "ansi", "image": "rgb_array"}
"""Render mode of each `observation` that is a rendering."""
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
            mode = RENDER_MODES.get(self.observation)
            options = {"render_mode": mode, **self.options} if mode else self.options
            self.env = load(self.make)(*([self.id] if self.id else []), **options)
        self.space = getattr(self.env, "action_space", None)
        n = getattr(self.space, "n", None)
        if n is not None and len(self.actions) > n:
            raise WrappedError(f"actions has {len(self.actions)} words, but {self.space} has {n} actions: remove words")
        self.describe = None if self.observation in ("text", *RENDER_MODES) else load(self.observation)
        self.parse = None if self.action is None else load(self.action)
        with calls_to(self._inner(), "reset"):
            observation, _ = self.env.reset(seed=seed)
        self.instruction = self.prompt if self.prompt is not None else self._instruction()
        return Opening(messages=[self._message(observation, *([self.instruction] if self.instruction else []))])

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
            messages=[self._message(observation)],
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

    def _message(self, observation: Any, *before: str) -> Message:
        """The message with an observation, after the texts `before`."""
        with calls_to(self._inner(), f"observation: {self.observation}"):
            if self.describe is not None:
                observation = self.describe(observation)
            elif self.observation == "render":
                observation = COLOUR.sub("", str(self.env.render())).strip()
            elif self.observation == "image":
                observation = _picture(self.env.render())
            value = observation if is_image(observation) else as_text(observation)
        content, media = with_images([*before, *([value] if value else [])])
        return {"role": "user", "content": content} | ({"media": media} if media else {})

    def _instruction(self) -> str:
        """What the action space expects. Empty for spaces of text."""
        n, shape = getattr(self.space, "n", None), getattr(self.space, "shape", None)
        if self.actions:
            return f"Reply with {', '.join(self.actions[:-1])} or {self.actions[-1]}."
        if shape and self.parse is None:
            return f"Reply with {math.prod(shape)} numbers."
        if (parts := getattr(self.space, "spaces", None)) is not None and self.parse is None:
            names = f"the keys {', '.join(map(str, parts))}" if isinstance(parts, Mapping) else f"{len(parts)} values"
            return f"Reply with a JSON {'object' if isinstance(parts, Mapping) else 'list'} of {names}."
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
            actions = re.findall(rf"(?<!\w)(?:{'|'.join(longest)})(?!\w)", text, re.IGNORECASE)
            names = [action.lower() for action in self.actions]
            return names.index(actions[-1].lower()) + int(getattr(self.space, "start", 0)) if actions else None
        shape, dtype = getattr(self.space, "shape", None), getattr(self.space, "dtype", None)
        if (parts := getattr(self.space, "spaces", None)) is not None:
            return _action_of(self.space, _json_of(text, *("{}" if isinstance(parts, Mapping) else "[]")))
        if dtype is None:  # environments without spaces, and spaces that no text can name
            return text if getattr(self.space, "contains", lambda _: True)(text) else None
        if dtype.kind not in "iufb":  # spaces of text
            return text
        number = math.prod(shape) if shape else 1
        values = numbers(text, number)
        return None if values is None else _action_of(self.space, values if shape else values[0])


def _picture(frame: Any) -> Any:
    """An image of Pillow from what `render` returns: one, or an array of its pixels. Raises `TypeError`."""
    import numpy as np
    from PIL import Image

    if is_image(frame):
        return frame
    pixels = np.asarray(frame)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
        raise TypeError(
            f"render returned {type(frame).__name__} of {pixels.dtype} and shape {pixels.shape}, expected the pixels of"
            " an image: set options: {render_mode: rgb_array}, if the environment has it"
        )
    return Image.fromarray(pixels)


def numbers(text: str, number: int) -> list[float] | None:
    """The last `number` numbers of a text; None if there are fewer, or if one of them can be read in several ways.

    `1,2` are two numbers and `1,234` is one, if the text then has exactly `number` numbers.
    """
    text = text.translate(MINUS)
    readings = [_numbers(text)]
    if JOINED.search(text):
        joined = THOUSANDS.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), text)
        readings += [_numbers(joined)] if joined != text else []
        readings = [reading for reading in readings if len(reading) == number]
    if len(readings) != 1 or len(readings[0]) < number:
        return None
    values = [value for value in readings[0][-number:] if value is not None]
    return values if len(values) == number else None


def _numbers(text: str) -> list[float | None]:
    """The numbers of a text. None stands for digits that are no number, such as `3-5`."""
    numbers: list[float | None] = []
    signed = False
    for match in CHUNK.finditer(text):
        chunk = match[0].rstrip(".")
        if any(character.isdigit() for character in chunk) and not chunk[0].isalpha():
            numbers.append(float(chunk) if NUMBER.fullmatch(chunk) and not signed else None)
        # A sign apart from its number is one of a list at the beginning of a line, and else has no clear meaning.
        line = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        signed = chunk == "-" and bool(line.strip())
    return numbers


def _action_of(space: Any, value: Any) -> Any:
    """The action of a space from JSON values; None if they are none of its actions."""
    action = _typed(space, value)
    return action if action is not None and (space is None or space.contains(action)) else None


def _typed(space: Any, value: Any) -> Any:
    parts, dtype = getattr(space, "spaces", None), getattr(space, "dtype", None)
    if isinstance(parts, Mapping):
        if not isinstance(value, dict) or value.keys() != set(parts):
            return None
        actions = {key: _typed(part, value[key]) for key, part in parts.items()}
        return None if any(action is None for action in actions.values()) else actions
    if parts is not None:
        if not isinstance(value, list) or len(value) != len(parts):
            return None
        listed = tuple(map(_typed, parts, value))
        return None if any(action is None for action in listed) else listed
    if dtype is None or dtype.kind not in "iufb":
        return value if isinstance(value, str) else None
    import numpy as np

    try:
        numbers = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    with np.errstate(all="ignore"):  # numbers outside of the type become others, which are no actions
        cast = numbers.astype(dtype)
    exact = np.isfinite(cast).all() if dtype.kind == "f" else np.array_equal(cast.astype(np.float64), numbers)
    shape = tuple(getattr(space, "shape", None) or ())
    if not exact or cast.size != math.prod(shape):
        return None
    return cast.reshape(shape) if shape else dtype.type(cast.item())


def _json_of(text: str, begin: str, end: str) -> Any:
    """The JSON value between the first `begin` and the last `end`; None if there is none."""
    try:
        return json.loads(text[text.index(begin) : text.rindex(end) + 1])
    except (ValueError, RecursionError):
        return None
