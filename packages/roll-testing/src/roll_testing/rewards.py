"""Conformance kit for rewards.

    class TestMine(RewardConformance):
        name = "mine"
        examples = (Scored("2 + 2 =", "4", 1.0, {"ground_truth": "4"}),)

Rewards run in this process, without a model and without the worker's child processes.
"""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from roll_core.errors import RewardFailure
from roll_core.plugins.targets import load_class, schema_of
from roll_core.spec.config import EngineRewardConfig, ModelRewardConfig, RewardConfig
from roll_core.spec.providers import RewardProvider
from roll_core.spec.rollout import RewardFunction, RewardRequest
from roll_core.types import Reward, Sample
from roll_testing.environments import USELESS
from roll_testing.packaging import PackagingTests

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Scored:
    """A response and the reward that it must get."""

    prompt: str
    response: str
    value: float | None
    """None for a failure."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the row."""


class RewardConformance(PackagingTests):
    """Tests that every reward must pass."""

    provider: RewardProvider
    settings: ClassVar[Mapping[str, Any]] = {}
    """Keys of `rewards.<domain>` besides `reward`."""
    examples: ClassVar[Sequence[Scored]] = ()
    """Responses with the reward that they must get."""
    row: ClassVar[Mapping[str, Any]] = {}
    """Columns of the row whose useless responses are scored. Default: those of the first example, else the text `1` in
    each column that the schema's `columns` names."""
    repeats: ClassVar[bool] = True
    """True if equal samples get equal rewards. False for a reward that samples from a model."""
    tolerance: ClassVar[float] = 1e-6

    _kind = RewardProvider

    def config(self) -> RewardConfig:
        """Validate the configuration of `settings`."""
        schema = schema_of(self.provider, RewardConfig, owner=self.name)
        return schema.model_validate({"reward": self.provider.name, **self.settings})

    @pytest.fixture
    def reward(self) -> Iterator[RewardFunction]:
        """A started reward."""
        self._engine_or_skip()
        reward = self._new()
        yield reward
        reward.close()

    # -- tests ---------------------------------------------------------------------------------------------------------

    def test_known_responses_get_their_rewards(self, reward: RewardFunction) -> None:
        """Each of `examples` must get its value."""
        if not self.examples:
            pytest.skip(f"{type(self).__name__} has no examples")
        for example in self.examples:
            scored = score(reward, self._request(example.prompt, example.response, example.columns))
            if example.value is None:
                assert scored.failed, f"{example.response!r} got {scored.value}, expected a failure"
            else:
                assert scored.value == pytest.approx(example.value, abs=self.tolerance), (
                    f"{example.response!r} got {scored.value}{scored.failure and f' ({scored.failure})'}, expected"
                    f" {example.value}"
                )

    def test_every_response_gets_a_finite_value_or_a_failure(self, reward: RewardFunction) -> None:
        """Any text must get a `Reward` with a finite value, or raise `RewardFailure`. No other exception, no NaN."""
        for request in self._requests():
            scored = score(reward, request)
            assert isinstance(scored, Reward), f"score returned {type(scored).__name__}, expected a Reward"
            assert (scored.value is None) == bool(scored.failure), "a reward has either a value or a failure"
            assert scored.value is None or math.isfinite(scored.value), f"{request.response[:40]!r} got {scored.value}"
            for name, value in scored.detail.items():
                assert isinstance(value, str) or math.isfinite(value), f"detail {name} is {value}"

    def test_values_are_those_that_the_schema_states(self, reward: RewardFunction) -> None:
        """With `zero_or_one` in the schema, every value must be 0 or 1."""
        self.need(self.config().zero_or_one, "zero_or_one")
        for request in self._requests():
            scored = score(reward, request)
            assert scored.value in (None, 0.0, 1.0), f"{request.response[:40]!r} got {scored.value}, expected 0 or 1"

    def test_the_same_sample_gets_the_same_reward(self, reward: RewardFunction) -> None:
        """Two instances must agree, in any order of the samples: each process of a worker has its own instance."""
        self.need(self.repeats, "repeats")
        other = self._new()
        requests = list(self._requests())
        first = [score(reward, request) for request in requests]
        second = [score(other, request) for request in reversed(requests)][::-1]
        other.close()
        for request, one, two in zip(requests, first, second, strict=True):
            assert one == two, f"{request.response[:40]!r} got {one.value}, then {two.value}"

    def test_a_score_changes_nothing_of_its_sample(self, reward: RewardFunction) -> None:
        """The row's columns must stay as they are: the samples of a group share them."""
        for request in self._requests():
            before = copy.deepcopy(dict(request.metadata))
            score(reward, request)
            assert dict(request.metadata) == before, f"score changed the row's columns: {request.metadata}"

    def test_rewards_and_configuration_can_be_pickled(self, reward: RewardFunction) -> None:
        """Both are sent between processes."""
        config = self.config()
        assert pickle.loads(pickle.dumps(config)) == config, "the configuration does not equal itself after pickling"
        for request in self._requests():
            scored = score(reward, request)
            assert pickle.loads(pickle.dumps(scored)) == scored, "the reward does not equal itself after pickling"

    def test_closing_twice_is_allowed(self) -> None:
        """`close` must be allowed twice, and before `start`."""
        self._engine_or_skip()
        for starts in (False, True):
            reward = self._new(starts=starts)
            reward.close()
            reward.close()

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _new(self, *, starts: bool = True) -> RewardFunction:
        cls = load_class(self.provider.target, RewardFunction, owner=self.name)  # type: ignore[type-abstract]
        reward = cls(self.config())
        if starts:
            reward.start()
        return reward

    def _requests(self) -> Iterator[RewardRequest]:
        for example in self.examples:
            yield self._request(example.prompt, example.response, example.columns)
        columns = self.row or (
            self.examples[0].columns if self.examples else dict.fromkeys(self.config().columns().values(), "1")
        )
        for response in USELESS:
            yield self._request("2 + 2 =", response, columns)

    def _request(self, prompt: str, response: str, columns: Mapping[str, Any]) -> RewardRequest:
        size = max(1, min(len(response), 64))
        sample = Sample(
            id="0/0/0",
            group_id="0/0",
            prompt_ids=np.arange(2, dtype=np.int64),
            response_ids=np.arange(size, dtype=np.int64),
            logprobs=np.zeros(size, dtype=np.float32),
            loss_mask=np.ones(size, dtype=np.bool_),
            versions=np.zeros(size, dtype=np.int32),
            finish_reason="stop",
            metadata=dict(columns),
        )
        is_model = isinstance(self.config(), ModelRewardConfig)
        is_engine = isinstance(self.config(), EngineRewardConfig)
        values = np.linspace(-1, 1, size + 2, dtype=np.float32) if is_model else None
        messages = ({"role": "user", "content": prompt},)
        return RewardRequest(
            sample=sample,
            prompt=prompt,
            response=response,
            messages=messages,
            values=values,
            replies=("1",) if is_engine else (),
            reply_finish_reasons=("stop",) if is_engine else (),
        )


def score(reward: RewardFunction, request: RewardRequest) -> Reward:
    """The reward of a sample. `RewardFailure` becomes a reward that failed, as in a worker."""
    try:
        return reward.score(request)
    except RewardFailure as failure:
        return Reward(value=None, failure=str(failure) or "failed")
