"""REINFORCE with the batch's mean as baseline, and a loss term of Acme's own, in one screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from roll_acme.config import BanditConfig
from roll_acme.credit import Unlikelihood
from roll_core.algorithms.losses import policy_objective
from roll_core.data.pack import sequence_of
from roll_core.spec.pipeline import Pipeline, RoleSpec, Run
from roll_core.types import SamplingParams


class BanditPipeline(Pipeline[BanditConfig]):
    """One policy, one sampler, one judge."""

    def prepare(self, run: Run) -> int:
        self.prompts = run.prompts(self.config.policy.data_args)
        self.sampling = SamplingParams(max_new_tokens=self.config.response_length)
        return self.config.max_steps

    def roles(self) -> Sequence[RoleSpec]:
        return [
            RoleSpec(name="policy", kind="train", num_steps=self.config.max_steps),
            RoleSpec(name="sampler", kind="generate", model_from="policy"),
            *(
                RoleSpec(name=f"rewards.{domain}", kind=reward.kind, task="reward")
                for domain, reward in self.config.rewards.items()
            ),
        ]

    async def step(self, run: Run) -> None:
        await run.publish_weights("policy", "sampler")
        groups = await run.rollout("sampler", self.prompts, self.sampling, n=8)
        samples = [sample for group in groups for sample in group.samples]
        scores = np.array([sample.reward.value for sample in samples])
        shunned = run.tokenizer.convert_tokens_to_ids(list(self.config.shunned))
        objective = policy_objective(aggregation="token-mean", terms={"shunned": Unlikelihood("shunned")})
        sequences = [
            replace(
                s,
                advantages=np.where(s.loss_mask, score - scores.mean(), 0).astype(np.float32),
                streams={"shunned": (np.isin(s.tokens, shunned) & s.loss_mask).astype(np.float32)},
            )
            for s, score in zip((sequence_of(sample, group=0) for sample in samples), scores, strict=True)
        ]
        with run.stage("train"):
            update = await run.train_role("policy").update(sequences, objective)
        run.log({"score/mean": float(scores.mean())} | update.named("policy"))

    def state(self) -> Mapping[str, Any]:
        return {}
