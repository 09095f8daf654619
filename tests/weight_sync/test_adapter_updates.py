"""What engines refuse of a published adapter, and how one is written for those that read folders."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from roll_core.errors import CorruptTensorError, MissingTensorError, UnexpectedTensorError
from roll_core.spec.model import LoraSpec
from roll_core.spec.weights import make_manifest
from roll_modeling.engine_weights import collected, write_adapter
from roll_testing.errors import raises_error
from roll_weight_transports.buckets import Incoming
from roll_weight_transports.comparing import compare_adapter, entries, refuse_adapter

RANK = 2
LORA = LoraSpec(targets=("q_proj", "o_proj"), rank=RANK, alpha=2.0)
ROOM = {
    "layers.0.q_proj.lora_A.weight": (4, 6),
    "layers.0.q_proj.lora_B.weight": (8, 4),
    "layers.0.o_proj.lora_A.weight": (4, 8),
    "layers.0.o_proj.lora_B.weight": (6, 4),
}
"""Shapes in an engine whose adapters have rank 4 at most."""


def adapter(**changes):
    found = {
        "layers.0.q_proj.lora_A.weight": torch.randn(RANK, 6),
        "layers.0.q_proj.lora_B.weight": torch.randn(8, RANK),
    }
    return {name: each for name, each in {**found, **changes}.items() if each is not None}


def refuse(tensors):
    manifest = make_manifest(1, tensors.items())
    refuse_adapter("engine rank 0", "Acme", manifest, LORA, [compare_adapter(entries(manifest), ROOM.__getitem__)])


def test_an_adapter_of_some_layers_and_a_smaller_rank_fits():
    assert refuse(adapter()) is None


@pytest.mark.parametrize(
    ("changes", "error", "facts"),
    [
        (
            {
                "layers.9.q_proj.lora_A.weight": torch.ones(RANK, 6),
                "layers.9.q_proj.lora_B.weight": torch.ones(8, RANK),
            },
            UnexpectedTensorError,
            ("layers.9.q_proj.lora_A.weight", "2"),
        ),
        ({"model.norm.weight": torch.ones(6)}, UnexpectedTensorError, ("model.norm.weight",)),
        (
            {"layers.0.q_proj.lora_A.weight": torch.ones(RANK, 7)},
            CorruptTensorError,
            ("lora_A.weight", "[2, 7]", "[4, 6]"),
        ),
        ({"layers.0.q_proj.lora_B.weight": torch.ones(8, 5)}, CorruptTensorError, ("[8, 4]",)),
        ({"layers.0.q_proj.lora_B.weight": torch.ones(8)}, CorruptTensorError, ("[8]",)),
        ({"layers.0.q_proj.lora_B.weight": torch.ones(8, 3)}, CorruptTensorError, ("rank 3", "2")),
        (
            {"layers.0.q_proj.lora_B.weight": None},
            MissingTensorError,
            ("q_proj.lora_B.weight", "layers.0.q_proj.lora_A.weight"),
        ),
        ({"layers.0.o_proj.lora_B.weight": torch.ones(6, RANK)}, MissingTensorError, ("o_proj.lora_A.weight",)),
    ],
)
def test_invalid_adapter_is_named(changes, error, facts):
    with raises_error(error, *facts):
        refuse(adapter(**changes))


def test_collected_tensors_outlive_the_receive_buffer():
    """A transport hands out one piece of memory again and again."""
    memory, sent = torch.empty(16), adapter()

    def arriving():
        for name, each in sent.items():
            view = memory[: each.numel()].view(each.shape)
            yield name, view.copy_(each)

    found = collected(Incoming("engine rank 0", make_manifest(1, sent.items()), arriving()))
    assert found.keys() == sent.keys()
    assert all(torch.equal(found[name], each) for name, each in sent.items())


def test_a_tensor_that_does_not_come_is_named():
    manifest, tensors = make_manifest(1, adapter().items()), adapter(**{"layers.0.q_proj.lora_B.weight": None})
    with raises_error(MissingTensorError, "q_proj.lora_B.weight", "version 1"):
        collected(Incoming("engine rank 0", manifest, iter(tensors.items())))


def test_layers_of_a_smaller_rank_are_filled_up_with_zeros(tmp_path):
    lora = LoraSpec(targets=("q_proj", "o_proj"), rank=4, alpha=4.0, rank_pattern={"q_proj": RANK})
    tensors = adapter() | {
        "layers.0.o_proj.lora_A.weight": torch.randn(4, 8),
        "layers.0.o_proj.lora_B.weight": torch.randn(6, 4),
    }
    manifest = make_manifest(1, tensors.items())
    fits = {"unknown": [], "shapes": {}}
    refuse_adapter("engine rank 0", "Acme", manifest, lora, [fits])
    with raises_error(CorruptTensorError, "layers.0.o_proj.lora_A.weight", "rank 4", "2"):
        refuse_adapter("engine rank 0", "Acme", manifest, replace(lora, rank_pattern={".*": RANK}), [fits])
    write_adapter(tmp_path, tensors, lora.max_rank)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    for layer in ("q_proj", "o_proj"):
        names = [f"layers.0.{layer}.lora_{side}.weight" for side in "AB"]
        a_RI, b_OR = (stored[f"base_model.model.{name}"] for name in names)
        assert a_RI.shape[0] == b_OR.shape[1] == 4
        torch.testing.assert_close(b_OR @ a_RI, tensors[names[1]] @ tensors[names[0]])


def test_a_written_adapter_is_what_peft_reads(tmp_path):
    """W + scale · B A with the scale in B: so peft's scale is 1."""
    from peft import LoraConfig

    tensors = adapter()
    write_adapter(tmp_path, tensors, RANK)
    config = LoraConfig.from_pretrained(str(tmp_path))
    assert config.lora_alpha / config.r == 1
    assert set(config.target_modules) == {"layers.0.q_proj"}
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert {f"base_model.model.{name}" for name in tensors} == stored.keys()
    assert all(torch.equal(stored[f"base_model.model.{name}"], each) for name, each in tensors.items())
    assert json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))["peft_type"] == "LORA"
