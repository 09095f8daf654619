"""Functions that ranks run in the tests of the portable state; see `programs`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.runtime.records.portable_state import opened_portable_state, write_portable_state
from roll_testing.bench import accumulate, built, take_step, weights
from roll_testing.programs import observe, raised

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roll_core.spec.train import PortableState
    from roll_testing.bench import Case, Step
    from roll_testing.programs import Raised, Trained


def export_between(rank: int, case: Case, steps: Sequence[Step], at: int, folder: str) -> Trained:
    """Run all steps without interruption, and export the state into `folder` after the first `at` steps.

    `before` has the weights at that point.
    """
    with built(case, rank) as strategy:
        for step in steps[:at]:
            take_step(strategy, step)
        write_portable_state(strategy.export_state(), case.model, Path(folder), leads=rank == 0)
        return observe(strategy, steps[at:])


def go_on(rank: int, case: Case, spoil: Sequence[Step], steps: Sequence[Step], folder: str) -> Trained:
    """Import a state after unrelated steps, then run `steps`.

    The import must discard everything before it, including gradients.
    """
    with built(case, rank) as strategy:
        for step in spoil:
            take_step(strategy, step)
        for step in spoil[:1]:
            accumulate(strategy, step)
        weights(strategy)  # as a publish does; weights cached by it must not survive the import
        with opened_portable_state(Path(folder)) as state:
            strategy.import_state(state)
        return observe(strategy, steps)


def import_foreign(rank: int, case: Case) -> dict[str, tuple[str, Raised | None]]:
    """Import states that do not fit this model.

    Return the parameter that does not fit and the error, by kind of mismatch.
    """
    with built(case, rank) as strategy:
        own = strategy.export_state()
        shapes = dict(own.shapes)
        last, shape = list(shapes.items())[-1]
        found: dict[str, tuple[str, Raised | None]] = {}
        for what, odd, others in (
            ("one parameter less", last, {name: each for name, each in shapes.items() if name != last}),
            ("one parameter more", "no.such.weight", shapes | {"no.such.weight": (2,)}),
            ("another shape", last, shapes | {last: (*shape[:-1], shape[-1] + 1)}),
        ):
            found[what] = odd, raised(_importing(strategy.import_state, replace(own, shapes=others)))
        return found


def _importing(import_state: Callable[[PortableState], None], state: PortableState) -> Callable[[], None]:
    return lambda: import_state(state)
