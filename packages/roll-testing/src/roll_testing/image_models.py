"""Tiny models with images and videos and random weights, as complete directories, without downloads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "internvl")
"""Model types whose every number tests compare."""
VIDEO_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Those that read videos."""
FAMILIES = ("qwen2_vl", "llava_next", "llava_onevision", "idefics3", "glm4v", "mistral3")
"""Further model types that `tiny_vision` writes."""

END, PADDING, TURN, TURN_END, IMAGE_START, IMAGE_END, IMAGE_TOKEN, VIDEO_TOKEN = (
    "</s>",
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SPECIAL = (PADDING, END, TURN, TURN_END, IMAGE_START, IMAGE_END, IMAGE_TOKEN, VIDEO_TOKEN)
IDS = {token: 256 + index for index, token in enumerate(SPECIAL)}
"""Ids of the special tokens. Ids below 256 are bytes."""
NEWLINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
"""Further tokens of gemma3: its processor writes newlines around an image, which join those of the text."""
IDEFICS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
"""Further tokens of idefics3, which its processor names."""
VOCABULARY = 256 + len(SPECIAL) + len(NEWLINES)

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}PLACEHOLDER"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLACEHOLDERS = {
    "qwen2_vl": IMAGE_START + IMAGE_TOKEN + IMAGE_END,
    "qwen2_5_vl": IMAGE_START + IMAGE_TOKEN + IMAGE_END,
    "qwen3_vl": IMAGE_START + IMAGE_TOKEN + IMAGE_END,
    "gemma3": IMAGE_START,
    "llava": IMAGE_TOKEN,
    "internvl": IMAGE_TOKEN,
    "llava_next": IMAGE_TOKEN,
    "llava_onevision": IMAGE_TOKEN,
    "idefics3": "<image>",
    "paligemma": IMAGE_TOKEN,
    "glm4v": IMAGE_START + IMAGE_TOKEN + IMAGE_END,
    "mistral3": IMAGE_TOKEN,
}
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "pad_token_id": IDS[PADDING],
    "eos_token_id": IDS[TURN_END],
    "bos_token_id": None,
}
_QWEN_IDS = {
    "image_token_id": IDS[IMAGE_TOKEN],
    "video_token_id": IDS[VIDEO_TOKEN],
    "vision_start_token_id": IDS[IMAGE_START],
    "vision_end_token_id": IDS[IMAGE_END],
}
_QWEN_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64}
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}


