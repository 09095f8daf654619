"""The example's configs are accepted, its reward cannot be won by a flat image, and its demo runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from roll_core.config import load
from roll_core.plugins.registry import load_registry

REPOSITORY = Path(__file__).resolve().parents[3]
EXAMPLE = REPOSITORY / "examples" / "diffusion"


@pytest.fixture
def rewards(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY)
    from examples.diffusion import rewards

    return rewards


def test_runs_evaluate_the_same_images_by_the_same_rewards():
    names = ("pretrain", "refl", "flow_grpo", "nft")
    configs = [load(EXAMPLE / f"{name}.yaml", [], load_registry()).config for name in names]
    assert [each.objective for each in configs] == ["flow_matching", "refl", "flow_grpo", "nft"]
    for each in configs[1:]:
        assert (each.validation, each.rewards) == (configs[0].validation, configs[0].rewards)
        assert each.pretrain == "output/diffusion-pretrain/latest/export"


def test_only_the_right_drawing_gets_the_whole_reward(rewards):
    drawings, parts = rewards.drawings()
    pixels = (drawings + 1) / 2
    right = rewards.label(pixels, {"parts": parts}) + 2 * rewards.drawn(pixels, {})
    assert right.min() > 0.97
    wrong = rewards.label(pixels.roll(1, 0), {"parts": parts})
    assert wrong[parts.ne(parts.roll(1, 0)).any(1)].max() < 0.7
    for level in (0.0, 0.5, 1.0):
        flat = torch.full((len(parts), 3, 8, 8), level)
        label = rewards.label(flat, {"parts": parts})
        assert label.mean() == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)  # the same image for every label
        assert (label + 2 * rewards.drawn(flat, {})).mean() < 0.25


@pytest.mark.slow
def test_the_demo_runs_small(tmp_path):
    pytest.importorskip("diffusers")
    command = [sys.executable, "examples/diffusion/demo.py", "max_steps=2", f"output_dir={tmp_path}", "track_with=[]"]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()[-4:]] == ["pretrain", "refl", "flow_grpo", "nft"]
    for name in ("pretrain", "refl", "flow-grpo", "nft"):
        run = tmp_path / f"diffusion-{name}" / "latest"
        assert json.loads((run / "run.json").read_text(encoding="utf-8"))["outcome"] == "finished"
        assert run.joinpath("report.html").read_text(encoding="utf-8").count("data:image/png;base64,") == 64
