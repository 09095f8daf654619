"""Distillation: a student learns a teacher's next-token distributions.

for step in steps:
    batch    = rollouts of the student, as in `rlvr`, or of the teacher, or rows of the data set
    support  = ids at each position: the sampled token, the K most likely of teacher or student, or all
    teacher  = its logprobs of the support, or its hidden states
    update the student with the divergence as a loss, or with its sampled estimate as an advantage

Rollouts, corrections, masks, policy losses and task rewards are those of `rlvr`; only the credit differs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from roll_core.algorithms.losses import CrossEntropy, Objective
from roll_core.data.tokenizers import stored_tokenizer
from roll_core.errors import ConfigError, ConfigProblem
from roll_core.pipelines.experience import Experience
from roll_core.pipelines.prompt_order import RowOrder
from roll_core.pipelines.rlvr import RLVRPipeline
from roll_core.pipelines.stages import Validation, log_update
from roll_pipeline_distill.divergences import STREAM, DistillationTerm, sampled_advantages
from roll_pipeline_distill.plans import distill
from roll_pipeline_distill.stored import with_stored
from roll_pipeline_distill.teachers import HEAD, Source, Teachers
from roll_pipeline_distill.vocabulary import difference, hub_vocabulary_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.pipeline import RoleSpec, Run
    from roll_core.spec.train import LossFn
    from roll_core.types import Group, TrainSequence
    from roll_pipeline_distill.config import DistillConfig


class DistillPipeline(RLVRPipeline):
    """Trains a student on a teacher's distributions. Its roles are those of `rlvr`, and the teachers."""

    config: DistillConfig

    @override
    def prepare(self, run: Run) -> int:
        config = self.config
        sizes = check_vocabulary(run, config)
        if config.rolls_out:
            super().prepare(run)
            self.rollout_role = config.rollout_role
            self.sampling = config.rollout_infer.generating_args.sampling_params(
                default_max_new_tokens=config.response_length
            )
            for tag in {prompt.tag for prompts in self.order.rows.values() for prompt in prompts}:
                config.teacher_role(tag)
        else:
            self.temperature = config.temperature
            self.validation = None
            if config.validation is not None:
                self.validation = Validation(run, config, config.validation, source="actor_train")
            self.set_up_objective(run)
        if config.reads_rows:
            self._read_rows(run)
        self.teachers = Teachers(run, config, sizes)
        return config.max_steps

    def _read_rows(self, run: Run) -> None:
        """Rows with responses, their sources, and the support that they store."""
        config = self.config
        data = config.actor_train.data_args
        rows = run.rows(data)
        self.rows = run.sequences(data, on_prompt=config.distill_on_prompt)
        sources = {row.id: Source.of_row(row) for row in rows}
        self.sources = [sources[each.id] for each in self.rows]
        if config.kd_support == "stored":
            self.rows = with_stored(
                self.rows, rows, ids=config.kd_ids, logprobs=config.kd_logprobs, vocab_size=len(run.tokenizer)
            )
        else:
            for source in self.sources:
                config.teacher_role(source.tag)
        self.row_order = RowOrder(len(self.rows), seed=config.seed)

    @override
    def set_up_objective(self, run: Run) -> None:
        super().set_up_objective(run)
        config = self.config
        term = DistillationTerm(
            kind=config.objective,
            tail=config.kd_tail,
            sampled=config.kd_support == "sampled",
            beta=config.js_beta,
            skew=config.skew_lambda,
            head_mass=config.adaptive_kl_alpha,
            tail_floor=config.kd_tail_floor,
            clip=config.kd_clip,
            head=str(run.dir / HEAD) if config.kd_support == "full" else "",
            overlap=config.logits_topk if config.kd_support == "teacher_topk" else 0,
        )
        terms: dict[str, LossFn] = {STREAM: term}
        coefs = {STREAM: config.kd_coef}
        if config.nll_coef:
            terms["nll"], coefs["nll"] = CrossEntropy(), config.nll_coef
        self.distillation = Objective(terms=terms, coefs=coefs, temperature=config.temperature)
        if config.placement == "loss" and config.task_coef:
            policy = self.policy_objective
            self.policy_objective = replace(policy, terms={**policy.terms, **terms}, coefs={**policy.coefs, **coefs})

    @override
    def roles(self) -> Sequence[RoleSpec]:
        return distill(self.config).roles

    @override
    async def setup(self, run: Run) -> None:
        if self.config.rolls_out:
            await super().setup(run)
        await self.teachers.setup(run)

    @override
    async def step(self, run: Run) -> None:
        if self._trains_on_rollouts(run.step):
            await super().step(run)
            return
        rows, sources = self._next_rows(run.step)
        with run.stage("logprobs"):
            batch = rows if self.config.kd_support == "stored" else await self.teachers.teach(run, rows, sources)
        with run.stage("train"):
            await self._distill(run, batch)

    @override
    def state(self) -> Mapping[str, Any]:
        return super().state() if self.config.rolls_out else {}

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        if self.config.rolls_out:
            super().load_state(state)

    # -- the stages of a step ------------------------------------------------------------------------------------------

    def _trains_on_rollouts(self, step: int) -> bool:
        """True if a step trains on rollouts: with probability `student_data_fraction` for mixed data (GKD)."""
        config = self.config
        if config.distill_data != "mix":
            return config.rolls_out
        return bool(np.random.default_rng([config.seed, step]).random() < config.student_data_fraction)

    def _next_rows(self, step: int) -> tuple[list[TrainSequence], list[Source]]:
        """Rows of a step on the data set, as many as rollouts in a step on these, and their sources."""
        size = self.config.rollout_batch_size * self.config.num_return_sequences_in_group
        chosen = self.row_order.batch(step, size)
        rows = [replace(self.rows[i], id=f"{self.rows[i].id}/{at}", group=at) for at, i in enumerate(chosen)]
        return rows, [self.sources[i] for i in chosen]

    @override
    def experience(self, groups: Sequence[Group]) -> Experience:
        """Samples of a batch. They need a reward only if the credit or a mask reads it."""
        config = self.config
        return Experience.of(
            groups,
            routed_experts=config.replays_experts,
            min_group_size=config.min_group_size,
            scored=config.reads_rewards,
        )

    @override
    async def _score(self, run: Run, experience: Experience) -> tuple[Experience, torch.Tensor | None]:
        """Add the scores of `rlvr`, and the logprobs of the teachers."""
        experience, entropy_T = await super()._score(run, experience)
        sources = [Source.of_sample(experience.samples[at]) for at in experience.rollouts_B.tolist()]
        taught = await self.teachers.teach(run, experience.sequences, sources)
        return replace(experience, sequences=tuple(taught)), entropy_T

    @override
    def assign_credit(self, run: Run, experience: Experience) -> Experience:
        """Advantages of task rewards, of the teacher, or of both; none if the divergence is a loss by itself."""
        config = self.config
        advantages_T = torch.zeros(len(experience.mask_T))
        if config.task_coef:
            experience = super().assign_credit(run, experience)
            task_T = experience.flat("advantages")
            advantages_T = advantages_T if task_T is None else config.task_coef * task_T
        if config.placement == "loss":
            return experience.with_flat(advantages=advantages_T) if config.task_coef else experience
        old_T, behaviour_T = experience.flat("old_logprobs"), experience.flat("behaviour_logprobs")
        student_T, teacher_T1 = behaviour_T if old_T is None else old_T, experience.flat("teacher_logprobs")
        if student_T is None or teacher_T1 is None:
            raise AssertionError("advantages of distillation need logprobs of student and teacher")
        mask_T, teacher_T = experience.mask_T, teacher_T1[:, 0]
        found_T = sampled_advantages(
            student_T, teacher_T, mask_T, experience.segments_T, clip=config.kd_clip, discount=config.kd_discount
        )
        run.log(
            {
                "distillation/divergence": float((student_T - teacher_T)[mask_T].mean()),
                "distillation/advantage_mean": float(found_T[mask_T].mean()),
            }
        )
        return experience.with_flat(advantages=advantages_T + config.kd_coef * found_T)

    @override
    def _chosen(self, run: Run, experience: Experience) -> Experience:
        return (
            super()._chosen(run, experience) if self.config.trains_policy else experience.keep(self._kept(experience))
        )

    @override
    async def _train(self, run: Run, experience: Experience, chosen: Experience) -> None:
        if self.config.trains_policy:
            await super()._train(run, experience, replace(chosen, sequences=_weighted(chosen.sequences)))
        elif chosen.sequences:
            await self._distill(run, chosen.sequences)
        else:
            run.guard("all_groups_filtered", False, "no sample to train on at {steps}: the masks excluded all samples")
            run.log({"tokens/trained": 0})

    async def _distill(self, run: Run, sequences: Sequence[TrainSequence]) -> None:
        """Update the student with the divergence alone."""
        config = self.config
        update = await run.train_role("actor_train").update(
            _weighted(sequences),
            self.distillation,
            epochs=config.ppo_epochs,
            max_length=config.response_length,
            shuffle_seed=self._shuffle_seed(run),
        )
        log_update(run, update, "actor")
        run.log({"tokens/trained": update.num_tokens})


