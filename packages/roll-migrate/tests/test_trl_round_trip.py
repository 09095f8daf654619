"""Scripts that run in TRL and, imported, here: the same losses and gradients in three steps. `./run test-engines trl`.

GRPO samples its responses at random. TRL therefore trains on the responses that the run here recorded: its generation
is replaced, and its rewards, advantages, reference and losses are its own.
"""

from __future__ import annotations

import base64
import json
import os
import random
import runpy
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from roll_core.cli.main import main
from roll_migrate.trl_keys import TABLES

pytestmark = pytest.mark.engine("trl")

SCRIPTS = Path(__file__).parent / "trl" / "runs"


@pytest.mark.parametrize("trainer", TABLES)
def test_every_argument_of_trl_has_a_rule(trainer):
    import trl

    config = next(getattr(trl, name) for name in dir(trl) if name.lower() == f"{trainer}config")
    sources = (config, trl.ModelConfig, trl.DatasetMixtureConfig)
    names = {argument.name for source in sources for argument in fields(source)}
    assert names - TABLES[trainer].keys() == set()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with the scripts, a model of random weights, and rows."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from roll_core.data.tokenizers import make_tokenizer
    from roll_core.spec.config import TokenizerConfig

    shutil.copytree(SCRIPTS, tmp_path, dirs_exist_ok=True)
    tokenizer = make_tokenizer(TokenizerConfig(kind="char", alphabet="0123456789+= "), (), tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=len(tokenizer), max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    Qwen3ForCausalLM(config).float().save_pretrained(tmp_path / "model")
    numbers = random.Random(0)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for _ in range(12):
            a, b = numbers.randrange(100), numbers.randrange(100)
            row = {"prompt": f"{a}+{b}=", "completion": str(a + b)}
            file.write(
                json.dumps(row | {"chosen": row["completion"], "rejected": str(1000 + 7 * a)[: a % 3 + 2]}) + "\n"
            )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def ours(script):
    """Loss, norm of the gradient and learning rate of each step of the imported run."""
    assert main(["import", "trl", script, "-o", "ours.yaml"]) == 0
    assert (
        main(["run", "ours.yaml", "exp_name=ours", "export_model=false", "save_steps=0", *RECORDS.get(script, ())]) == 0
    )
    lines = map(json.loads, Path("runs/ours/001/metrics.jsonl").read_text().splitlines())
    prefix = "actor" if script in RECORDS else "train"
    return [
        [line[f"{prefix}/{name}"] for name in ("loss", "grad_norm", "lr")] for line in lines if f"{prefix}/loss" in line
    ]


RECORDS = {"trl_grpo_digits.py": ["record_rollouts=true"]}


def theirs(script, *, replays=False):
    """The same of the script, which runs in a process of its own."""
    words = [sys.executable, __file__, script] if replays else [sys.executable, script]
    paths = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    subprocess.run(words, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": paths})
    history = json.loads(Path("history.json").read_text())
    return [[line[name] for name in ("loss", "grad_norm", "learning_rate")] for line in history if "loss" in line]


@pytest.mark.parametrize("script", ["trl_sft_sums.py", "trl_dpo_sums.py"])
def test_imported_script_has_the_losses_of_trl(script, folder):
    np.testing.assert_allclose(ours(script), theirs(script), rtol=1e-4)


def test_imported_grpo_has_the_losses_of_trl_on_its_responses(folder):
    mine = ours("trl_grpo_digits.py")
    np.testing.assert_allclose(mine, theirs("trl_grpo_digits.py", replays=True), rtol=1e-4, atol=1e-7)


def recorded(step):
    """Ids of the prompt and the response of each sample of a recorded step."""

    def array(value):
        return np.frombuffer(base64.b64decode(value[2]), dtype=value[0]).tolist()

    _, *groups = map(json.loads, Path(f"runs/ours/001/rollouts/step-{step}.jsonl").read_text().splitlines())
    return [
        (array(group["prompt_ids"]), array(sample["response_ids"])) for group in groups for sample in group["samples"]
    ]


if __name__ == "__main__":  # TRL on the recorded responses
    from trl import GRPOTrainer

    def _tokenize_prompts(self, prompts):
        return [prompt for prompt, _ in recorded(self.state.global_step + 1)], None, {}

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return [response for _, response in recorded(self.state.global_step + 1)], None

    GRPOTrainer._tokenize_prompts = _tokenize_prompts
    GRPOTrainer._generate_single_turn = _generate_single_turn
    runpy.run_path(sys.argv[1], run_name="__main__")
