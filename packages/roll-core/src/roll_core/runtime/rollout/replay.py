"""A run without an engine: its batches are those that another run recorded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from typing_extensions import override

from roll_core.errors import RecordingError, UnsupportedError
from roll_core.runtime.rollout.of_run import RunRollouts
from roll_core.runtime.rollout.recording import Recording
from roll_core.runtime.rollout.scheduler import REPLAYED
from roll_core.spec.pipeline import InferRole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roll_core.runtime.rollout.groups import BatchFacts
    from roll_core.runtime.run import ActiveRun
    from roll_core.spec.config import WorkerConfig
    from roll_core.spec.pipeline import RolloutPlan
    from roll_core.types import Completion, GenerateRequest, Group


class ReplayedRole(InferRole):
    """Stands where an engine was, and is said to hold the weights that it would hold. Nothing is sent to it."""

    def __init__(self, name: str, config: WorkerConfig) -> None:
        self.name, self.config = name, config
        self.version = 0

    @property
    @override
    def weight_version(self) -> int:
        return self.version

    @override
    async def generate(
        self, requests: Sequence[GenerateRequest], on_completion: Callable[[Completion], None] | None = None
    ) -> NoReturn:
        raise UnsupportedError(f"{self.name} is not started: replay_rollouts reads what it generated in another run")


class ReplayedRollouts(RunRollouts):
    """Steps in the order in which they were recorded."""

    def __init__(self, run: ActiveRun, role: ReplayedRole, plan: RolloutPlan) -> None:
        super().__init__(run, role.name, plan)
        self._replayed = role
        self._recording = Recording(Path(plan.replay))

    @override
    async def _next(self, step: int) -> tuple[Sequence[Group], BatchFacts]:
        found = await asyncio.to_thread(self._recording.batch, step + 1, self._plan)
        here = self._replayed.weight_version
        if found.weight_version != here:
            raise RecordingError(
                f"step {step + 1} of {self._recording.run} was drawn when {found.weight_version} optimizer steps were"
                f" done, here {here} are: a replay needs as many for each batch as the recorded run had (ppo_epochs,"
                " gradient_accumulation_steps, warm-up, …)"
            )
        return found.groups, found.facts

    @override
    def state(self) -> Mapping[str, Any]:
        return {REPLAYED: True}

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        """The step says which batch is next."""
