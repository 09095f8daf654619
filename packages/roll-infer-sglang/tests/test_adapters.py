"""Adapters on the real engine, where it is installed: what the conformance kit does not ask."""

from __future__ import annotations

import pytest
from sglang_on_a_cpu import ON_A_CPU, stood_in

from roll_infer_sglang.config import SglangConfig
from shared_tests.adapted_engine import Adapted, AdaptedTests

pytestmark = pytest.mark.engine("sglang")


class TestAdapted(AdaptedTests):
    @pytest.fixture(scope="class")
    @classmethod
    def live(cls):
        from roll_infer_sglang.strategy import SglangStrategy

        with stood_in():
            engine = Adapted(SglangStrategy(SglangConfig.model_validate({**ON_A_CPU, "enable_lora": True})))
            yield engine
            engine.close()
