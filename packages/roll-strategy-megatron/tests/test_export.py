"""A model that is spread over ranks is read and written as transformers has it, and no rank holds more of it at once
than a little beside its own share."""

from __future__ import annotations

import pytest
import torch
from megatron_programs import MIXTURE, case_on, export, loaded_weights, read
from transformers import AutoModelForCausalLM

from roll_testing.bounds import check_same
from roll_testing.models import QWEN3, write_checkpoint
from roll_testing.ranks import free_port

PIECE_BYTES = 1 << 16
DENSE = QWEN3 | {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 12}
TIED = DENSE | {"tie_word_embeddings": True}
EXPERTS = MIXTURE | {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 8}
GATHERED = {"dense": 2 * 192 * 64 * 4, "experts": 4 * 2 * 64 * 64 * 4}
"""Bytes of the most that is gathered at once: gate and up of a layer; those of all of its experts."""


def case_of(model, config, folder):
    written = write_checkpoint(folder, model, task="causal_lm", vocab_size=61)
    return case_on(2, config, written, training=None, name="megatron_infer")


def test_rank_reads_its_shards_one_weight_at_a_time(host, tmp_path):
    config = {"pipeline_model_parallel_size": 2}
    first, last = host.run(read, case_of(TIED, config, tmp_path / "dense"), num_ranks=2, timeout_s=100)
    for (names, most), own, others in ((first, range(6), range(6, 12)), (last, range(6, 12), range(6))):
        assert all(any(f".layers.{layer}." in name for name in names) for layer in own)
        assert not any(f".layers.{layer}." in name for layer in others for name in names)
        assert len(names) == len(set(names))
        assert most == GATHERED["dense"]
    assert "model.norm.weight" in last[0]
    assert "model.norm.weight" not in first[0]
    config = {"expert_model_parallel_size": 2}
    answers = host.run(read, case_of(EXPERTS, config, tmp_path / "experts"), num_ranks=2, timeout_s=100)
    for rank, (names, most) in enumerate(answers):
        read_of = {int(name.split(".experts.")[1].split(".")[0]) for name in names if ".experts." in name}
        assert read_of == {2 * rank, 2 * rank + 1}
        assert most <= GATHERED["experts"] / 4


def test_a_tensor_of_all_experts_is_read_once(host, tmp_path):
    """As transformers writes it with `save_original_format=False`."""
    case = case_of(EXPERTS, {"expert_model_parallel_size": 2}, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path, save_original_format=False)
    for names, most in host.run(read, case, num_ranks=2, timeout_s=100):
        assert "model.layers.7.mlp.experts.gate_up_proj" in names
        assert len(names) == len(set(names))
        assert most <= GATHERED["experts"]
    (found, _) = host.run(loaded_weights, case.with_(master_port=free_port()), num_ranks=2, timeout_s=100)
    check_same("weights", found, {name: each.numpy() for name, each in loaded.state_dict().items()})


@pytest.mark.parametrize(
    ("model", "gathered", "config"),
    [
        pytest.param(DENSE, "dense", {"tensor_model_parallel_size": 2}, id="tensor"),
        pytest.param(TIED, "dense", {"pipeline_model_parallel_size": 2}, id="pipeline, tied"),
        pytest.param(EXPERTS, "experts", {"expert_model_parallel_size": 2}, id="experts"),
    ],
)
def test_export_equals_the_source_and_no_rank_holds_all(host, tmp_path, model, gathered, config):
    case = case_of(model, config, tmp_path / "in")
    counts = host.run(export, case, str(tmp_path / "out"), PIECE_BYTES, num_ranks=2, timeout_s=100)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "in").state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    whole = sum(each.nbytes for each in expected.values())
    # What is gathered, once as it comes from the ranks and once in order; and on rank 0 a file that is not yet full.
    for rank, (most, share) in enumerate(counts):
        assert GATHERED[gathered] <= most <= 3 * GATHERED[gathered] + PIECE_BYTES, (rank, most, share)
    assert 3 * GATHERED[gathered] + PIECE_BYTES < whole / 3
