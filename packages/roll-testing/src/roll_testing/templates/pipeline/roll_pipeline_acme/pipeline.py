"""Pipeline `acme`: REINFORCE with a baseline, on one screen.

publish weights -> generate and score groups -> advantage: reward - mean reward of the group -> update
"""

from collections.abc import Mapping, Sequence

from roll_core.algorithms.losses import policy_objective
from roll_core.pipelines.experience import Experience, sample_metrics
from roll_core.pipelines.prompt_order import RowOrder
from roll_core.pipelines.stages import Validation, log_update
from roll_core.spec.pipeline import Pipeline, RoleSpec, Run
from roll_pipeline_acme.config import AcmePipelineConfig
from roll_pipeline_acme.plans import acme


class AcmePipeline(Pipeline[AcmePipelineConfig]):
    """A step depends only on `run.step` and the weights, so a resumed run needs no `state`."""

    def prepare(self, run: Run) -> int:
        """Read prompts and held-out prompts."""
        config, held_out = self.config, self.config.validation
        self.prompts = run.prompts(config.actor_train.data_args)
        self.order = RowOrder(len(self.prompts), seed=config.seed)
        generating = config.actor_infer.generating_args
        self.sampling = generating.sampling_params(default_max_new_tokens=config.response_length)
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
        run.log(sample_metrics(groups))
        batch = Experience.of(groups)  # S samples with a reward, T tokens of all their rows
        if not batch.samples:
            run.guard("all_groups_filtered", False, "no reward signal at {steps}: no response has a reward")
            return
        same_SS = (batch.groups_S[:, None] == batch.groups_S).double()
        advantages_S = batch.scores_S - same_SS @ batch.scores_S / same_SS.sum(1)
        batch = batch.with_flat(advantages=advantages_S[batch.segments_T] * batch.mask_T)
        update = await run.train_role("actor_train").update(batch.sequences, policy_objective(aggregation="token-mean"))
        log_update(run, update, "actor")

    async def evaluate(self, run: Run) -> Mapping[str, float]:
        """Scores of held-out prompts."""
        return await self.validation.evaluate(run) if self.validation else {}

    def export_role(self) -> str:
        """The policy is exported at the end."""
        return "actor_train"
