"""What the ranks do: functions that the kit runs on every rank of a role, each in a process of its own.

Arguments and results are plain values: they travel between processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from roll_core.spec.train import ParameterState, PortableState
from roll_testing.bench import (
    WHOLE,
    accumulate,
    as_array,
    built,
    make,
    mesh_of,
    micros,
    outputs,
    present,
    take_step,
    weights,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roll_core.spec.providers import Task
    from roll_core.spec.train import LossFn, Part, StepStats, TrainStrategy, Want
    from roll_core.types import DataRank, Floats, TrainSequence
    from roll_testing.bench import Arrays, Case, Split, Step

Rows = dict[str, dict[str, "Floats"]]
"""Outputs by their name, then by id of the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception, told to another process."""

    kinds: tuple[str, ...]
    """Its class and the classes above it."""
    message: str

    def is_a(self, kind: type[BaseException]) -> bool:
        """Whether `except kind` would have caught it."""
        return kind.__name__ in self.kinds

    def __str__(self) -> str:
        return f"{self.kinds[0]}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What one rank saw of some optimizer steps."""

    data_rank: DataRank
    stats: tuple[StepStats, ...]
    metrics: tuple[dict[str, float], ...]
    """Of each step, this rank's share."""
    before: Arrays
    """Weights at the start; empty on ranks whose exports nobody reads."""
    after: Arrays


def raised(call: Callable[[], object]) -> Raised | None:
    """What a call raises, if anything."""
    try:
        call()
    except Exception as error:  # whatever a strategy raises is what is asked for
        return Raised(kinds=tuple(kind.__name__ for kind in type(error).__mro__), message=str(error))
    return None


# -- numbers -----------------------------------------------------------------------------------------------------------


def score(rank: int, case: Case, sequences: Sequence[TrainSequence], want: Want, split: Split) -> Rows:
    """Outputs of a freshly built model."""
    with built(case, rank) as strategy:
        return outputs(strategy, sequences, want, split)


def train(rank: int, case: Case, steps: Sequence[Step]) -> Trained:
    """Some optimizer steps of a freshly built model."""
    with built(case, rank) as strategy:
        return observe(strategy, steps)


def observe(strategy: TrainStrategy, steps: Sequence[Step]) -> Trained:
    """Some optimizer steps of a model that is there."""
    before = weights(strategy)
    done = [take_step(strategy, step) for step in steps]
    return Trained(
        data_rank=strategy.data_rank,
        stats=tuple(stats for stats, _ in done),
        metrics=tuple(metrics for _, metrics in done),
        before=before,
        after=weights(strategy),
    )


# -- contract ----------------------------------------------------------------------------------------------------------


def call_before_build(rank: int, case: Case, step: Step, folder: str) -> dict[str, Raised | None]:
    """Every call that needs a model, without one; and `close`, twice."""
    strategy = make(case)
    (micro,) = micros(step.sequences, step.sequences, WHOLE)
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: strategy.forward(micro, step.loss.want),
        "forward_backward": lambda: strategy.forward_backward([micro], step.loss),
        "optimizer_step": strategy.optimizer_step,
        "export_weights": lambda: list(strategy.export_weights()),
        "save": lambda: strategy.save(Path(folder)),
        "load": lambda: strategy.load(Path(folder)),
        "export_state": strategy.export_state,
        "import_state": lambda: strategy.import_state(PortableState(step_count=0, shapes={}, read=_nothing)),
    }
    found = {name: raised(call) for name, call in calls.items()}
    return found | {"close": raised(strategy.close), "close again": raised(strategy.close)}


def _nothing(name: str) -> ParameterState:
    raise KeyError(name)


def close_twice(rank: int, case: Case, step: Step) -> Raised | None:
    """After a step."""
    with built(case, rank) as strategy:  # closes it once more
        take_step(strategy, step)
        strategy.close()
        return raised(strategy.close)


def fail_to_build(rank: int, case: Case) -> tuple[Raised | None, Raised | None]:
    """What `build` raises, and `close` after it."""
    strategy = make(case)
    return raised(lambda: strategy.build(case.model, mesh_of(case, rank))), raised(strategy.close)


