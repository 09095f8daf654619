"""Pipeline `acme`: REINFORCE with a baseline, on one screen.

publish weights -> generate and score groups -> advantage: reward - mean reward of the group -> update
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from roll_core.algorithms.losses import PolicyObjective
from roll_core.data.pack import sequence_of
from roll_core.pipelines.prompt_order import RowOrder
from roll_core.pipelines.stages import Validation, log_update
from roll_core.spec.pipeline import Pipeline, RoleSpec, Run
from roll_core.types import Group, Sample, TrainSequence
from roll_pipeline_acme.config import AcmePipelineConfig
from roll_pipeline_acme.plans import acme


class AcmePipeline(Pipeline[AcmePipelineConfig]):
    """A step depends only on `run.step` and the weights, so a resumed run needs no `state`."""

    def prepare(self, run: Run) -> int:
        """Read prompts and held-out prompts."""
        config = self.config
        self.prompts = run.prompts(config.actor_train.data_args)
        self.order = RowOrder(len(self.prompts), seed=config.seed)
        self.sampling = config.actor_infer.generating_args.sampling_params(
            default_max_new_tokens=config.response_length
        )
        held_out = config.validation
        self.validation = held_out and Validation(run, config, held_out, source="actor_train")
        return config.max_steps

    def roles(self) -> Sequence[RoleSpec]:
        """The roles of the plan."""
        return acme(self.config).roles

    async def step(self, run: Run) -> None:
        """Generate with the current weights, and update once."""
        prompts = [self.prompts[row] for row in self.order.batch(run.step, self.config.rollout_batch_size)]
        await run.publish_weights("actor_train", "actor_infer")
        number = self.config.num_return_sequences_in_group
        groups = await run.rollout("actor_infer", prompts, self.sampling, n=number)
        run.log_samples([sample for group in groups for sample in group.samples])
        sequences = [each for at, group in enumerate(groups) for each in _advantages(group, at)]
        scores = [value for group in groups for _, value in _values(group)]
        run.log({"score/mean": float(np.mean(scores)), "samples": float(len(sequences))})
        with run.stage("train"):
            update = await run.train_role("actor_train").update(sequences, PolicyObjective(aggregation="token-mean"))
        log_update(run, update, "actor")

    async def evaluate(self, run: Run) -> Mapping[str, float]:
        """Scores of held-out prompts."""
        return await self.validation.evaluate(run) if self.validation else {}

    def export_role(self) -> str:
        """The policy is exported at the end."""
        return "actor_train"


def _values(group: Group) -> list[tuple[Sample, float]]:
    """Samples with their rewards. A failed reward has no value, and is never 0."""
    rewards = [(each, each.reward.value) for each in group.samples if each.reward is not None]
    return [(sample, value) for sample, value in rewards if value is not None]


def _advantages(group: Group, at: int) -> list[TrainSequence]:
    """Sequences of a group: each token's advantage is the reward minus the group's mean."""
    values = _values(group)
    mean = sum(value for _, value in values) / max(len(values), 1)
    sequences = [(sequence_of(sample, group=at), value) for sample, value in values]
    return [
        replace(each, advantages=np.where(each.loss_mask, value - mean, 0).astype(np.float32))
        for each, value in sequences
    ]
