"""Ranks for tests of our own: processes that have imported everything once, and what is built on them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from roll_core.plugins.requirements import check_requirements
from roll_strategy_deepspeed.plugin import roll_train_strategies
from roll_testing.bench import Case
from roll_testing.losses import TRAINING
from roll_testing.models import QWEN3, write_checkpoint
from roll_testing.ranks import RankHost, free_port, shared_host

sys.path.append(str(Path(__file__).parent))  # ranks import modules of this folder by name

from deepspeed_ranks import ENVIRONMENT, PRELOAD, in_float16

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def provider():
    found = next(iter(roll_train_strategies()))
    check_requirements(found, owner="the tests")
    return found


RARE = re.compile(r"::TestStages::.*\[(zero1|zero[02]-1)\b")
"""Tests of the conformance kit at stage 1, whose optimizer is that of stage 2, and on one rank of these stages."""


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    for item in items:
        if RARE.search(item.nodeid) and str(item.path).startswith(f"{HERE}/"):
            item.add_marker(pytest.mark.slow)
        if "provider" in getattr(item, "fixturenames", ()) and str(item.path).startswith(f"{HERE}/"):
            item.add_marker(pytest.mark.engine("deepspeed"))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), QWEN3, task="causal_lm", vocab_size=61)


@pytest.fixture
def case(provider, model):
    """One rank that trains the small model at stage 0, to be changed by `with_`."""
    return Case(provider=provider, strategy_config={}, model=model, training=TRAINING)


def running(host):
    def run(function, case, *arguments):
        ready = case.with_(master_port=free_port() if case.world_size > 1 else 0, devices=("cpu",) * case.world_size)
        return host.run(function, ready, *arguments, num_ranks=case.world_size, timeout_s=100)

    return run


@pytest.fixture(scope="session")
def ranks():
    """`ranks(function, case, *arguments)`: what each rank returned."""
    return running(shared_host(tuple(sorted(ENVIRONMENT.items())), PRELOAD))


@pytest.fixture(scope="session")
def ranks_in_float16(ranks):
    """The same where DeepSpeed takes the host for one that computes in float16: slow ones do, too."""
    return lambda function, case, *arguments: ranks(in_float16, case, function, *arguments)


@pytest.fixture(scope="session")
def ranks_without_programs():
    """The same where no program can be found, a compiler and ninja among them."""
    host = RankHost(environment={**ENVIRONMENT, "PATH": ""}, preload=PRELOAD)
    yield running(host)
    host.close()
