"""`training_args.optimizer`: names, options, and strategies that run it."""

import textwrap

import pytest

from roll_core.config import load
from roll_core.errors import ConfigError
from roll_core.plugins.registry import load_registry
from roll_testing.errors import check_error

SFT = """\
pipeline: sft
{more}
sft_train:
  data_args: {{file_name: rows.jsonl}}
  strategy_args: {{strategy_name: {strategy}}}
  device_mapping: [0]
  training_args: {training}
"""
OWN = """
import torch

def lion(parameters, training, beta: float = 0.9):
    return torch.optim.SGD(parameters.values(), lr=training.learning_rate)
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_optimizers.py").write_text(textwrap.dedent(OWN))

    def run(training, strategy="hf_train", more=""):
        (tmp_path / "run.yaml").write_text(SFT.format(training=training, strategy=strategy, more=more))
        return load("run.yaml", [], load_registry())

    return run


@pytest.mark.parametrize(
    ("training", "strategy"),
    [
        ("{optimizer: sgd, optimizer_kwargs: {momentum: 0.5}}", "hf_train"),
        ("{optimizer: muon}", "hf_train"),
        ("{optimizer: roll-core/sgd}", "fsdp2_train"),
        ("{optimizer: muon}", "fsdp2_train"),
        ("{optimizer: 'own_optimizers:lion', optimizer_kwargs: {beta: 0.5}}", "hf_train"),
        ("{optimizer: adamw}", "megatron_train"),
    ],
)
def test_optimizers_pass_where_they_run(check, training, strategy):
    check(training, strategy)


@pytest.mark.parametrize(
    ("training", "strategy", "more", "code", "key", "facts"),
    [
        ("{optimizer: mun}", "hf_train", "", "ROLL-P004", "optimizer", ["'muon'?"]),
        ("{optimizer: sgd, optimizer_kwargs: {momentun: 1}}", "hf_train", "", "ROLL-C010", "momentun", ["momentum"]),
        ("{optimizer: muon, optimizer_kwargs: {ns_steps: 0}}", "hf_train", "", "ROLL-C013", "ns_steps", []),
        ("{optimizer: adamw, optimizer_kwargs: {x: 1}}", "hf_train", "", "ROLL-C010", "x", []),
        ("{optimizer: sgd}", "megatron_train", "", "ROLL-C017", "optimizer", ["sgd", "hf_train"]),
        ("{optimizer: muon}", "megatron_train", "", "ROLL-C017", "optimizer", ["muon", "hf_train", "fsdp2_train"]),
        ("{optimizer: muon}", "deepspeed_train", "", "ROLL-C017", "optimizer", ["muon", "hf_train", "fsdp2_train"]),
        ("{optimizer: sgd}", "hf_train", "portable_checkpoints: true", "ROLL-C017", "optimizer", ["sgd"]),
        ("{optimizer: 'own_optimizers:nothing'}", "hf_train", "", "ROLL-C041", "optimizer", ["'nothing'"]),
        ("{optimizer: 'own_optimizers:lion'}", "fsdp2_train", "", "ROLL-C017", "optimizer", ["fsdp2_train"]),
    ],
)
def test_a_mistake_is_located(check, training, strategy, more, code, key, facts):
    with pytest.raises(ConfigError) as raised:
        check(training, strategy, more)
    path = "sft_train.training_args." + (key if key == "optimizer" else f"optimizer_kwargs.{key}")
    check_error(raised.value, code, *facts, key=path)
