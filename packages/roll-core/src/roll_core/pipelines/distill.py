"""Distillation: a student learns a teacher's next-token distributions, on its own responses or on a data set's.

for step in steps:
    batch    = rollouts of the student, as in `rlvr`, or rows of the data set
    support  = ids at each position: the sampled token, or the most likely tokens of the teacher or the student
    teacher  = its logprobs of the support
    update the student with the divergence as a loss, or with its sampled estimate as an advantage

Rollouts, corrections, masks, policy losses and task rewards are those of `rlvr`; only the credit differs.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from roll_core.algorithms.distillation import STREAM, DistillationTerm, overlap, sampled_advantages
from roll_core.algorithms.losses import Objective
from roll_core.data.sequences import sequence_of
from roll_core.data.tokenizers import stored_tokenizer
from roll_core.errors import ConfigError, ConfigProblem, ModelError
from roll_core.pipelines.experience import Experience, without_experts
from roll_core.pipelines.plans import distill
from roll_core.pipelines.prompt_order import RowOrder
from roll_core.pipelines.rlvr import RLVRPipeline
from roll_core.pipelines.stages import Validation, log_update
from roll_core.runtime.planning.memory import size_of
from roll_core.runtime.rollout.requests import stable_seed
from roll_core.runtime.workers.build import model_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.pipelines.distill_config import DistillConfig
    from roll_core.spec.model import ModelSpec
    from roll_core.spec.pipeline import RoleSpec, Run
    from roll_core.types import Group, TokenIds, TrainSequence


class DistillPipeline(RLVRPipeline):
    """Trains a student on a teacher's distributions. Its roles are those of `rlvr`, and the teachers."""

    config: DistillConfig

    @override
    def prepare(self, run: Run) -> int:
        config = self.config
        check_vocabulary(run, config)
        if config.rolls_out:
            super().prepare(run)
            for tag in {prompt.tag for prompts in self.order.rows.values() for prompt in prompts}:
                config.teacher_of(tag)
        else:
            self.temperature = config.temperature
            self.validation = None
            if config.validation is not None:
                self.validation = Validation(run, config, config.validation, source="actor_train")
            self._set_up_objective(run)
        if config.reads_rows:
            self.rows = run.sequences(config.actor_train.data_args)
            self.row_order = RowOrder(len(self.rows), seed=config.seed)
        return config.max_steps

    @override
    def _set_up_objective(self, run: Run) -> None:
        super()._set_up_objective(run)
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
            overlap=config.logits_topk if config.kd_support == "teacher_topk" else 0,
        )
        terms, coefs = {STREAM: term}, {STREAM: config.kd_coef}
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

    @override
    async def step(self, run: Run) -> None:
        if self._on_policy(run.step):
            await super().step(run)
            return
        rows = self._next_rows(run.step)
        with run.stage("logprobs"):
            batch = await self._teach(run, rows, [""] * len(rows))
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

    def _on_policy(self, step: int) -> bool:
        """True if a step trains on rollouts: with probability `student_data_fraction` for mixed data (GKD)."""
        config = self.config
        if config.distill_data != "mix":
            return config.rolls_out
        seed = stable_seed(config.seed, "distillation data", step)
        return bool(np.random.default_rng(seed).random() < config.student_data_fraction)

    def _next_rows(self, step: int) -> tuple[TrainSequence, ...]:
        """Rows of a step on the data set, as many as rollouts in a step on these."""
        size = self.config.rollout_batch_size * self.config.num_return_sequences_in_group
        return tuple(
            replace(self.rows[i], id=f"{self.rows[i].id}/{at}", group=at)
            for at, i in enumerate(self.row_order.batch(step, size))
        )

    @override
    def _experience(self, groups: Sequence[Group]) -> Experience:
        """Samples of a batch. They need a reward only if it is part of the credit."""
        return super()._experience(groups) if self.config.task_coef else _unscored(groups, self.config.replays_experts)

    @override
    async def _taught(self, run: Run, experience: Experience) -> Experience:
        tags = [sample.tag for sample in experience.samples]
        return replace(experience, sequences=tuple(await self._teach(run, experience.sequences, tags)))

    async def _teach(self, run: Run, sequences: Sequence[TrainSequence], tags: Sequence[str]) -> list[TrainSequence]:
        """Add the support and the logprobs of each sequence's teacher."""
        config = self.config
        options: dict[str, Any] = {"temperature": config.temperature, "masked_only": True}
        asked = list(without_experts(sequences))
        if config.kd_support == "student_topk":
            mine = await run.train_role("actor_train").score(sequences, topk=config.logits_topk, **options)
            asked = [replace(each, gather_ids=ids) for each, ids in zip(asked, mine.topk_ids or (), strict=True)]
            options |= {"gathered": True, "topk": config.logits_topk}
        elif config.kd_support == "teacher_topk":
            options["topk"] = config.logits_topk
        else:
            asked = [replace(each, gather_ids=each.tokens[:, None]) for each in asked]
            options["gathered"] = True

        async def score(domain: str) -> None:
            places = [at for at, tag in enumerate(tags) if config.teacher_of(tag) == domain]
            scored = await run.train_role(f"teachers.{domain}").score([asked[at] for at in places], **options)
            for index, at in enumerate(places):
                if scored.gathered_logprobs is not None:
                    asked[at] = replace(asked[at], teacher_logprobs=scored.gathered_logprobs[index])
                elif scored.topk_ids is not None and scored.topk_logprobs is not None:
                    ids, logprobs = scored.topk_ids[index], scored.topk_logprobs[index]
                    asked[at] = replace(asked[at], gather_ids=ids, teacher_logprobs=logprobs)
                if config.kd_support == "student_topk" and scored.topk_ids is not None:
                    overlaps[at] = _overlap(asked[at], scored.topk_ids[index])

        overlaps: dict[int, torch.Tensor] = {}
        await asyncio.gather(*(score(domain) for domain in dict.fromkeys(map(config.teacher_of, tags))))
        if overlaps:
            run.log({"distillation/overlap": float(torch.cat([overlaps[at] for at in sorted(overlaps)]).mean())})
        return [
            replace(each, gather_ids=taught.gather_ids, teacher_logprobs=taught.teacher_logprobs)
            for each, taught in zip(sequences, asked, strict=True)
        ]

    @override
    def _credit(self, run: Run, experience: Experience) -> Experience:
        """Advantages of task rewards, of the teacher, or of both; none if the divergence is a loss by itself."""
        config = self.config
        advantages_T = torch.zeros(len(experience.mask_T))
        if config.task_coef:
            experience = super()._credit(run, experience)
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
        else:
            await self._distill(run, chosen.sequences)

    async def _distill(self, run: Run, sequences: Sequence[TrainSequence]) -> None:
        """Update the student with the divergence alone."""
        config = self.config
        update = await run.train_role("actor_train").update(
            _weighted(sequences),
            self.distillation,
            epochs=config.ppo_epochs,
            max_length=config.response_length,
            shuffle_seed=stable_seed(config.seed, "optimizer steps", run.step) if config.shuffle else None,
        )
        log_update(run, update, "actor")
        run.log({"tokens/trained": update.num_tokens})


