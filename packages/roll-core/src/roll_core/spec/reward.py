"""The contract of rewards: a judged sample is a value, or a failure to find one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.config import RewardConfig
    from roll_core.types import Reward, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """A sample to judge, with its text decoded once. The text is for judging only: it is never tokenised again."""

    sample: Sample
    prompt: str
    response: str
    """Without special tokens."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The row's other columns."""
        return self.sample.metadata


class RewardFunction(ABC):
    """Scores samples, in child processes of its role's worker: one instance in each, which scores one sample at a time.

    A process that takes longer than `timeout_s` for a sample is killed. If the provider declares `enforces_timeout`,
    there is one instance in the worker itself, and `score` is called from several threads at once.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Keep the configuration; load nothing heavy."""
        self.config = config

    def start(self) -> None:
        """Load what is needed; called once, in the process that calls `score`."""

    @abstractmethod
    def score(self, request: RewardRequest) -> Reward:
        """Judge one sample. Raise `RewardFailure` if no value can be found: it is never the same as 0.

        The text is a model's output: treat it as data, never evaluate it.
        """

    def close(self) -> None:
        """Release everything; called once or several times. A process that is killed does not call it."""


document_fields(__name__)
