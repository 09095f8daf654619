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
from typing import TYPE_CHECKING

import numpy as np
import torch
from typing_extensions import override

from roll_core.algorithms.losses import CrossEntropy, Objective
from roll_core.data.tokenizers import stored_tokenizer
from roll_core.errors import ConfigError, ConfigProblem
from roll_core.pipelines.prompt_order import RowOrder, group_filter
from roll_core.pipelines.rlvr import PolicyPipeline, prompt_order
from roll_core.pipelines.stages import (
    CollectRollouts,
    PolicyStages,
    RewardCredit,
    ScorePolicy,
    SelectSamples,
    SelectTokens,
    UpdatePolicy,
    Validation,
    log_update,
    overlong_masks,
    overlong_penalty,
    policy_masks,
    rollout_plan,
    shuffle_seed,
)
from roll_pipeline_distill.config import DistillConfig
from roll_pipeline_distill.divergences import STREAM, DistillationTerm, sampled_advantages
from roll_pipeline_distill.plans import distill
from roll_pipeline_distill.stored import with_stored
from roll_pipeline_distill.teachers import HEAD, Source, Teachers
from roll_pipeline_distill.vocabulary import difference, hub_vocabulary_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.pipelines.experience import Experience
    from roll_core.spec.pipeline import RoleSpec, Run
    from roll_core.spec.train import LossFn
    from roll_core.types import TrainSequence


class ScoreWithTeachers(ScorePolicy):
    """The scores of `rlvr`, and the logprobs of the teachers."""

    def __init__(self, config: DistillConfig, teachers: Teachers) -> None:
        super().__init__(config)
        self.teachers = teachers

    @override
    async def __call__(self, run: Run, experience: Experience) -> Experience:
        experience = await super().__call__(run, experience)
        sources = [Source.of_sample(experience.samples[index]) for index in experience.rollouts_B.tolist()]
        return replace(experience, rows=tuple(await self.teachers.teach(run, experience.sequences, sources)))


class TeacherCredit(RewardCredit):
    """Advantages of task rewards, of the teacher, or of both; none if the divergence is a loss by itself."""

    config: DistillConfig

    @override
    def __call__(self, run: Run, experience: Experience) -> Experience:
        config = self.config
        advantages_T = torch.zeros(len(experience.mask_T))
        if config.task_coef:
            experience = super().__call__(run, experience)
            advantages_T = config.task_coef * experience.require("advantages")
        if config.placement == "loss":
            return experience.with_flat(advantages=advantages_T) if config.task_coef else experience
        student_T = experience.flat("old_logprobs")
        if student_T is None:
            student_T = experience.require("behaviour_logprobs")
        mask_T, teacher_T = experience.mask_T, experience.require("teacher_logprobs")[:, 0]
        of_teacher_T = sampled_advantages(
            student_T, teacher_T, mask_T, experience.segments_T, clip=config.kd_clip, discount=config.kd_discount
        )
        run.log(
            {
                "distillation/divergence": float((student_T - teacher_T)[mask_T].mean()),
                "distillation/advantage_mean": float(of_teacher_T[mask_T].mean()),
            }
        )
        return experience.with_flat(advantages=advantages_T + config.kd_coef * of_teacher_T)


class UpdateStudent(UpdatePolicy):
    """Updates the student with the policy loss, with the divergence, or with both."""

    config: DistillConfig

    def __init__(self, run: Run, config: DistillConfig) -> None:
        term = DistillationTerm(
            kind=config.objective,
            tail=config.kd_tail,
            sampled=config.kd_support == "sampled",
            beta=config.js_beta,
            skew=config.skew_lambda,
            head_mass=config.adaptive_kl_alpha,
            clip=config.kd_clip,
            head=str(run.dir / HEAD) if config.kd_support == "full" else "",
            overlap=config.logits_topk if config.kd_support == "teacher_topk" else 0,
        )
        terms: dict[str, LossFn] = {STREAM: term}
        coefs = {STREAM: config.kd_coef}
        if config.nll_coef:
            terms["nll"], coefs["nll"] = CrossEntropy(), config.nll_coef
        self.distillation = Objective(terms=terms, coefs=coefs, temperature=config.temperature)
        adds = config.placement == "loss" and config.task_coef
        super().__init__(run, config, terms=terms if adds else {}, coefs=coefs if adds else {})

    @override
    async def __call__(self, run: Run, experience: Experience, selected: Experience) -> None:
        if self.config.trains_policy:
            if selected.rows:
                selected = selected.with_stream(STREAM, selected.loss_mask_T)
            await super().__call__(run, experience, selected)
        elif selected.rows:
            await self.distil(run, selected.sequences)
        else:
            run.guard("all_groups_filtered", False, "no sample to train on at {steps}: the masks excluded all samples")
            run.log({"tokens/trained": 0})

    async def distil(self, run: Run, sequences: Sequence[TrainSequence]) -> None:
        """Update the student with the divergence alone."""
        config = self.config
        update = await run.train_role("actor_train").update(
            _weighted(sequences),
            self.distillation,
            epochs=config.ppo_epochs,
            max_length=config.response_length,
            shuffle_seed=shuffle_seed(run, config),
        )
        log_update(run, update, "actor")
        run.log({"tokens/trained": update.num_tokens})


