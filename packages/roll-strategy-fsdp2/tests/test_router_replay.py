"""The engine's experts, however the model is spread."""

from __future__ import annotations

import pytest
from fsdp2_programs import MIXTURES, MOE, mixture_case

from roll_strategy_fsdp2.config import FSDP2Config
from roll_testing.errors import raises_error
from shared_tests.replaying import check_replay

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_replayed_as_in_one_process(ranks, tmp_path, name):
    check_replay(ranks, mixture_case(tmp_path, name), MOE, MOE["vocab_size"])


def test_routers_that_are_not_known_are_named():
    with raises_error(ValueError, "gpt_oss"):
        FSDP2Config().check_router_replay({"model_type": "gpt_oss"})
    FSDP2Config().check_router_replay({"model_type": "qwen3_moe"})
