"""Guards: runtime checks that prevent a broken run from ending as a success.

The schema `roll_core.spec.config.GuardsConfig` defines the guards and their meaning. This module has the remedies
and applies the configured action (`error`, `warn` or `off`) when a guard trips. docs/guards.md has a section for each.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_core.errors import GuardTrippedError, RollError, UnsupportedError
from roll_core.spec.config import GuardConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from roll_core.spec.config import GuardAction, GuardsConfig

logger = logging.getLogger(__name__)

REMEDIES = {
    "weights_unchanged": "is learning_rate 0, or too small for the dtype? If not, the trainer exports stale weights",
    "zero_gradient": "are all trained parameters frozen, or do the loss mask or the clip range exclude every token?",
    "weight_manifest": "the engine's weights differ from those of the trainer: update the infer strategy's plugin",
    "logprob_probe": (
        "does the engine load the weights that it confirms, and are its logprobs those of"
        " softmax(logits / temperature)? Compare dtype and attention of trainer and engine. If they are correct, raise"
        " the threshold"
    ),
    "logprob_gap": (
        "compare temperature, dtype and attention of trainer and engine. If they are correct, raise the threshold"
    ),
    "reward_failures": "fix what the failure names, or raise its timeout; failed samples are never trained on",
    "non_finite": "lower learning_rate, clip gradients (max_grad_norm), or compute in bf16 or fp32 instead of fp16",
    "zero_steps": "raise max_steps above the step of the checkpoint, or remove resume_from_checkpoint",
    "staleness": "please report: generation must not run further ahead of training than async_generation_ratio allows",
    "token_round_trip": "update that package or report the problem there: sampled ids must reach the trainer unchanged",
    "all_groups_filtered": (
        "the prompts are too hard or too easy for the model: try other prompts, SFT first, a larger"
        " num_return_sequences_in_group, a higher temperature, or a reward with partial credit"
    ),
    "advantage_size": (
        "which samples have such advantages? A deviation or a mean near 0 divides them, or the critic or the KL in the"
        " reward diverges: change the estimator's options, or set advantage_clip"
    ),
    "falling_reward": (
        "continue from an earlier checkpoint with a lower learning_rate or a KL term; look at entropy, grad_norm,"
        " actor/logprob_gap and response_length/cut_share in report.html"
    ),
    "dead_worker": "look for its exit in log.txt and in the system's log; the usual cause is exhausted memory",
}
"""Remedy for a tripped guard, by guard id."""

STEPS = "{steps}"
"""Placeholder in messages for the consecutive steps at which the guard tripped, `step 3` or `steps 3–7`."""


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


class Guards:
    """The guards of one run. The run loop updates `step`, which is recorded with each event."""

    def __init__(self, config: GuardsConfig, on_event: Callable[[GuardEvent], None] | None = None) -> None:
        """`on_event` is called for each guard that trips, before any exception is raised."""
        self.config = config
        self.step = 0
        self._stretches: dict[str, _Stretch] = {}
        self._on_event = on_event

    def of(self, guard_id: str) -> GuardConfig:
        """Config of a guard. Raises `UnsupportedError` for an unknown id."""
        guard_config = getattr(self.config, guard_id, None)
        if not isinstance(guard_config, GuardConfig):
            raise UnsupportedError(f"found guard {guard_id!r}, expected {', '.join(type(self.config).model_fields)}")
        return guard_config

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
        """Warn at the 1st, 10th, 100th, … trip within consecutive steps. Log others at INFO level."""
        action = self.of(guard_id).action
        if action == "off":
            return
        if fatal:
            action = "error"
        stretch = self._stretches.get(guard_id)
        if stretch is None or not stretch.last <= self.step <= stretch.last + 1:
            stretch = self._stretches[guard_id] = _Stretch(self.step, self.step)
        stretch.last = self.step
        stretch.count += 1
        first, last = stretch.first + 1, stretch.last + 1  # counted from 1, as in metrics
        message = message.replace(STEPS, f"step {first}" if first == last else f"steps {first}–{last}")
        if self._on_event is not None:
            event = GuardEvent(
                guard=guard_id,
                action=action,
                message=message,
                step=self.step,
                time=round(time.time(), 3),
                since=stretch.first,
            )
            self._on_event(event)
        if error is not None and action == "error":
            raise error
        remedy = f"; {REMEDIES[guard_id]}" if guard_id in REMEDIES else ""
        advised = f"{message}{remedy} (docs/guards.md#{guard_id})"
        if action == "error":
            raise GuardTrippedError(guard_id, advised)
        count = stretch.count
        if count == 1:
            logger.warning("guard %s: %s", guard_id, advised)
        elif count == 10 ** (len(str(count)) - 1):
            logger.warning("guard %s tripped %d times: %s", guard_id, count, message)
        else:
            logger.info("guard %s: %s", guard_id, message)
