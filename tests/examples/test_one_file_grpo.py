"""The one-file example learns, and stays short."""

import asyncio
import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "one_file_grpo.py"


@pytest.mark.slow(ci=True)
def test_rewards_rise():
    spec = importlib.util.spec_from_file_location("one_file_grpo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rewards = asyncio.run(module.train(steps=40))
    assert sum(rewards[-5:]) / 5 > 3 * sum(rewards[:5]) / 5


def test_example_has_less_than_150_lines():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 150
