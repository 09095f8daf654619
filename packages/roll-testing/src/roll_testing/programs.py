"""Functions that the kit runs on every rank of a role, each rank in its own process.

Arguments and results are plain values, because they are sent between processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from roll_core.spec.train import ParameterState, PortableState, WantedOutputs
from roll_testing.bench import (
    WHOLE,
    accumulate,
    as_array,
    built,
    make,
    mesh_of,
    micros,
    module_outputs,
    outputs,
    present,
    take_step,
    weights,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roll_core.spec.module_program import ModuleProgram, ModuleRow
    from roll_core.spec.providers import Task
    from roll_core.spec.train import LossFn, StateKind, StepStats, TrainStrategy
    from roll_core.types import DataRank, Floats, TrainSequence
    from roll_testing.bench import Arrays, Case, ModuleStep, Split, Step

Rows = dict[str, dict[str, "Floats"]]
"""Outputs by output name, then by sequence id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception in a form that can be sent to another process."""

    kinds: tuple[str, ...]
    """Names of its class and of all base classes."""
    message: str

    def is_a(self, kind: type[BaseException]) -> bool:
        """True if `except kind` would have caught it."""
        return kind.__name__ in self.kinds

    def __str__(self) -> str:
        return f"{self.kinds[0]}: {self.message}"

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Describe an exception."""
        return cls(kinds=tuple(kind.__name__ for kind in type(error).__mro__), message=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Results of some optimizer steps on one rank."""

    data_rank: DataRank
    stats: tuple[StepStats, ...]
    metrics: tuple[dict[str, float], ...]
    """This rank's share of the metrics of each step."""
    before: Arrays
    """Weights before the steps; empty on ranks that are not leaders."""
    after: Arrays
    frozen: frozenset[str]
    """Names of the weights that the strategy declares as frozen."""


def raised(call: Callable[[], object]) -> Raised | None:
    """Return the exception that a call raises, or None."""
    try:
        call()
    except AssertionError:  # of the kit itself, such as a timeout
        raise
    except Exception as error:  # any error of the strategy is the result
        return Raised.of(error)
    return None


def expect(error: Raised | None, kind: type[Exception], doing: str, *named: str) -> None:
    """Fail unless `error` is of class `kind`, gives a reason of at least three words, and contains all of `named`."""
    assert error is not None, f"{doing} raised nothing, expected {kind.__name__}"
    assert error.is_a(kind), f"{doing} raised {error}, expected {kind.__name__}"
    assert len(error.message.split()) >= 3, f"{doing} raised {error}: the message gives no reason"
    missing = [name for name in named if name not in error.message]
    assert not missing, f"{doing} raised {error}: the message does not contain {', '.join(missing)}"


# -- numbers -----------------------------------------------------------------------------------------------------------


def score(rank: int, case: Case, sequences: Sequence[TrainSequence], want: WantedOutputs, split: Split) -> Rows:
    """Return outputs of a freshly built model."""
    with built(case, rank) as strategy:
        return outputs(strategy, sequences, want, split)


def train(rank: int, case: Case, steps: Sequence[Step | ModuleStep]) -> Trained:
    """Run some optimizer steps on a freshly built model."""
    with built(case, rank) as strategy:
        return observe(strategy, steps)


def observe(strategy: TrainStrategy, steps: Sequence[Step | ModuleStep]) -> Trained:
    """Run some optimizer steps on a built model."""
    before = weights(strategy)
    return _trained(strategy, before, [take_step(strategy, step) for step in steps])


def _trained(strategy: TrainStrategy, before: Arrays, done: Sequence[tuple[StepStats, dict[str, float]]]) -> Trained:
    return Trained(
        data_rank=strategy.data_rank,
        stats=tuple(stats for stats, _ in done),
        metrics=tuple(metrics for _, metrics in done),
        before=before,
        after=weights(strategy),
        frozen=frozenset(strategy.frozen_weights()),
    )


# -- contract ----------------------------------------------------------------------------------------------------------


def call_before_build(rank: int, case: Case, step: Step, folder: str) -> dict[str, Raised | None]:
    """Make every call that needs a model before `build`, then `close` twice. Return the errors by call."""
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
    errors = {name: raised(call) for name, call in calls.items()}
    return errors | {"close": raised(strategy.close), "close again": raised(strategy.close)}


def _nothing(name: str) -> ParameterState:
    raise KeyError(name)


def close_twice(rank: int, case: Case, step: Step) -> Raised | None:
    """Close the strategy after a step, then return the error of a second `close`."""
    with built(case, rank) as strategy:  # closes it a third time
        take_step(strategy, step)
        strategy.close()
        return raised(strategy.close)


def fail_to_build(rank: int, case: Case) -> tuple[Raised | None, Raised | None]:
    """Return the errors of `build` and of the `close` after it."""
    strategy = make(case)
    return raised(lambda: strategy.build(case.model, mesh_of(case, rank))), raised(strategy.close)


def only_score(rank: int, case: Case, step: Step, want: WantedOutputs) -> tuple[Rows, dict[str, Raised | None]]:
    """Return the outputs of a role without an optimizer, and the errors of its training calls."""
    with built(case.with_(training=None), rank) as strategy:
        (micro,) = micros(step.sequences, step.sequences, WHOLE)
        scores = outputs(strategy, step.sequences, want)
        return scores, {
            "forward_backward": raised(lambda: strategy.forward_backward([micro], step.loss)),
            "optimizer_step": raised(strategy.optimizer_step),
        }


def export_teacher(rank: int, case: Case, sequences: Sequence[TrainSequence], head: str) -> Rows:
    """Export the head to a file; return the hidden states."""
    with built(case.with_(training=None), rank) as strategy:
        strategy.export_head(Path(head))
        return outputs(strategy, sequences, WantedOutputs(hidden=True))


def average(
    rank: int, case: Case, steps: Sequence[Step], batch: Sequence[TrainSequence]
) -> tuple[list[Arrays], dict[str, Rows]]:
    """Return the weights before and after each step; and outputs of the moving average, and of the weights around."""
    want = WantedOutputs(logprobs=True)
    with built(case, rank) as strategy:
        held = [weights(strategy)]
        for step in steps:
            take_step(strategy, step)
            held.append(weights(strategy))
        names = ("before", "average", "after")
        scores = {name: outputs(strategy, batch, replace(want, ema=name == "average")) for name in names}
        return [*held, weights(strategy)], scores


def live_together(rank: int, case: Case, step: Step, want: WantedOutputs) -> tuple[Rows, Rows, Trained]:
    """Run a training role and a scoring role in one process.

    Return the scorer's outputs before and after a step of the other role, and the training steps.
    """
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
    rank: int, case: Case, sequences: Sequence[TrainSequence], want: WantedOutputs
) -> dict[str, tuple[tuple[int, ...], str, bool, float]]:
    """Return shape, dtype, `requires_grad`, and the largest absolute value at first tokens, for each output."""
    with built(case, rank) as strategy:
        (micro,) = micros(sequences, sequences, WHOLE)
        tensors = present(strategy.forward(micro, want))
        first_T = (micro.positions_T == 0).numpy()
        return {
            name: (
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                tensor.requires_grad,
                float(np.abs(as_array(tensor)[first_T]).max()),
            )
            for name, tensor in tensors.items()
        }


