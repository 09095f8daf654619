"""Stages that several pipelines share: number of steps, validation, and the checks of an optimizer update."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING

from roll_core.pipelines.best_of_k import best_of_k_metrics
from roll_core.pipelines.config import sequences_per_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.config import (
        AdvantageSizeConfig,
        RewardRunConfig,
        RunConfig,
        TrainWorkerConfig,
        ValidationConfig,
    )
    from roll_core.spec.pipeline import Run, UpdateResult
    from roll_core.types import Sample


def num_steps(config: RunConfig, role: TrainWorkerConfig, num_rows: int) -> int:
    """Steps of a run of one optimizer step per batch of rows: `max_steps`, or as many as `num_train_epochs` need."""
    per_epoch = math.ceil(num_rows / sequences_per_step(role)[0])
    return config.max_steps or math.ceil(role.training_args.num_train_epochs * per_epoch)


class Validation:
    """Held-out prompts of a run and their sampling parameters."""

    def __init__(self, run: Run, config: RewardRunConfig, validation: ValidationConfig, *, source: str) -> None:
        """`actor_infer` generates with the weights of the role `source`, `val_batch_size` prompts at once."""
        self.source, self.batch_size = source, config.val_batch_size
        self.num_responses = validation.generating_args.num_return_sequences
        self.params = validation.generating_args.sampling_params(default_max_new_tokens=config.response_length)
        self.prompts = run.prompts(validation.data_args)

    async def evaluate(self, run: Run) -> Mapping[str, float]:
        """Publish the weights, generate responses and score them. Returns the metrics of `score_metrics`."""
        await run.publish_weights(self.source, "actor_infer")
        samples: list[Sample] = []
        for start in range(0, len(self.prompts), self.batch_size):
            prompts = self.prompts[start : start + self.batch_size]
            groups = await run.rollout("actor_infer", prompts, self.params, n=self.num_responses, split="val")
            samples += [sample for group in groups for sample in group.samples]
        run.log_samples(samples, split="val")
        return score_metrics(samples)


def score_metrics(samples: list[Sample]) -> dict[str, float]:
    """Averages over samples: `val/score/mean`, the same per tag, response length, and the number of failed rewards.

    With several responses per prompt also `val/pass@k`, `val/best@k` and `val/maj@k`, see `best_of_k_metrics`. A failed
    reward counts only in `val/reward_failures`.
    """
    by_tag: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.reward is not None and sample.reward.value is not None:
            by_tag[sample.tag].append(sample.reward.value)
    scores = [score for tag in by_tag.values() for score in tag]
    metrics = {
        "val/num_samples": float(len(samples)),
        "val/reward_failures": float(len(samples) - len(scores)),
        "val/response_length/mean": statistics.fmean(int((s.versions >= 0).sum()) for s in samples) if samples else 0.0,
    }
    if scores:
        metrics["val/score/mean"] = statistics.fmean(scores)
    metrics |= {f"val/{name}": value for name, value in best_of_k_metrics(samples).items()}
    if len(by_tag) > 1:
        for tag, found in by_tag.items():
            metrics[f"val/{tag or 'untagged'}/score/mean"] = statistics.fmean(found)
            own = best_of_k_metrics([sample for sample in samples if sample.tag == tag])
            metrics |= {f"val/{tag or 'untagged'}/{name}": value for name, value in own.items()}
    return metrics


def check_size(run: Run, guard: AdvantageSizeConfig, what: str, value: float, reward_size: float) -> None:
    """Trip the guard `advantage_size` if the absolute `value` of `what` is out of proportion to the rewards."""
    run.guard(
        "advantage_size",
        abs(value) <= guard.threshold * reward_size,
        f"{what} at {{steps}} is {value:.4g}, more than {guard.threshold:g} times {reward_size:.4g}, the largest"
        " absolute reward or 1",
    )


def log_update(run: Run, update: UpdateResult, name: str) -> None:
    """Log an update's metrics as `<name>/...`. Trips the guard `non_finite` if steps were skipped."""
    run.log(update.named(name))
    run.guard(
        "non_finite",
        update.num_not_finite == 0,
        f"step {run.step + 1}: {update.num_not_finite} of {update.num_steps} optimizer steps were skipped, because the"
        " gradient was NaN or infinite: lower the learning rate, clip the gradient, or check the rewards",
    )
