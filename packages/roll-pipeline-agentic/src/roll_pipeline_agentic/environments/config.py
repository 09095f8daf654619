"""Options of the environments. Light."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from roll_core.spec.config import Config, Fraction, PositiveInt


def _has_pillow(observation: str) -> str:
    if observation == "image" and find_spec("PIL") is None:
        raise ValueError("pictures need the package pillow: pip install 'roll-core[images]'")
    return observation


BoardObservation = Annotated[Literal["text", "image"], AfterValidator(_has_pillow)]


class GuessNumberConfig(Config):
    """Options of the environment `guess_number`."""

    low: int = 1
    """Smallest possible secret number."""
    high: int = 100
    """Largest possible secret number."""
    step_penalty: float = 0.0
    """Subtracted from the reward of each guess that is wrong."""

    @model_validator(mode="after")
    def _is_a_range(self) -> GuessNumberConfig:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low}, expected less than high {self.high}")
        return self


class NimConfig(Config):
    """Options of the environment `nim`."""

    low: PositiveInt = 5
    """Smallest number of stones."""
    high: PositiveInt = 21
    """Largest number of stones."""
    max_take: PositiveInt = 3
    """Largest number of stones that a turn takes."""

    @model_validator(mode="after")
    def _is_a_range(self) -> NimConfig:
        if self.low > self.high:
            raise ValueError(f"low is {self.low}, expected at most high {self.high}")
        return self


class FrozenLakeConfig(Config):
    """Options of the environment `frozen_lake`."""

    size: Annotated[int, Field(ge=2, le=32)] = 4
    """Number of rows, and of columns."""
    holes: Fraction = 0.2
    """Probability that a field is a hole. Every map has a path to the goal."""
    slippery: Fraction = 0.0
    """Probability of a move to one of the two sides instead."""
    hole_reward: float = 0.0
    """Reward of falling into a hole. The goal has 1."""
    observation: BoardObservation = "text"
    """`image`: a picture of the map, for a model that reads images."""


class SokobanConfig(Config):
    """Options of the environment `sokoban`."""

    rows: Annotated[int, Field(ge=5, le=32)] = 6
    """Number of rows, walls included."""
    columns: Annotated[int, Field(ge=5, le=32)] = 6
    """Number of columns, walls included."""
    boxes: Annotated[int, Field(ge=1, le=8)] = 1
    """Number of boxes, and of targets."""
    box_reward: float = 0.0
    """Reward of a push onto a target; its negative for a push away from one. A solved level has 1."""
    observation: BoardObservation = "text"
    """`image`: a picture of the room, for a model that reads images."""

    @model_validator(mode="after")
    def _has_space(self) -> SokobanConfig:
        fields = (self.rows - 2) * (self.columns - 2)
        if 4 * self.boxes > fields:
            raise ValueError(
                f"boxes is {self.boxes}, but {fields} fields inside the walls have space for {fields // 4}"
            )
        return self
