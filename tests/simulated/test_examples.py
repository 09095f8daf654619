"""Examples of every pipeline on a simulated device, with the metrics that they have on the CPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from shared_tests.simulated import check_metrics, program

IN_CI = ("sft", "sft, resumed", "grpo", "diffusion", "flow_grpo", "grpo in bf16")
"""In this order, since some start from the exports of others."""
OTHERS = (
    *("grpo with adapters", "dpo", "reward_model", "ppo", "distill", "distill off policy", "agentic sft", "agentic"),
    *("frozen_lake sft", "frozen_lake", "tools sft", "tools", "diffusion", "nft", "refl"),
)
BF16_GAP = 1e-2
"""Bound on the mean difference between logprobs of engine and trainer in bf16, whose 8 bits round a logprob of 2.5 by
up to 0.01. Found: 7e-4."""


@cache
def results(*names: str) -> dict[str, Any]:
    """Metrics of these runs by name and platform. They run in one process, which imports libraries once."""
    with TemporaryDirectory() as folder:
        return program("example_runs", "sim", *names, folder=Path(folder))


def metrics(found: dict[str, Any], platform: str) -> list[dict[str, float]]:
    assert isinstance(found[platform], list), f"the run on {platform} failed:\n{found[platform]}"
    return found[platform]


@pytest.mark.slow(ci=True)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", IN_CI[:-1])
def test_an_example_has_the_cpus_metrics(name):
    found = results(*IN_CI)[name]
    check_metrics(metrics(found, "sim"), metrics(found, "cpu"))


@pytest.mark.slow(ci=True)
@pytest.mark.timeout(900)
def test_engine_and_trainer_agree_in_bf16():
    lines = metrics(results(*IN_CI)["grpo in bf16"], "sim")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert max(line["actor/logprob_gap"] for line in lines) < BF16_GAP


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", OTHERS)
def test_other_examples_have_the_cpus_metrics(name):
    found = results("sft", "grpo", *OTHERS)[name]
    check_metrics(metrics(found, "sim"), metrics(found, "cpu"))