_CROPS = [[56, 56], [56, 112], [112, 56]]


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": _TEXT | {"rope_parameters": _rope(2, 3, 3)},
        "vision_config": {"embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "depth": 2},
        **_QWEN_IDS,
    },
    "qwen2_5_vl": {
        "text_config": _TEXT | {"rope_parameters": _rope(2, 3, 3)},
        "vision_config": _QWEN_VISION | {"depth": 2, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        **_QWEN_IDS,
    },
    "qwen3_vl": {
        "text_config": _TEXT | {"num_hidden_layers": 3, "rope_parameters": _rope(4, 2, 2)},
        "vision_config": _QWEN_VISION
        | {"depth": 3, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        **_QWEN_IDS,
    },
    "gemma3": {
        "text_config": _TEXT
        | {
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": _VISION | {"vision_use_head": False},
        "mm_tokens_per_image": 4,
        "boi_token_index": IDS[IMAGE_START],
        "eoi_token_index": IDS[IMAGE_END],
        "image_token_index": IDS[IMAGE_TOKEN],
    },
    "llava": {
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": _VISION | {"model_type": "clip_vision_model", "projection_dim": 32},
        "image_token_index": IDS[IMAGE_TOKEN],
        "image_seq_length": 16,
    },
    "internvl": {
        "text_config": _TEXT | {"model_type": "qwen2"},
        "vision_config": _VISION,
        "image_token_id": IDS[IMAGE_TOKEN],
        "image_seq_length": 4,
        "tie_word_embeddings": False,
    },
    "llava_next": {
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": _VISION | {"model_type": "clip_vision_model", "projection_dim": 32},
        "image_token_index": IDS[IMAGE_TOKEN],
        "image_grid_pinpoints": _CROPS,
        "image_seq_length": 16,
    },
    "llava_onevision": {
        "text_config": _TEXT | {"model_type": "qwen2"},
        "vision_config": _VISION | {"model_type": "siglip_vision_model", "vision_use_head": False},
        "image_token_index": IDS[IMAGE_TOKEN],
        "video_token_index": IDS[VIDEO_TOKEN],
        "image_grid_pinpoints": _CROPS,
    },
    "idefics3": {
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": _VISION,
        "image_token_id": 256 + len(SPECIAL),
        "scale_factor": 2,
    },
    "paligemma": {
        "text_config": _TEXT | {"model_type": "gemma"},
        "vision_config": _VISION
        | {"model_type": "siglip_vision_model", "projection_dim": 64, "vision_use_head": False},
        "image_token_index": IDS[IMAGE_TOKEN],
        "projection_dim": 64,
    },
    "glm4v": {
        "text_config": _TEXT | {"rope_parameters": _rope(2, 3, 3) | {"partial_rotary_factor": 1.0}},
        "vision_config": _QWEN_VISION | {"depth": 2, "patch_size": 14, "image_size": 56},
        "image_token_id": IDS[IMAGE_TOKEN],
        "video_token_id": IDS[VIDEO_TOKEN],
        "image_start_token_id": IDS[IMAGE_START],
        "image_end_token_id": IDS[IMAGE_END],
    },
    "mistral3": {
        "text_config": _TEXT | {"model_type": "mistral"},
        "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 16},
        "image_token_index": IDS[IMAGE_TOKEN],
        "spatial_merge_size": 2,
    },
}
"""Keys of each model's config."""

_SQUARE = {"height": 56, "width": 56}
_PREPROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "processor_class": "Qwen2VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 28 * 28, "longest_edge": 112 * 112},
        "patch_size": 14,
    },
    "qwen2_5_vl": {
        "processor_class": "Qwen2_5_VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 28 * 28, "longest_edge": 112 * 112},
        "patch_size": 14,
    },
    "qwen3_vl": {
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128},
        "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "gemma3": {"processor_class": "Gemma3Processor", "image_processor_type": "Gemma3ImageProcessor", "size": _SQUARE},
    "llava": {
        "processor_class": "LlavaProcessor",
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 56},
        "crop_size": _SQUARE,
    },
    "internvl": {
        "processor_class": "InternVLProcessor",
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": _SQUARE,
        "crop_to_patches": False,
    },
    "llava_next": {
        "processor_class": "LlavaNextProcessor",
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": 56},
        "crop_size": _SQUARE,
        "image_grid_pinpoints": _CROPS,
    },
    "llava_onevision": {
        "processor_class": "LlavaOnevisionProcessor",
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": _SQUARE,
        "image_grid_pinpoints": _CROPS,
    },
    "idefics3": {
        "processor_class": "Idefics3Processor",
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 112},
        "max_image_size": {"longest_edge": 56},
    },
    "paligemma": {
        "processor_class": "PaliGemmaProcessor",
        "image_processor_type": "SiglipImageProcessor",
        "size": _SQUARE,
        "image_seq_length": 16,
    },
    "glm4v": {
        "processor_class": "Glm4vProcessor",
        "image_processor_type": "Glm4vImageProcessor",
        "size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 112 * 112},
    },
    "mistral3": {
        "processor_class": "PixtralProcessor",
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 112},
        "patch_size": 14,
    },
}
_PROCESSORS: dict[str, dict[str, Any]] = {
    "gemma3": {"image_seq_length": 4},
    "llava": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    "internvl": {"image_seq_length": 4},
    "llava_next": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    "llava_onevision": {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    "idefics3": {"image_seq_len": 4},
    "mistral3": {"patch_size": 14, "spatial_merge_size": 2, "image_token": IMAGE_TOKEN},
}
_TOKENIZER: dict[str, dict[str, str]] = {
    "gemma3": {"boi_token": IMAGE_START, "eoi_token": IMAGE_END, "image_token": IMAGE_TOKEN},
    "llava": {"image_token": IMAGE_TOKEN},
    "llava_next": {"image_token": IMAGE_TOKEN},
    "llava_onevision": {"image_token": IMAGE_TOKEN, "video_token": VIDEO_TOKEN},
    "paligemma": {"image_token": IMAGE_TOKEN},
    "glm4v": {"image_token": IMAGE_TOKEN, "video_token": VIDEO_TOKEN},
    "internvl": {
        "start_image_token": IMAGE_START,
        "end_image_token": IMAGE_END,
        "context_image_token": IMAGE_TOKEN,
        "video_token": VIDEO_TOKEN,
    },
}


def tiny_vision(folder: Path, model_type: str, *, seed: int = 7, num_heads: int = 4) -> Path:
    """Write a model of `MODEL_TYPES` or `FAMILIES` with its tokenizer and processor to `folder`, which is returned.

    The language model is 64 wide and has `num_heads` heads: engines support the size of 2 heads on a CPU.

    Tokens are bytes and `SPECIAL`. Tokens of an image: qwen2_5_vl one for 28 x 28 pixels, qwen3_vl one for 32 x 32,
    gemma3 4, llava 16, internvl 4 for each of its crops. Weights are random float32, about 0.3 million.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    write_processor(folder, model_type)
    config = AutoConfig.for_model(model_type, **_with_heads(CONFIGS[model_type], num_heads))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            # Weights of the image encoder are small by default, and would hide that images are exchanged.
            if parameter.ndim >= 2 and "language_model" not in name and "lm_head" not in name:
                torch.nn.init.normal_(parameter, 0.0, 0.1)
    model.generation_config.eos_token_id = IDS[TURN_END]
    model.save_pretrained(folder)
    return folder


def _with_heads(keys: dict[str, Any], num_heads: int) -> dict[str, Any]:
    text = dict(keys["text_config"])
    wider = text["num_attention_heads"] // num_heads
    for key in ("num_attention_heads", "num_key_value_heads"):
        text[key] //= wider
    for key in {"head_dim", "query_pre_attn_scalar"} & text.keys():
        text[key] *= wider
    if "rope_parameters" in text:
        text["rope_parameters"] = _rope(*[wider * size for size in text["rope_parameters"]["mrope_section"]])
    return {**keys, "text_config": text}


def write_processor(folder: Path, model_type: str) -> None:
    """Write the tokenizer and the processor of `tiny_vision`."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(ByteLevel.alphabet())
    characters = Tokenizer(BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    characters.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    characters.decoder = ByteDecoder()
    characters.add_special_tokens(list(SPECIAL))
    if model_type == "gemma3":
        characters.add_tokens([AddedToken(newlines, normalized=False) for newlines in NEWLINES])
    if model_type == "idefics3":
        characters.add_special_tokens(list(IDEFICS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        eos_token=TURN_END,
        pad_token=PADDING,
        extra_special_tokens=_TOKENIZER.get(model_type, {}),
    )
    tokenizer.chat_template = _TEMPLATE.replace("PLACEHOLDER", PLACEHOLDERS[model_type])
    tokenizer.save_pretrained(folder)
    preprocessor = _PREPROCESSORS[model_type]
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    if model_type in _PROCESSORS:
        processor = {"processor_class": preprocessor["processor_class"], **_PROCESSORS[model_type]}
        (folder / "processor_config.json").write_text(json.dumps(processor))
