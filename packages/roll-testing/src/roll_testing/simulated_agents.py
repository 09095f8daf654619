"""A simulated engine whose outputs are trajectories of agents: a turn is drawn, an environment answers, and so on.

    prompt ──► turn 0 ──► environment ──► observation ──► turn 1 ──► ... ──► last turn
               row draws   no row         prefill          row draws

The scheduler knows one request for each trajectory; turns and environments are the engine's own affair. While an
environment works its trajectory takes none of the rows that draw together, but keeps its keys and values, so that only
the observation is computed when it comes back: who asks bounds how many trajectories an engine has at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from roll_testing.simulation import SimulatedEngine, SimulatedRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roll_testing.simulation import Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What happens to one agent; K turns. The prompt is its first observation."""

    drawn_K: np.ndarray
    """int, tokens of each turn, at least 1."""
    observed_K: np.ndarray
    """int, tokens of the observation before each turn; 0 for the first, whose observation is the prompt."""
    away_s_K: np.ndarray
    """Seconds that the environment takes after each turn; nothing waits for that of the last."""

    @property
    def num_tokens(self) -> int:
        """Drawn in all turns."""
        return int(self.drawn_K.sum())


@dataclass(slots=True)
class Environments:
    """Those of all trajectories, whichever engine draws them: they go on when an engine lets a trajectory go."""

    answer_at: dict[tuple[str, int], float] = field(default_factory=dict)
    """When the environment of a trajectory will have answered, or has, where it was at work last."""


@dataclass(slots=True)
class _Agent:
    """Whose a row is."""

    key: tuple[str, int]
    trajectory: Trajectory
    turn: int
    """That it draws, or will draw once its environment has answered."""
    to_compute: int
    """Tokens before it draws on."""


class SimulatedAgents(SimulatedEngine):
    """An output of a request is one trajectory; its tokens are those that are drawn."""

    def __init__(
        self,
        name: str,
        speed: Speed,
        trajectory_of: Callable[[str, int], Trajectory],
        environments: Environments,
        *,
        prompt_tokens: int,
        real: bool = True,
    ) -> None:
        """`trajectory_of(id, index)` of a request of that id. What goes on after it was cut short has lost its keys and
        values: prompt, turns and observations so far are computed again."""
        super().__init__(
            name, speed, lambda id, index: trajectory_of(id, index).num_tokens, prompt_tokens=prompt_tokens, real=real
        )
        self._trajectory_of, self._environments = trajectory_of, environments

    @override
    def _arrived(self, rows: Sequence[SimulatedRow]) -> None:
        for row in rows:
            request = row.request.request
            base, _, suffix = request.id.partition("#")
            key = base, int(suffix.partition(".")[0]) if suffix else row.index
            trajectory = self._trajectory_of(*key)
            drawn = len(request.prompt_ids) - self._prompt_tokens
            ends_K = np.cumsum(trajectory.drawn_K)
            turn = int(np.searchsorted(ends_K, drawn, side="right"))
            row.stretch = int(ends_K[turn]) - drawn
            prompt = len(request.prompt_ids) if row.index == 0 else 0
            row.plan = _Agent(key, trajectory, turn, prompt + int(trajectory.observed_K[: turn + 1].sum()))
            between_turns = drawn > 0 and row.stretch == trajectory.drawn_K[turn]
            self._wait(row, self._environments.answer_at.get(key, 0.0) if between_turns else 0.0)

    @override
    def _entered(self, row: SimulatedRow) -> int:
        return row.plan.to_compute  # type: ignore[no-any-return]

    @override
    def _reached(self, row: SimulatedRow) -> None:
        if row.output is not None:
            return
        agent: _Agent = row.plan
        trajectory = agent.trajectory
        if row.before + row.stretch >= row.length:
            self._environments.answer_at.pop(agent.key, None)
            self._end(row, "stop")
            return
        self._running -= 1
        row.before += row.stretch
        row.start = -1.0
        answer_at = asyncio.get_running_loop().time() + float(trajectory.away_s_K[agent.turn])
        self._environments.answer_at[agent.key] = answer_at
        agent.turn += 1
        row.stretch, agent.to_compute = int(trajectory.drawn_K[agent.turn]), int(trajectory.observed_K[agent.turn])
        self._wait(row, answer_at)

    def _wait(self, row: SimulatedRow, answer_at: float) -> None:
        """For its environment."""
        loop = asyncio.get_running_loop()
        if answer_at <= loop.time():
            self._waiting.append(row)
        else:
            loop.call_at(answer_at, self._observed, row)

    def _observed(self, row: SimulatedRow) -> None:
        if row.output is None and not self.dead:
            self._waiting.append(row)
            self._advance()
