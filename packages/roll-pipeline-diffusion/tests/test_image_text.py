"""The reward `image_text` with its default reader, on rendered words."""

from __future__ import annotations

import numpy as np
import pytest

from roll_pipeline_diffusion.rewards import config as schemas
from roll_pipeline_diffusion.rewards.base import ImageRewards

pytestmark = pytest.mark.engine("rapidocr")


def drawn(text: str, colour: str) -> np.ndarray:
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (320, 96), colour)
    ImageDraw.Draw(image).text((24, 24), text, fill="black", font=ImageFont.load_default(size=40))
    return np.asarray(image)


def test_rendered_word_is_read_and_wrong_ones_score_less():
    images = np.stack([drawn("Open 42", "white"), drawn("Open 42", "orange"), drawn("Closed", "white")])
    images = np.concatenate([images, np.full((1, 96, 320, 3), 200, np.uint8)])
    config = schemas.ImageTextConfig(reward="image_text")
    assert not config.check_code(None, 60)
    found = ImageRewards({"text": config}).score(images, ['a sign "open 42"'] * 4, [{}] * 4)["text"]
    assert [each.value for each in found[:2]] == [1.0, 1.0]
    assert found[2].value < 0.6
    assert (found[3].value, found[3].detail["read"]) == (0.0, "")
