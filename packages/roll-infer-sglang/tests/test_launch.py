"""What SGLang's server is told: without SGLang."""

from __future__ import annotations

import pytest

from roll_core.errors import ModelError
from roll_core.modeling.engine_files import engine_files
from roll_core.spec.model import MeshInfo
from roll_core.testing.infer.live import biased
from roll_infer_sglang.config import SglangConfig
from roll_infer_sglang.launch import SPARE_TOKENS, server_arguments


def told(device="cpu", **config):
    with engine_files(biased(), "SGLang") as files:
        mesh = MeshInfo(role="actor_infer", device=device)
        return server_arguments(SglangConfig.model_validate(config), biased(), mesh, files, 2)


@pytest.mark.parametrize(
    ("device", "level", "saver", "backup"),
    [("cuda:1", 0, False, False), ("cuda:1", 1, True, True), ("cuda:1", 2, True, False), ("cpu", 2, False, False)],
)
def test_memory_is_saved_where_an_engine_on_an_accelerator_may_sleep(device, level, saver, backup):
    found = told(device, sleep_level=level)
    assert (found["enable_memory_saver"], found["enable_weights_cpu_backup"]) == (saver, backup)
    assert "sleep_level" not in found


def test_a_device_is_taken_apart():
    found = told("cuda:1")
    assert (found["device"], found["base_gpu_id"], found["tp_size"]) == ("cuda", 1, 2)
    assert "max_total_tokens" not in found


def test_a_cpus_cache_is_bounded_unless_the_user_says_how():
    assert told()["max_total_tokens"] == 1 << 16
    assert told(max_total_tokens=4096)["max_total_tokens"] == 4096


def test_the_context_is_the_models_unless_it_is_to_be_shorter():
    assert told()["context_length"] == 256 + SPARE_TOKENS
    assert told(context_length=100)["context_length"] == 100 + SPARE_TOKENS
    with pytest.raises(ModelError, match="context_length is 257, but the model has 256 positions"):
        told(context_length=257)


def test_priorities_are_told_of_where_they_are_heeded():
    assert told()["disable_priority_preemption"]
    assert "disable_priority_preemption" not in told(enable_priority_scheduling=False)
