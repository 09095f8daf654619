"""Guards: runtime checks that prevent a broken run from ending as a success.

The schema `roll_core.spec.config.GuardsConfig` defines the guards and their meaning. This module has the remedies and
applies the configured action (`error`, `warn` or `off`) when a guard trips. `docs/guards.md` has a section for each.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_core.errors import GuardTrippedError, RollError, UnsupportedError
from roll_core.spec.config import GuardConfig, GuardsConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from roll_core.spec.config import GuardAction

logger = logging.getLogger(__name__)

REMEDIES = {
    "weights_unchanged": "is learning_rate 0, or too small for the dtype? if not, the trainer exports a stale copy",
    "zero_gradient": "is what is trained frozen, or does the loss mask or the clip range exclude every token?",
    "weight_manifest": "the engine does not hold what the trainer sent: update the plugin of the infer strategy",
    "logprob_probe": (
        "does the engine load what it confirms, and report logprobs of softmax(logits / temperature)? compare dtype and"
        " attention of both sides; if all are right, raise the threshold"
    ),
    "logprob_gap": "compare temperature, dtype and attention of both sides; if all are right, raise the threshold",
    "reward_failures": "mend the reward, or give it more time (timeout_s); failed samples are never trained on",
    "non_finite": "lower learning_rate, clip gradients (max_grad_norm), or compute in bf16 or fp32 instead of fp16",
    "zero_steps": "raise max_steps above the step that was resumed from, or leave out resume_from_checkpoint",
    "staleness": "report this: generation runs no further ahead of training than it is allowed to",
    "token_round_trip": "update that package or report it there: sampled ids must reach the trainer as they are",
    "all_groups_filtered": (
        "the prompts are too hard or too easy for the model: try other prompts, SFT first, a larger"
        " num_return_sequences_in_group, a higher temperature, or a reward with partial credit"
    ),
    "dead_worker": "look for its end in log.txt and in the system's log; exhausted memory is the usual cause",
}
"""Remedy for a tripped guard, by guard id."""

DOCS = "docs/guards.md"
STEPS = "{steps}"
"""Placeholder in messages for the consecutive steps at which the guard tripped, `step 3` or `steps 3–7`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardInfo:
    """Documentation of one guard."""

    id: str
    meaning: str
    default: GuardAction
    remedy: str
    """Remedy when the guard trips; empty for a plugin's guard without one."""

    @property
    def docs(self) -> str:
        """Path and anchor of the guard's documentation."""
        return f"{DOCS}#{self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardEvent:
    """One trip of a guard."""

    guard: str
    action: GuardAction
    message: str
    step: int
    time: float
    since: int
    """First of the consecutive steps at which the guard tripped."""


@dataclass(slots=True)
class _Stretch:
    """Consecutive steps at which a guard tripped."""

    first: int
    last: int
    count: int = 0
    """Number of trips; a guard can trip several times in a step."""


def guard_table(schema: type[GuardsConfig] = GuardsConfig) -> dict[str, GuardInfo]:
    """All guards of a schema by id, in the schema's order."""
    table = {}
    for name, each in schema.model_fields.items():
        default = each.get_default(call_default_factory=True)
        if isinstance(default, GuardConfig):
            meaning = " ".join((each.description or "").split())
            table[name] = GuardInfo(id=name, meaning=meaning, default=default.action, remedy=REMEDIES.get(name, ""))
    return table


class Guards:
    """The guards of one run. The run loop updates `step`, which is recorded with each event."""

    def __init__(self, config: GuardsConfig, on_event: Callable[[GuardEvent], None] | None = None) -> None:
        """`on_event` is called for each guard that trips, before any exception is raised."""
        self.config = config
        self.step = 0
        self.counts: Counter[str] = Counter()
        self._stretches: dict[str, _Stretch] = {}
        self._on_event = on_event
        self._table = guard_table(type(config))

    def of(self, guard_id: str) -> GuardConfig:
        """Config of a guard. Raises `UnsupportedError` for an unknown id."""
        found = getattr(self.config, guard_id, None) if guard_id in self._table else None
        if not isinstance(found, GuardConfig):
            raise UnsupportedError(f"there is no guard {guard_id!r}; there are {', '.join(self._table)}")
        return found

    def active(self, guard_id: str) -> bool:
        """True unless the guard is off; use it to skip expensive checks."""
        return self.of(guard_id).action != "off"

    def check(self, guard_id: str, ok: bool, message: str, *, fatal: bool = False) -> None:
        """Trip the guard unless `ok`: raise `GuardTrippedError`, warn, or do nothing, as configured.

        If `fatal`, raise also if the configured action is `warn`.
        """
        self.of(guard_id)
        if not ok:
            self._trip(guard_id, message, None, fatal)

    def check_at_most(
        self, guard_id: str, value: float, threshold: float, what: str, *, error_threshold: float = math.inf
    ) -> None:
        """Trip if `value` exceeds `threshold` or is not finite. `what` names the value in the message.

        Above `error_threshold`, raise also if the configured action is `warn`.
        """
        fatal = value > error_threshold
        bound = error_threshold if fatal else threshold
        ok = math.isfinite(value) and value <= threshold
        self.check(guard_id, ok, f"{what} is {value:.4g}, above the threshold of {bound:g}", fatal=fatal)

    def failed(self, guard_id: str, error: RollError, *, fatal: bool = False) -> None:
        """Trip the guard with an `error` that was already caught: raise it, warn, or do nothing, as configured."""
        self._trip(guard_id, str(error), error, fatal)

    def _trip(self, guard_id: str, message: str, error: RollError | None, fatal: bool) -> None:
        action = self.of(guard_id).action
        if action == "off":
            return
        if fatal:
            action = "error"
        self.counts[guard_id] += 1
        stretch = self._stretches.get(guard_id)
        if stretch is None or not stretch.last <= self.step <= stretch.last + 1:
            stretch = self._stretches[guard_id] = _Stretch(self.step, self.step)
        stretch.last = self.step
        stretch.count += 1
        message = message.replace(STEPS, _steps(stretch))
        if self._on_event is not None:
            self._on_event(
                GuardEvent(
                    guard=guard_id,
                    action=action,
                    message=message,
                    step=self.step,
                    time=round(time.time(), 3),
                    since=stretch.first,
                )
            )
        if action == "error":
            if error is not None:
                raise error
            raise GuardTrippedError(guard_id, self._advise(guard_id, message))
        self._warn(guard_id, message, stretch.count)

    def _warn(self, guard_id: str, message: str, count: int) -> None:
        """Warn at the 1st, 10th, 100th, … trip within consecutive steps, with the remedy at the first.

        Other trips are logged at INFO level and counted in the record.
        """
        if count == 1:
            logger.warning("guard %s: %s", guard_id, self._advise(guard_id, message))
        elif count == 10 ** (len(str(count)) - 1):
            logger.warning("guard %s, for the %dth time: %s", guard_id, count, message)
        else:
            logger.info("guard %s: %s", guard_id, message)

    def _advise(self, guard_id: str, message: str) -> str:
        info = self._table[guard_id]
        remedy = f"; {info.remedy}" if info.remedy else ""
        return f"{message}{remedy} ({info.docs})"


def _steps(stretch: _Stretch) -> str:
    """Format the steps, counted from 1 as in metrics: `Guards.step` completed steps precede the current one."""
    first, last = stretch.first + 1, stretch.last + 1
    return f"step {first}" if first == last else f"steps {first}–{last}"
