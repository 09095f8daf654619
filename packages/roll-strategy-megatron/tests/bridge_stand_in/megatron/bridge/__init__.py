"""Stand-in for NVIDIA's Megatron-Bridge: an `AutoBridge` with the attributes that the template reads.

Mappings have the names that Megatron-Bridge 0.6 gives them; a provider is a `TransformerConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from megatron.bridge.models.gpt_provider import GPTModelProvider

LAYERS = "decoder.layers.*."
HF = "model.layers.*."


@dataclass
class AutoMapping:
    megatron_param: str
    hf_param: str | dict[str, str]


class QKVMapping(AutoMapping):
    def __init__(self, megatron_param: str, **parts: str) -> None:
        super().__init__(megatron_param, parts)


class GatedMLPMapping(QKVMapping):
    pass


class ConcatenatedQKVMapping(AutoMapping):
    pass


class AutoBridge:
    def __init__(self, config: Any) -> None:
        self._config = config
        self._model_bridge = self

    @classmethod
    def from_hf_config(cls, config: Any) -> AutoBridge:
        return cls(config)

    def to_megatron_provider(self, load_weights: bool) -> GPTModelProvider:
        assert not load_weights
        config = self._config
        provider = GPTModelProvider(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads,
            kv_channels=config.head_dim,
            layernorm_epsilon=config.rms_norm_eps,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            add_qkv_bias=config.model_type == "seed_oss",
            qk_layernorm=config.model_type.startswith("qwen3"),
        )
        if config.model_type == "qwen3_moe":
            provider.num_moe_experts = config.num_local_experts
            provider.moe_ffn_hidden_size = config.moe_intermediate_size
            provider.moe_router_topk = config.num_experts_per_tok
            provider.moe_router_pre_softmax = not config.norm_topk_prob
            provider.moe_grouped_gemm = True
            provider.moe_aux_loss_coeff = 1e-3
        if config.model_type == "gemma3_text":
            provider.transformer_layer_spec = "own_layers"
        return provider

    def mapping_registry(self) -> list[AutoMapping]:
        kind = self._config.model_type
        qkv = {each: f"{HF}self_attn.{each}_proj" for each in "qkv"}
        found = [
            AutoMapping("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
            AutoMapping("output_layer.weight", "lm_head.weight"),
            AutoMapping("decoder.final_layernorm.weight", "model.norm.weight"),
            AutoMapping(f"{LAYERS}self_attention.linear_qkv.layer_norm_weight", f"{HF}input_layernorm.weight"),
            AutoMapping(f"{LAYERS}self_attention.linear_proj.weight", f"{HF}self_attn.o_proj.weight"),
            QKVMapping(
                f"{LAYERS}self_attention.linear_qkv.weight", **{each: f"{name}.weight" for each, name in qkv.items()}
            ),
            AutoMapping("mtp.layers.0.eh_proj.weight", "mtp.fc.weight"),
        ]
        if kind == "seed_oss":
            found.append(
                QKVMapping(
                    f"{LAYERS}self_attention.linear_qkv.bias", **{each: f"{name}.bias" for each, name in qkv.items()}
                )
            )
        if kind.startswith("qwen3"):
            found += [
                AutoMapping(f"{LAYERS}self_attention.{each}_layernorm.weight", f"{HF}self_attn.{each}_norm.weight")
                for each in "qk"
            ]
        if kind == "phi3":
            found.append(
                ConcatenatedQKVMapping(f"{LAYERS}self_attention.linear_qkv.weight", f"{HF}self_attn.qkv_proj.weight")
            )
        if kind == "qwen3_moe":
            experts = f"{HF}mlp.experts.*."
            down = f"{experts}down_proj.weight"
            gated = {each: f"{experts}{each}_proj.weight" for each in ("gate", "up")}
            return [
                *found,
                AutoMapping(f"{LAYERS}pre_mlp_layernorm.weight", f"{HF}post_attention_layernorm.weight"),
                AutoMapping(f"{LAYERS}mlp.router.weight", f"{HF}mlp.gate.weight"),
                GatedMLPMapping(f"{LAYERS}mlp.experts.linear_fc1.weight*", **gated),
                AutoMapping(f"{LAYERS}mlp.experts.linear_fc2.weight*", down),
                GatedMLPMapping(f"{LAYERS}mlp.experts.local_experts.*.linear_fc1.weight", **gated),
                AutoMapping(f"{LAYERS}mlp.experts.local_experts.*.linear_fc2.weight", down),
            ]
        return [
            *found,
            AutoMapping(f"{LAYERS}mlp.linear_fc1.layer_norm_weight", f"{HF}post_attention_layernorm.weight"),
            GatedMLPMapping(
                f"{LAYERS}mlp.linear_fc1.weight",
                gate=f"{HF}mlp.gate_proj.weight",
                up=f"{HF}mlp.up_proj.weight",
            ),
            AutoMapping(f"{LAYERS}mlp.linear_fc2.weight", f"{HF}mlp.down_proj.weight"),
        ]
