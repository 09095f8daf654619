"""Architectures of NVIDIA's Megatron-Bridge for `megatron_train`: a template for a package of your own.

Megatron-Bridge describes an architecture by the settings of a provider and by mappings of parameters. Both are
translated into an `Architecture`, so that loading, export, weight sync and checkpoints of ROLL work with it. Copy this
file, name your `model_type`s in `pyproject.toml`, and compare logprobs with transformers before you train: the layers
are those of ROLL, and a provider with layers of its own is an error.

Attributes read: `AutoBridge.from_hf_config(config)` with `to_megatron_provider(load_weights=False)` and
`_model_bridge.mapping_registry()`, and of a mapping `megatron_param` and `hf_param` (Megatron-Bridge 0.3 to 0.6).
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from roll_core.errors import ModelError
from roll_strategy_megatron.bridge.bridge import own_name
from roll_strategy_megatron.bridge.rules import Architecture, Rule
from roll_strategy_megatron.bridge.transforms import Copy, FuseGateUp, FuseQKV, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from roll_strategy_megatron.bridge.transforms import Transform

SET_BY_ROLL = re.compile(
    r".*parallel.*|.*dtype|.*fusion|.*recompute.*|.*dropout|.*init_method.*|(fp|bf)(4|8|16).*|.*cuda_graph.*"
    r"|perform_initialization|moe_token_dispatcher_type|moe_grouped_gemm|moe_aux_loss_coeff|moe_permute_fusion"
    r"|moe_router_load_balancing_type|moe_shared_expert_overlap|mtp_.*|autocast_.*|variable_seq_lengths|.*offload.*"
    r"|microbatch_.*"
)
"""Settings that do not describe the model: ROLL sets them from `strategy_config`."""
ROWS_OF_EXPERTS = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight\*$")
"""Megatron's name of grouped experts; ROLL names them as single modules."""


def architecture(model_type: str) -> Architecture:
    """The architecture of a `model_type` as Megatron-Bridge describes it. Raises `ModelError` if it cannot be."""
    from megatron.bridge import AutoBridge
    from transformers import AutoConfig

    def settings(config: Any) -> Mapping[str, Any]:
        return _settings(AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False))

    described = AutoBridge.from_hf_config(AutoConfig.for_model(model_type))
    mappings = described._model_bridge.mapping_registry()
    rules = {rule.mcore: rule for mapping in mappings for rule in _rules(mapping)}
    return Architecture(rules=tuple(rules.values()), settings=settings, ignored=(r"mtp\..*",))


def _settings(provider: Any) -> dict[str, Any]:
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.core.transformer import TransformerConfig

    layers = provider.transformer_layer_spec
    if layers is not GPTModelProvider.transformer_layer_spec:
        raise ModelError(f"{type(provider).__name__} has layers of its own ({getattr(layers, '__name__', layers)})")
    described = [field for field in fields(TransformerConfig) if field.init and not SET_BY_ROLL.fullmatch(field.name)]
    settings = {field.name: getattr(provider, field.name) for field in described}
    return {
        field.name: settings[field.name] for field in described if settings[field.name] not in (None, field.default)
    }


def _rules(mapping: Any) -> Iterator[Rule]:
    name, given = mapping.megatron_param, mapping.hf_param
    if name.startswith("mtp.") or ("*" not in name and name.startswith("decoder.layers.")):
        return  # layers that predict further tokens, which ROLL does not load
    mcore = own_name(ROWS_OF_EXPERTS.sub(r"mlp.experts.local_experts.*.\1.weight", name).replace("*", "0"))
    numbered = iter(("{layer}", "{expert}"))
    mcore = re.sub(r"(?<=\.)0(?=\.)", lambda _: next(numbered), mcore)
    stored = [each.replace("*", "{layer}", 1).replace("*", "{expert}") for each in _names(given)]
    transform = _transform(mapping, mcore)
    if "{expert}" not in mcore:
        yield Rule(mcore=mcore, hf=tuple(stored), transform=transform)
        return
    together = "gate_up_proj" if len(stored) > 1 else "down_proj"  # as transformers' modules name them
    hf = f"{stored[0].partition('.{expert}.')[0]}.{together}"
    yield Rule(mcore=mcore, hf=(hf,), transform=transform, stored=tuple(stored))


def _names(given: str | Mapping[str, str]) -> list[str]:
    """Names in the files: in the order query, key, value or gate, up."""
    return [given] if isinstance(given, str) else [given[key] for key in ("q", "k", "v", "gate", "up") if key in given]


def _transform(mapping: Any, mcore: str) -> Transform:
    kind = type(mapping).__name__
    if kind == "QKVMapping":
        return FuseQKV()
    if kind == "GatedMLPMapping":
        return FuseGateUp()
    if kind in ("AutoMapping", "ColumnParallelMapping") and mcore.startswith(("embedding.", "output_layer.")):
        return Vocabulary()
    if kind == "ReplicatedMapping" or re.search(r"layernorm\.|router\.|norm\.weight$|down_proj\.weight$", mcore):
        return Copy()
    if kind == "RowParallelMapping" or re.search(r"linear_(proj|fc2)\.weight$", mcore):
        return Copy(tp_dim=1)
    if kind in ("AutoMapping", "ColumnParallelMapping"):
        return Copy(tp_dim=0)
    raise ModelError(f"Megatron-Bridge maps {mcore} by {kind}, for which this template has no transform")


def __getattr__(name: str) -> Architecture:
    """`roll_megatron_bridge:ernie4_5` in `pyproject.toml` is the architecture of that `model_type`."""
    if name.startswith("_"):
        raise AttributeError(name)
    return architecture(name)
