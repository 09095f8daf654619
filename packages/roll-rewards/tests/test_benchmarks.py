"""Fragments of benchmarks, with rows of the shape of the published files."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

import roll_core as roll
from roll_core.data.rows import read_rows
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
    "gpqa": (
        {"Record ID": "rec7", "Question": "Which is a metal?\n", "Correct Answer": "iron\n",
         "Incorrect Answer 1": "neon", "Incorrect Answer 2": "argon", "Incorrect Answer 3": "xenon"},
        "It is \\boxed{LETTER}.",
        "It is \\boxed{OTHER}.",
    ),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def twice(x: int) -> int:\n    \"\"\"2 x\"\"\"\n", "entry_point": "twice",
         "canonical_solution": "    return 2 * x\n",
         "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(3) == 6\n"},
        "```python\ndef twice(x: int) -> int:\n    return 2 * x\n```",
        "```python\ndef twice(x: int) -> int:\n    return x * x\n```",
    ),
    "livecodebench": (
        {"question_content": "Add two numbers.", "starter_code": "class Solution:\n    def add(self, a, b):\n        ",
         "question_id": "3000", "difficulty": "easy", "metadata": json.dumps({"func_name": "add"}),
         "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}])},
        "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```",
        "```python\nclass Solution:\n    def add(self, a, b):\n        return a\n```",
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
    (read,) = read_rows(config.validation.data_args)
    prompt = read.values[config.validation.data_args.prompt]
    if name == "gpqa":  # the letter before the right choice in the prompt
        (letter,) = re.findall(r"\(([A-D])\) iron\n", prompt)
        right, wrong = right.replace("LETTER", letter), wrong.replace("OTHER", "B" if letter == "A" else "A")
        assert sorted(re.findall(r"\([A-D]\) (\w+)", prompt)) == ["argon", "iron", "neon", "xenon"]
    registry = load_registry()
    provider = registry.find(RewardProvider, options.reward)
    reward = load_target(provider.target, owner=registry.owner(provider))(options)
    reward.start()
    try:
        assert [reward.score(requesting(text, **read.values)).value for text in (right, wrong)] == [1.0, 0.0]
    finally:
        reward.close()


def test_missing_file_of_a_benchmark_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG.replace("NAME", "gsm8k"), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        roll.check("run.yaml")
    assert "gsm8k.jsonl" in str(caught.value)


def test_choices_of_gpqa_have_every_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = BENCHMARKS["gpqa"][0]
    rows = [{**row, "Record ID": f"rec{number}"} for number in range(400)]
    (tmp_path / "gpqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(CONFIG.replace("NAME", "gpqa"), encoding="utf-8")
    data = roll.check("run.yaml").config.validation.data_args
    read = read_rows(data)
    letters = Counter(row.values["ground_truth"] for row in read)
    assert all(70 <= letters[letter] <= 130 for letter in "ABCD")  # 100, with a deviation of 8.7
    assert [row.values for row in read_rows(data)] == [row.values for row in read]
