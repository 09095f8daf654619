"""The interface of reward functions. Scoring a sample returns a value or fails explicitly."""

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
    """A sample to score, with its text decoded once. The text is only for scoring: it is never tokenised again."""

    sample: Sample
    prompt: str
    response: str
    """Without special tokens."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Other columns of the row."""
        return self.sample.metadata


class RewardFunction(ABC):
    """Scores samples in child processes of its role's worker: one instance per process, one sample at a time.

    If scoring a sample takes longer than `timeout_s`, its process is killed. If the provider declares
    `enforces_timeout`, the worker itself has one instance, and several threads call `score` concurrently.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Keep the configuration; load nothing heavy."""
        self.config = config

    def start(self) -> None:
        """Load resources. Called once, in the process that calls `score`."""

    @abstractmethod
    def score(self, request: RewardRequest) -> Reward:
        """Score one sample. Raise `RewardFailure` if no value can be computed: a failure is never a reward of 0.

        The text is a model's output: treat it as data, never evaluate it.
        """

    def close(self) -> None:
        """Release all resources. May be called more than once; not called if the process is killed."""


document_fields(__name__)
