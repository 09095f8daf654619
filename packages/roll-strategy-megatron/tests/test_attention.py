"""Where torch's kernels of flash-attn 2 take a microbatch they are asked once per layer, with the same result. They are
CUDA's; here something plain stands for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron_programs import DEEPSEEK
from test_arrangements import MISTRAL, Arrangement, check_against_transformers, sizes
from varlen import with_kernel

from roll_strategy_megatron import attention
from roll_testing.models import QWEN3
from roll_testing.ranks import free_port


@pytest.fixture
def run(host):
    def on_ranks(function, case, *arguments):
        ready = case.with_(master_port=free_port())
        return host.run(with_kernel, function, ready, *arguments, num_ranks=case.world_size, timeout_s=200)

    return on_ranks


@pytest.mark.parametrize(
    "arrangement",
    [
        pytest.param(Arrangement(ranks=1, model=MISTRAL), id="window"),
        pytest.param(Arrangement(ranks=2, model=MISTRAL, config=sizes(cp=2)), id="window, cp 2"),
        pytest.param(Arrangement(ranks=2, model=QWEN3, config=sizes(cp=2)), id="cp 2", marks=pytest.mark.slow),
        pytest.param(Arrangement(ranks=1, model=DEEPSEEK), id="values smaller than keys", marks=pytest.mark.slow),
    ],
)
def test_one_call_computes_all_sequences(run, tmp_path, arrangement):
    check_against_transformers(run, tmp_path, arrangement)


@pytest.mark.parametrize(
    ("changed", "takes"),
    [
        ({}, True),
        ({"shape": (7, 4, 192)}, True),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, False),
        ({"is_cuda": False}, False),
        ({"shape": (7, 4, 100)}, False),
        ({"shape": (7, 4, 256)}, False),
    ],
)
def test_the_kernels_are_asked_only_for_what_they_take(monkeypatch, changed, takes):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    query = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (7, 4, 128), "device": "cuda:0"}
    assert attention.kernel_takes(SimpleNamespace(**query | changed)) is takes


def test_the_kernels_are_not_asked_on_devices_that_lack_them(monkeypatch):
    query = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(7, 4, 128), device="cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert not attention.kernel_takes(query)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert attention.kernel_takes(query)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert not attention.kernel_takes(query)
