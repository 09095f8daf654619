"""Rewards of other services: a language model behind OpenAI's API, or an endpoint that returns the value.

Only JSON crosses the network. The processes of the reward worker are killed at `timeout_s`, so a service that sends a
byte now and then cannot hold a sample. Retries are those of every reward (`max_retries`).
"""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from collections import Counter
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.errors import RewardFailure
from roll_core.spec.rollout import RewardFunction
from roll_core.types import Reward

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.rollout import RewardRequest
    from roll_rewards.config import HttpConfig, JudgeConfig

MAX_REPLY = 4 << 20
"""Maximum bytes of a reply."""
PLACEHOLDER = re.compile(r"\{(prompt|response|ground_truth)\}")
YES_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


class ReplyTooLargeError(RewardFailure):
    """A reply has more bytes than allowed."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which would send the key to another host."""

    @override
    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        return None


def post(url: str, message: Mapping[str, Any], key: str, timeout_s: float, *, max_reply: int = MAX_REPLY) -> Any:
    """Send JSON and return the JSON of the reply. Raises `RewardFailure` with the status or the cause."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        data = json.dumps(message, default=_plain, allow_nan=False).encode("ascii")
    except ValueError as error:
        raise RewardFailure(f"a column cannot be sent: {error}") from error
    request = urllib.request.Request(url, data=data, headers=headers, method="POST")
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s) as reply:
            body = reply.read(max_reply + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise RewardFailure(f"{url}: status {error.code}: {error.read(300)!r}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise RewardFailure(f"{url}: {type(error).__name__}: {error}") from error
    if len(body) > max_reply:
        raise ReplyTooLargeError(f"{url}: a reply of more than {max_reply} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RewardFailure(f"{url}: the reply is not JSON: {body[:100]!r}") from error


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
            "messages": [dict(each) for each in request.messages],
            "metadata": dict(request.metadata),
        }
        reply = post(config.url, message, config.api_key, config.timeout_s)
        if isinstance(reply, dict) and isinstance(reply.get("failure"), str) and reply["failure"]:
            raise RewardFailure(reply["failure"][:500])
        value: Any = reply.get("value") if isinstance(reply, dict) else None
        detail = reply.get("detail", {}) if isinstance(reply, dict) else {}
        if not _is_number(value) or not isinstance(detail, dict):
            raise RewardFailure(f"{config.url}: the reply is {str(reply)[:100]!r}, expected a finite `value`")
        if not all(isinstance(each, str) or _is_number(each) for each in detail.values()):
            raise RewardFailure(f"{config.url}: detail is {str(detail)[:100]!r}, expected numbers and texts")
        numbers = {key: each if isinstance(each, str) else float(each) for key, each in detail.items()}
        return Reward(value=float(value), detail=numbers)


class JudgeReward(RewardFunction):
    """The score that a language model gives, by the majority of `num_votes` replies."""

    config: JudgeConfig

    @override
    def score(self, request: RewardRequest) -> Reward:
        config = self.config
        content = self._prompt(request)
        url = config.judge_api_url.rstrip("/") + "/chat/completions"
        message = {
            "model": config.judge_model_name,
            "messages": [{"role": "user", "content": content}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }
        votes, last = [], ""
        for _ in range(config.num_votes):
            last = _content(post(url, message, config.judge_api_key, config.timeout_s), url)
            votes.append(self._vote(last))
        valid = [vote for vote in votes if vote is not None]
        if 2 * len(valid) <= len(votes):
            raise RewardFailure(f"{len(valid)} of {len(votes)} replies have a score, the last: {last[-200:]!r}")
        return Reward(value=majority(valid), detail={"votes": float(len(valid)), "reply": last[-500:]})

    def _prompt(self, request: RewardRequest) -> str:
        column = self.config.ground_truth
        if "{ground_truth}" in self.config.judge_prompt and column not in request.metadata:
            raise RewardFailure(f"judge_prompt needs the column {column!r}, which the row lacks")
        values = {
            "prompt": request.prompt,
            "response": request.response,
            "ground_truth": str(request.metadata.get(column, "")),
        }
        # All at once: a response that contains a placeholder stays as it is.
        return PLACEHOLDER.sub(lambda match: values[match[1]], self.config.judge_prompt)

    def _vote(self, reply: str) -> float | None:
        """Value of a reply, from 0 to 1; None if it has no score."""
        config, reply = self.config, reply.rpartition("</think>")[2]
        if config.judge_scale == "yes_no":
            words = YES_NO.findall(reply)
            return float(words[-1].lower() == "yes") if words else None
        found = [each.group(1) for each in re.finditer(config.score_pattern, reply)]
        try:
            score = float(found[-1])
        except (IndexError, TypeError, ValueError):
            return None
        low, high = config.score_range
        return (score - low) / (high - low) if low <= score <= high else None


def majority(votes: Sequence[float]) -> float:
    """The most frequent vote. Of several, the lowest: a tie does not raise a reward."""
    counts = Counter(votes)
    most = max(counts.values())
    return min(vote for vote, number in counts.items() if number == most)


def _content(reply: Any, url: str) -> str:
    try:
        content = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        content = None
    if not isinstance(content, str):
        raise RewardFailure(f"{url}: the reply is no chat completion: {str(reply)[:100]!r}")
    return content


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