def only_score(rank: int, case: Case, step: Step, want: Want) -> tuple[Rows, dict[str, Raised | None]]:
    """A role without an optimizer: what it computes, and what it raises when it is told to train."""
    with built(case.with_(training=None), rank) as strategy:
        (micro,) = micros(step.sequences, step.sequences, WHOLE)
        found = outputs(strategy, step.sequences, want)
        return found, {
            "forward_backward": raised(lambda: strategy.forward_backward([micro], step.loss)),
            "optimizer_step": raised(strategy.optimizer_step),
        }


def live_together(rank: int, case: Case, step: Step, want: Want) -> tuple[Rows, Rows, Trained]:
    """A role that trains and one that scores, in one process: the scorer around the other's step, and the steps."""
    with built(case, rank) as actor:
        with built(case.with_(training=None), rank) as reference:
            before = outputs(reference, step.sequences, want)
            first = observe(actor, [step])
            after = outputs(reference, step.sequences, want)
        second = observe(actor, [step])
    together = replace(
        first, stats=first.stats + second.stats, metrics=first.metrics + second.metrics, after=second.after
    )
    return before, after, together


def describe_outputs(
    rank: int, case: Case, sequences: Sequence[TrainSequence], want: Want
) -> dict[str, tuple[tuple[int, ...], str, bool, float]]:
    """Of each output: shape, dtype, whether it carries gradients, and the largest number at first tokens."""
    with built(case, rank) as strategy:
        (micro,) = micros(sequences, sequences, WHOLE)
        found = present(strategy.forward(micro, want))
        first_T = (micro.positions_T == 0).numpy()
        return {
            name: (
                tuple(each.shape),
                str(each.dtype).removeprefix("torch."),
                each.requires_grad,
                float(np.abs(as_array(each)[first_T]).max()),
            )
            for name, each in found.items()
        }


def want_undeclared(rank: int, case: Case, sequences: Sequence[TrainSequence], want: Want) -> Raised | None:
    """What a forward pass raises."""
    with built(case, rank) as strategy:
        (micro,) = micros(sequences, sequences, WHOLE)
        return raised(lambda: strategy.forward(micro, want))


def build_undeclared(rank: int, case: Case, task: Task) -> Raised | None:
    """What building a model of another task raises."""
    return fail_to_build(rank, case.with_(model=replace(case.model, task=task)))[0]


def look_between(rank: int, case: Case, step: Step, want: Want) -> Trained:
    """A step with forward passes and an export between gradients and update."""
    with built(case, rank) as strategy:
        before = weights(strategy)
        metrics = accumulate(strategy, step)
        outputs(strategy, step.sequences, want)
        weights(strategy)
        stats = strategy.optimizer_step()
        return Trained(
            data_rank=strategy.data_rank, stats=(stats,), metrics=(metrics,), before=before, after=weights(strategy)
        )


def list_exports(rank: int, case: Case, step: Step) -> tuple[list[tuple[str, tuple[int, ...], bool]], ...]:
    """Names, shapes, and whether gradients hang on them: before and after a step."""

    def exported(strategy: TrainStrategy) -> list[tuple[str, tuple[int, ...], bool]]:
        return [(name, tuple(each.shape), each.requires_grad) for name, each in strategy.export_weights()]

    with built(case, rank) as strategy:
        before = exported(strategy)
        take_step(strategy, step)
        return before, exported(strategy)


# -- state -------------------------------------------------------------------------------------------------------------


def save_between(rank: int, case: Case, steps: Sequence[Step], at: int, folder: str) -> Trained:
    """All steps in one go, with a save after the first `at`. What it leaves to be written is written as late as can
    be, after the last step: nothing of these may get into it."""
    with built(case, rank) as strategy:
        for step in steps[:at]:
            take_step(strategy, step)
        mine = Path(folder) / f"rank-{rank}"
        mine.mkdir()
        write_the_rest = strategy.save(mine)
        found = observe(strategy, steps[at:])
        if write_the_rest is not None:
            write_the_rest()
        return found


def resume(rank: int, case: Case, spoil: Sequence[Step], steps: Sequence[Step], folder: str) -> Trained:
    """Whatever was there before, gradients included, is gone once a state is loaded."""
    with built(case, rank) as strategy:
        for step in spoil:
            take_step(strategy, step)
        for step in spoil[:1]:
            accumulate(strategy, step)
        weights(strategy)  # as a publish does; nothing that is kept of it may come back
        strategy.load(Path(folder) / f"rank-{rank}")
        return observe(strategy, steps)


