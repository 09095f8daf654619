"""A model that is gathered tensor by tensor is written as transformers writes it, in pieces wherever that can be."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers.core_model_loading import Chunk, WeightConverter

from roll_modeling import pieces
from roll_modeling.model import load_model
from roll_modeling.pieces import write_gathered
from roll_modeling.shards import ShardFiles
from roll_testing.models import QWEN3, write_checkpoint

MIXTURE = QWEN3 | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTRAL = QWEN3 | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
GATE_AND_UP = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
FUSED = [WeightConverter("mlp.gate_up_proj.weight", GATE_AND_UP, operations=[Chunk(dim=0)])]


def write(model, spec, folder):
    write_gathered(
        model,
        spec,
        folder,
        adapters=None,
        exported=((name, each.detach()) for name, each in model.named_parameters()),
        gather=lambda tensor: tensor,
        shape_of=lambda each: tuple(each.shape),
        writes=True,
    )


def tensors(folder):
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


@pytest.mark.parametrize(
    ("architecture", "conversions", "in_pieces"),
    [
        (QWEN3, None, True),
        (QWEN3 | {"tie_word_embeddings": True}, None, True),
        (MIXTURE, None, True),
        (MIXTRAL, None, True),
        (QWEN3, FUSED, False),
    ],
    ids=["as held", "tied", "experts", "renamed experts", "stored as one"],
)
def test_files_hold_what_transformers_would_store(monkeypatch, tmp_path, architecture, conversions, in_pieces):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1 << 13)
    spec = write_checkpoint(tmp_path / "in", architecture, task="causal_lm", vocab_size=61)
    model = load_model(spec)
    if conversions:
        model._weight_conversions = conversions
    model.save_pretrained(tmp_path / "expected")
    write(model, spec, tmp_path / "out")
    found, expected = tensors(tmp_path / "out"), tensors(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 2) == in_pieces
    assert ("model.layers.0.mlp.gate_up_proj.weight" in found) == bool(conversions)


def test_a_file_is_written_when_the_next_tensor_does_not_fit(tmp_path):
    files = ShardFiles(tmp_path, "part-{}.safetensors", 16)
    named = [files.add({str(number): torch.full((2,), float(number))}) for number in range(3)]
    named.append(files.add({"large": torch.zeros(9)}))
    files.flush()
    assert named == ["part-1.safetensors", "part-1.safetensors", "part-2.safetensors", "part-3.safetensors"]
    assert [names for _, names in files.files] == [["0", "1"], ["2"], ["large"]]
    assert load_file(tmp_path / "part-2.safetensors")["2"].tolist() == [2.0, 2.0]
