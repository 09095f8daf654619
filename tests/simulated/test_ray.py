"""Roles in processes of their own, on simulated devices: two ranks, resume, and every transport between processes."""

from __future__ import annotations

from typing import Any

import pytest

from shared_tests.simulated import check_metrics, program

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return program("ray_runs", folder=tmp_path_factory.mktemp("ray"))


def test_run_on_two_ranks_has_the_metrics_of_one_on_cpu(runs):
    check_metrics(runs["two ranks"]["metrics"], runs["one rank"]["metrics"])


def test_resumed_run_on_two_ranks_is_equal_bit_for_bit(runs):
    assert runs["two ranks, resumed"]["metrics"] == runs["two ranks"]["metrics"]


@pytest.mark.parametrize("transport", ["shm", "disk", "collective"])
def test_interprocess_transport_delivers_the_trainer_weights(runs, transport):
    found = runs[transport]
    assert found["transports"] == {"actor_train -> actor_infer": transport}
    check_metrics(found["metrics"], runs["grpo"]["metrics"])
