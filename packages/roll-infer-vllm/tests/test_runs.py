"""The quick start, shortened, with the engine's name changed and where the roles sit: as a user runs it."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path

import pytest

from roll_core.testing.quickstart import QuickStartTests

OTHER_TORCH = "2.12.1"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.timeout(900)
class TestQuickStart(QuickStartTests):
    engine = "vllm"
    settings = {"kv_cache_memory_bytes": 64 << 20}  # noqa: RUF012
    repository = Path(__file__).parents[3]

    @pytest.mark.ray
    @pytest.mark.slow
    def test_trainer_and_engine_may_have_different_torch(self, pretrained, tmp_path, monkeypatch):
        """The trainer in an environment that uv makes of packages, vLLM in this one."""
        monkeypatch.setenv("ROLL_ENVIRONMENTS_DIR", str(self.repository / ".engines" / "roles"))
        left = self.grpo(pretrained, tmp_path, f"+actor_train.environment.packages=['torch=={OTHER_TORCH}']")
        self.check(left, num_steps=2)
        record = left.record
        assert record["weight_transports"] == {"actor_train -> actor_infer": "shm"}
        assert record["environments"]["actor_train"]["torch"].partition("+")[0] == OTHER_TORCH
        assert record["versions"]["torch"] == version("torch")
        assert not version("torch").startswith(OTHER_TORCH)
