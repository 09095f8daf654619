"""Evaluation of a model on held-out prompts, without a trainer.

for batch in prompts, in the order of the file:
    groups      = responses of the engine, scored by the rewards
    scores.jsonl  has a line of each step, which a resumed run continues
metrics of all responses: see `score_metrics`
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from roll_core.errors import CheckpointError, CheckpointMismatchError
from roll_core.pipelines.config import EvaluateConfig, EvaluationConfig
from roll_core.pipelines.plans import evaluate
from roll_core.pipelines.score_metrics import score_metrics
from roll_core.pipelines.stages import Validation
from roll_core.runtime.records.run_dir import RunDir
from roll_core.runtime.records.scores import ScoredResponse, last_responses
from roll_core.spec.pipeline import Pipeline, Run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.pipeline import RoleSpec
    from roll_core.types import Sample

EvaluationT = TypeVar("EvaluationT", bound=EvaluationConfig)


class Evaluation(Pipeline[EvaluationT]):
    """Scores a model. A step is a batch of prompts. Base of evaluations: subclasses generate and score the batches."""

    @override
    def prepare(self, run: Run) -> int:
        self.responses: list[ScoredResponse] = []
        self.scores = RunDir(run.dir).scores
        num_batches = self.load(run)
        return min(num_batches, self.config.max_steps or num_batches)

    @abstractmethod
    def load(self, run: Run) -> int:
        """Read the prompts, and return the number of batches."""

    @abstractmethod
    async def batch(self, run: Run, index: int) -> list[Sample]:
        """Generate and score responses to a batch of prompts."""

    @override
    def roles(self) -> Sequence[RoleSpec]:
        return evaluate(self.config).roles

    @override
    async def step(self, run: Run) -> None:
        samples = await self.batch(run, run.step)
        run.log_samples(samples, split="val", all=True)
        batch = [ScoredResponse.of(sample) for sample in samples]
        run.log({"tokens/generated": sum(response.num_tokens for response in batch)})
        self.responses += batch

    @override
    async def evaluate(self, run: Run) -> Mapping[str, float]:
        """Metrics of all responses so far."""
        return score_metrics(self.responses) if self.responses else {}

    @override
    def state(self) -> Mapping[str, Any]:
        return {"terms": self.config.terms, "num_responses": len(self.responses)}

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Raises `CheckpointMismatchError` if the scores so far are those of another model or other prompts, and
        `CheckpointError` if the run directory of the checkpoint lacks them."""
        check_terms(state["terms"], self.config.terms)
        number = state.get("num_responses", 0)
        self.responses = last_responses(self.scores, number)
        if not number or len(self.responses) != number:
            raise CheckpointError(
                f"{self.scores} was copied from the run of the checkpoint and lacks the {number} responses that it"
                " counts: the file was deleted, or an earlier version wrote it; remove resume_from_checkpoint"
            )


class EvaluatePipeline(Evaluation[EvaluateConfig]):
    """Scores a model on the prompts of rows."""

    @override
    def load(self, run: Run) -> int:
        self.validation = Validation(run, self.config, self.config.validation)
        return self.validation.num_batches

    @override
    async def batch(self, run: Run, index: int) -> list[Sample]:
        return await self.validation.batch(run, index)


def check_terms(saved: Mapping[str, Any], terms: Mapping[str, Any]) -> None:
    """Raise `CheckpointMismatchError` if `saved` terms of a checkpoint differ from those of the config."""
    if changed := [key for key in terms if saved.get(key) != terms[key]]:
        raise CheckpointMismatchError(
            f"the checkpoint has the scores of an evaluation with another {', '.join(changed)}: remove"
            " resume_from_checkpoint, or give the evaluation the values of the resumed run"
        )
