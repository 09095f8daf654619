"""Adapters on the real engine, where it is installed: what the conformance kit does not ask."""

from __future__ import annotations

import pytest
from vllm_live import CACHE

from roll_infer_vllm.config import VllmConfig
from shared_tests.adapted_engine import Adapted, AdaptedTests

pytestmark = pytest.mark.engine("vllm")


class TestAdapted(AdaptedTests):
    @pytest.fixture(scope="class")
    @classmethod
    def live(cls):
        from roll_infer_vllm.strategy import VllmStrategy

        engine = Adapted(VllmStrategy(VllmConfig.model_validate({**CACHE, "enable_lora": True})))
        yield engine
        engine.close()