def want_undeclared(rank: int, case: Case, sequences: Sequence[TrainSequence], want: WantedOutputs) -> Raised | None:
    """Return the error of a forward pass."""
    with built(case, rank) as strategy:
        (micro,) = micros(sequences, sequences, WHOLE)
        return raised(lambda: strategy.forward(micro, want))


def build_undeclared(rank: int, case: Case, task: Task) -> Raised | None:
    """Return the error of building a model of another task."""
    return fail_to_build(rank, case.with_(model=replace(case.model, task=task)))[0]


def look_between(rank: int, case: Case, step: Step, want: WantedOutputs) -> Trained:
    """Run a step with forward passes and an export between backward and the optimizer step."""
    with built(case, rank) as strategy:
        before = weights(strategy)
        metrics = accumulate(strategy, step)
        outputs(strategy, step.sequences, want)
        weights(strategy)
        return _trained(strategy, before, [(strategy.optimizer_step(), metrics)])


def list_exports(rank: int, case: Case, step: Step) -> tuple[list[tuple[str, tuple[int, ...], bool]], ...]:
    """Return names, shapes and `requires_grad` of the exported tensors, before and after a step."""

    def exported(strategy: TrainStrategy) -> list[tuple[str, tuple[int, ...], bool]]:
        return [(name, tuple(tensor.shape), tensor.requires_grad) for name, tensor in strategy.export_weights()]

    with built(case, rank) as strategy:
        before = exported(strategy)
        take_step(strategy, step)
        return before, exported(strategy)


