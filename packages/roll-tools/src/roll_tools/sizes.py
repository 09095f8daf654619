"""Size of a model from its `config.json`, without loading it: parameters by part, as transformers would create them.

A table covers architectures whose layers consist of attention and a gated feed-forward part. For other local models the
headers of the safetensors files give the number of parameters, and the config gives the widths. Imports no torch.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roll_core.errors import ModelError
from roll_core.spec.model import PROJECTORS, LayerSize, Linear, ModelSize, VisionSize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from roll_core.spec.providers import Task

_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
_QWEN = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768,
}  # fmt: skip
_MISTRAL = _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "qwen3_moe": _QWEN
    | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    "mixtral": _MISTRAL | {"num_experts": 8, "num_experts_per_tok": 2},
}  # fmt: skip
"""Defaults of transformers for missing config keys, by `model_type`. Keys with a default of 0 or False are omitted."""
_QWEN_VISION = {
    "in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 3584,
}  # fmt: skip
WITH_IMAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        "qwen2",
        {
            "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8,
        },
        _QWEN_VISION | {"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14},
    ),
    "qwen3_vl": (
        "qwen3",
        {"max_position_embeddings": 128000},
        _QWEN_VISION
        | {
            "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16,
            "num_position_embeddings": 2304, "deepstack_visual_indexes": (8, 16, 24),
        },
    ),
}  # fmt: skip
"""Architecture of the language model, and defaults of the text and vision configs, of models with images."""
QKV_BIAS = frozenset({"qwen2"})
"""Architectures that always have query, key and value biases. In others `attention_bias` adds biases to all four."""
HONOURS_ATTENTION_BIAS = frozenset({"llama", "qwen3", "qwen3_moe"})
NORMED_HEADS = frozenset({"qwen3", "qwen3_moe"})
_HEADER = struct.Struct("<Q")
_LONGEST_HEADER = 100_000_000
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.|(?:^|\.)h\.(\d+)\.")
_VISION = re.compile(r"(?:^|\.)(?:visual|vision_\w+|image_newline)\b")
_READ_KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def model_size(config: Mapping[str, Any], *, task: Task = "causal_lm", folder: Path | None = None) -> ModelSize:
    """Size of the model that a transformers config describes, with the head of `task`.

    `folder` is the model's local directory, if there is one. Raises `ModelError` for an unknown architecture without
    local files.
    """
    model_type = str(config.get("model_type", ""))
    nested = config.get("text_config")
    text = {**config, **nested} if isinstance(nested, dict) else config
    if model_type in ARCHITECTURES:
        return _of_table(model_type, config, task)
    if model_type in WITH_IMAGES:
        language, text_defaults, vision_defaults = WITH_IMAGES[model_type]
        text = {**text_defaults, **text, "tie_word_embeddings": config.get("tie_word_embeddings")}
        vision = _vision_of_table({**vision_defaults, **(config.get("vision_config") or {})})
        return replace(_of_table(language, text, task), model_type=model_type, vision=vision)
    if folder is not None and any(folder.glob("*.safetensors")):
        return _of_files(folder, text, model_type, task)
    raise ModelError(
        f"cannot compute the size of a model of type {model_type or '(none given)'}: known types are"
        f" {', '.join((*ARCHITECTURES, *WITH_IMAGES))}; other models need local safetensors files"
    )


def _of_table(model_type: str, config: Mapping[str, Any], task: Task) -> ModelSize:
    configured = {key: value for key, value in config.items() if value is not None or key == "num_key_value_heads"}
    # Without a number of key heads, there are as many as query heads.
    keys = {**ARCHITECTURES[model_type], **configured}
    keys["num_experts"] = config.get("num_local_experts") or keys.get("num_experts", 0)
    hidden, heads, vocab = keys["hidden_size"], keys["num_attention_heads"], keys["vocab_size"]
    size = keys.get("head_dim") or hidden // heads
    layers = tuple(_layer(model_type, keys, index, size) for index in range(keys["num_hidden_layers"]))
    return ModelSize(
        model_type=model_type,
        vocab_size=vocab,
        hidden_size=hidden,
        query_width=heads * size,
        key_width=(keys.get("num_key_value_heads") or heads) * size,
        num_heads=heads,
        normed_heads=model_type in NORMED_HEADS,
        max_positions=keys["max_position_embeddings"],
        layers=layers,
        embedding=vocab * hidden,
        head=_head(task, vocab * hidden, hidden, tied=bool(keys.get("tie_word_embeddings"))),
        final_norm=hidden,
    )


def _vision_of_table(keys: Mapping[str, Any]) -> VisionSize:
    """Image encoder of Qwen2.5-VL, whose feed-forward parts are gated and norms have no bias, or of Qwen3-VL."""
    gated, width, inner, out = (
        "num_position_embeddings" not in keys,
        *(keys[name] for name in ("hidden_size", "intermediate_size", "out_hidden_size")),
    )
    merged = keys["spatial_merge_size"] ** 2
    patch_elements = keys["in_channels"] * keys["temporal_patch_size"] * keys["patch_size"] ** 2
    norm = width if gated else 2 * width
    attention = 4 * width * width + 4 * width
    feed_forward = (3 if gated else 2) * width * inner + (2 if gated else 1) * inner + width
    encoder = width * patch_elements + keys["depth"] * (2 * norm + attention + feed_forward)
    two_layers = (merged * width) ** 2 + merged * width + out * merged * width + out
    projector = norm + two_layers
    if not gated:
        encoder += width + keys["num_position_embeddings"] * width
        projector += len(keys["deepstack_visual_indexes"]) * (2 * merged * width + two_layers)
    return VisionSize(
        encoder=encoder,
        projector=projector,
        num_layers=keys["depth"],
        hidden_size=width,
        intermediate_size=inner,
        patch_elements=patch_elements,
        patches_per_token=merged,
        pixels_per_token=merged * keys["patch_size"] ** 2,
    )


def _head(task: Task, language: int, hidden: int, *, tied: bool) -> int:
    if task == "causal_lm":
        return 0 if tied else language
    return hidden  # one output, without bias


def _layer(model_type: str, keys: Mapping[str, Any], index: int, size: int) -> LayerSize:
    hidden, heads = keys["hidden_size"], keys["num_attention_heads"]
    query, key = heads * size, (keys.get("num_key_value_heads") or heads) * size
    linears = [
        Linear(path="self_attn.q_proj", outputs=query, inputs=hidden),
        Linear(path="self_attn.k_proj", outputs=key, inputs=hidden),
        Linear(path="self_attn.v_proj", outputs=key, inputs=hidden),
        Linear(path="self_attn.o_proj", outputs=hidden, inputs=query),
    ]
    biases = query + 2 * key if model_type in QKV_BIAS else 0
    if model_type in HONOURS_ATTENTION_BIAS and keys.get("attention_bias"):
        biases += query + 2 * key + hidden
    norms = 2 * hidden + (2 * size if model_type in NORMED_HEADS else 0)
    experts = chosen = 0
    if _is_mixture(keys, index):
        width = keys.get("moe_intermediate_size") or keys["intermediate_size"]
        experts = keys["num_experts"] * 3 * hidden * width
        biases += keys["num_experts"] * hidden  # the router
        chosen = keys["num_experts_per_tok"]
        active = chosen * width
    else:
        active = keys["intermediate_size"]
        for name in ("gate_proj", "up_proj"):
            linears.append(Linear(path=f"mlp.{name}", outputs=active, inputs=hidden))
        linears.append(Linear(path="mlp.down_proj", outputs=hidden, inputs=active))
        if model_type == "llama" and keys.get("mlp_bias"):
            biases += 2 * active + hidden
    return LayerSize(
        parameters=sum(linear.outputs * linear.inputs for linear in linears) + biases + norms + experts,
        linears=tuple(linears),
        active_width=active,
        experts=experts,
        chosen=chosen,
    )


def _is_mixture(keys: Mapping[str, Any], index: int) -> bool:
    every = keys.get("decoder_sparse_step", 1)
    return bool(keys["num_experts"]) and index not in (keys.get("mlp_only_layers") or ()) and (index + 1) % every == 0


# -- models that only their files describe ----------------------------------------------------------------------------


def _of_files(folder: Path, config: Mapping[str, Any], model_type: str, task: Task) -> ModelSize:
    """Size with parameters from the files' headers and widths from the config."""
    missing = [key for key in _READ_KEYS if not isinstance(config.get(key), int)]
    if missing:
        raise ModelError(f"{folder}: config.json has no {missing[0]}, which is required to compute activation memory")
    layers = [0] * config["num_hidden_layers"]
    embedding = head = rest = encoder = projector = 0
    for name, shape in _shapes(folder):
        count, match = math.prod(shape), _LAYER.search(name)
        if any(word in name for word in PROJECTORS):
            projector += count
        elif _VISION.search(name):
            encoder += count
        elif match is not None and (index := int(match[1] or match[2])) < len(layers):
            layers[index] += count
        elif name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight")):
            embedding += count
        elif "head" in name.rpartition(".")[0].rpartition(".")[2] or name.startswith("embed_out"):
            head += count
        else:
            rest += count
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    width = config.get("intermediate_size") or 4 * hidden
    return ModelSize(
        model_type=model_type,
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        query_width=heads * size,
        key_width=(config.get("num_key_value_heads") or heads) * size,
        num_heads=heads,
        normed_heads=False,
        max_positions=config.get("max_position_embeddings") or 0,
        layers=tuple(LayerSize(parameters=count, active_width=width) for count in layers),
        embedding=embedding,
        head=head if task == "causal_lm" else hidden,
        final_norm=rest,
        vision=_vision_of_config(config, encoder, projector) if encoder else None,
    )


