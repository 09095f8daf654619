"""Requests to other services, and the reward of an endpoint that returns the value.

Only JSON crosses the network. A service that sends a byte now and then cannot hold a sample: `post` has a deadline.
Retries are those of every reward (`max_retries`).
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from http.client import HTTPException, IncompleteRead
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.data.media import with_parts
from roll_core.errors import RewardFailure
from roll_core.http_requests import open_within
from roll_core.spec.rollout import RewardFunction
from roll_core.types import Reward

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.rollout import RewardRequest
    from roll_rewards.config import HttpConfig

MAX_REPLY = 4 << 20
"""Maximum bytes of a reply."""


class ReplyTooLargeError(RewardFailure):
    """A reply has more bytes than allowed."""


def post(url: str, message: Mapping[str, Any], key: str, timeout_s: float, *, max_reply: int = MAX_REPLY) -> Any:
    """Send JSON and return the JSON of the reply. Raises `RewardFailure` with the status or the cause.

    `timeout_s` bounds all of it.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        data = json.dumps(message, default=_plain, allow_nan=False).encode("ascii")
    except ValueError as error:
        raise RewardFailure(f"a column cannot be sent: {error}") from error
    request = urllib.request.Request(url, data=data, headers=headers, method="POST")
    try:
        with open_within(request, timeout_s) as reply:
            body = bytearray()
            while len(body) <= max_reply and (part := reply.read1(1 << 16)):
                body += part
            if reply.length and len(body) <= max_reply:  # of what the headers announced
                raise IncompleteRead(bytes(body), reply.length)
    except urllib.error.HTTPError as error:
        with error:
            raise RewardFailure(f"{url}: status {error.code}: {_start_of(error)!r}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise RewardFailure(f"{url}: {type(error).__name__}: {error}") from error
    if len(body) > max_reply:
        raise ReplyTooLargeError(f"{url}: a reply of more than {max_reply} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RewardFailure(f"{url}: the reply is not JSON: {bytes(body[:100])!r}") from error


def _start_of(error: urllib.error.HTTPError) -> bytes:
    try:
        return bytes(error.read1(300))
    except (OSError, HTTPException):  # the deadline has ended the connection
        return b""


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ValueError(f"{type(value).__name__} is not JSON")


class HttpReward(RewardFunction):
    """The value that an endpoint returns: `{"value": 0.5, "detail": {...}}` or `{"failure": "why"}`."""

    config: HttpConfig

    @override
    def score(self, request: RewardRequest) -> Reward:
        config = self.config
        message = {
            "id": request.sample.id,
            "prompt": request.prompt,
            "response": request.response,
            "messages": with_parts(request.messages, data=True),
            "metadata": dict(request.metadata),
        }
        reply = post(config.url, message, config.api_key, config.timeout_s)
        if isinstance(reply, dict) and reply.get("failure"):
            raise RewardFailure(str(reply["failure"])[:500])
        value: Any = reply.get("value") if isinstance(reply, dict) else None
        detail = reply.get("detail", {}) if isinstance(reply, dict) else {}
        if not _is_number(value) or not isinstance(detail, dict):
            raise RewardFailure(f"{config.url}: the reply is {str(reply)[:100]!r}, expected a finite `value`")
        if not all(isinstance(value, str) or _is_number(value) for value in detail.values()):
            raise RewardFailure(f"{config.url}: detail is {str(detail)[:100]!r}, expected numbers and texts")
        numbers = {key: value if isinstance(value, str) else float(value) for key, value in detail.items()}
        return Reward(value=float(value), detail=numbers)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