class DistillPipeline(PolicyPipeline[DistillConfig]):
    """Trains a student on a teacher's distributions. Its roles are those of `rlvr`, and the teachers."""

    @override
    def prepare(self, run: Run) -> int:
        self.teachers = Teachers(run, self.config, check_vocabulary(run, self.config))
        if self.config.reads_rows:
            self._read_rows(run)
        return super().prepare(run)

    @override
    def compose(self, run: Run) -> PolicyStages:
        config = self.config
        credit = TeacherCredit(run, config, overlong_penalty(config))
        masks = [*policy_masks(config), *overlong_masks(config)]
        self.update = UpdateStudent(run, config)
        return PolicyStages(
            collect=self._collect(run, credit) if config.rolls_out else None,
            score=ScoreWithTeachers(config, self.teachers),
            credit=credit,
            select=SelectTokens(config, masks) if config.trains_policy else SelectSamples(masks),
            update=self.update,
            evaluation=Validation.of(run, config, source="actor_train"),
        )

    def _collect(self, run: Run, credit: RewardCredit) -> CollectRollouts:
        """Rollouts of the student or of the teacher. They need a reward only if the credit or a mask reads it."""
        config = self.config
        order = prompt_order(run, config)
        for tag in {prompt.tag for prompts in order.rows.values() for prompt in prompts}:
            config.teacher_role(tag)
        plan = rollout_plan(
            config,
            order,
            params=config.rollout_infer.generating_args.sampling_params(default_max_new_tokens=config.response_length),
            keep=group_filter(config.rewards) if config.filters else None,
            program=credit.program,
        )
        return CollectRollouts(config, plan, role=config.rollout_role, scored=config.reads_rewards)

    def _read_rows(self, run: Run) -> None:
        """Rows with responses, their sources, and the support that they store."""
        config = self.config
        data = config.actor_train.data_args
        rows = run.rows(data)
        self.rows = run.sequences(data, on_prompt=config.distill_on_prompt)
        sources = {row.id: Source.of_row(row) for row in rows}
        self.sources = [sources[sequence.id] for sequence in self.rows]
        if config.kd_support == "stored":
            self.rows = with_stored(
                self.rows, rows, ids=config.kd_ids, logprobs=config.kd_logprobs, vocab_size=len(run.tokenizer)
            )
        else:
            for source in self.sources:
                config.teacher_role(source.tag)
        self.row_order = RowOrder(len(self.rows), seed=config.seed)

    @override
    def roles(self) -> Sequence[RoleSpec]:
        return distill(self.config).roles

    @override
    async def setup(self, run: Run) -> None:
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
            await self.update.distil(run, batch)

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
        rows = [
            replace(self.rows[row], id=f"{self.rows[row].id}/{group}", group=group) for group, row in enumerate(chosen)
        ]
        return rows, [self.sources[row] for row in chosen]


def _weighted(sequences: Sequence[TrainSequence]) -> tuple[TrainSequence, ...]:
    """Sequences whose trained tokens have weight 1 in the distillation term."""
    return tuple(
        replace(sequence, streams={**sequence.streams, STREAM: sequence.loss_mask.astype(np.float32)})
        for sequence in sequences
    )


def check_vocabulary(run: Run, config: DistillConfig) -> Mapping[str, int | None]:
    """Raise `ConfigError` if a teacher has another tokenizer, or if K exceeds a vocabulary. Loads no model.

    Returns the number of ids of each role's model; None if it is unknown.

    The schema compares what it finds in directories. Here the run's tokenizer is known, and models on the Hub are.
    """
    vocabulary, sizes = run.tokenizer.get_vocab(), config.vocabulary_sizes()
    for name in sizes:
        path, trusted = config.model_path(name), config.roles()[name].model_args.trust_remote_code
        size = sizes[name] = sizes[name] or hub_vocabulary_size(path, trust_remote_code=trusted)
        if name == "actor_train":
            size = sizes[name] = size or len(vocabulary)
        else:
            stored = stored_tokenizer(path, trust_remote_code=trusted) if path else None
            theirs = None if stored is None else stored.get_vocab()
            if why := difference(vocabulary, theirs, sizes["actor_train"], size):
                raise _refused(config, f"{name}.model_args", why, "choose a teacher with the student's tokenizer")
        if config.uses_topk and size is not None and config.logits_topk > size:
            message = f"found {config.logits_topk}, but the vocabulary of {name} has {size} ids"
            raise _refused(config, "logits_topk", message, f"set at most {size}")
    return sizes


def _refused(config: DistillConfig, key: str, message: str, hint: str) -> ConfigError:
    return ConfigError([ConfigProblem(where=config.exp_name, key=key, message=message, hint=hint, code="ROLL-C014")])
