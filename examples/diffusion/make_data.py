"""Draw shapes: the training images, and the labels for which images are sampled.

    python examples/diffusion/make_data.py [DIRECTORY]

An image of 8 × 8 pixels has one shape (square, cross) in one colour (red, green, blue) in one quadrant: 24 labels. In
30 % of the training images one of the three parts is not the label's: the pretrained model makes such mistakes, and
rewards correct them.

    images/        the training images, PNG
    train.jsonl    their labels: 30 % wrong in one part
    prompts.jsonl  the 24 labels
"""

from __future__ import annotations

import json
import random
import sys
from itertools import product
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
SHAPES, COLOURS = ("square", "cross"), {"red": (1, -1, -1), "green": (-1, 1, -1), "blue": (-1, -1, 1)}
PLACES = ("top left", "top right", "bottom left", "bottom right")
LABELS = list(product(SHAPES, COLOURS, PLACES))
OFFSETS = list(product((0, 1), (0, 1)))
"""Rows and columns between a quadrant's corner and its shape."""
NUM_IMAGES, WRONG = 1200, 0.3


def draw(shape: str, colour: str, place: str, offset: tuple[int, int]) -> np.ndarray:
    """Pixels `[3, 8, 8]` in [-1, 1]: a shape of 3 × 3 pixels on black."""
    mask = np.ones((3, 3), bool)
    if shape == "cross":
        mask[np.ix_((0, 2), (0, 2))] = False
    at = PLACES.index(place)
    top, left = 4 * (at // 2) + offset[0], 4 * (at % 2) + offset[1]
    image = np.full((3, 8, 8), -1.0, np.float32)
    image[:, top : top + 3, left : left + 3][:, mask] = np.array(COLOURS[colour])[:, None]
    return image


def row(label: tuple[str, str, str]) -> dict[str, object]:
    """Prompt of a label, and its parts as numbers."""
    shape, colour, place = label
    return {"prompt": f"{colour} {shape} {place}", "parts": parts(label)}


def parts(label: tuple[str, str, str]) -> list[int]:
    """Shape, colour and place as numbers."""
    return [SHAPES.index(label[0]), list(COLOURS).index(label[1]), PLACES.index(label[2])]


def main(directory: Path) -> None:
    """Write all files."""
    from PIL import Image

    rng = random.Random(0)
    (directory / "images").mkdir(parents=True, exist_ok=True)
    train = []
    for number in range(NUM_IMAGES):
        label = LABELS[number % len(LABELS)]
        drawn = list(label)
        if rng.random() < WRONG:
            at = rng.randrange(3)
            drawn[at] = rng.choice([each for each in (SHAPES, tuple(COLOURS), PLACES)[at] if each != label[at]])
        pixels = draw(*drawn, rng.choice(OFFSETS))
        file = directory / "images" / f"{number:04d}.png"
        Image.fromarray(((pixels.transpose(1, 2, 0) + 1) * 127.5).round().astype(np.uint8)).save(file)
        train.append(row(label) | {"id": number, "image": f"images/{file.name}"})
    prompts = [row(label) | {"id": number} for number, label in enumerate(LABELS)]
    for name, rows in (("train", train), ("prompts", prompts)):
        text = "".join(json.dumps(each) + "\n" for each in rows)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "data")
