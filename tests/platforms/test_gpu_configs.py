"""Configs for hardware that is not here: checked in full, and refused by `run` in a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll_core.cli.main import main
from roll_testing.errors import mentions

GRPO = """\
pipeline: rlvr
pretrain: /models/qwen
platform: {platform}
num_gpus_per_node: 8
max_steps: 1
rollout_batch_size: 64
num_return_sequences_in_group: 8
actor_train:
  device_mapping: list(range(0,8))
  strategy_args: {{strategy_name: fsdp2_train}}
  model_args: {{dtype: bf16}}
  training_args: {{per_device_train_batch_size: 8, gradient_accumulation_steps: 8}}
  data_args: {{file_name: rows.jsonl}}
actor_infer:
  device_mapping: list(range(0,8))
  strategy_args: {{strategy_name: hf_infer}}
  model_args: {{dtype: bf16}}
rewards:
  math: {{reward: math_rule}}
"""


@pytest.mark.parametrize("platform", ["cuda", "rocm", "npu"])
def test_check_passes_without_the_hardware(
    platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grpo.yaml").write_text(GRPO.format(platform=platform))
    assert main(["check", "--no-files", "grpo.yaml"]) == 0, capsys.readouterr().err
    assert "actor_train fsdp2_train × 8, actor_infer hf_infer × 8" in capsys.readouterr().out


@pytest.mark.slow(ci=True)
def test_run_explains_in_one_sentence_why_it_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text(GRPO.format(platform="cuda"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "ground_truth": "2"}\n')
    # Hidden, where there are some.
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "CUDA_VISIBLE_DEVICES": ""
    }
    done = subprocess.run(
        [sys.executable, "-m", "roll_core", "run", "--no-files", "grpo.yaml"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    said = " ".join(done.stdout.split())
    assert mentions(said, "cuda", "roll-core")
    assert "Traceback" not in done.stdout + done.stderr
