"""Messages of environments on a board: the board as text, or as a picture for a model that reads images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from roll_core.spec.rollout import IMAGE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from PIL import Image

Observation = Literal["text", "image"]
FIELD_PIXELS = 28
"""Pixels of a field, in each direction."""
GROUND, WALL = (235, 235, 225), (70, 70, 80)
Shape = tuple[Literal["square", "circle", "ring"], tuple[int, int, int]]
AGENT: Shape = ("circle", (40, 90, 220))
BOX: Shape = ("square", (150, 95, 45))
TARGET: Shape = ("ring", (215, 45, 45))
GOAL: Shape = ("square", (40, 165, 75))
HOLE: Shape = ("circle", (0, 0, 0))
"""Shapes in fields. Colours and shapes differ, so that a model without colours sees them too."""


def board_message(
    observation: Observation, board: str, shapes: Mapping[str, Sequence[Shape]], *before: str
) -> dict[str, Any]:
    """The user's message with a board after the texts `before`.

    `board` has a row per line and a sign per field; `shapes` are those of each sign. `#` is a wall, other signs are
    empty.
    """
    texts = list(before)
    if observation == "text":
        return {"role": "user", "content": "\n".join([*texts, board])}
    return {"role": "user", "content": "\n".join([*texts, IMAGE]), "media": [picture(board, shapes)]}


def picture(board: str, shapes: Mapping[str, Sequence[Shape]]) -> Image.Image:
    """A picture of the board. Equal boards have equal pixels."""
    from PIL import Image, ImageDraw

    rows = board.splitlines()
    image = Image.new("RGB", (FIELD_PIXELS * len(rows[0]), FIELD_PIXELS * len(rows)), GROUND)
    draw = ImageDraw.Draw(image)
    for y, row in enumerate(rows):
        for x, sign in enumerate(row):
            left, top = FIELD_PIXELS * x, FIELD_PIXELS * y
            field = (left, top, left + FIELD_PIXELS - 1, top + FIELD_PIXELS - 1)
            draw.rectangle(field, fill=WALL if sign == "#" else GROUND, outline=(190, 190, 180))
            for kind, colour in shapes.get(sign, ()):
                margin = 3 if kind == "ring" else 6
                inside = (field[0] + margin, field[1] + margin, field[2] - margin, field[3] - margin)
                if kind == "square":
                    draw.rectangle(inside, fill=colour)
                elif kind == "circle":
                    draw.ellipse(inside, fill=colour)
                else:
                    draw.ellipse(inside, outline=colour, width=3)
    return image
