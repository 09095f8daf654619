"""Check of flow models with two experts on ranks whose batches need different experts, and differ in number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.plugins.registry import load_registry
from roll_core.spec.model import ModelSpec
from roll_core.spec.module_program import LossOutput, ModuleRow
from roll_core.spec.providers import TrainProvider
from roll_testing.bench import ModuleStep, built, module_outputs
from roll_testing.bounds import check_near, check_rows
from roll_testing.losses import TRAINING
from roll_testing.programs import observe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from roll_core.spec.module_program import ModuleBatch, ProgramModule
    from roll_testing.bench import Arrays, Case
    from roll_testing.programs import Trained

LIBRARY = "roll_pipeline_diffusion.models.library:DiffusersLibrary"
HIGH, LOW = 0.9, 0.3
"""Times above and below the experts' boundary."""


@dataclass(frozen=True, slots=True)
class Matching:
    """Loss and program: the mean squared distance of the velocity to `target`, or the velocity itself."""

    loss: bool = True

    def __call__(self, module: ProgramModule, batch: ModuleBatch) -> Any:
        """A loss, or outputs."""
        given = batch.tensors
        found = module(given["x"], given["sigma"], prompt_embeds=given["prompt"]).float()
        if not self.loss:
            return {"velocity": found}
        total = (found - given["target"]).square().flatten(1).mean(dim=1).sum()
        return LossOutput(loss=total / batch.total_rows)


def wan_rows(sigmas: Sequence[float], seed: int = 0) -> list[ModuleRow]:
    """Rows of the tiny Wan of `flow_models`, one for each time."""
    rng = np.random.default_rng(seed)

    def some(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return rng.normal(size=shape).astype(np.float32)

    return [
        ModuleRow(
            id=f"row-{seed}-{at}",
            arrays={
                "x": some(4, 1, 4, 4),
                "target": some(4, 1, 4, 4),
                "prompt": some(3, 16),
                "sigma": np.float32(sigma) + np.zeros((), np.float32),
            },
        )
        for at, sigma in enumerate(sigmas)
    ]


def compute_then_train(
    rank: int, case: Case, rows: Sequence[ModuleRow], steps: Sequence[ModuleStep]
) -> tuple[Arrays, Trained]:
    """Velocities of single rows, then training steps."""
    with built(case, rank) as strategy:
        found = module_outputs(strategy, rows, Matching(loss=False), 1)
        return found["velocity"], observe(strategy, steps)


def check_experts(run: Callable[..., Sequence[Any]], case: Case, folder: Path) -> None:
    """Fail unless two ranks with different experts, and different numbers of batches, compute and train as one rank
    of `hf_train`."""
    from shared_tests.flow_models import save_without_text, wan_pipeline

    save_without_text(wan_pipeline(2), folder)
    # Rank 0 has rows 0, 2 and 4: three batches of one row beside two.
    steps = [
        ModuleStep(rows=wan_rows(sigmas, seed), loss=Matching(), max_rows=1)
        for seed, sigmas in enumerate(
            [
                (HIGH, LOW, HIGH, LOW, HIGH),
                (LOW, HIGH, HIGH, LOW, LOW),
                (LOW, HIGH, LOW, HIGH, LOW),
                (LOW, LOW, LOW, LOW, HIGH),
                (HIGH, HIGH, HIGH, HIGH, HIGH),
                (LOW, LOW, LOW, LOW, LOW),
            ]
        )
    ]
    model = ModelSpec(task="flow", library=LIBRARY, path=str(folder))
    two = case.with_(model=model, training=TRAINING, world_size=2, devices=("cpu",) * 2)
    hf = load_registry().find(TrainProvider, "hf_train")
    alone = two.with_(provider=hf, strategy_config={}, world_size=1)
    rows = steps[0].rows
    (velocities, expected), *_ = run(compute_then_train, alone, rows, steps)
    answers = run(compute_then_train, two, rows, steps)
    assert len({len(found) for found, _ in answers}) == 2, "ranks have shares of unequal size"
    check_rows("velocity", {name: row for found, _ in answers for name, row in found.items()}, velocities, 1e-4)
    trained = answers[0][1]
    for one, other in zip(trained.stats, expected.stats, strict=True):
        assert abs(one.grad_norm / other.grad_norm - 1) < 1e-4, f"norms {one.grad_norm} and {other.grad_norm}"
    way = {name: each - expected.before[name] for name, each in trained.after.items()}
    check_near("way", way, {name: each - expected.before[name] for name, each in expected.after.items()}, 1e-3)
