"""Error bounds, and comparisons whose messages state what differs and by how much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.types import Floats
    from roll_testing.bench import Arrays
    from roll_testing.programs import Trained

SPLIT = 1e-6
"""Allowed relative distance between fp32 gradients of one batch that is split in different ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Allowed distances to the reference, which computes in float32."""

    outputs: float
    """Largest absolute difference of a logprob, an entropy or a value, in nats or in the value's unit."""
    gradient: float
    """Norm of the difference of two gradients, divided by the norm of the reference's."""
    steps: float
    """Same measure for the change of the parameters in a few optimizer steps."""
    learning_rate: float = 1e-9
    """Relative difference of learning rates. Schedules are computed in float64 everywhere."""


BOUNDS: Mapping[str, Bounds] = {
    "fp32": Bounds(outputs=1e-4, gradient=1e-5, steps=1e-4),
    "bf16": Bounds(outputs=0.25, gradient=0.05, steps=0.1),
    "fp16": Bounds(outputs=0.05, gradient=0.02, steps=0.05),
}
"""Bounds by dtype. fp32 allows other orders of summation; bf16 and fp16 round to 8 and 11 bits."""


def distance(actual: Arrays, expected: Arrays) -> float:
    """Return the norm of the difference divided by the norm of `expected`, over all tensors together.

    Raises `AssertionError` if the names differ.
    """
    check_names(actual, expected)
    missed = sum(float(np.square(actual[name].astype(np.float64) - value).sum()) for name, value in expected.items())
    size = sum(float(np.square(value.astype(np.float64)).sum()) for value in expected.values())
    return float(np.sqrt(missed / size)) if size else float(np.sqrt(missed))


def check_near(what: str, actual: Arrays, expected: Arrays, bound: float) -> None:
    """Fail if the distance exceeds `bound`; the message names the tensor with the largest difference, or a factor."""
    off = distance(actual, expected)
    if off <= bound:
        return
    differences = {name: float(np.abs(actual[name] - expected[name]).max()) for name in expected if expected[name].size}
    worst = max(differences, key=lambda name: (not np.isfinite(differences[name]), differences[name]))
    one, other = (
        np.concatenate([side[name].ravel().astype(np.float64) for name in expected]) for side in (actual, expected)
    )
    with np.errstate(all="ignore"):
        factor = (one * other).sum() / np.square(other).sum()
        proportional = np.linalg.norm(one - factor * other) <= 1e-3 * np.linalg.norm(one)
    raise AssertionError(
        f"{what}: relative distance {off:.3g}, allowed {bound:g}; furthest off is {worst}, by"
        f" {differences[worst]:.3g} where the largest entry is {float(np.abs(expected[worst]).max()):.3g}"
        + (f"; all of it is {factor:.4g} times the expected value" if proportional else "")
    )


def check_rows(what: str, actual: Mapping[str, Floats], expected: Mapping[str, Floats], bound: float) -> None:
    """Fail at the first token whose absolute difference exceeds `bound`. Rows are keyed by sequence id."""
    check_names(actual, expected)
    for sequence, row in expected.items():
        assert actual[sequence].shape == row.shape, (
            f"{what} of {sequence}: shape {actual[sequence].shape}, expected {row.shape}"
        )
        off = np.abs(actual[sequence] - row)
        if row.size and not bool((off <= bound).all()):
            place = tuple(int(i) for i in np.argwhere(~(off <= bound))[0])
            raise AssertionError(
                f"{what} of token {place[0]} of sequence {sequence}: {float(actual[sequence][place]):.6g}, expected"
                f" {float(row[place]):.6g}, allowed difference {bound:g}"
            )


def check_names(actual: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Fail unless both mappings have the same keys."""
    if missing := sorted(set(expected) - set(actual)):
        raise AssertionError(f"{len(missing)} of {len(expected)} are missing, for example {missing[0]!r}")
    if extra := sorted(set(actual) - set(expected)):
        raise AssertionError(f"{len(extra)} are not expected, for example {extra[0]!r}")


def check_same(what: str, actual: Arrays, expected: Arrays) -> None:
    """Fail unless all arrays are equal bit for bit."""
    check_names(actual, expected)
    for name, value in expected.items():
        assert actual[name].shape == value.shape, (
            f"{what}: {name} has shape {actual[name].shape}, expected {value.shape}"
        )
        if not np.array_equal(actual[name], value, equal_nan=True):
            off = float(np.abs(actual[name].astype(np.float64) - value).max())
            raise AssertionError(f"{what}: {name} differs by up to {off:.3g}; expected the same bits")


def check_same_run(what: str, actual: Trained, expected: Trained) -> None:
    """Fail unless two runs of equal steps have equal statistics and end with equal weights, bit for bit."""
    for number, (one, other) in enumerate(zip(actual.stats, expected.stats, strict=True), 1):
        assert one == other, f"{what}: step {number} was {one}, expected {other}"
    check_same(f"{what}: weights", actual.after, expected.after)
