"""Check of the moving average of a sharded strategy: against `hf_train`, over skipped steps, and after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import CheckpointError, UnsupportedError
from roll_core.plugins.registry import load_registry
from roll_core.spec.providers import TrainProvider
from roll_core.spec.train import WantedOutputs
from roll_testing.bench import Step, built, outputs, take_step, weights
from roll_testing.bounds import check_near, check_rows, check_same
from roll_testing.losses import LOSSES, SPLITS, TRAINING, SpoiltGradient
from roll_testing.models import make_batch
from roll_testing.programs import Raised, expect, raised

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roll_testing.bench import Arrays, Case
    from roll_testing.programs import Rows

VOCABULARY = 61
BATCH = make_batch(VOCABULARY)
STEPS = [Step(sequences=make_batch(VOCABULARY, seed=seed), loss=LOSSES["sft"]) for seed in range(3)]
SKIPPED = Step(sequences=BATCH, loss=SpoiltGradient(sequence=BATCH[4].id), split=SPLITS["three at a time"])
AVERAGED = replace(TRAINING, ema_decay=0.8, ema_ramp=0.3)
"""Decays 0.3, 0.6, 0.8."""
WANT = WantedOutputs(logprobs=True, ema=True)


def average_and_save(rank: int, case: Case, folder: str) -> tuple[list[Rows], Arrays, Raised | None]:
    """Outputs of the average after two steps and a skipped one, after `offload` and `onload`, and after a third step;
    the weights at the end; and the error of `export_state`. Saves after the second step."""
    with built(case, rank) as strategy:
        for step in STEPS[:2]:
            take_step(strategy, step)
        if case.model.dtype != "fp16":
            take_step(strategy, SKIPPED)
        mine = Path(folder) / f"rank-{rank}"
        mine.mkdir(exist_ok=True)
        strategy.save(mine)
        found = [outputs(strategy, BATCH, WANT)]
        strategy.offload(("weights", "optimizer"))
        strategy.onload(("weights", "optimizer"))
        found.append(outputs(strategy, BATCH, WANT))
        take_step(strategy, STEPS[2])
        return [*found, outputs(strategy, BATCH, WANT)], weights(strategy), raised(strategy.export_state)


def resume_average(rank: int, case: Case, folder: str) -> tuple[list[Rows], Arrays]:
    """The same from the saved state on, without the outputs after `offload`."""
    with built(case, rank) as strategy:
        take_step(strategy, STEPS[1])
        strategy.load(Path(folder) / f"rank-{rank}")
        found = [outputs(strategy, BATCH, WANT)]
        take_step(strategy, STEPS[2])
        return [*found, outputs(strategy, BATCH, WANT)], weights(strategy)


def load_without(rank: int, case: Case, folder: str) -> Raised | None:
    """The error of loading the state in a role that keeps no average."""
    with built(case.with_(training=TRAINING), rank) as strategy:
        return raised(lambda: strategy.load(Path(folder) / f"rank-{rank}"))


def check_moving_average(run: Callable[..., Sequence[Any]], case: Case, folder: Path, bound: float = 1e-5) -> None:
    """Fail unless the average equals `hf_train`'s, a skipped step does not count, and a resume is exact.

    `run(program, case, *arguments)` returns the result of each rank.
    """
    case = case.with_(training=AVERAGED)
    hf = case.with_(provider=load_registry().find(TrainProvider, "hf_train"), strategy_config={}, world_size=1)
    own, other = folder / "own", folder / "hf_train"
    own.mkdir()
    other.mkdir()
    found = run(average_and_save, case, str(own))
    ((expected, ends, _),) = run(average_and_save, hf, str(other))
    resumed = run(resume_average, case, str(own))
    for at, there in enumerate(expected):
        here = {name: row for rows, _, _ in found for name, row in rows[at].get("logprobs", {}).items()}
        check_rows(f"logprobs of average {at}", here, there["logprobs"], bound)
    check_near("weights", found[0][1], ends, bound)
    for rank, ((rows, held, error), (again, held_again)) in enumerate(zip(found, resumed, strict=True)):
        expect(error, UnsupportedError, f"export_state of rank {rank}")
        for one, same in ((1, rows[0]), (2, again[1])):
            check_rows(f"rank {rank}", rows[one].get("logprobs", {}), same.get("logprobs", {}), 0.0)
        check_rows(f"rank {rank}", again[0].get("logprobs", {}), rows[0].get("logprobs", {}), 0.0)
        check_same("weights after a resume", held_again, held)
    expect(run(load_without, case, str(own))[0], CheckpointError, "a state with an average, in a role without")
