"""What training ends responses with ends generation, in the run and in its export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from roll_core.cli import main as cli
from roll_core.data.tokenizers import make_tokenizer
from roll_core.spec.config import TokenizerConfig
from roll_testing.runs import TINY
from shared_tests.runs import PipelineRuns

EOS, END = 1, 2
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'user' %}>{% else %}<end>{% endif %}{% endfor %}"
)


def write_model(folder: Path, *, eos: int, generation: int | list[int] | None, template: str = "") -> str:
    """A model whose config ends at `EOS`, with a tokenizer whose end-of-sequence token is `eos`."""
    tokenizer = make_tokenizer(
        TokenizerConfig(kind="char", alphabet="0123456789>"), (), folder, control_tokens=("<end>",)
    )
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos)
    tokenizer.chat_template = template or None
    tokenizer.save_pretrained(folder)
    keys = {"vocab_size": len(tokenizer), "eos_token_id": EOS, "pad_token_id": 3, "bos_token_id": None}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY, **keys)).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        GenerationConfig(eos_token_id=generation, pad_token_id=3).save_pretrained(folder)
    return str(folder)


def config(runs: PipelineRuns, model: str, **given: Any) -> dict[str, Any]:
    """SFT with generated validation."""
    made = runs.sft(max_steps=40, eval_steps=40, pretrain=model, response_length=12, **given)
    del made["tokenizer"], made["sft_train"]["model_args"]["random_init"]
    engine = {"model_args": {"dtype": "fp32"}, "strategy_args": {"strategy_name": "hf_infer"}, "device_mapping": [0]}
    reward = {"reward": "function", "function": "rollrewards:constant"}
    made["validation"]["generating_args"] = {"temperature": 0.0}
    return made | {"actor_infer": engine, "rewards": {"constant": reward}}


@pytest.mark.parametrize("generation", [EOS, None], ids=["generation_config", "config"])
def test_the_tokenizers_end_token_ends_responses(local_runs: PipelineRuns, generation: int | None) -> None:
    model = write_model(local_runs.folder / "model", eos=END, generation=generation)
    result = local_runs.ok(config(local_runs, model))
    samples = [json.loads(line) for line in (result.run_dir.path / "samples.jsonl").read_text().splitlines()]
    assert {sample["finish"] for sample in samples if sample["step"] == 40} == {"stop"}
    export = AutoModelForCausalLM.from_pretrained(result.run_dir.export)
    tokenizer = AutoTokenizer.from_pretrained(result.run_dir.export)
    assert export.generation_config.eos_token_id == [END, EOS]
    for place in (export.config, export.generation_config):
        assert place.pad_token_id == tokenizer.pad_token_id == 0
    assert export.config.eos_token_id == tokenizer.eos_token_id == END
    prompt = tokenizer("531>", return_tensors="pt")
    tokens = export.generate(**prompt, max_new_tokens=12, do_sample=False)[0].tolist()
    assert tokens[-1] == END
    assert len(tokens) < 12


@pytest.mark.parametrize("export", ["preference", "adapter", "convert"])
def test_every_export_has_the_trained_end_token(local_runs: PipelineRuns, export: str) -> None:
    model = write_model(local_runs.folder / "model", eos=END, generation=EOS)
    made = local_runs.preference(max_steps=1, eval_steps=0, pretrain=model, loss_type="simpo")
    del made["tokenizer"], made["actor_train"]["model_args"]["random_init"]
    if export == "adapter":
        made["actor_train"]["model_args"] |= {"lora_target": "all-linear", "lora_rank": 2, "lora_export": "adapter"}
    result = local_runs.ok(made, *(["save_steps=1", "portable_checkpoints=true"] if export == "convert" else []))
    folder = result.run_dir.export
    if export == "convert":
        folder = local_runs.folder / "converted"
        assert cli.main(["checkpoint", "convert", str(result.run_dir.checkpoints / "step-1"), str(folder)]) == 0
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [END, EOS]
