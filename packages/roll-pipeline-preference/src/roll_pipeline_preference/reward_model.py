"""Training of a reward model on pairs of responses (Bradley-Terry).

for batch of pairs, shuffled in each epoch:
    one optimizer step on -log sigmoid(score of the chosen - score of the rejected response)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.algorithms.losses import Objective
from roll_core.pipelines.prompt_order import RowOrder
from roll_core.pipelines.stages import log_update, num_steps
from roll_core.spec.pipeline import Pipeline, Run
from roll_core.spec.train import WantedOutputs
from roll_pipeline_preference import plans
from roll_pipeline_preference.config import RewardModelConfig
from roll_pipeline_preference.encode import encode_pairs
from roll_pipeline_preference.preference import Preferences, held_out_metrics
from roll_pipeline_preference.terms import BradleyTerryTerm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.config import DataArguments
    from roll_core.spec.pipeline import RoleSpec


class RewardModelPipeline(Pipeline[RewardModelConfig]):
    """Trains one model that scores responses."""

    @override
    def prepare(self, run: Run) -> int:
        config = self.config
        term = BradleyTerryTerm(center_rewards_coefficient=config.center_rewards_coefficient)
        self.objective = Objective(terms={"bradley_terry": term})
        self.rows = self._preferences(run, config.reward_train.data_args)
        self.order = RowOrder(len(self.rows), seed=config.seed, shuffle=config.shuffle)
        self.steps = num_steps(config, config.reward_train, len(self.rows))
        validation = config.validation
        self.held_out = None if validation is None else self._preferences(run, validation.data_args)
        return self.steps

    @override
    def roles(self) -> Sequence[RoleSpec]:
        return [replace(role, num_steps=self.steps) for role in plans.reward_model(self.config).roles]

    @override
    async def step(self, run: Run) -> None:
        model = run.train_role("reward_train")
        batch = self.rows.batch(self.order.batch(run.step, model.sequences_per_step))
        with run.stage("train"):
            update = await model.update(batch, self.objective)
        run.log({"tokens/trained": update.num_tokens})
        log_update(run, update, "train")

    @override
    async def evaluate(self, run: Run) -> Mapping[str, float]:
        if self.held_out is None:
            return {}
        batch = self.held_out.batch(range(len(self.held_out)))
        scored = await run.train_role("reward_train").score(batch, WantedOutputs(values=True))
        return held_out_metrics(self.objective, batch, values=scored.values)

    @override
    def export_role(self) -> str:
        return "reward_train"

    def _preferences(self, run: Run, data: DataArguments) -> Preferences:
        config = self.config
        sequences, _ = encode_pairs(
            run.rows(data),
            data,
            run.tokenizer,
            prompt_length=config.prompt_length,
            response_length=config.response_length,
            overlong=config.overlong,
            margin=config.margin,
        )
        return Preferences(sequences)