def load_damaged(rank: int, case: Case, folder: str) -> Raised | None:
    """What loading raises."""
    with built(case, rank) as strategy:
        return raised(lambda: strategy.load(Path(folder)))


def export_after_steps(
    rank: int, case: Case, steps: Sequence[Step], batch: Sequence[TrainSequence], want: Want, folder: str
) -> tuple[Arrays, Rows, Raised | None]:
    """Weights, what the trained model answers, and what `export_model` into `folder` raises, if anything."""
    with built(case, rank) as strategy:
        for step in steps:
            take_step(strategy, step)
        held = weights(strategy)
        found = outputs(strategy, batch, want)
        return held, found, raised(lambda: strategy.export_model(Path(folder)))


def offload_between(rank: int, case: Case, steps: Sequence[Step], parts: Sequence[Part]) -> Trained:
    """Steps with `parts` moved away and back before each, and between gradients and update."""
    with built(case, rank) as strategy:
        before = weights(strategy)
        done = []
        for step in steps:
            _away_and_back(strategy, parts)
            metrics = accumulate(strategy, step)
            _away_and_back(strategy, parts)
            done.append((strategy.optimizer_step(), metrics))
        _away_and_back(strategy, parts)
        return Trained(
            data_rank=strategy.data_rank,
            stats=tuple(stats for stats, _ in done),
            metrics=tuple(metrics for _, metrics in done),
            before=before,
            after=weights(strategy),
        )


def compute_while_away(
    rank: int, case: Case, step: Step, batch: Sequence[TrainSequence], want: Want
) -> tuple[tuple[Rows, Arrays], tuple[Rows, Arrays]]:
    """What the model answers and what is exported after a step, and again while gradients and optimizer are away."""
    with built(case, rank) as strategy:
        take_step(strategy, step)
        here = outputs(strategy, batch, want), weights(strategy)
        strategy.offload(("grads", "optimizer"))
        away = outputs(strategy, batch, want), weights(strategy)
        strategy.onload(("grads", "optimizer"))
        return here, away


def _away_and_back(strategy: TrainStrategy, parts: Sequence[Part]) -> None:
    strategy.offload(parts)
    strategy.onload(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsed:
    """Bytes used on the device, and what the strategy says that it holds there."""

    held: int
    """By the parts, in the strategy's words, before they were moved away."""
    before: int
    away: int
    back: int


def offload_and_measure(rank: int, case: Case, step: Step, parts: Sequence[Part]) -> MemoryUsed:
    """By the platform's own count, once a step has made all there is."""
    import gc

    def used() -> int:
        return int(case.platform().memory(rank)["used"])

    with built(case, rank) as strategy:
        take_step(strategy, step)
        accumulate(strategy, step)
        held = sum(strategy.memory().get(part, 0) for part in parts)
        before = used()
        strategy.offload(parts)
        away = used()
        if before - away < held:  # cycles may still hold it; looking for them takes its time
            gc.collect()
            away = used()
        strategy.onload(parts)
        return MemoryUsed(held=held, before=before, away=away, back=used())


def publish(
    rank: int, case: Case, steps: Sequence[Step], transport: str
) -> list[tuple[Mapping[str, str], Mapping[str, str]]]:
    """After each step, digests of what a receiver holds and of what is exported; empty on ranks that do not send."""
    from roll_testing.publishing import published

    with built(case, rank) as strategy:
        return list(published(strategy, rank, steps, transport))


# -- failure -----------------------------------------------------------------------------------------------------------


def spoil_a_step(rank: int, case: Case, spoiled: Step, steps: Sequence[Step]) -> tuple[Trained, bool, Raised | None]:
    """A step whose gradient is not finite, then good ones; whether the first was skipped, or what it raised."""
    with built(case, rank) as strategy:
        error = raised(lambda: accumulate(strategy, spoiled))
        if error is not None:
            return observe(strategy, []), False, error
        before = weights(strategy)
        stats = strategy.optimizer_step()
        return replace(observe(strategy, steps), before=before), stats.skipped, None


def refuse_a_loss(rank: int, case: Case, sequences: Sequence[TrainSequence], loss: LossFn) -> Raised | None:
    """What `forward_backward` raises."""
    with built(case, rank) as strategy:
        (micro,) = micros(sequences, sequences, WHOLE)
        return raised(lambda: strategy.forward_backward([micro], loss))
