"""Module programs on ranks that share a module: what the conformance kit does not ask."""

from __future__ import annotations

import pytest

from roll_core.errors import UnsupportedError
from roll_core.plugins.registry import load_registry
from roll_core.spec.model import ModelSpec
from roll_core.spec.providers import TrainProvider
from roll_testing.bench import Case
from roll_testing.programs import expect, fail_to_build
from roll_testing.tiny_flow import FLOW
from shared_tests.flow_experts import check_experts
from shared_tests.module_programs import check_disagreement, check_low_precision

pytestmark = pytest.mark.engine


@pytest.fixture
def case():
    provider = load_registry().find(TrainProvider, "fsdp2_train")
    return Case(provider=provider, strategy_config={}, model=ModelSpec(), training=None, devices=("cpu",) * 2)


def test_programs_that_differ_between_ranks_raise_on_all(ranks, case):
    check_disagreement(ranks, case)


def test_bf16_stays_near_float32(ranks, case):
    check_low_precision(ranks, case.with_(strategy_config={"reshard_after_forward": True}), "bf16", 0.02)


@pytest.mark.parametrize("reduces_each", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_with_different_experts_train_as_one_rank(ranks, case, reduces_each, tmp_path):
    pytest.importorskip("diffusers")
    keys = {"reduce_scatter_during_grad_accumulation": reduces_each}
    check_experts(ranks, case.with_(strategy_config=keys), tmp_path)


@pytest.mark.parametrize("key", ["tensor_model_parallel_size", "ulysses_size", "ring_size", "ep_size"])
def test_ranks_do_not_split_a_librarys_module(ranks, case, key):
    error, closing = ranks(fail_to_build, case.with_(model=FLOW, strategy_config={key: 2}))[0]
    expect(error, UnsupportedError, "build", key)
    assert closing is None
