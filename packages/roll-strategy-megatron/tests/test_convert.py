"""`roll-core checkpoint convert` makes of the portable state what the strategy itself exports."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from convert_programs import write_and_export
from megatron_programs import MIXTURE, case_on
from safetensors.torch import load_file

from roll_core.cli.main import main
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.spec.model import LoraSpec
from roll_testing.bench import Step
from roll_testing.losses import LOSSES
from roll_testing.models import make_batch, write_checkpoint

EXPERTS = LoraSpec(targets=("o_proj", "gate_proj", "down_proj"), rank=2, alpha=6.0)


@pytest.mark.parametrize("export", ["merged", "adapter"])
def test_converted_expert_adapters_equal_the_export(host, tmp_path, export):
    model = write_checkpoint(tmp_path / "model", MIXTURE, task="causal_lm", vocab_size=61)
    lora = replace(EXPERTS, export=export)
    case = case_on(2, {"expert_model_parallel_size": 2}, replace(model, lora=lora))
    steps = [Step(sequences=make_batch(61, seed=seed), loss=LOSSES["sft"]) for seed in range(2)]
    state = {"strategy": "megatron_train", "world_size": 2, "weight_version": 1, "portable": True}
    store = CheckpointDirectory(tmp_path / "checkpoints")
    with store.writing(1, {"pipeline": "sft", "pipeline_state": {}, "roles": {"sft_train": state}}) as path:
        folder = path / "sft_train" / "portable"
        folder.mkdir(parents=True)
        host.run(write_and_export, case, steps, str(folder), str(tmp_path / "export"), num_ranks=2, timeout_s=150)
    assert main(["checkpoint", "convert", str(store.directory / "step-1"), str(tmp_path / "out")]) == 0
    file = "model.safetensors" if export == "merged" else "adapter_model.safetensors"
    found, expected = (load_file(tmp_path / name / file) for name in ("out", "export"))
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each)
    if export == "merged":
        before = load_file(tmp_path / "model" / file)
        moved = [name for name in before if not torch.equal(before[name], expected[name])]
        assert len(moved) == 2 + 2 * 2 * 4  # o_proj of two layers; gate and down of four experts of each
