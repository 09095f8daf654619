"""The example of mixtures: its configs, and two steps of each run with and without router replay."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import transformers

import roll_core as roll

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = (
    *("max_steps=2", "eval_steps=0", "executor=local", "platform=cpu"),
    "validation.data_args.file_name=val.jsonl",
    "rewards.sorting.function=parity:parity",
)
PARITY = "def parity(prompt, response, **row):\n    return float(len(response) % 2)\n"
"""Reward that differs between responses of a model that has learned nothing."""
BF16_GAP = 1e-2
"""Bound on the mean difference between logprobs of an engine in bf16 and a trainer in fp32. Found: 9e-4."""
GRPO = (
    *SMALL,
    *("rollout_batch_size=8", "num_return_sequences_in_group=4", "export_model=false", "seeded_rollouts=true"),
    "actor_train.training_args.per_device_train_batch_size=16",
    "actor_train.data_args.file_name=train.jsonl",
)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with the first rows of the data, and the export of two steps of SFT."""
    folder = tmp_path_factory.mktemp("moe")
    runpy.run_path(str(EXAMPLES / "quickstart" / "make_data.py"))["main"](folder)
    for file in folder.glob("*.jsonl"):
        file.write_text("".join(file.read_text(encoding="utf-8").splitlines(keepends=True)[:128]), encoding="utf-8")
    (folder / "parity.py").write_text(PARITY, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        sizes = ("sft_train.training_args.per_device_train_batch_size=16", "sft_train.data_args.file_name=sft.jsonl")
        roll.run(EXAMPLES / "moe" / "sft.yaml", [*SMALL, *sizes])
        yield folder


def test_the_policy_is_a_mixture_with_the_quick_starts_tokenizer(here):
    export = here / "output/moe-sft/latest/export"
    config = transformers.AutoConfig.from_pretrained(export)
    assert (config.model_type, config.num_experts, config.num_experts_per_tok) == ("qwen3_moe", 8, 2)
    assert (config.num_hidden_layers, config.hidden_size) == (2, 64)
    assert len(transformers.AutoTokenizer.from_pretrained(export)("01>")["input_ids"]) == 3


def test_short_runs_work_with_and_without_replay(here):
    history = {
        mode: roll.run(
            EXAMPLES / "moe" / "grpo.yaml", [*GRPO, f"router_replay.mode={mode}", f"exp_name={mode}"], files=False
        ).history
        for mode in ("R3", "disable")
    }
    for mode, lines in history.items():
        steps = [line for line in lines if line["step"]]
        assert [line["step"] for line in steps] == [1, 2]
        assert all(line["actor/grad_norm"] > 0 for line in steps)
        assert all(0 < line["actor/logprob_gap"] < BF16_GAP for line in steps)
        shares = [line["actor/routing_disagreement"] for line in steps if "actor/routing_disagreement" in line]
        assert len(shares) == (2 if mode == "R3" else 0)
        assert all(0 <= share < 0.2 for share in shares)
