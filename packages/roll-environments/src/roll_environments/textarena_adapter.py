"""`textarena`: games of TextArena. The policy is one player and a function plays the others, or it plays all."""

from __future__ import annotations

import importlib
import random
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.spec.environment import Environment, Opening, Turn
from roll_core.types import Reward
from roll_environments.targets import WrappedError, calls_to, load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from roll_core.spec.environment import Reply, Task

MAX_OPPONENT_TURNS = 100
"""Turns of other players in a row. More are an error of the game."""


class TextArena(Environment):
    """One game with the rewards of the player at its end. The game defines the reward of a tie, usually 0."""

    def __init__(
        self,
        *,
        id: str,
        options: Mapping[str, Any] | None = None,
        num_players: int = 1,
        player: int = 0,
        opponent: str | None = None,
        self_play: bool = False,
    ) -> None:
        self.id, self.options, self.num_players, self.player = id, dict(options or {}), num_players, player
        self.opponent, self.self_play = opponent, self_play
        self.state = random.Random(0).getstate()
        self.env: Any = None
        self.done = False
        self.outcome: tuple[Any, Any] | None = None

    @override
    def reset(self, task: Task, seed: int) -> Opening:
        textarena = importlib.import_module("textarena")
        self.plays = None if self.opponent is None else load(self.opponent)
        self.state = random.Random(seed).getstate()
        with calls_to(f"textarena {self.id}", "make"):
            self.env = textarena.make(self.id, **self.options)
        with self._random(), calls_to(self._game(), "reset"):
            self.env.reset(num_players=self.num_players, seed=seed)
            text = self._next()
        if self.done:
            raise WrappedError(f"textarena {self.id}: the game ended before the first turn of player {self.player}")
        messages = [{"role": "user", "content": text}]
        if not self.self_play:
            return Opening(messages=messages)
        players = tuple(str(player) for player in range(self.num_players))
        return Opening(messages=messages, players=players, player=str(self.player))

    @override
    def step(self, reply: Reply) -> Turn:
        replied = self.player
        with self._random(), calls_to(self._game(), "step"):
            self.done, _ = self.env.step(action=reply.text)
            text = "" if self.done else self._next()
        turn = Turn(messages=[{"role": "user", "content": text}], done=self.done)
        if not self.self_play:
            return turn
        if not self.done:
            return replace(turn, player=str(self.player))
        others = {str(player): float(reward) for player, reward in self._outcome()[0].items() if player != replied}
        return replace(turn, reward=float(self._outcome()[0][replied]), rewards=others)

    @override
    def score(self) -> Reward | None:
        rewards, info = self._outcome()
        if self.self_play:  # the last turn has the rewards
            return Reward(value=0.0, detail={"finished": float(rewards is not None)})
        if rewards is None:  # the limit of turns ended the episode before the game had an outcome
            return Reward(value=0.0, detail={"finished": 0.0})
        invalid = float(bool(info[self.player].get("invalid_move")))
        return Reward(value=float(rewards[self.player]), detail={"finished": 1.0, "invalid_move": invalid})

    def _outcome(self) -> tuple[Any, Any]:
        """Rewards of the players and information of the game; rewards are None if it is unfinished."""
        if self.outcome is None:
            with self._random(), calls_to(self._game(), "close"):
                self.outcome = self.env.close()
        return self.outcome

    def _game(self) -> Any:
        game = self.env
        while hasattr(game, "env"):
            game = game.env
        return game

    def _next(self) -> str:
        """Play the other players' turns, and return what the player sees."""
        for _ in range(MAX_OPPONENT_TURNS):
            player, observation = self.env.get_observation()
            text = observation if isinstance(observation, str) else "\n".join(str(entry[1]) for entry in observation)
            if self.self_play:
                self.player = player
            if player == self.player:
                return text.strip() or "Your turn."
            if self.plays is None:
                raise ValueError(f"player {player} has no opponent function: set opponent")
            with calls_to(self.opponent or "", "opponent"):
                action = str(self.plays(text))
            self.done, _ = self.env.step(action=action)
            if self.done:
                return ""
        raise ValueError(f"the other players took {MAX_OPPONENT_TURNS} turns in a row")

    @contextmanager
    def _random(self) -> Iterator[None]:
        """Give the game a state of Python's `random` of its own: games use the one of the process."""
        before = random.getstate()
        random.setstate(self.state)
        try:
            yield
        finally:
            self.state = random.getstate()
            random.setstate(before)
