"""Advice on hyper-parameters: when `check` warns, and docs/hyperparameters.md.

ROLL_UPDATE_GOLDEN=1 updates the table.
"""

import json
import os
import re
from pathlib import Path

import pytest

from roll_core.config import load
from roll_core.config.advice import ADVICE, SOURCES, sources
from roll_core.plugins.registry import Registry
from shared_tests.hf_plugins import hf_plugins

DOCS = Path(__file__).parents[2] / "docs" / "hyperparameters.md"
REGISTRY = Registry(hf_plugins("roll-pipeline-preference"))
RLVR = """\
pipeline: rlvr
pretrain: Qwen/Qwen3-8B
rollout_batch_size: 64
actor_train:
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
  training_args: {learning_rate: 1.0e-6}
actor_infer: {strategy_args: {strategy_name: hf_infer}}
rewards: {math: {reward: math_rule}}
"""
PREFERENCE = """\
pipeline: preference
pretrain: Qwen/Qwen3-8B
actor_train:
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
  training_args: {learning_rate: 1.0e-6}
reference: {strategy_args: {strategy_name: hf_infer}}
"""
RATE = "actor_train.training_args.learning_rate"
LORA = "actor_train.model_args.lora_target=all-linear"


def warned(text, *overrides):
    """Position and key of each warning of advice."""
    Path("run.yaml").write_text(text)
    found = load(Path("run.yaml"), list(overrides), REGISTRY).warnings
    return [f"{warning.where} {warning.key}" for warning in found if warning.code == "ROLL-C051"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "overrides", "keys"),
    [
        (RLVR, [], []),
        (RLVR.replace("1.0e-6", "1.0e-4"), [], [f"run.yaml:7:19 {RATE}"]),
        (RLVR, [f"{RATE}=1e-4", "max_steps=5"], [f"command line {RATE}"]),
        (RLVR, [f"{RATE}=5e-9"], [f"command line {RATE}"]),
        (RLVR, [LORA], [f"run.yaml:7:19 {RATE}"]),
        (RLVR, [LORA, f"{RATE}=1e-5"], []),
        (RLVR, [f"{RATE}=1e-2", "actor_train.training_args.optimizer=sgd"], []),
        (RLVR, ["pg_clip=0.9", "num_return_sequences_in_group=2"],
         ["command line num_return_sequences_in_group", "command line pg_clip"]),
        (RLVR, ["pg_clip=0.9", "num_return_sequences_in_group=2", "pg_variant=vanilla", "adv_estimator=reinforce"], []),
        (RLVR, ["kl_loss_coef=3"], []),
        (RLVR, ["actor_infer.generating_args.temperature=0.1", "response_length=20"],
         ["command line actor_infer.generating_args.temperature", "command line response_length"]),
        (PREFERENCE, [], []),
        (PREFERENCE, [f"{RATE}=2e-5", "beta=5"], [f"command line {RATE}", "command line beta"]),
        (PREFERENCE, [f"{RATE}=2e-5", "beta=5", LORA, "~reference", "loss_type=ipo"], []),
    ],
)  # fmt: skip
def test_check_warns_outside_the_ranges(text, overrides, keys):
    assert warned(text, *overrides) == keys


@pytest.mark.parametrize(
    ("hidden_size", "pretrain", "warns"),
    [(64, "model", False), (4096, "model", True), (None, "output/sft/latest/export", False), (None, "./x", False)],
)
def test_only_pretrained_models_are_compared(hidden_size, pretrain, warns, folder):
    if hidden_size:
        (folder / "model").mkdir()
        keys = {"model_type": "qwen3", "hidden_size": hidden_size}
        (folder / "model" / "config.json").write_text(json.dumps(keys))
    assert bool(warned(RLVR, f"{RATE}=1e-4", f"pretrain={pretrain}")) == warns
    assert not warned(RLVR, f"{RATE}=1e-4", "actor_train.model_args.random_init={model_type: qwen3}")


def test_a_key_has_one_warning():
    Path("run.yaml").write_text(RLVR.replace("1.0e-6", "0.5"))
    found = load(Path("run.yaml"), [], REGISTRY).warnings
    assert [(warning.code, warning.key) for warning in found] == [("ROLL-C050", RATE)]


def test_values_of_sources_are_inside_the_ranges():
    for advice in ADVICE:
        assert set(re.findall(r"{(.*?)}", advice.seen)) <= SOURCES.keys()
        numbers = [float(number) for number in re.findall(r"(?<![\w.×])\d+(?:\.\d+)?(?:e-\d+)?(?= [{t])", advice.seen)]
        assert numbers or advice.adapters
        assert all(advice.low <= number <= advice.high for number in numbers), advice.key


def test_the_page_has_the_table():
    rows = [f"| {a.method} | `{a.key}` | {a.low:g} to {a.high:g} | {sources(a.seen, linked=True)} |" for a in ADVICE]
    table = "\n".join(["", "| method | key | no warning | values of sources |", "|---|---|---|---|", *rows, "", ""])
    begin, end = "<!-- advice: made by tests/config/test_advice.py -->\n", "<!-- end of advice -->"
    text = DOCS.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    expected = f"{before}{begin}{table}{end}{rest.partition(end)[2]}"
    if os.environ.get("ROLL_UPDATE_GOLDEN"):
        DOCS.write_text(expected, encoding="utf-8")
    assert DOCS.read_text(encoding="utf-8") == expected
