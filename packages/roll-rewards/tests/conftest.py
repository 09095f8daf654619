"""Rewards and requests for the tests of this package."""

from __future__ import annotations

import numpy as np
import pytest

from roll_core.spec.rollout import RewardRequest
from roll_core.types import Sample


def request_for(response, /, prompt="", **row):
    ids, floats = np.asarray([1], dtype=np.int64), np.zeros(1, dtype=np.float32)
    sample = Sample(
        id="g/0",
        group_id="g",
        prompt_ids=ids,
        response_ids=ids,
        logprobs=floats,
        loss_mask=np.ones(1, dtype=np.bool_),
        versions=np.zeros(1, dtype=np.int32),
        finish_reason="stop",
        tag="t",
        metadata=row,
    )
    return RewardRequest(sample=sample, prompt=prompt, response=response)


@pytest.fixture
def reward():
    """`reward(cls, schema, **options)`: a started reward, closed after the test."""
    started = []

    def make(cls, schema, name, **options):
        config = schema.model_validate({"reward": name, **options})
        found = cls(schema.model_validate(config.model_dump(mode="json")))  # as a worker receives it
        found.start()
        started.append(found)
        return found

    yield make
    for each in started:
        each.close()


@pytest.fixture(scope="session")
def requesting():
    return request_for
