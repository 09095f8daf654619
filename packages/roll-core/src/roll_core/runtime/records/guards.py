"""Guards: what is watched while a run goes on, so that no run ends well that went wrong.

The schema (`roll_core.spec.config.GuardsConfig`) says which guards there are and what each means; this module says
what to do about them, and does what the config says when one trips. `docs/guards.md` has a section for each.
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
"""What to do when a guard trips, by id."""

DOCS = "docs/guards.md"
STEPS = "{steps}"
"""In a message: stands for the consecutive steps at which the guard has tripped, `step 3` or `steps 3–7`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardInfo:
    """A guard, as it is documented."""

    id: str
    meaning: str
    default: GuardAction
    remedy: str
    """What to do; empty for guards of a plugin that does not say."""

    @property
    def docs(self) -> str:
        """Where it is explained."""
        return f"{DOCS}#{self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardEvent:
    """A guard that tripped."""

    guard: str
    action: GuardAction
    message: str
    step: int
    time: float
    since: int
    """First of the consecutive steps at which it has tripped."""


@dataclass(slots=True)
class _Stretch:
    """Consecutive steps at which a guard tripped."""

    first: int
    last: int
    count: int = 0
    """Of trips: a guard can trip several times in a step."""


def guard_table(schema: type[GuardsConfig] = GuardsConfig) -> dict[str, GuardInfo]:
    """Every guard of a schema by id, in its order."""
    table = {}
    for name, each in schema.model_fields.items():
        default = each.get_default(call_default_factory=True)
        if isinstance(default, GuardConfig):
            meaning = " ".join((each.description or "").split())
            table[name] = GuardInfo(id=name, meaning=meaning, default=default.action, remedy=REMEDIES.get(name, ""))
    return table


class Guards:
    """The guards of one run. `step` is kept by the run loop, for the record."""

    def __init__(self, config: GuardsConfig, on_event: Callable[[GuardEvent], None] | None = None) -> None:
        """`on_event` is told of every guard that trips, before anything is raised."""
        self.config = config
        self.step = 0
        self.counts: Counter[str] = Counter()
        self._stretches: dict[str, _Stretch] = {}
        self._on_event = on_event
        self._table = guard_table(type(config))

    def of(self, guard_id: str) -> GuardConfig:
        """What the config says of a guard."""
        found = getattr(self.config, guard_id, None) if guard_id in self._table else None
        if not isinstance(found, GuardConfig):
            raise UnsupportedError(f"there is no guard {guard_id!r}; there are {', '.join(self._table)}")
        return found

    def active(self, guard_id: str) -> bool:
        """Whether it is worth finding out: false where the guard is off."""
        return self.of(guard_id).action != "off"

    def check(self, guard_id: str, ok: bool, message: str, *, fatal: bool = False) -> None:
        """Unless `ok`, trip: raise `GuardTrippedError`, warn, or do nothing, as the config says. `fatal`: raise where
        the config says `warn`."""
        self.of(guard_id)
        if not ok:
            self._trip(guard_id, message, None, fatal)

    def check_at_most(
        self, guard_id: str, value: float, threshold: float, what: str, *, error_threshold: float = math.inf
    ) -> None:
        """Trip if `value` is above `threshold` or is no number; `what` names it. Fatal above `error_threshold`."""
        fatal = value > error_threshold
        bound = error_threshold if fatal else threshold
        ok = math.isfinite(value) and value <= threshold
        self.check(guard_id, ok, f"{what} is {value:.4g}, above the threshold of {bound:g}", fatal=fatal)

    def failed(self, guard_id: str, error: RollError, *, fatal: bool = False) -> None:
        """`error` says what the guard watches for: raise it, warn or do nothing."""
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
        """In full at the first of a stretch of steps, then at the 10th, 100th, … trip of it: the others are in the log
        and in the record's count."""
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
    """Counted from 1, as in metrics: the step under way is the one after those that are done."""
    first, last = stretch.first + 1, stretch.last + 1
    return f"step {first}" if first == last else f"steps {first}–{last}"
