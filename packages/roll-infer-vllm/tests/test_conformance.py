"""The contract of infer strategies. Without vLLM only what needs none of it runs."""

from __future__ import annotations

import psutil
import pytest

from roll_testing import InferStrategyConformance


class TestVllm(InferStrategyConformance):
    name = "vllm"
    variants = {"default": {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 64}}  # noqa: RUF012
    tight_config = {"kv_cache_memory_bytes": 1 << 20, "block_size": 32}  # noqa: RUF012
    adapter_config = {"enable_lora": True}  # noqa: RUF012
    timeout_s = 300.0

    def processes(self, strategy):
        children = [each for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]
        return [each.pid for each in children if "EngineCore" in " ".join(each.cmdline())]

    @pytest.mark.xfail(reason="on a CPU vLLM has its first runner; TestSecondRunner runs this test", strict=True)
    def test_routed_experts_are_those_that_the_model_chooses(self, setup, fresh, tmp_path):
        super().test_routed_experts_are_those_that_the_model_chooses(setup, fresh, tmp_path)