def _vision_of_config(config: Mapping[str, Any], encoder: int, projector: int) -> VisionSize:
    """Widths of an image encoder as far as its config has them; 0 for others."""
    keys = config.get("vision_config") or {}

    def number(*names: str) -> int:
        values = (keys[name] for name in names if keys.get(name))
        value = next(values, 0)
        return int(value[0] if isinstance(value, (list, tuple)) else value)  # a height and a width

    width, patch, image = number("hidden_size", "embed_dim"), number("patch_size"), number("image_size")
    merged = (number("spatial_merge_size") or config.get("spatial_merge_size") or 1) ** 2
    if config.get("downsample_ratio"):
        merged = round(config["downsample_ratio"] ** -2)
    elif config.get("mm_tokens_per_image") and patch:
        merged = (image // patch) ** 2 // config["mm_tokens_per_image"]
    return VisionSize(
        encoder=encoder,
        projector=projector,
        num_layers=number("num_hidden_layers", "depth"),
        hidden_size=width,
        intermediate_size=number("intermediate_size") or 4 * width,
        patch_elements=3 * patch**2,
        patches_per_token=merged,
    )


def _shapes(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes in all files, from their headers: eight bytes of length, then JSON."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as opened:
                (length,) = _HEADER.unpack(opened.read(_HEADER.size))
                if length > _LONGEST_HEADER:
                    raise ModelError(
                        f"{file} is not a safetensors file: header size {length} bytes, at most {_LONGEST_HEADER}"
                    )
                header = json.loads(opened.read(length))
            yield from ((name, tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
        except (OSError, ValueError, RecursionError, KeyError, struct.error) as error:
            raise ModelError(f"{file}: its header cannot be read: {error}") from error
