"""Flow models trained on rewards of their own images, on preferences, or on data.

for batch of prompts, shuffled in each epoch:
    sample G images per prompt by the trained module itself: noise in the window's steps, the ODE elsewhere
    rewards of the images, then advantages within prompts
    optimizer steps on the objective

`refl` samples within the optimizer step, because its gradient flows through the sampler. `flow_matching` and
`diffusion_dpo` train on images of the data instead of samples.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from roll_core.pipelines.prompt_order import RowOrder
from roll_core.pipelines.stages import check_size, log_update, num_steps
from roll_core.spec.module_program import ModuleRow
from roll_core.spec.pipeline import Pipeline, Run
from roll_pipeline_diffusion import plans
from roll_pipeline_diffusion.algorithm_config import FlowGRPOOptions, ReflOptions
from roll_pipeline_diffusion.config import RewardFlowConfig
from roll_pipeline_diffusion.rewards.base import DifferentiableRewards, ImageRewards
from roll_pipeline_diffusion.samples import FlowData, SampledImages, png_of, seed_of
from roll_pipeline_diffusion.windows import stop_step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from roll_core.spec.pipeline import RoleSpec
    from roll_pipeline_diffusion.programs import FlowSetup
    from roll_pipeline_diffusion.samples import FlowRow

    Image = NDArray[np.uint8]
    """`[H, W, 3]`, or a video `[F, H, W, 3]`."""
    Scores = Mapping[str, NDArray[np.float64]]
    """Scores of images by reward."""


class RewardFlowPipeline(Pipeline[RewardFlowConfig]):
    """Trains a flow model."""

    @override
    def prepare(self, run: Run) -> int:
        config, train = self.config, self.config.actor_train
        self.data = FlowData(config)
        self.rewards = ImageRewards(config.rewards) if config.rewards else None
        self.gradient: DifferentiableRewards | None = None
        if self.rewards is not None and "score" in config.objective_inputs:
            self.gradient = DifferentiableRewards(self.rewards)
        self.rows = self.data.read(run.rows(train.data_args), train.data_args, images=config.image_columns)
        self.held_out: Sequence[FlowRow] = ()
        if config.validation is not None:
            source = config.validation.data_args
            self.held_out = self.data.read(run.rows(source), source, images={})
        self.order = RowOrder(len(self.rows), seed=config.seed, shuffle=config.shuffle)
        if not config.samples_images:
            self.steps = num_steps(config, train, len(self.rows))
        else:
            per_epoch = math.ceil(len(self.rows) / config.rollout_batch_size)
            self.steps = config.max_steps or math.ceil(train.training_args.num_train_epochs * per_epoch)
        return self.steps

    @override
    def roles(self) -> Sequence[RoleSpec]:
        optimizer_steps = self.steps * self.config.num_steps_per_batch
        planned = plans.reward_flow(self.config).roles
        return [replace(role, num_steps=optimizer_steps) if role.kind == "train" else role for role in planned]

    @override
    async def step(self, run: Run) -> None:
        config, inputs = self.config, self.config.objective_inputs
        if config.samples_images:
            prompts = [self.rows[i] for i in self.order.batch(run.step, config.rollout_batch_size)]
            batch = self._batch(prompts, config.num_images_per_prompt, "train", run.step)
        else:
            size = run.train_role("actor_train").sequences_per_step
            batch = self._batch([self.rows[i] for i in self.order.batch(run.step, size)], 1, "train", run.step)
        if inputs & {"samples", "steps"}:
            batch, images = await self._sample(run, batch)
            if "advantages" in inputs:
                batch = await self._with_advantages(run, batch, images, prompts)
        if "teacher" in inputs:
            batch = await self._with_velocities_of_the_teacher(run, batch)
        await self._train(run, batch)

    @override
    async def evaluate(self, run: Run) -> Mapping[str, float]:
        config, validation = self.config, self.config.validation
        if validation is None or not self.held_out:
            return {}
        from roll_pipeline_diffusion.programs import SamplingProgram

        setup = replace(
            self._setup(run.step),
            schedule=self.data.schedule(validation.num_inference_steps),
            guidance_scale=config.validation_guidance,
        )
        sampling = SamplingProgram(setup=setup, weights="average" if validation.ema else "trained")
        program = SampledImages(sampling=sampling, decoder=self.data.decoder)
        count = validation.num_images_per_prompt
        batch = self._batch(self.held_out, count, "val", 0)
        outputs = await run.train_role("actor_train").run_program(batch, program)
        images = [np.asarray(row_outputs["images"], np.uint8) for row_outputs in outputs]
        rows = [row for row in self.held_out for _ in range(count)]
        scores = await self._scores(run, images, rows)
        self._log_images(run, images, rows, scores)
        return {f"val/{name}": value for name, value in self._score_metrics(scores).items()}

    @override
    def export_role(self) -> str:
        return "actor_train"

    def _batch(self, rows: Sequence[FlowRow], count: int, split: str, step: int) -> list[ModuleRow]:
        """`count` rows for a program per row of the data, each with a seed of its own: fixed for `val`."""
        return [
            ModuleRow(
                id=f"{row.id}/{step}/{position * count + index}",
                arrays={
                    **row.arrays,
                    **(self.gradient.row_arrays(row.prompt, row.values) if self.gradient and split == "train" else {}),
                    "seed": np.asarray(seed_of(self.config.seed, split, step, position * count + index), np.int64),
                },
            )
            for position, row in enumerate(rows)
            for index in range(count)
        ]

    def _setup(self, update: int) -> FlowSetup:
        """Settings of the programs of an update."""
        from roll_pipeline_diffusion.programs import FlowSetup

        config, options, stop = self.config, self.config.objective_settings, None
        if isinstance(options, ReflOptions):
            steps = config.num_inference_steps
            stop = stop_step(update, steps, config.seed, options.resolved_stop_range(steps))
        return FlowSetup(
            schedule=self.data.schedule(),
            latent_shape=self.data.latent_shape,
            sampler=config.bound("sampler"),
            guidance_scale=config.guidance_scale,
            logprob_reduction=config.logprob_reduction,
            decode=self.data.decoder.decode,
            reward=self.gradient,
            stop_step=stop,
        )

    async def _train(self, run: Run, batch: Sequence[ModuleRow]) -> None:
        from roll_pipeline_diffusion.objectives import ObjectiveLoss

        loss = ObjectiveLoss(function=self.config.bound("objective"), setup=self._setup(run.step))
        with run.stage("train"):
            update = await run.train_role("actor_train").update_program(
                batch, loss, epochs=self.config.ppo_epochs, shuffle_seed=seed_of(self.config.seed, "order", run.step)
            )
        run.log({"train/images": float(len(batch))})
        log_update(run, update, "train")

    async def _sample(self, run: Run, batch: Sequence[ModuleRow]) -> tuple[list[ModuleRow], list[Image]]:
        """Sample an image for each row. Returns rows with the trajectories, and the images."""
        from roll_pipeline_diffusion.programs import SamplingProgram

        config, options = self.config, self.config.objective_settings
        sampling = SamplingProgram(
            setup=self._setup(run.step),
            window=config.window_steps(run.step, config.seed) if "steps" in config.objective_inputs else (),
            weights="average" if config.uses_average else "trained",
            keep_velocities=isinstance(options, FlowGRPOOptions) and options.variant != "clip",
        )
        with run.stage("sample"):
            program = SampledImages(sampling=sampling, decoder=self.data.decoder)
            outputs = await run.train_role("actor_train").run_program(batch, program)
        rows = [
            replace(row, arrays={**row.arrays, **{name: array for name, array in outputs.items() if name != "images"}})
            for row, outputs in zip(batch, outputs, strict=True)
        ]
        return rows, [np.asarray(row_outputs["images"], np.uint8) for row_outputs in outputs]

    async def _with_advantages(
        self, run: Run, batch: Sequence[ModuleRow], images: Sequence[Image], prompts: Sequence[FlowRow]
    ) -> list[ModuleRow]:
        """Rows with `advantages`, without images whose rewards failed."""
        import torch

        from roll_pipeline_diffusion.advantages import flow_advantages

        count = self.config.num_images_per_prompt
        scores = await self._scores(run, images, [row for row in prompts for _ in range(count)])
        with run.stage("advantages"):
            advantages, counts = flow_advantages(
                self.config.bound("advantage"),
                {name: torch.from_numpy(score) for name, score in scores.items()},
                torch.arange(len(prompts)).repeat_interleave(count),
                {name: reward.weight for name, reward in self.config.rewards.items()},
            )
        run.log(self._score_metrics(scores))
        if counts.any():
            run.log({"advantage/std": float(advantages[counts].std(correction=0))})
            largest = float(advantages[advantages.abs().argmax()])
            size = max([1.0, *(float(np.nanmax(np.abs(score))) for score in scores.values())])
            check_size(run, self.config.guards.advantage_size, "the largest advantage", largest, size)
        reason = "all advantages are 0: are the rewards of each prompt's images equal?"
        run.guard(
            "all_groups_filtered",
            bool((advantages[counts] != 0).any()),
            f"no reward signal at {{steps}}: {reason if counts.any() else 'every image has a failed reward'}",
        )
        return [
            replace(row, arrays={**row.arrays, "advantages": np.asarray(value, np.float32)})
            for row, value, counted in zip(batch, advantages.tolist(), counts.tolist(), strict=True)
            if counted
        ]

    async def _with_velocities_of_the_teacher(self, run: Run, batch: Sequence[ModuleRow]) -> list[ModuleRow]:
        from roll_pipeline_diffusion.programs import VelocityProgram

        with run.stage("teacher"):
            program = VelocityProgram(setup=self._setup(run.step))
            outputs = await run.train_role("teacher").run_program(batch, program)
        return [
            replace(row, arrays={**row.arrays, **row_outputs}) for row, row_outputs in zip(batch, outputs, strict=True)
        ]

    async def _scores(self, run: Run, images: Sequence[Image], rows: Sequence[FlowRow]) -> Scores:
        """Unweighted rewards of each image by name; NaN if one failed. Trips `reward_failures`."""
        if self.rewards is None:
            return {}
        prompts, values = [row.prompt for row in rows], [row.values for row in rows]
        with run.stage("rewards"):  # in a thread: user code must not block the checks for exited workers
            rewards = await asyncio.to_thread(self.rewards.score, np.stack(images), prompts, values)
        failures = [reward.failure for scored in rewards.values() for reward in scored if reward.failed]
        if failures:
            threshold, number = self.config.guards.reward_failures.threshold, len(images) * len(rewards)
            run.guard(
                "reward_failures",
                len(failures) <= threshold * number,
                f"{len(failures)} of {number} rewards failed, more than the {threshold:.0%} allowed; the first:"
                f" {failures[0]}",
            )
        return {
            name: np.array([math.nan if reward.value is None else reward.value for reward in scored])
            for name, scored in rewards.items()
        }

    def _score_metrics(self, scores: Scores) -> dict[str, float]:
        """Means of the total reward and of each reward, unweighted, over images whose rewards did not fail."""
        if not scores:
            return {}
        total = self._total(scores)
        scored = ~np.isnan(total)
        metrics = {"reward_failures": float(len(total) - scored.sum())}
        if scored.any():
            metrics |= {"score/mean": float(total[scored].mean()), "score/std": float(total[scored].std())}
            metrics |= {"score/min": float(total[scored].min()), "score/max": float(total[scored].max())}
            metrics |= {f"score/{name}/mean": float(score[scored].mean()) for name, score in scores.items()}
        return metrics

    def _total(self, scores: Scores) -> NDArray[np.float64]:
        """Weighted sum of the rewards of each image; NaN if one failed."""
        weighted = [self.config.rewards[name].weight * score for name, score in scores.items()]
        return np.asarray(np.sum(weighted, axis=0), np.float64)

    def _log_images(
        self,
        run: Run,
        images: Sequence[Image],
        rows: Sequence[FlowRow],
        scores: Scores,
    ) -> None:
        """Record the first images of an evaluation, with their rewards."""
        shown = range(min(len(images), self.config.num_logged_images))
        total = self._total(scores) if scores else np.zeros(len(images))
        captions = []
        for index in shown:
            lines = [rows[index].prompt]
            if scores:
                lines.append("reward failed" if np.isnan(total[index]) else f"reward {total[index]:.3f}")
                lines += [f"{name} {score[index]:.3f}" for name, score in scores.items() if len(scores) > 1]
            captions.append("\n".join(lines))
        if captions:
            run.log_images([png_of(images[index]) for index in shown], captions, split="val")
