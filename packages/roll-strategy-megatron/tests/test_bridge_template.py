"""The template that takes architectures from Megatron-Bridge, beside a stand-in for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from roll_core.errors import ModelError
from roll_strategy_megatron.bridge.registry import find_architecture
from roll_testing.errors import mentions

pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated")
TESTS = Path(__file__).parent
TEMPLATE = TESTS.parents[2] / "examples" / "megatron_bridge"


@pytest.fixture
def template(monkeypatch):
    """The template's module; `megatron` is a namespace, so the stand-in's folder joins that of megatron-core."""
    pytest.importorskip("megatron.core")
    loaded = set(sys.modules)
    monkeypatch.syspath_prepend(TESTS / "bridge_stand_in")
    monkeypatch.syspath_prepend(TEMPLATE)
    import roll_megatron_bridge

    yield roll_megatron_bridge
    for name in set(sys.modules) - loaded:
        if name.startswith(("megatron.bridge", "roll_megatron_bridge")):
            del sys.modules[name]


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_the_architecture_equals_the_builtin_one(template, model_type):
    found, builtin = getattr(template, model_type), find_architecture(model_type)
    # Megatron-Bridge maps no dense layers between those with experts.
    mapped = [rule for rule in builtin.rules if model_type == "qwen3" or ".mlp.linear_fc" not in rule.mcore]
    assert {rule.mcore: rule for rule in found.rules} == {rule.mcore: rule for rule in mapped}
    config = AutoConfig.for_model(model_type, num_hidden_layers=3, hidden_size=64, head_dim=32)
    expected = dict(builtin.settings(config))
    # ROLL's balancing replaces Megatron's; a layer frequency of 1 is the default.
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_layer_freq"):
        expected.pop(name, None)
    assert plain(found.settings(config)) == plain(expected)


def plain(settings):
    """Settings but those that are absent by default."""
    return {name: value for name, value in settings.items() if value not in (None, False)}


def test_layers_of_a_provider_are_refused(template):
    config = AutoConfig.for_model("gemma3_text")
    with pytest.raises(ModelError) as refused:
        template.architecture("gemma3_text").settings(config)
    assert mentions(str(refused.value), "GPTModelProvider", "own_layers")


def test_a_mapping_without_a_transform_is_refused(template):
    with pytest.raises(ModelError) as refused:
        template.architecture("phi3")
    assert mentions(str(refused.value), "ConcatenatedQKVMapping", "linear_qkv")
