"""Requests to judge, and modules that stand in for the user's."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll_core.spec.rollout import RewardRequest
from roll_core.types import Sample


def request_of(response: str, prompt: str = "How much?", **metadata: Any) -> RewardRequest:
    sample = Sample(
        id="row7/0/1",
        group_id="row7/0",
        prompt_ids=np.array([1], dtype=np.int64),
        response_ids=np.array([2], dtype=np.int64),
        logprobs=np.zeros(1, dtype=np.float32),
        loss_mask=np.ones(1, dtype=np.bool_),
        versions=np.zeros(1, dtype=np.int32),
        finish_reason="stop",
        metadata=metadata,
    )
    return RewardRequest(sample=sample, prompt=prompt, response=response)


@pytest.fixture(scope="session")
def asking() -> Callable[..., RewardRequest]:
    return request_of


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module into the working directory and returns its name, a new one for each test."""
    monkeypatch.chdir(tmp_path)
    name = f"user_rewards_{abs(hash(tmp_path)):x}"
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])

    def write(source: str) -> str:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        return name

    yield write
    sys.modules.pop(name, None)