def _weighted(sequences: Sequence[TrainSequence]) -> tuple[TrainSequence, ...]:
    """Sequences whose trained tokens have weight 1 in the distillation term."""
    return tuple(
        replace(each, streams={**each.streams, STREAM: each.loss_mask.astype(np.float32)}) for each in sequences
    )


def _unscored(groups: Sequence[Group], routed_experts: bool) -> Experience:
    """All samples with at least one response token, whether or not they have a reward."""
    samples = [(at, each) for at, group in enumerate(groups) for each in group.samples if len(each.response_ids)]
    sequences = tuple(sequence_of(sample, group=at) for at, sample in samples)
    return Experience(
        samples=tuple(sample for _, sample in samples),
        sequences=sequences if routed_experts else without_experts(sequences),
    )


def _overlap(sequence: TrainSequence, ids: TokenIds) -> torch.Tensor:
    """Share of the support of each trained token that is among `ids` `[L, K]`."""
    if sequence.gather_ids is None:
        raise AssertionError("a sequence without a support")
    mask = sequence.loss_mask
    return overlap(torch.from_numpy(sequence.gather_ids[mask]), torch.from_numpy(ids[mask]))


def check_vocabulary(run: Run, config: DistillConfig) -> None:
    """Raise `ConfigError` if a teacher has another tokenizer, or if K exceeds a vocabulary. Loads no model.

    Without a tokenizer of the teacher, the sizes of the vocabularies are compared. Equal tokenizers may have padded
    vocabularies of different sizes.
    """
    own = run.tokenizer.get_vocab()
    roles = [each for each in distill(config).roles if each.name == "actor_train" or each.name.startswith("teachers.")]
    specs = {role.name: model_spec(role, config, Path()) for role in roles}
    sizes = {name: _vocab_size(spec, config) for name, spec in specs.items()}
    for name in (each for each in specs if each != "actor_train"):
        hint, spec = "choose a teacher with the student's tokenizer", specs[name]
        stored = stored_tokenizer(spec.path, trust_remote_code=spec.trust_remote_code) if spec.path else None
        theirs = None if stored is None else stored.get_vocab()
        if theirs is not None and theirs != own:
            token, number = min(own.items() ^ theirs.items())
            whose = "the student" if own.get(token) == number else "the teacher"
            message = (
                f"its tokenizer has {len(theirs)} tokens and differs from the student's {len(own)}: only {whose} has"
                f" token {token!r} with id {number}"
            )
            raise _refused(config, f"{name}.model_args", message, hint)
        if theirs is None and None not in (sizes[name], sizes["actor_train"]) and sizes[name] != sizes["actor_train"]:
            message = f"its vocabulary has {sizes[name]} ids, the student's {sizes['actor_train']}"
            raise _refused(config, f"{name}.model_args", message, hint)
    for name, size in sizes.items():
        if config.kd_support != "sampled" and size is not None and config.logits_topk > size:
            message = f"found {config.logits_topk}, but the vocabulary of {name} has {size} ids"
            raise _refused(config, "logits_topk", message, f"set at most {size}")


def _vocab_size(spec: ModelSpec, config: DistillConfig) -> int | None:
    """Number of ids of a model; None if it is not known without loading it."""
    try:
        return size_of(spec, config).vocab_size
    except ModelError:
        return None


def _refused(config: DistillConfig, key: str, message: str, hint: str) -> ConfigError:
    return ConfigError([ConfigProblem(where=config.exp_name, key=key, message=message, hint=hint, code="ROLL-C014")])
