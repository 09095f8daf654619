"""Direct alignment: DPO and its relatives, on pairs of responses or on labelled responses.

for batch of pairs, shuffled in each epoch:
    logprobs of both responses under the reference
    one optimizer step on the weighted sum of the losses
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from roll_core.algorithms.losses import CrossEntropy, Objective
from roll_core.data.pack import pack
from roll_core.errors import UnsupportedError
from roll_core.pipelines.prompt_order import RowOrder
from roll_core.pipelines.stages import Validation, log_update, num_steps
from roll_core.spec.pipeline import Pipeline, Run
from roll_core.spec.train import TokenOutputs, WantedOutputs
from roll_pipeline_preference import plans
from roll_pipeline_preference.config import PreferenceConfig
from roll_pipeline_preference.encode import CHOSEN, encode_labelled, encode_pairs, mismatched
from roll_pipeline_preference.losses import PreferenceParams
from roll_pipeline_preference.reference_cache import cached_logprobs
from roll_pipeline_preference.terms import PreferenceTerm

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from roll_core.spec.config import DataArguments
    from roll_core.spec.pipeline import RoleSpec, TrainRole
    from roll_core.spec.train import LossFn
    from roll_core.types import Floats, TrainSequence

RESPONSES = WantedOutputs(logprobs=True, masked_only=True)
"""Logprobs of responses, without those of prompts."""


class Preferences:
    """Training sequences of preference data, in units: pairs, or single labelled responses."""

    def __init__(
        self, sequences: Sequence[TrainSequence], *, labelled: bool = False, mismatched: Sequence[TrainSequence] = ()
    ) -> None:
        """`mismatched` has a sequence for each response, for `kto`."""
        self.sequences, self.size, self.mismatched = sequences, 1 if labelled else 2, mismatched
        self.references: dict[str, Floats] = {}
        """Known reference logprobs by sequence id."""

    def __len__(self) -> int:
        return len(self.sequences) // self.size

    def batch(self, units: Iterable[int]) -> list[TrainSequence]:
        """Sequences of these units, numbered within the batch."""
        return [
            replace(self.sequences[self.size * unit + index], group=number, unit=number)
            for number, unit in enumerate(units)
            for index in range(self.size)
        ]


class PreferencePipeline(Pipeline[PreferenceConfig]):
    """Trains a policy on preferences."""

    @override
    def prepare(self, run: Run) -> int:
        config = self.config
        self.rows = self._preferences(run, config.actor_train.data_args)
        self.order = RowOrder(len(self.rows), seed=config.seed, shuffle=config.shuffle)
        self.steps = num_steps(config, config.actor_train, len(self.rows))
        self.held_out: Preferences | None = None
        self.validation: Validation | None = None
        if config.validation is not None:
            data = config.validation.data_args
            if {data.chosen, data.rejected, data.label} & set(run.rows(data).columns) or config.actor_infer is None:
                self.held_out = self._preferences(run, data)
            if config.actor_infer is not None:
                self.validation = Validation(run, config, config.validation, source="actor_train")
        return self.steps

    @override
    def roles(self) -> Sequence[RoleSpec]:
        planned = plans.preference(self.config).roles
        return [replace(role, num_steps=self.steps) if role.kind == "train" else role for role in planned]

    @override
    async def setup(self, run: Run) -> None:
        model = run.train_role("actor_train")
        if self.config.use_weighting and not model.capabilities.topk:
            raise UnsupportedError("use_weighting needs argmax tokens, which the strategy of actor_train cannot return")
        if self.config.precompute_ref_log_probs:
            # A resumed run loads its checkpoint later: the policy still has its initial weights.
            for rows in (self.rows, self.held_out) if self.held_out is not None else (self.rows,):
                every = [*rows.sequences, *rows.mismatched]
                with run.stage("reference logprobs"):
                    logprobs_of_rows = await cached_logprobs(self.config, model, every)
                rows.references = {
                    sequence.id: logprobs for sequence, logprobs in zip(every, logprobs_of_rows, strict=True)
                }

    @override
    async def step(self, run: Run) -> None:
        model, rows = run.train_role("actor_train"), self.rows
        units = self.order.batch(run.step, model.sequences_per_step)
        batch, kl = rows.batch(units), 0.0
        if self.config.uses_reference:
            with run.stage("reference logprobs"):
                batch = await self._with_reference(run, rows, batch)
                kl = await self._kl(run, rows, [rows.mismatched[unit] for unit in units] if rows.mismatched else ())
        with run.stage("train"):
            update = await model.update(batch, self._objective(kl, use_weighting=self.config.use_weighting))
        run.log({"tokens/trained": update.num_tokens})
        log_update(run, update, "train")

    @override
    async def evaluate(self, run: Run) -> Mapping[str, float]:
        metrics: dict[str, float] = {}
        if self.held_out is not None:
            metrics |= await self._held_out_metrics(run, self.held_out)
        if self.validation is not None:
            metrics |= await self.validation.evaluate(run)
        return metrics

    @override
    def export_role(self) -> str:
        return "actor_train"

    def _preferences(self, run: Run, data: DataArguments) -> Preferences:
        config, rows = self.config, run.rows(data)
        sequences, _ = (encode_labelled if config.labelled else encode_pairs)(
            rows,
            data,
            run.tokenizer,
            prompt_length=config.prompt_length,
            response_length=config.response_length,
            overlong=config.overlong,
        )
        kl = "kto" in config.loss_type and config.uses_reference
        others = mismatched(sequences, rows[0].where) if kl else ()
        return Preferences(sequences, labelled=config.labelled, mismatched=others)

    def _objective(self, kl: float, *, use_weighting: bool) -> Objective:
        """The preference losses, and the nll of chosen responses, which is reported or trained on (`sft`)."""
        config = self.config
        losses = {name: weight for name, weight in config.weights.items() if name != "sft"}
        params = PreferenceParams(**{field.name: getattr(config, field.name) for field in fields(PreferenceParams)})
        term = PreferenceTerm(
            losses=losses,
            params=params,
            reference=config.uses_reference,
            ld_alpha=config.ld_alpha,
            use_weighting=use_weighting,
            mean_rewards=config.loss_type[0] in ("simpo", "orpo"),
            kl=kl,
        )
        return Objective(
            terms={"preference": term, "sft": CrossEntropy(stream=CHOSEN)},
            coefs={"preference": float(bool(losses)), "sft": config.weights.get("sft", 0.0)},
        )

    async def _with_reference(
        self, run: Run, rows: Preferences, sequences: Sequence[TrainSequence]
    ) -> list[TrainSequence]:
        """The sequences of `rows` with the reference's logprobs."""
        references = await self._reference_logprobs(run, rows, sequences)
        return [
            replace(sequence, ref_logprobs=logprobs) for sequence, logprobs in zip(sequences, references, strict=True)
        ]

    async def _reference_logprobs(
        self, run: Run, rows: Preferences, sequences: Sequence[TrainSequence]
    ) -> list[Floats]:
        if rows.references:
            return [rows.references[sequence.id] for sequence in sequences]
        if self.config.reference is not None:
            return await logprobs_of(run.train_role("reference"), sequences)
        return await logprobs_of(run.train_role("actor_train"), sequences, base=True)

    async def _kl(self, run: Run, rows: Preferences, sequences: Sequence[TrainSequence]) -> float:
        """KTO's `z`: mean log-ratio of mismatched responses over the whole step, at least 0."""
        if not sequences:
            return 0.0
        policy = await logprobs_of(run.train_role("actor_train"), sequences)
        reference = await self._reference_logprobs(run, rows, sequences)
        ratios = [
            float((mine - other)[sequence.loss_mask].sum(dtype="float64"))
            for sequence, mine, other in zip(sequences, policy, reference, strict=True)
        ]
        return max(0.0, math.fsum(ratios) / len(ratios))

    async def _held_out_metrics(self, run: Run, rows: Preferences) -> dict[str, float]:
        """The objective's metrics on held-out preferences, all in one batch. WPO's weights are omitted."""
        batch, kl = rows.batch(range(len(rows))), 0.0
        if self.config.uses_reference:
            if not rows.references:  # the reference does not change: its logprobs are computed once
                every = [*rows.sequences, *rows.mismatched]
                references = await self._reference_logprobs(run, rows, every)
                rows.references = {sequence.id: logprobs for sequence, logprobs in zip(every, references, strict=True)}
            batch = await self._with_reference(run, rows, batch)
            kl = await self._kl(run, rows, rows.mismatched)
        logprobs = await logprobs_of(run.train_role("actor_train"), batch)
        return held_out_metrics(self._objective(kl, use_weighting=False), batch, logprobs=logprobs)


async def logprobs_of(role: TrainRole, sequences: Sequence[TrainSequence], *, base: bool = False) -> list[Floats]:
    """Logprobs of the responses' tokens under the role's model, or under its base model without adapters."""
    scored = await role.score(sequences, replace(RESPONSES, base=base))
    return scored.logprobs or []


def held_out_metrics(
    objective: LossFn,
    batch: Sequence[TrainSequence],
    *,
    logprobs: Sequence[Floats] | None = None,
    values: Sequence[Floats] | None = None,
) -> dict[str, float]:
    """Metrics of the objective on a scored batch, as `val/<name>`."""
    import torch

    def flat(arrays: Sequence[Floats] | None) -> torch.Tensor | None:
        return None if arrays is None else torch.from_numpy(np.concatenate(arrays))

    (micro,) = pack(batch)
    output = objective(TokenOutputs(logprobs_T=flat(logprobs), values_T=flat(values)), micro)
    return {f"val/{name}": float(value) for name, value in output.metrics.items()}
