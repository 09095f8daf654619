"""Data parallel over gloo, beyond the conformance kit: 4-bit base models, non-finite losses, experts of a flow."""

from __future__ import annotations

import pytest
import torch
from replica_program import lose_one, run

from roll_core.errors import NonFiniteError
from roll_core.plugins.registry import load_registry
from roll_core.spec.model import LoraSpec, ModelSpec
from roll_core.spec.providers import TrainProvider
from roll_testing import TrainStrategyConformance
from roll_testing.bench import Case
from roll_testing.models import QWEN3
from roll_testing.ranks import RankHost, free_port
from shared_tests.flow_experts import check_experts

MODEL = {**QWEN3, "vocab_size": 61}
SEQUENCES = [
    ([5, 17, 3, 44, 9], 2),
    ([8], 1),
    ([1, 60, 33, 2, 2, 19, 7, 21, 50], 1),
    ([4, 11, 12], 3),
    ([30, 31, 7, 9, 10, 55, 54, 53, 2, 6, 18, 19], 5),
    ([41, 42], 1),
]

IN_4_BITS = LoraSpec(targets=("all-linear",), rank=4, alpha=12.0, load_in_4bit=True)


@pytest.fixture(scope="module")
def host():
    """Processes that have imported everything once."""
    host = RankHost(preload=(*TrainStrategyConformance.preload, "replica_program"))
    yield host
    host.close()


def relative(gradient, expected):
    one, other = torch.tensor(gradient), torch.tensor(expected)
    return float((one - other).norm() / other.norm())


def test_a_base_model_in_4_bits_is_that_of_rank_0(host, tmp_path):
    one, two = (
        host.run(run, size, free_port(), MODEL, SEQUENCES, tmp_path / str(size), IN_4_BITS, num_ranks=size)
        for size in (1, 2)
    )
    for each in two:
        assert relative(each["gradient"], one[0]["gradient"]) < 1e-6
        assert each["weights"] == two[0]["weights"]
        assert each["stats"][1] == each["stats"][2]


def test_non_finite_loss_on_one_rank_ends_the_call_on_all(host):
    spoilt = SEQUENCES[4]
    errors = host.run(lose_one, 3, free_port(), MODEL, SEQUENCES, str(spoilt[0]), num_ranks=3)
    for error in errors:
        assert error.is_a(NonFiniteError)
        assert str(spoilt[0]) in error.message
    assert sum(error.message.startswith("rank ") for error in errors) == 2


def test_ranks_with_different_experts_train_as_one_rank(host, tmp_path):
    pytest.importorskip("diffusers")

    def run(function, case, *arguments):
        ready = case.with_(master_port=free_port())
        return host.run(function, ready, *arguments, num_ranks=case.world_size, timeout_s=100)

    provider = load_registry().find(TrainProvider, "hf_train")
    check_experts(run, Case(provider=provider, strategy_config={}, model=ModelSpec(), training=None), tmp_path)
