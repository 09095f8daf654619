"""The prompt sampler by measured difficulty. Imports no torch."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, model_validator
from typing_extensions import override

from roll_core.errors import DataError
from roll_core.spec.config import Config, Fraction
from roll_core.spec.rollout import PromptSampler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from roll_core.spec.rollout import Prompt


class PassRateOptions(Config):
    """Options (`prompt_sampler_options`) of `pass_rate`."""

    low: float = 0.0
    """Lower bound of the pass rate, exclusive."""
    high: float = 1.0
    """Upper bound of the pass rate, exclusive."""
    column: str = "pass_rate"
    """Column with the pass rate of a row before the run, as `roll-core filter` writes it. It may be missing."""
    revisit: Fraction = 0.1
    """Probability that a pass over the data includes a row outside the window, which measures it again."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Weight of earlier measurements of a row. 0: the pass rate is that of its last group."""

    @model_validator(mode="after")
    def _the_window_is_open(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be less than high {self.high:g}")
        return self


class PassRateSampler(PromptSampler):
    """Passes over the rows in a new random order each, and skips rows whose pass rate is outside a window.

    The pass rate of a row is the mean reward of its responses. Rows without one are taken. If a whole pass has no row
    in the window, the next row is taken.
    """

    def __init__(
        self,
        *,
        low: float = 0.0,
        high: float = 1.0,
        column: str = "pass_rate",
        revisit: float = 0.1,
        momentum: float = 0.0,
    ) -> None:
        self.low, self.high, self.column, self.revisit, self.momentum = low, high, column, revisit, momentum
        self.next = 0
        """Position in the endless order of rows, counting skipped ones."""
        self.measured: dict[int, float] = {}
        """Pass rates that this run has measured, by row."""
        self._pass = -1

    @override
    def start(self, rows: Sequence[Prompt], seed: int) -> None:
        self.num_rows, self._seed = len(rows), seed
        self.given: dict[int, float] = {}
        for index, row in enumerate(rows):
            value = row.metadata.get(self.column)
            if value is None or value == "":
                continue
            try:
                rate = float(value)
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"row {row.id}: column {self.column!r} has {value!r}, expected a pass rate"
                    " (prompt_sampler_options.column)"
                ) from error
            if not math.isnan(rate):  # pandas writes NaN for a missing value
                self.given[index] = rate

    def pass_rate(self, row: int) -> float | None:
        """Last measured pass rate of a row; None if there is none."""
        return self.measured.get(row, self.given.get(row))

    def is_inside(self, row: int) -> bool:
        """True if the pass rate of a row is in the window, or not measured."""
        rate = self.pass_rate(row)
        return rate is None or self.low < rate < self.high

    @override
    def choose(self, position: int) -> int:
        # To the end of the next pass, which has every row. The next `num_rows` positions may be of two passes.
        for index in range(self.next, (self.next // self.num_rows + 2) * self.num_rows):
            row, revisited = self._row(index)
            if revisited or self.is_inside(row):
                self.next = index + 1
                return row
        row, _ = self._row(self.next)
        self.next += 1
        return row

    def _row(self, index: int) -> tuple[int, bool]:
        """Row at a position of the endless order, and True if it is taken outside the window too."""
        epoch, place = divmod(index, self.num_rows)
        if epoch != self._pass:
            rng = np.random.default_rng([self._seed, epoch])
            self._order, self._draws, self._pass = rng.permutation(self.num_rows), rng.random(self.num_rows), epoch
        return int(self._order[place]), bool(self._draws[place] < self.revisit)

    @override
    def observe(self, row: int, scores: Sequence[float]) -> None:
        if not scores:
            return
        rate, before = statistics.fmean(scores), self.pass_rate(row)
        self.measured[row] = rate if before is None else self.momentum * before + (1 - self.momentum) * rate

    @override
    def state(self) -> Mapping[str, Any]:
        return {"next": self.next, "measured": [[row, rate] for row, rate in self.measured.items()]}

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        self.next, self.measured = state["next"], {int(row): float(rate) for row, rate in state["measured"]}

    @override
    def metrics(self) -> Mapping[str, float]:
        rates = {**self.given, **self.measured}
        inside = sum(self.low < rate < self.high for rate in rates.values())
        return {
            "measured_share": len(rates) / self.num_rows,
            **({"inside_share": inside / len(rates)} if rates else {}),
        }
