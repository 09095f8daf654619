"""Simulated engine whose outputs are agent trajectories: generate a turn, wait for the environment, and repeat.

    prompt ──► turn 0 ──► environment ──► observation ──► turn 1 ──► ... ──► last turn
             row decodes    no row         prefill       row decodes

The scheduler sees one request for each trajectory; turns and environments are internal to the engine. While an
environment runs, its trajectory uses no decoding row but keeps its KV cache. Afterwards only the observation is
prefilled. The caller therefore has to limit the number of trajectories on an engine.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from shared_tests.simulation import SimulatedEngine, SimulatedRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shared_tests.simulation import Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Episode of one agent with K turns. The prompt is its first observation."""

    generated_K: np.ndarray
    """int, generated tokens of each turn, at least 1."""
    observed_K: np.ndarray
    """int, tokens of the observation before each turn; 0 for the first turn, whose observation is the prompt."""
    environment_s_K: np.ndarray
    """Seconds that the environment takes after each turn; the value of the last turn is ignored."""

    @property
    def num_tokens(self) -> int:
        """Tokens generated in all turns."""
        return int(self.generated_K.sum())


@dataclass(slots=True)
class Environments:
    """Environments of all trajectories, shared by all engines. They keep running if an engine drops a trajectory."""

    answer_at: dict[tuple[str, int], float] = field(default_factory=dict)
    """Time at which the latest environment step of a trajectory finishes or finished, by request id and output
    index."""


@dataclass(slots=True)
class _Agent:
    """Trajectory that a row belongs to."""

    key: tuple[str, int]
    trajectory: Trajectory
    turn: int
    """Turn that the row generates now, or after its environment has finished."""
    to_compute: int
    """Tokens to prefill before the row continues to decode."""


class SimulatedAgents(SimulatedEngine):
    """Each output of a request is one trajectory. Its tokens are the generated ones, without observations."""

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
        """`trajectory_of(id, index)` is the trajectory of one output of the request with that id.

        A resumed trajectory has lost its KV cache: prompt, turns and observations so far are prefilled again.
        """
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
            generated = len(request.prompt_ids) - self._prompt_tokens
            ends_K = np.cumsum(trajectory.generated_K)
            turn = int(np.searchsorted(ends_K, generated, side="right"))
            row.stretch = int(ends_K[turn]) - generated
            prompt = len(request.prompt_ids) if row.index == 0 else 0
            row.plan = _Agent(key, trajectory, turn, prompt + int(trajectory.observed_K[: turn + 1].sum()))
            between_turns = generated > 0 and row.stretch == trajectory.generated_K[turn]
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
        answer_at = asyncio.get_running_loop().time() + float(trajectory.environment_s_K[agent.turn])
        self._environments.answer_at[agent.key] = answer_at
        agent.turn += 1
        row.stretch, agent.to_compute = int(trajectory.generated_K[agent.turn]), int(trajectory.observed_K[agent.turn])
        self._wait(row, answer_at)

    def _wait(self, row: SimulatedRow, answer_at: float) -> None:
        """Queue the row once its environment has finished."""
        loop = asyncio.get_running_loop()
        if answer_at <= loop.time():
            self._waiting.append(row)
        else:
            loop.call_at(answer_at, self._observed, row)

    def _observed(self, row: SimulatedRow) -> None:
        if row.output is None and not self.dead:
            self._waiting.append(row)
            self._advance()
