"""Environments whose messages have images, in each form in which a message may have them."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from roll_core.data.media import image_media
from roll_core.spec.environment import Environment, Opening, Reply, Turn
from roll_core.spec.rollout import IMAGE


def image(seed: int, size: tuple[int, int] = (56, 28)) -> Image.Image:
    """An image of one colour."""
    return Image.new("RGB", size, (40 * seed % 256, 90, 200))


def png(seed: int) -> bytes:
    file = io.BytesIO()
    image(seed).save(file, "PNG")
    return file.getvalue()


def message(form: str, seed: int, role: str = "user") -> dict[str, Any]:
    """`see`, an image, and `now`, with the image in this form."""
    encoded = base64.b64encode(png(seed)).decode()
    media = {"pillow": image(seed), "bytes": png(seed), "media": image_media(image(seed))}
    if form in media:
        return {"role": role, "content": f"see{IMAGE}now", "media": [media[form]]}
    part: dict[str, Any] = {
        "part": {"type": "image", "image": image(seed)},
        "base64": {"type": "image", "base64": encoded},
        "url": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        "remote": {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        "path": {"type": "image", "path": "/tmp/a.png"},
        "video": {"type": "video", "video": "a.mp4"},
        "corrupt": {"type": "image", "image": png(seed)[:60]},
        "empty": {"type": "image"},
    }[form]
    return {"role": role, "content": [{"type": "text", "text": "see"}, part, {"type": "text", "text": "now"}]}


class Pictures(Environment):
    """One image in the message of each turn. `seeds` are those of the images."""

    def __init__(self, *, form: str = "pillow", seeds: tuple[int, ...] = (1, 2), tail: str = "") -> None:
        self.form, self.seeds, self.tail, self.turn = form, seeds, tail, 0

    def _message(self) -> dict[str, Any]:
        self.turn += 1
        return message(self.form, self.seeds[self.turn - 1])

    def reset(self, task: Any, seed: int) -> Opening:
        return Opening(messages=[self._message()])

    def step(self, reply: Reply) -> Turn:
        if self.turn == len(self.seeds):
            return Turn(reward=float(sum(map(ord, reply.text)) % 2), done=True)
        following = self._message()
        more = [{"role": "user", "content": self.tail}] if self.tail else []
        return Turn(messages=[following, *more], reward=0.0)
