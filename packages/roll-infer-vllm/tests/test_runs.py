"""The quick start, shortened, with the engine's name changed and where the roles sit: as a user runs it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from shared_tests.engine_runs import ImageRunTests
from shared_tests.quickstart import FULL_RUN_S, LEARNED, PLACES, TAUGHT, QuickStartTests

STRICT = ("guards.logprob_gap=error",)
OTHER_TORCH = "2.12.1"


@pytest.mark.engine("vllm")
@pytest.mark.timeout(900)
class TestQuickStart(QuickStartTests):
    engine = "vllm"
    settings = {"kv_cache_memory_bytes": 64 << 20}  # noqa: RUF012
    repository = Path(__file__).parents[3]
    fp8 = ("+actor_infer.strategy_args.strategy_config.quantization=fp8",)

    @pytest.mark.ray
    @pytest.mark.parametrize("where", ["one process", pytest.param("apart and asynchronous", marks=pytest.mark.slow)])
    def test_short_run_works_in_fp8(self, pretrained, tmp_path, where):
        """Within the bounds of the guards, which would end it, and with importance weights that nobody asked for."""
        left = self.grpo(pretrained, tmp_path, *PLACES[where], *self.fp8, *STRICT)
        steps = left.metrics
        assert [line["step"] for line in steps] == list(range(1, 5 if "asynchronous" in where else 3))
        for name in ("actor/logprob_gap", "weight_sync/logprob_probe"):
            found = [line[name] for line in steps if name in line]
            assert max(found) > 1e-3
        assert all(0.5 < line["correction/weight/mean"] < 1.2 for line in steps)

    @pytest.mark.slow
    @pytest.mark.timeout(2 * FULL_RUN_S)
    def test_training_reaches_the_accuracy_in_fp8(self, taught, tmp_path):
        """The quick start in full."""
        left = self.whole(taught, tmp_path, *self.fp8, *STRICT)
        assert left.accuracies[0] < TAUGHT
        assert left.accuracies[-1] > LEARNED

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


@pytest.mark.slow
@pytest.mark.engine("vllm")
@pytest.mark.timeout(900)
class TestImageRun(ImageRunTests):
    engine = "vllm"
    settings = {"kv_cache_memory_bytes": 64 << 20}  # noqa: RUF012
