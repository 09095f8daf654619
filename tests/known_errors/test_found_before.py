"""What other trainers answer with a trace is a sentence here, before anything starts: each row of the first table of
docs/troubleshooting.md, and the test that causes it."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from pathlib import Path

import pytest

from roll_core.cli.main import main
from roll_core.errors import MissingRequirementError
from roll_core.plugins.registry import load_registry
from roll_core.plugins.requirements import check_requirements
from roll_core.spec.providers import InferProvider
from roll_testing.errors import mentions

ROOT = Path(__file__).parents[2]
HERE = "tests/known_errors/test_found_before.py"
CAUSED_IN = {
    "vLLM is not installed or not properly configured": (HERE, "test_an_engine_of_a_wrong_version"),
    "self.node2pg[node_rank] KeyError: 1": (HERE, "test_slots_that_no_node_has"),
    "overlap_param_gather is not supported": (HERE, "test_a_megatron_option_that_is_not_supported"),
    "Batch size assertion": (HERE, "test_a_batch_that_does_not_divide"),
    "Windows is not supported": ("tests/doctor/test_builtin_checks.py", "test_the_system_and_its_kernel"),
    "System CUDA version does not match PyTorch CUDA version": (
        "packages/roll-platform-cuda/tests/test_checks.py",
        "test_other_toolkit_is_an_error_by_major_warning_by_minor",
    ),
    "PyTorch version is too old": (
        "tests/doctor/test_builtin_checks.py",
        "test_a_library_that_is_missing_or_too_old_names_the_command",
    ),
    "CUDA_HOME environment variable is not set": (
        "packages/roll-platform-cuda/tests/test_checks.py",
        "test_a_home_without_a_compiler_is_named",
    ),
    "unsupported architecture": (
        "packages/roll-platform-cuda/tests/test_checks.py",
        "test_capabilities_have_two_floors",
    ),
    "bf16 on a V100": (
        "tests/doctor/test_builtin_checks.py",
        "test_a_dtype_that_a_role_wants_and_devices_lack_is_an_error",
    ),
}
RLVR = """\
pipeline: rlvr
num_gpus_per_node: 4
rollout_batch_size: 6
num_return_sequences_in_group: 4
actor_train:
  data_args: {file_name: rows.jsonl}
  training_args: {per_device_train_batch_size: 2, gradient_accumulation_steps: 4}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 2}
  device_mapping: list(range(0,4))
actor_infer:
  strategy_args: {strategy_name: hf_infer}
rewards:
  math: {reward: math_rule}
"""


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(RLVR)
    return file


def test_every_row_is_caused_by_a_test_that_is_there():
    rows = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("| elsewhere |")[2]
    told = re.findall(r"^\| `(.+?)` \| \S", rows, re.MULTILINE)
    assert [row for row in told if row != "Slow training with ZeRO-3"] == list(CAUSED_IN)  # slow is no error to cause
    for file, name in CAUSED_IN.values():
        functions = {
            node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert name in functions


def test_an_engine_of_a_wrong_version(monkeypatch):
    registry = load_registry()
    if "vllm" not in registry.names(InferProvider):
        pytest.skip("needs roll-infer-vllm")
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.8.4" if name == "vllm" else version(name))
    record = registry.find(InferProvider, "vllm")
    with pytest.raises(MissingRequirementError) as raised:
        check_requirements(record, owner=registry.owner(record))
    assert "0.8.4" in str(raised.value)
    assert mentions(str(raised.value), "'vllm")


def test_slots_that_no_node_has(config, capsys):
    strategy = ["actor_train.strategy_args.strategy_name=hf_train", "~actor_train.strategy_args.strategy_config"]
    slots = ["actor_train.device_mapping=list(range(0,8))", "rollout_batch_size=64", "platform=cpu"]
    code = main(["plan", str(config), *strategy, *slots, "--nodes", "1"])
    shown = capsys.readouterr()
    assert code == 1
    assert re.search(r"actor_train.*slot 4", shown.out + shown.err)


def test_a_megatron_option_that_is_not_supported(config, capsys):
    key = "actor_train.strategy_args.strategy_config.overlap_param_gather"
    assert main(["check", str(config), f"{key}=true"]) == 2
    assert mentions(capsys.readouterr().err, "overlap_param_gather")


def test_a_batch_that_does_not_divide(config, capsys):
    """6 prompts × 4 answers = 24; 4 microbatches × 2 sequences × (4 ranks / 2 per replica) = 16."""
    assert main(["check", str(config)]) == 2
    shown = capsys.readouterr().err
    assert "run.yaml:3:" in shown
    assert "= 24 samples is not a multiple of" in shown
    assert "data parallel (4 ranks / 2 per replica = 2) = 16" in shown