# -- state -------------------------------------------------------------------------------------------------------------


def save_between(rank: int, case: Case, steps: Sequence[Step | ModuleStep], done: int, folder: str) -> Trained:
    """Run all steps without interruption, and save after the first `at` steps.

    The deferred write that `save` returns is executed as late as possible, after the last step. It must not contain any
    of the later steps.
    """
    with built(case, rank) as strategy:
        for step in steps[:done]:
            take_step(strategy, step)
        mine = Path(folder) / f"rank-{rank}"
        mine.mkdir()
        write_the_rest = strategy.save(mine)
        trained = observe(strategy, steps[done:])
        if write_the_rest is not None:
            write_the_rest()
        return trained


def resume(
    rank: int, case: Case, spoil: Sequence[Step | ModuleStep], steps: Sequence[Step | ModuleStep], folder: str
) -> Trained:
    """Load a state after unrelated steps, then run `steps`.

    Loading must discard everything before it, including gradients.
    """
    with built(case, rank) as strategy:
        _spoil(strategy, spoil)
        strategy.load(Path(folder) / f"rank-{rank}")
        return observe(strategy, steps)


def _spoil(strategy: TrainStrategy, steps: Sequence[Step | ModuleStep]) -> None:
    """Give the strategy another state: weights, moments, gradients, and weights that a publish may cache."""
    for step in steps:
        take_step(strategy, step)
    for step in steps[:1]:
        accumulate(strategy, step)
    weights(strategy)


def load_damaged(rank: int, case: Case, folder: str) -> Raised | None:
    """Return the error of `load`."""
    with built(case, rank) as strategy:
        return raised(lambda: strategy.load(Path(folder)))


def export_after_steps(
    rank: int, case: Case, steps: Sequence[Step], batch: Sequence[TrainSequence], want: WantedOutputs, folder: str
) -> tuple[Arrays, Rows, Raised | None]:
    """Return exported weights and outputs of the trained model, and the error of `export_model` into `folder`."""
    with built(case, rank) as strategy:
        for step in steps:
            take_step(strategy, step)
        held = weights(strategy)
        scores = outputs(strategy, batch, want)
        return held, scores, raised(lambda: strategy.export_model(Path(folder)))


def offload_between(rank: int, case: Case, steps: Sequence[Step], parts: Sequence[StateKind]) -> Trained:
    """Run steps, and offload and onload `parts` before each step, before each optimizer step, and at the end."""
    with built(case, rank) as strategy:
        before = weights(strategy)
        done = []
        for step in steps:
            _away_and_back(strategy, parts)
            metrics = accumulate(strategy, step)
            _away_and_back(strategy, parts)
            done.append((strategy.optimizer_step(), metrics))
        _away_and_back(strategy, parts)
        return _trained(strategy, before, done)


def compute_while_away(
    rank: int, case: Case, step: Step, batch: Sequence[TrainSequence], want: WantedOutputs
) -> tuple[tuple[Rows, Arrays], tuple[Rows, Arrays]]:
    """Return outputs and exported weights after a step, and again with gradients and optimizer offloaded."""
    with built(case, rank) as strategy:
        take_step(strategy, step)
        here = outputs(strategy, batch, want), weights(strategy)
        strategy.offload(("grads", "optimizer"))
        away = outputs(strategy, batch, want), weights(strategy)
        strategy.onload(("grads", "optimizer"))
        return here, away


