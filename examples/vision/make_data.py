"""Make the data of the vision example: pictures of a digit, and a tiny vision-language model with random weights.

    python examples/vision/make_data.py [DIRECTORY]

SFT responses are noisy: half of them name the next digit. GRPO rewards correct responses only.

    images/       the pictures, and a blank one (blank.png)
    sft.jsonl     pictures with noisy responses
    train.jsonl   the same pictures with the digit, for the reward
    val.jsonl     other pictures
    blank-*.jsonl the same rows with the blank picture, which nobody can read
    model/        a Qwen2.5-VL of 350,000 parameters, with tokenizer and image processor
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

SEED = 2026
NUM_TRAIN, NUM_VALIDATION = 4_000, 200
NOISE = 0.5
"""Probability of a wrong response."""
CELL = 28
"""Pixels of a picture, in each direction. The model sees a square of 28 x 28 pixels as one token."""
# The segments a to g of a digit as lines from corner to corner, and those that are lit, from 0 to 9.
SEGMENTS = [((0, 0), (1, 0)), ((1, 0), (1, 1)), ((1, 1), (1, 2)), ((0, 2), (1, 2)), ((0, 1), (0, 2)), ((0, 0), (0, 1))]
SEGMENTS += [((0, 1), (1, 1))]
LIT = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
SPECIAL += ("<|image_pad|>", "<|video_pad|>")
TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}\
{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CONFIG = {
    "image_token_id": 261,
    "video_token_id": 262,
    "vision_start_token_id": 259,
    "vision_end_token_id": 260,
    "text_config": {
        "vocab_size": 263,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "pad_token_id": 256,
        "bos_token_id": None,
        "eos_token_id": 258,
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": 14,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    },
}
PROCESSOR = {
    "processor_class": "Qwen2_5_VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": CELL * CELL,
    "max_pixels": 4 * CELL * CELL,
}


def picture(digit: int, rng: random.Random) -> Image.Image:
    """Draw the digit somewhere in the picture, in a brightness of its own, on a dark ground."""
    image = Image.new("RGB", (CELL, CELL), tuple(rng.randint(0, 40) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    left, top, brightness = rng.randint(8, 10), rng.randint(5, 7), rng.randint(200, 255)
    for segment in LIT[digit]:
        line = [(left + 10 * x, top + 8 * y) for x, y in SEGMENTS["abcdefg".index(segment)]]
        draw.line(line, fill=(brightness,) * 3, width=3)
    return image


def main(directory: Path) -> None:
    """Write all files. Their contents are the same every time."""
    rng = random.Random(SEED)
    (directory / "images").mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (CELL, CELL), (20, 20, 20)).save(directory / "images" / "blank.png")
    rows = []
    for number in range(NUM_TRAIN + NUM_VALIDATION):
        digit = rng.randrange(10)
        picture(digit, rng).save(directory / "images" / f"{number:04d}.png")
        rows.append({"id": number, "prompt": "read", "images": [f"images/{number:04d}.png"], "digit": digit})
    train, validation = rows[:NUM_TRAIN], rows[NUM_TRAIN:]
    noisy = [row | {"response": str((row["digit"] + (rng.random() < NOISE)) % 10)} for row in train]
    for name, lines in (("sft", noisy), ("train", train), ("val", validation)):
        write(directory / f"{name}.jsonl", lines)
        write(directory / f"blank-{name}.jsonl", [line | {"images": ["images/blank.png"]} for line in lines])
    save_tokenizer(directory / "model")
    torch.manual_seed(SEED)
    Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**CONFIG)).save_pretrained(directory / "model")


def save_tokenizer(directory: Path) -> None:
    """Write a tokenizer of bytes with the special tokens of Qwen's models, and the settings of their processor."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2), encoding="utf-8")


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data")
