"""Supervised fine-tuning on responses, with periodic evaluation on held-out rows.

for batch in rows, shuffled in each epoch, or in the order of the files (`shuffle: false`); with `streaming`, from disk:
    one optimizer step on the masked negative log-likelihood
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.algorithms.losses import sft_objective
from roll_core.errors import CheckpointMismatchError
from roll_core.pipelines.config import SFTConfig
from roll_core.pipelines.plans import sft
from roll_core.pipelines.prompt_order import RowOrder
from roll_core.pipelines.stages import Validation, log_update, num_steps
from roll_core.spec.pipeline import Pipeline, Run
from roll_core.spec.train import WantedOutputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.pipeline import RoleSpec, StreamedSequences
    from roll_core.types import TrainSequence


class SFTPipeline(Pipeline[SFTConfig]):
    """Trains one model on rows of prompt and response."""

    @override
    def prepare(self, run: Run) -> int:
        config = self.config
        data, on_prompt = config.sft_train.data_args, config.train_on_prompt
        self.rows: Sequence[TrainSequence] = ()
        self.stream: StreamedSequences | None = None
        self.position = 0
        """Position of the next streamed row in the order."""
        if config.streaming:
            self.stream = run.streamed_sequences(data, overlong=config.overlong, on_prompt=on_prompt)
        else:
            self.rows = run.sequences(data, overlong=config.overlong, on_prompt=on_prompt)
        num_rows = len(self.rows if self.stream is None else self.stream)
        self.order = RowOrder(num_rows, seed=config.seed, shuffle=config.shuffle)
        self.steps = num_steps(config, config.sft_train, num_rows)
        self.held_out: Sequence[TrainSequence] = ()
        self.validation: Validation | None = None
        if config.validation is not None:
            data = config.validation.data_args
            generates = config.actor_infer is not None
            # Rows with a response are used for the loss. An engine generates responses to all prompts.
            if (data.messages or data.response) in run.rows(data).columns:
                self.held_out = run.sequences(data, on_prompt=config.train_on_prompt, require_response=not generates)
            if generates:
                self.validation = Validation(run, config, config.validation, source="sft_train")
        return self.steps

    @override
    def roles(self) -> Sequence[RoleSpec]:
        planned = sft(self.config).roles
        return [replace(role, num_steps=self.steps) if role.kind == "train" else role for role in planned]

    @override
    async def step(self, run: Run) -> None:
        model = run.train_role("sft_train")
        batch = self._batch(run, model.sequences_per_step)
        with run.stage("train"):
            update = await model.update(batch, sft_objective(token_accuracy=model.capabilities.topk))
        run.log({"tokens/trained": update.num_tokens})
        log_update(run, update, "train")

    def _batch(self, run: Run, size: int) -> Sequence[TrainSequence]:
        """Sequences of a step. A streamed row that is dropped is replaced by the next one."""
        if self.stream is None:
            return [self.rows[i] for i in self.order.batch(run.step, size)]
        batch: list[TrainSequence] = []
        with run.stage("data"):
            while len(batch) < size:
                end = self.position + size - len(batch)
                batch += self.stream.read([self.order.row(position) for position in range(self.position, end)])
                self.position = end
        run.log({"data/dropped_rows": self.position - (run.step + 1) * size})
        return batch

    @override
    def state(self) -> Mapping[str, Any]:
        return {} if self.stream is None else {"position": self.position, "num_rows": len(self.stream)}

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Raises `CheckpointMismatchError` if the checkpoint has another number of streamed rows, or none."""
        num_rows = None if self.stream is None else len(self.stream)
        if state.get("num_rows") != num_rows:
            raise CheckpointMismatchError(
                f"the checkpoint has {state.get('num_rows', 'no')} streamed rows, and this run"
                f" {'none' if num_rows is None else num_rows}: give it the rows and the key streaming of that run"
            )
        self.position = state.get("position", 0)

    @override
    async def evaluate(self, run: Run) -> Mapping[str, float]:
        metrics: dict[str, float] = {}
        if self.held_out:
            metrics |= await self._held_out_metrics(run)
        if self.validation is not None:
            metrics |= await self.validation.evaluate(run)
        return metrics

    @override
    def export_role(self) -> str:
        return "sft_train"

    async def _held_out_metrics(self, run: Run) -> dict[str, float]:
        """Held-out metrics: negative log-likelihood per trained token, in nats, and token accuracy.

        Token accuracy is the share of trained tokens that equal the model's argmax token. It requires a strategy that
        returns argmax tokens.
        """
        model = run.train_role("sft_train")
        want = WantedOutputs(logprobs=True, masked_only=True, topk=int(model.capabilities.topk))
        scored = await model.score(self.held_out, want)
        num_learnt = max(sum(int(row.loss_mask.sum()) for row in self.held_out), 1)
        pairs = zip(scored.logprobs or (), self.held_out, strict=True)
        total = math.fsum(float(logprobs[row.loss_mask].sum(dtype="float64")) for logprobs, row in pairs)
        metrics = {"val/loss": -total / num_learnt}
        if scored.topk_ids is not None:
            choices = zip(scored.topk_ids, self.held_out, strict=True)
            hits = sum(int((chosen[:, 0] == row.tokens)[row.loss_mask].sum()) for chosen, row in choices)
            metrics["val/token_accuracy"] = hits / num_learnt
        return metrics