def _away_and_back(strategy: TrainStrategy, parts: Sequence[StateKind]) -> None:
    strategy.offload(parts)
    strategy.onload(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsed:
    """Bytes used on the device, and bytes that the strategy reports."""

    held: int
    """Bytes that `memory()` reports for the parts before they are offloaded."""
    before: int
    away: int
    back: int


def offload_and_measure(rank: int, case: Case, step: Step, parts: Sequence[StateKind]) -> MemoryUsed:
    """Measure the platform's used bytes before offload, after offload and after onload.

    A step runs first, so that all buffers exist.
    """
    import gc

    def used() -> int:
        return int(case.platform().memory(rank)["used"])

    gc.collect()  # strategies of earlier calls may be in reference cycles, and their memory is not free
    with built(case, rank) as strategy:
        take_step(strategy, step)
        accumulate(strategy, step)
        held = sum(strategy.memory().get(part, 0) for part in parts)
        before = used()
        strategy.offload(parts)
        away = used()
        if before - away < held:  # reference cycles may still hold it; collecting always would be slow
            gc.collect()
            away = used()
        strategy.onload(parts)
        return MemoryUsed(held=held, before=before, away=away, back=used())


def publish(
    rank: int, case: Case, steps: Sequence[Step], transport: str
) -> list[tuple[Mapping[str, str], Mapping[str, str]]]:
    """Publish after each step.

    Return digests of the received and of the exported weights; empty on ranks that do not send.
    """
    from roll_testing.publishing import published

    with built(case, rank) as strategy:
        return list(published(strategy, rank, steps, transport))


# -- portable state ----------------------------------------------------------------------------------------------------


def export_between(rank: int, case: Case, steps: Sequence[Step], done: int, folder: str) -> Trained:
    """Run all steps without interruption, and export the state into `folder` after the first `at` steps.

    `before` has the weights at that point.
    """
    with built(case, rank) as strategy:
        for step in steps[:done]:
            take_step(strategy, step)
        strategy.save_portable(Path(folder))
        return observe(strategy, steps[done:])


def go_on(rank: int, case: Case, spoil: Sequence[Step], steps: Sequence[Step], folder: str) -> Trained:
    """Import a state after unrelated steps, then run `steps`.

    The import must discard everything before it, including gradients.
    """
    with built(case, rank) as strategy:
        _spoil(strategy, spoil)
        strategy.load_portable(Path(folder))
        return observe(strategy, steps)


def import_foreign(rank: int, case: Case) -> dict[str, tuple[str, Raised | None]]:
    """Import states that do not fit this model.

    Return the parameter that does not fit and the error, by kind of mismatch.
    """
    with built(case, rank) as strategy:
        state = strategy.export_state()
        shapes = dict(state.shapes)
        last, shape = list(shapes.items())[-1]
        errors: dict[str, tuple[str, Raised | None]] = {}
        for what, odd, others in (
            ("one parameter less", last, {name: shape for name, shape in shapes.items() if name != last}),
            ("one parameter more", "no.such.weight", shapes | {"no.such.weight": (2,)}),
            ("another shape", last, shapes | {last: (*shape[:-1], shape[-1] + 1)}),
        ):
            errors[what] = odd, raised(partial(strategy.import_state, replace(state, shapes=others)))
        return errors


# -- module programs ---------------------------------------------------------------------------------------------------


def run_programs(
    rank: int,
    case: Case,
    steps: Sequence[ModuleStep],
    rows: Sequence[ModuleRow],
    programs: Sequence[ModuleProgram],
    max_rows: int = 100,
    folder: str = "",
) -> tuple[list[Arrays], list[Rows]]:
    """Return the weights before, between and after steps and programs, and the outputs of the programs.

    The programs run after the steps, which are a batch. Exports the model into `folder`, if given.
    """
    with built(case, rank) as strategy:
        held = [weights(strategy)]
        for step in steps:
            take_step(strategy, step)
            held.append(weights(strategy))
        if case.training is not None and case.training.ema_per_batch:
            strategy.move_averages()
        sampled = [module_outputs(strategy, rows, program, max_rows) for program in programs]
        held.append(weights(strategy))
        if folder:
            strategy.export_model(Path(folder))
        return held, sampled


def refuse_a_module_loss(rank: int, case: Case, step: ModuleStep) -> tuple[Raised | None, Arrays, Arrays]:
    """Return the error of `forward_backward_module`, and the weights before and after it."""
    with built(case, rank) as strategy:
        before = weights(strategy)
        return raised(lambda: accumulate(strategy, step)), before, weights(strategy)


# -- failure -----------------------------------------------------------------------------------------------------------


def spoil_a_step(rank: int, case: Case, spoiled: Step, steps: Sequence[Step]) -> tuple[Trained, bool, Raised | None]:
    """Run a step whose gradient is not finite, then good ones.

    Return the good steps, whether the first was skipped, and the error that the first raised.
    """
    with built(case, rank) as strategy:
        error = raised(lambda: accumulate(strategy, spoiled))
        if error is not None:
            return observe(strategy, []), False, error
        before = weights(strategy)
        stats = strategy.optimizer_step()
        return replace(observe(strategy, steps), before=before), stats.skipped, None


def refuse_a_loss(rank: int, case: Case, sequences: Sequence[TrainSequence], loss: LossFn) -> Raised | None:
    """Return the error of `forward_backward`."""
    with built(case, rank) as strategy:
        (micro,) = micros(sequences, sequences, WHOLE)
        return raised(lambda: strategy.forward_backward([micro], loss))
