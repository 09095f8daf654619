"""The best checkpoint by a metric (`save_best`): which step it is, and where it is after a resume."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import ConfigError, ConfigProblem, closest
from roll_core.runtime.records.tracking import is_lower_better

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.config import BestCheckpointConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestCheckpoint:
    """The checkpoint with the best value of a metric."""

    metric: str
    mode: str
    """`max` or `min`."""
    value: float
    step: int
    path: str

    @classmethod
    def read(cls, best: Mapping[str, Any] | None, beside: Path, origin: str = "") -> BestCheckpoint | None:
        """The best checkpoint that the state of the checkpoint `beside` names; None if it does not exist any more.

        A run may have been moved: the checkpoint is also searched beside that checkpoint. A copy of a run whose disk
        is gone has its best checkpoint beside the URL `origin`.
        """
        try:
            found = cls(**best) if best else None
            if found is None or not math.isfinite(found.value):
                return None
            if "://" in found.path:
                return found
            places = [Path(found.path), beside.parent / f"step-{int(found.step)}"]
        except (TypeError, ValueError):
            return None
        place = next((each for each in places if each.is_dir()), None)
        if place is None and origin:
            return replace(found, path=f"{origin.rpartition('/')[0]}/step-{found.step}")
        if place is None:
            logger.warning("the best checkpoint, %s with %s %g, does not exist", found.path, found.metric, found.value)
            return None
        return replace(found, path=str(place))


class BestMetric:
    """Compares the metric of `save_best` between steps."""

    def __init__(self, config: BestCheckpointConfig, source: str) -> None:
        """`source`: the config that messages name."""
        self.metric = config.metric
        self.mode = config.mode or ("min" if is_lower_better(config.metric) else "max")
        self._source = source
        self._seen = False
        self._offered: list[str] | None = None
        """Metrics of the first step that should have had the metric and lacked it."""

    def resumed(self, best: BestCheckpoint | None) -> BestCheckpoint | None:
        """`best` if it was measured by this metric; otherwise None."""
        if best is not None and (best.metric, best.mode) != (self.metric, self.mode):
            logger.info("save_best: the best checkpoint by %s (%s) is not retained further", best.metric, best.mode)
            return None
        return best

    def improved(self, step: int, metrics: Mapping[str, float], best: BestCheckpoint | None) -> float | None:
        """The value at `step` if it is better than `best`; otherwise None.

        Equal values do not improve, so the earlier step stays the best. NaN and infinities never do. Step 0, the
        initial model, is not compared: it is no checkpoint.
        """
        if self.metric not in metrics:
            evaluated = any(name.startswith("val/") for name in metrics)
            if not self._seen and (evaluated if self.metric.startswith("val/") else step > 0):
                self._offered = sorted(metrics)
            return None
        self._seen = True
        value = float(metrics[self.metric])
        if not math.isfinite(value):
            logger.warning("save_best: %s is %s at step %d, which cannot be the best", self.metric, value, step)
            return None
        if step == 0:
            return None
        sign = 1 if self.mode == "max" else -1
        return value if best is None or sign * value > sign * best.value else None

    def check(self) -> None:
        """Raise `ConfigError` if the first evaluation, or step, did not have the metric."""
        if self._offered is None:
            return
        prefix = "val/" if self.metric.startswith("val/") else ""
        names = [name for name in self._offered if name.startswith(prefix) and not name.startswith("time/")]
        close = closest(self.metric, names)
        hint = f"did you mean {close}?" if close else f"available: {', '.join(names) or 'none'}"
        message = f"found {self.metric}, which {'the evaluation' if prefix else 'the step'} did not measure"
        problem = ConfigProblem(where=self._source, key="save_best", message=message, hint=hint, code="ROLL-C013")
        raise ConfigError([problem])
