"""Configs of runs that are only planned, on this host or on accelerators that are made up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from roll_core.builtin.cpu import CpuPlatform
from roll_core.config import LoadedConfig, load
from roll_core.plugins.loader import Plugin, load_plugins
from roll_core.plugins.registry import Registry
from roll_core.spec.providers import PlatformProvider
from roll_testing.image_models import CONFIGS
from roll_tools.planning import make_plan
from roll_tools.run_plan import Plan

MODULE = "platforms_of_these_tests"
GIB = 2**30
MODEL = {
    "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}  # fmt: skip
NUM_PARAMETERS = 64_000 + 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160 + 2 * 64 + 2 * 16)
"""Embedding and last norm; in each layer q and o, k and v, gate, up and down, two norms, norms of heads."""
RLVR = f"""\
pipeline: rlvr
prompt_length: 24
response_length: 40
rollout_batch_size: 16
num_return_sequences_in_group: 4
tokenizer: {{kind: byte}}
actor_train:
  model_args: {{dtype: fp32, random_init: {json.dumps(MODEL)}}}
  training_args: {{per_device_train_batch_size: 8, gradient_accumulation_steps: 1}}
  data_args: {{file_name: rows.jsonl}}
  strategy_args: {{strategy_name: hf_train}}
actor_infer:
  model_args: {{dtype: fp32}}
  strategy_args: {{strategy_name: hf_infer}}
rewards:
  math: {{reward: math_rule}}
"""


class Accelerators(CpuPlatform):
    """Eight of 80 GiB, of which one has 2 GiB less."""

    name = "acc"
    device_type = "acc"
    resource_name = "GPU"
    visible_devices = "ACC_VISIBLE"
    slots_share_cores = False

    def device_count(self) -> int:
        return 8

    def device(self, local_index: int) -> str:
        return f"acc:{local_index}"

    def memory(self, local_index: int) -> Mapping[str, int]:
        return {"total": 80 * GIB, "used": 2 * GIB if local_index == 3 else 0}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """What is installed, and the accelerators."""
    module = ModuleType(MODULE)
    module.Accelerators = Accelerators  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    record = PlatformProvider(name="acc", target=f"{MODULE}:Accelerators", summary="", priority=-1)
    plugin = Plugin(package="acme", version="1", entry_point="a", target="a", state="loaded", providers=(record,))
    return Registry([*load_plugins(), plugin])


@pytest.fixture
def loaded(tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoadedConfig]:
    """The GRPO of these tests with overrides, or another text."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def read(*overrides: str, text: str = RLVR) -> LoadedConfig:
        (tmp_path / "run.yaml").write_text(text)
        return load(tmp_path / "run.yaml", list(overrides), registry)

    return read


@pytest.fixture
def planned(loaded: Callable[..., LoadedConfig], registry: Registry) -> Callable[..., Plan]:
    """Its plan."""

    def plan(*overrides: str, text: str = RLVR, **known: int) -> Plan:
        return make_plan(loaded(*overrides, text=text), registry, **known)

    return plan


@pytest.fixture
def seeing(planned: Callable[..., Plan]) -> Callable[..., Plan]:
    """Plan with a Qwen2.5-VL of `shared_tests.tiny_vision`: 24 tokens of prompt, 8 sequences in a microbatch."""
    model = json.dumps({"model_type": "qwen2_5_vl", **CONFIGS["qwen2_5_vl"]})

    def plan(*keys: str, images: bool = True) -> Plan:
        overrides = [f"actor_train.{key}" for key in keys] + ["actor_train.data_args.images=images"] * images
        return planned(*overrides, text=RLVR.replace(json.dumps(MODEL), model))

    return plan


@pytest.fixture
def num_parameters() -> int:
    """Of the model of these configs, counted by hand."""
    return NUM_PARAMETERS


@pytest.fixture
def distill() -> str:
    """The text of a distillation without rewards, by a teacher of half the hidden size in bfloat16."""
    teacher = json.dumps({**MODEL, "hidden_size": 32})
    return RLVR.partition("rewards:")[0].replace("pipeline: rlvr", "pipeline: distill") + (
        "teachers:\n"
        "  main:\n"
        f"    model_args: {{dtype: bf16, random_init: {teacher}}}\n"
        "    strategy_args: {strategy_name: hf_infer}\n"
    )
