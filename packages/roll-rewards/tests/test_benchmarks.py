"""Fragments of benchmarks, with rows of the shape of the published files."""

from __future__ import annotations

import json

import pytest

import roll_core as roll
from roll_core.errors import ConfigError
from roll_core.plugins.registry import load_registry
from roll_core.plugins.targets import load_target
from roll_core.spec.providers import RewardProvider

CONFIG = """\
defaults: [NAME, _self_]
pipeline: evaluate
tokenizer: {kind: byte}
actor_infer:
  model_args: {random_init: {model_type: qwen3, hidden_size: 32, num_hidden_layers: 1}}
  strategy_args: {strategy_name: hf_infer}
  device_mapping: [0]
validation: ${NAME.validation}
rewards: ${NAME.rewards}
"""
BENCHMARKS = {
    "gsm8k": (
        {"question": "48 clips, then half as many. How many?", "answer": "48/2 = <<48/2=24>>24\n48+24 = 72\n#### 72"},
        "She sold 24 in May, so 72 in all. The answer is 72.",
        "So the answer is 24.",
    ),
    "math_500": (
        {"problem": "Convert $(0,3)$ to polar coordinates.", "solution": "…",
         "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
         "subject": "Precalculus", "level": 2, "unique_id": "test/precalculus/807.json"},
        "It is $\\boxed{(3, \\pi/2)}$.",
        "It is $\\boxed{(3, \\pi)}$.",
    ),
    "aime": (
        {"id": 60, "problem": "Find the number of minutes.", "solution": "…", "answer": "204", "year": "2024"},
        "\\boxed{204}",
        "\\boxed{205}",
    ),
    "ifeval": (
        {"key": 1001, "prompt": "Write two words without commas, in lowercase.",
         "instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase"], "kwargs": [{}, {}]},
        "hello world",
        "hello, world",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BENCHMARKS)
def test_fragment_reads_and_scores_rows_of_the_benchmark(name, tmp_path, monkeypatch, requesting):
    monkeypatch.chdir(tmp_path)
    row, right, wrong = BENCHMARKS[name]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (tmp_path / "run.yaml").write_text(CONFIG.replace("NAME", name), encoding="utf-8")
    config = roll.check("run.yaml", ["validation.data_args.file_name=rows.jsonl"]).config
    (options,) = config.rewards.values()
    registry = load_registry()
    provider = registry.find(RewardProvider, options.reward)
    reward = load_target(provider.target, owner=registry.owner(provider))(options)
    reward.start()
    try:
        assert [reward.score(requesting(text, **row)).value for text in (right, wrong)] == [1.0, 0.0]
    finally:
        reward.close()


def test_missing_file_of_a_benchmark_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG.replace("NAME", "gsm8k"), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        roll.check("run.yaml")
    assert "gsm8k.jsonl" in str(caught.value)
