"""vLLM's second model runner (V2), its default on CUDA: the contract of infer strategies, and routed experts."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
from interpreted_runner import second_runner
from vllm_live import start

from roll_core.errors import UnsupportedError
from roll_testing import InferStrategyConformance
from roll_testing.errors import raises_error
from roll_testing.infer import lifecycle
from roll_testing.infer.routing import MIXTURE
from roll_testing.models import write_checkpoint

pytestmark = [pytest.mark.engine("vllm"), pytest.mark.timeout(900)]  # kernels are interpreted


class TestSecondRunner(InferStrategyConformance):
    name = "vllm"
    variants = {"default": {"kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 64, "block_size": 32}}  # noqa: RUF012
    tight_config = {"kv_cache_memory_bytes": 1 << 20, "block_size": 32}  # noqa: RUF012
    adapter_config = {"enable_lora": True}  # noqa: RUF012
    timeout_s = 600.0  # kernels are interpreted

    def mixture(self, folder):
        """A first layer without experts, for which vLLM returns zeros."""
        keys = {**MIXTURE, "num_hidden_layers": 3, "mlp_only_layers": [0]}
        return write_checkpoint(folder, keys, task="causal_lm", vocab_size=self.vocab_size)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _second_runner(cls, _on_one_thread):
        """Within `_on_one_thread`, whose end stops the shared engine.

        Requests that are interrupted have 80 tokens instead of 400: the engine samples tens of tokens per second.
        """
        with second_runner(), patch.object(lifecycle, "LONG", 80):
            yield


@pytest.mark.parametrize(("variable", "facts"), [("0", ("system_envs",)), (None, ("Triton",))])
def test_router_replay_without_the_second_runner_is_an_error(tmp_path, monkeypatch, variable, facts):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", variable)
    model = write_checkpoint(tmp_path, MIXTURE, task="causal_lm", vocab_size=40)
    with raises_error(UnsupportedError, "router_replay", *facts):
        start(replace(model, router_replay=True))