def _weighted(sequences: Sequence[TrainSequence]) -> tuple[TrainSequence, ...]:
    """Sequences whose trained tokens have weight 1 in the distillation term."""
    return tuple(
        replace(each, streams={**each.streams, STREAM: each.loss_mask.astype(np.float32)}) for each in sequences
    )


def check_vocabulary(run: Run, config: DistillConfig) -> Mapping[str, int | None]:
    """Raise `ConfigError` if a teacher has another tokenizer, or if K exceeds a vocabulary. Loads no model.

    Returns the number of ids of each role's model; None if it is unknown.

    The schema compares what it finds in directories. Here the run's tokenizer is known, and models on the Hub are.
    """
    own, sizes = run.tokenizer.get_vocab(), config.vocabulary_sizes()
    for name in sizes:
        path, trusted = config.model_path(name), config.roles()[name].model_args.trust_remote_code
        size = sizes[name] = sizes[name] or hub_vocabulary_size(path, trust_remote_code=trusted)
        if name == "actor_train":
            size = sizes[name] = size or len(own)
        else:
            stored = stored_tokenizer(path, trust_remote_code=trusted) if path else None
            theirs = None if stored is None else stored.get_vocab()
            if why := difference(own, theirs, sizes["actor_train"], size):
                raise _refused(config, f"{name}.model_args", why, "choose a teacher with the student's tokenizer")
        if config.uses_topk and size is not None and config.logits_topk > size:
            message = f"found {config.logits_topk}, but the vocabulary of {name} has {size} ids"
            raise _refused(config, "logits_topk", message, f"set at most {size}")
    return sizes


def _refused(config: DistillConfig, key: str, message: str, hint: str) -> ConfigError:
    return ConfigError([ConfigProblem(where=config.exp_name, key=key, message=message, hint=hint, code="ROLL-C014")])
