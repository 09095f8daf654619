"""One run of the strategy on some ranks, and what came of it: imported by the ranks."""

from __future__ import annotations

from roll_core.spec.train import Want
from roll_core.testing import TrainStrategyConformance
from roll_core.testing.bench import Case, built, outputs, take_step, weights
from roll_core.testing.models import QWEN3

PRELOAD = ("megatron_on_cpu", *TrainStrategyConformance.preload, "roll_strategy_megatron.strategy")
"""Megatron is imported once for all ranks, on a machine without an accelerator by way of the shims."""
MIXTURE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
WANT = Want(logprobs=True, entropy=True, topk=3, temperature=0.8)


def score_and_train(rank, case: Case, batch, steps):
    """Outputs of the new model, what each step says, and the weights in the end."""
    with built(case, rank) as strategy:
        before, scored = weights(strategy), outputs(strategy, batch, WANT)
        stats = [take_step(strategy, step) for step in steps]
        return {
            "place": strategy.data_rank,
            "before": before,
            "scored": scored,
            "stats": [found for found, _ in stats],
            "losses": [metrics.get("loss", 0.0) for _, metrics in stats],
            "weights": weights(strategy),
            "memory": dict(strategy.memory()),
        }


def export(rank, case: Case, folder):
    """A directory that transformers loads."""
    from pathlib import Path

    with built(case, rank) as strategy:
        strategy.export_model(Path(folder))


def save_after(rank, case: Case, steps, folder):
    """Saved after the steps; weights and the next step's norm."""
    from pathlib import Path

    mine = Path(folder) / f"rank-{rank}"
    mine.mkdir(parents=True)
    with built(case, rank) as strategy:
        for step in steps[:-1]:
            take_step(strategy, step)
        strategy.save(mine)
        stats, _ = take_step(strategy, steps[-1])
        return stats, weights(strategy)


def resume(rank, case: Case, step, folder):
    """Loaded, and one step on."""
    from pathlib import Path

    mine = Path(folder) / f"rank-{rank}"
    mine.mkdir(exist_ok=True)
    with built(case, rank) as strategy:
        strategy.load(mine)
        stats, _ = take_step(strategy, step)
        return stats, weights(strategy)
