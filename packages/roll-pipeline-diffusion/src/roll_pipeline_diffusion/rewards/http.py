"""A reward by an endpoint that scores images. Only JSON crosses the network, with images as PNG in base64."""

from __future__ import annotations

import base64
import io
import json
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.errors import RewardFailure
from roll_core.http_requests import open_within
from roll_core.types import Reward
from roll_pipeline_diffusion.rewards.base import ImageReward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_pipeline_diffusion.rewards.base import Images, Row
    from roll_pipeline_diffusion.rewards.config import ImageHttpConfig

MAX_REPLY = 4 << 20
"""Bytes of a reply."""
FIRST_DELAY_S = 0.2
"""Seconds before the first retry. Each further one waits twice as long."""


class HttpReward(ImageReward):
    """Scores batches of images by an endpoint. A request that fails is a failure of its images, never a value."""

    config: ImageHttpConfig

    @override
    def score_images(self, images: Images, prompts: Sequence[str], rows: Sequence[Row]) -> Sequence[Reward]:
        size = self.config.batch_size
        rewards: list[Reward] = []
        for start in range(0, len(images), size):
            part = slice(start, start + size)
            rewards += self._score(images[part], prompts[part], rows[part])
        return rewards

    def _score(self, images: Images, prompts: Sequence[str], rows: Sequence[Row]) -> list[Reward]:
        columns = self.config.row_columns
        message = {
            "images": [[_png(frame) for frame in image] if image.ndim == 4 else _png(image) for image in images],
            "prompts": list(prompts),
            "rows": [{name: row.get(name) for name in columns} for row in rows],
        }
        try:
            data = json.dumps(message, default=_plain, allow_nan=False).encode("ascii")
            scores = self._post_with_retries(data)
            if not isinstance(scores, list) or len(scores) != len(images):
                count = f"{len(scores)} scores" if isinstance(scores, list) else "no list of scores"
                raise RewardFailure(f"{self.config.url}: {count} for {len(images)} images")
        except (RewardFailure, ValueError) as error:
            return [Reward(value=None, failure=str(error))] * len(images)
        return [_reward(score) for score in scores]

    def _post_with_retries(self, data: bytes) -> Any:
        for attempt in range(self.config.max_retries + 1):
            try:
                return self._post(data)
            except _TemporaryFailure:
                if attempt == self.config.max_retries:
                    raise
                time.sleep(FIRST_DELAY_S * 2**attempt)
        raise AssertionError

    def _post(self, data: bytes) -> Any:
        url = self.config.url
        headers = {"Content-Type": "application/json"}
        if self.config.api_key:
            headers["Authorization"] = f"Bearer {self.config.api_key}"
        request = urllib.request.Request(url, data=data, headers=headers, method="POST")
        body = b""
        try:
            with open_within(request, self.config.timeout_s) as reply:
                while chunk := reply.read1(1 << 16):
                    body += chunk
                    if len(body) > MAX_REPLY:
                        raise RewardFailure(f"{url}: a reply of more than {MAX_REPLY} bytes")
                missing = reply.length
            if missing:
                raise _TemporaryFailure(f"{url}: the reply ended {missing} bytes early")
        except urllib.error.HTTPError as error:
            start = b""
            with error, suppress(OSError, HTTPException):
                start = error.read1(300)
            kind = _TemporaryFailure if error.code == 429 or error.code >= 500 else RewardFailure
            raise kind(f"{url}: status {error.code}: {start!r}") from error
        except (OSError, ValueError, HTTPException) as error:
            raise _TemporaryFailure(f"{url}: {type(error).__name__}: {error}") from error
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RewardFailure(f"{url}: the reply is not JSON: {body[:100]!r}") from error
        return parsed.get("scores") if isinstance(parsed, dict) else None


class _TemporaryFailure(RewardFailure):
    """A failure that may not happen again."""


def _reward(score: Any) -> Reward:
    if isinstance(score, int | float) and not isinstance(score, bool):
        return Reward(value=float(score))
    if isinstance(score, dict):
        value, detail = score.get("value"), score.get("detail")
        detail = detail if isinstance(detail, dict) else {}
        plain = {str(name): number for name, number in detail.items() if isinstance(number, int | float | str)}
        if score.get("failure"):  # also beside a value, which it makes doubtful
            return Reward(value=None, failure=str(score["failure"])[:500], detail=plain)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return Reward(value=float(value), detail=plain)
    return Reward(value=None, failure=f"the endpoint returned {score!r:.200}, expected a number or value or failure")


def _png(image: Images) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode("ascii")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ValueError(f"a column has {type(value).__name__}, which is not JSON: remove it from row_columns")
