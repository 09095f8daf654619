"""The quick start, shortened, with no other change than the engine's name: as a user runs it, on both executors."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_on_a_cpu import ON_A_CPU

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
    pytest.mark.timeout(900),  # a server takes 30 s of CPU time to start
]

REPOSITORY = Path(__file__).parents[3]
QUICKSTART = REPOSITORY / "examples" / "quickstart"
SHORT = (
    "max_steps=2",
    "eval_steps=0",
    "rollout_batch_size=8",
    "num_return_sequences_in_group=4",
    "actor_train.training_args.per_device_train_batch_size=16",
    "actor_train.training_args.gradient_accumulation_steps=2",
    "guards.logprob_probe.every=1",
)


def roll(folder, *arguments, timeout=800):
    """`roll-core` as from a shell, with output in `folder`."""
    command = [sys.executable, "-m", "roll_core", *arguments, f"output_dir={folder}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """What the quick start's SFT leaves, which is right often enough to be rewarded, and the quick start's data."""
    folder = tmp_path_factory.mktemp("sft")
    subprocess.run([sys.executable, str(QUICKSTART / "make_data.py"), str(folder)], check=True)
    roll(
        folder,
        "run",
        str(QUICKSTART / "sft.yaml"),
        "eval_steps=0",
        f"sft_train.data_args.file_name={folder}/sft.jsonl",
        f"validation.data_args.file_name={folder}/val.jsonl",
    )
    return folder


@pytest.mark.parametrize(
    ("executor", "transport"), [("local", "shared"), pytest.param("ray", "shm", marks=[pytest.mark.ray])]
)
def test_the_quick_start_runs_on_sglang(pretrained, tmp_path, executor, transport):
    roll(
        tmp_path,
        "run",
        str(QUICKSTART / "grpo.yaml"),
        *SHORT,
        f"executor={executor}",
        f"pretrain={pretrained}/quickstart-sft/latest/export",
        f"actor_train.data_args.file_name={pretrained}/train.jsonl",
        f"validation.data_args.file_name={pretrained}/val.jsonl",
        "actor_infer.strategy_args.strategy_name=sglang",
        *(f"+actor_infer.strategy_args.strategy_config.{key}={value}" for key, value in ON_A_CPU.items()),
    )
    run = tmp_path / "quickstart-grpo" / "latest"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["tokens/generated"] > 0
        assert line["actor/logprob_gap"] < 1e-4
        assert line["weight_sync/logprob_probe"] < 1e-4
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert record["weight_transports"] == {"actor_train -> actor_infer": transport}
