"""What training needs on a device: shown on a CPU, with torch's device functions or type replaced."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from roll_core.errors import ModelError
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.train import TrainingSpec
from roll_modeling import offload
from roll_modeling.logprobs import LinearHead, read_head, write_head
from roll_modeling.model import check_ties, load_model, moved, tied_names
from roll_modeling.process_group import select_device
from roll_strategy_hf import replicas
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.errors import raises_error
from roll_testing.tiny_flow import FLOW


@pytest.fixture
def no_shallow_copies(tiny, monkeypatch):
    """A device whose tensors cannot replace those of the host in place, as PrivateUse1 without torch's override."""
    load_model(ModelSpec(random_init=tiny))  # torch._dynamo, which comes with the first model, lists torch's functions
    monkeypatch.setattr(torch, "_has_compatible_shallow_copy_type", lambda one, other: False)


def test_a_loaded_model_keeps_its_ties(tiny, no_shallow_copies):
    model = load_model(ModelSpec(random_init={**tiny, "tie_word_embeddings": True}))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    separate = load_model(ModelSpec(random_init={**tiny, "tie_word_embeddings": False}))
    assert separate.lm_head.weight is not separate.model.embed_tokens.weight


def test_a_moved_module_keeps_any_tie(no_shallow_copies):
    module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    module[1][0].weight = module[1][1].weight = module[0].weight
    module[1][1].bias = module[0].bias
    moved(module, "cpu")
    assert module[1][0].weight is module[1][1].weight is module[0].weight
    assert module[1][1].bias is module[0].bias
    assert module[1][0].bias is not module[0].bias


def test_a_tie_that_came_apart_is_an_error(tiny):
    model = load_model(ModelSpec(random_init={**tiny, "tie_word_embeddings": True}))
    ties = tied_names(model)
    check_ties(model, ties)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with raises_error(ModelError, "lm_head.weight", "model.embed_tokens.weight"):
        check_ties(model, ties)


def build_flow(**mesh):
    """A model without a probe of its attention, so that the device `meta` will do."""
    strategy = HFTrainStrategy(HFTrainConfig(fused=False), TrainingSpec(learning_rate=1e-2, num_steps=9))
    strategy.build(FLOW, MeshInfo(role="flow", **mesh))
    return strategy


def test_collectives_of_resuming_get_tensors_of_the_device(tmp_path, monkeypatch):
    """NCCL and HCCL have no backend for tensors of the host."""
    devices = []
    monkeypatch.setattr(replicas, "ProcessGroup", lambda mesh: SimpleNamespace())
    monkeypatch.setattr(replicas.dist, "broadcast", lambda tensor, source: devices.append(tensor.device.type))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    resumed = build_flow(rank=1, world_size=2, device="meta", backend="fake")
    num_parameters = len(devices)
    with suppress(RuntimeError):  # the device `meta` has no values to read back
        resumed.load(tmp_path)
    assert len(devices) > 2 * num_parameters
    assert set(devices) == {"meta"}


def test_copies_to_the_host_wait_for_their_own_devices(monkeypatch):
    copied, waits = [], []
    monkeypatch.setattr(
        offload.torch, "empty", lambda *shape, **_: SimpleNamespace(copy_=lambda t, non_blocking: copied.append(t))
    )
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *device: waits.append(device))

    def tensor(device):
        made = SimpleNamespace(shape=(1,), dtype=torch.float32, device=torch.device(device))
        made.detach = lambda: made
        return made

    offload.host_copies({"host": tensor("cpu"), "a": tensor("cuda:1"), "b": tensor("cuda:1"), "c": tensor("cuda:3")})
    assert len(copied) == 4
    assert sorted(str(device) for (device,) in waits) == ["cuda:1", "cuda:3"]


def test_head_loads_to_a_device_unknown_to_safetensors(tmp_path):
    write_head(LinearHead(weight=torch.ones(3, 2), bias=torch.ones(3)), tmp_path / "head")
    head = read_head(str(tmp_path / "head"), torch.device("meta"))
    assert head.weight.device.type == head.bias.device.type == "meta"


def test_building_selects_the_device_of_its_thread(monkeypatch):
    selected = []
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda index: selected.append((threading.get_ident(), index))
    )
    build_flow(device="meta:3")
    select_device(torch.device("cpu"))
    assert set(selected) == {(threading.get_ident(), 3)}
