"""A role's model as inference engines load it: model directory, tokenizer, sizes and end-of-sequence ids."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.data.processor import loaded_processor, save_processor
from roll_core.errors import ModelError
from roll_modeling.model import end_token_ids, layer_configs, load_config, load_model, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from roll_core.data.processor import Processor
    from roll_core.spec.model import ModelSpec


INTERLEAVED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Types whose rotary frequencies are dealt to the axes of image positions in turn, not in sections."""
DENSE_FIRST = ("glm4_moe_lite", "hy_v3")
"""Types whose released models have the number of layers before the first mixture of experts."""
RELEASED: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {"moe_layer_freq": 1, "scoring_func": "softmax"},
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "glm4_moe_lite": {"moe_layer_freq": 1},
    "hunyuan_v1_dense": {"use_qk_norm": True},
    "hunyuan_v1_moe": {"use_qk_norm": True, "use_mixed_mlp_moe": True, "num_shared_expert": 1},
    "hy_v3": {"qk_norm": True, "route_norm": True},
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "mimo_v2_flash": {"add_swa_attention_sink_bias": True},
    "minimax_m2": {"use_routing_bias": True, "scoring_func": "sigmoid", "use_qk_norm": True},
}
"""Constant keys of `released_keys`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFiles:
    """Inputs for starting an engine."""

    model: str
    """Directory or hub id."""
    overrides: Mapping[str, Any]
    """Overrides of the stored config."""
    tokenizer: str
    """Directory or hub id; empty if the model has no tokenizer."""
    end_ids: tuple[int, ...]
    """End-of-sequence ids of the model."""
    processor: Processor | None
    """Processor of images; None if the model reads text alone."""
    config: Any
    """Config of transformers, with the overrides applied."""
    scratch: Path
    """Directory for further files; deleted after the engine's start."""

    @property
    def text_config(self) -> Any:
        """Config of the language model inside a multimodal config, or the config itself."""
        return self.config.get_text_config()

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the embeddings."""
        return int(self.text_config.vocab_size)

    @property
    def max_positions(self) -> int | None:
        """Maximum sequence length of the model, in tokens; None if its config has none (BLOOM, Mamba)."""
        return getattr(self.text_config, "max_position_embeddings", None)

    @property
    def head_sizes(self) -> set[int]:
        """Sizes of attention heads: one, unless layers differ; none without attention (Mamba)."""
        return {
            int(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)
            for layer in layer_configs(self.config)
            if hasattr(layer, "num_attention_heads")
        }


@contextmanager
def engine_files(spec: ModelSpec, engine: str) -> Iterator[EngineFiles]:
    """Prepare the files of `spec` for the duration of an engine's start. `engine` is its name in error messages.

    Models of `random_init` are created and saved to a temporary directory. Raises `ModelError`.
    """
    if spec.attn_implementation != "auto":
        raise ModelError(
            f"model_args.attn_implementation is {spec.attn_implementation}, but {engine} has its own attention:"
            f" remove the key; strategy_config.attention_backend selects one of {engine}'s kernels"
        )
    with tempfile.TemporaryDirectory(prefix="roll-engine-") as scratch:
        stored = spec
        if spec.random_init is not None:
            stored = replace(spec, path=str(Path(scratch, "model")), random_init=None, config_overrides={})
            load_model(spec).save_pretrained(stored.path)
            if spec.tokenizer:
                save_processor(spec.tokenizer, Path(stored.path))
        config = load_config(stored)
        tokenizer = spec.tokenizer or (spec.path if _has_tokenizer(spec.path) else "")
        loaded = load_tokenizer(spec) if tokenizer else None
        text = config.get_text_config()
        vocab_size, has_parts = int(text.vocab_size), text is not config
        yield EngineFiles(
            model=stored.path,
            overrides=stored.config_overrides,
            tokenizer=tokenizer,
            end_ids=end_token_ids(config, _generation_config(stored), vocab_size, loaded),
            processor=loaded_processor(loaded) if loaded is not None and has_parts else None,
            config=config,
            scratch=Path(scratch),
        )


def interleaved_rope(config: Any) -> dict[str, Any]:
    """Keys of the language model's config without which engines deal frequencies to the axes of positions in sections.

    transformers does not need them, so that a model of `random_init` lacks them. Empty for other types.
    """
    if config.model_type not in INTERLEAVED:
        return {}
    return {"rope_parameters": {"mrope_interleaved": True, **(config.get_text_config().rope_parameters or {})}}


def released_keys(config: Any) -> dict[str, Any]:
    """Config keys of released models that engines read and transformers does not need, and `config` lacks.

    A model of `random_init` lacks them. They have the values with which transformers always computes. Without them
    engines do not start, or route without the correction bias.
    """
    keys = dict(RELEASED.get(config.model_type, {}))
    if config.model_type in DENSE_FIRST and "sparse" in config.mlp_layer_types:
        keys["first_k_dense_replace"] = config.mlp_layer_types.index("sparse")
    if config.model_type == "hunyuan_v1_moe":
        keys["moe_intermediate_size"] = config.intermediate_size
    elif config.model_type == "hy_v3":
        keys["expert_hidden_dim"] = config.moe_intermediate_size
    elif config.model_type == "lfm2":
        keys |= dict.fromkeys(("conv_dim", "block_dim"), config.hidden_size)
    elif config.model_type == "mimo_v2_flash":
        keys |= _mimo_keys(config)
    elif config.model_type == "minimax_m2":
        keys["rotary_dim"] = int(config.head_dim * (config.rope_parameters or {}).get("partial_rotary_factor", 1.0))
    elif config.model_type == "qwen3_next" and "full_attention" in config.layer_types:
        keys["full_attention_interval"] = config.layer_types.index("full_attention") + 1
    return {key: value for key, value in keys.items() if not hasattr(config, key)}


def _mimo_keys(config: Any) -> dict[str, Any]:
    all_tokens, window = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    return {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in config.layer_types],
        "moe_layer_freq": [int(kind == "sparse") for kind in config.mlp_layer_types],
        "sliding_window_size": config.sliding_window,
        "layernorm_epsilon": config.rms_norm_eps,
        "swa_num_attention_heads": config.num_attention_heads,
        "swa_num_key_value_heads": 2 * config.num_key_value_heads,
        "swa_head_dim": config.head_dim,
        "swa_v_head_dim": config.v_head_dim,
        "rope_theta": all_tokens["rope_theta"],
        "swa_rope_theta": window["rope_theta"],
        "partial_rotary_factor": all_tokens["partial_rotary_factor"],
    }


def _generation_config(stored: ModelSpec) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(stored.path)
    except OSError:  # the model has no generation config
        return None


def _has_tokenizer(path: str) -> bool:
    """True if `path` has tokenizer files. Hub ids are assumed to have them."""
    folder = Path(path)
    return bool(path) and (not folder.is_dir() or any(folder.glob("tokenizer*")))
