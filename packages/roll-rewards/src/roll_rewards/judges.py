"""Rewards of language models as judges: behind OpenAI's API, or in a role of the run. Both read the same replies.

sample ──► judging_prompt ─┬─► POST /chat/completions ─┬─► replies ──► votes ──► majority ──► reward
                           └─► the role's engine ──────┘
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.data.encode import media_of
from roll_core.data.media import with_parts
from roll_core.data.reasoning import answer_of
from roll_core.errors import RewardFailure
from roll_core.spec.rollout import IMAGE, EngineReward, RewardFunction
from roll_core.types import Reward
from roll_rewards.services import post

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.rollout import RewardRequest
    from roll_rewards.config import JudgeConfig, JudgeModelConfig, JudgingConfig

PLACEHOLDER = re.compile(r"\{(prompt|response|ground_truth)\}")
YES_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
VERDICTS = (
    re.compile(r"^\W*(?:[\w ]{1,30}:)?\W*(yes|no)\W*$", re.IGNORECASE | re.MULTILINE),  # a line of its own
    re.compile(r"\b(YES|NO)\b(?=(?:.*\b(?:YES|NO))?\W*\Z)", re.DOTALL),  # capitals, if the last word is one of them
)
COMPLETE = frozenset({"stop", "eos_token", "stop_sequence", None})
"""Finish reasons of complete replies: OpenAI's and TGI's. None: the server states none."""


class JudgeReward(RewardFunction):
    """The score that a language model behind an API gives, by the majority of `num_votes` replies."""

    config: JudgeConfig

    @override
    def score(self, request: RewardRequest) -> Reward:
        config = self.config
        url = config.judge_api_url.rstrip("/") + "/chat/completions"
        message = {
            "model": config.judge_model_name,
            "messages": with_parts(judging_messages(config, request), data=True),
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }
        replies = [
            _reply(post(url, message, config.judge_api_key, config.timeout_s), url) for _ in range(config.num_votes)
        ]
        return reward_of(config, replies)


class JudgeModelReward(EngineReward):
    """The score that the model of the role gives, by the majority of `num_votes` replies."""

    config: JudgeModelConfig

    @override
    def messages(self, request: RewardRequest) -> Sequence[Mapping[str, Any]]:
        return judging_messages(self.config, request)

    @override
    def score(self, request: RewardRequest) -> Reward:
        return reward_of(self.config, list(zip(request.replies, request.reply_finish_reasons, strict=True)))


def judging_messages(config: JudgingConfig, request: RewardRequest) -> list[dict[str, Any]]:
    """The message to the judge: `judge_prompt` with its placeholders replaced. Raises `RewardFailure`.

    The prompt of a sample with images is the texts of its messages, with the images at their places.
    """
    column = config.ground_truth
    if "{ground_truth}" in config.judge_prompt and column not in request.metadata:
        raise RewardFailure(f"judge_prompt needs the column {column!r}, which the row lacks")
    media = media_of(request.messages) * config.judge_prompt.count("{prompt}")
    values = {
        "prompt": "\n\n".join(message["content"] for message in request.messages) if media else request.prompt,
        "response": request.response,
        "ground_truth": str(request.metadata.get(column, "")),
    }
    if media:  # only the prompt has images
        values |= {name: values[name].replace(IMAGE, "") for name in ("response", "ground_truth")}
    # All at once: a response that contains a placeholder stays as it is.
    content = PLACEHOLDER.sub(lambda match: values[match[1]], config.judge_prompt)
    return [{"role": "user", "content": content, **({"media": media} if media else {})}]


def reward_of(config: JudgingConfig, replies: Sequence[tuple[str, str | None]]) -> Reward:
    """The majority of the scores of replies, each a text and its finish reason.

    Raises `RewardFailure` if half of the replies or more have no score.
    """
    votes = [_vote(config, text, finish_reason) for text, finish_reason in replies]
    valid = [vote for vote in votes if vote is not None]
    last, finish_reason = replies[-1] if replies else ("", None)
    if 2 * len(valid) <= len(votes):
        ended = "" if finish_reason in COMPLETE else f" (finish_reason {finish_reason!r})"
        raise RewardFailure(f"{len(valid)} of {len(votes)} replies have a score, the last{ended}: {last[-200:]!r}")
    return Reward(value=majority(valid), detail={"votes": float(len(valid)), "reply": last[-500:]})


def _vote(config: JudgingConfig, reply: str, finish_reason: str | None) -> float | None:
    """Value of a reply, from 0 to 1; None if it has no score.

    An incomplete reply has none: the score would be at the end, and its last number may lack digits.
    """
    if finish_reason not in COMPLETE:
        return None
    answer = answer_of(reply)
    if answer is None:
        return None
    if config.judge_scale == "yes_no":
        words = {word.lower() for word in YES_NO.findall(answer)}
        if len(words) > 1:  # "Yes. No issues found." is no vote, "I see no error. YES" is one
            words = {word.lower() for pattern in VERDICTS for word in pattern.findall(answer)}
        return float("yes" in words) if len(words) == 1 else None
    scores = [match.group(1) for match in re.finditer(config.score_pattern, answer)]
    try:
        score = float(scores[-1])
    except (IndexError, TypeError, ValueError):
        return None
    low, high = config.score_range
    return (score - low) / (high - low) if low <= score <= high else None


def majority(votes: Sequence[float]) -> float:
    """The most frequent vote. Of several, the lowest: a tie does not raise a reward."""
    counts = Counter(votes)
    most = max(counts.values())
    return min(vote for vote, number in counts.items() if number == most)


def _reply(reply: Any, url: str) -> tuple[str, str | None]:
    """Text and finish reason of a chat completion. Raises `RewardFailure` for another reply."""
    try:
        choice = reply["choices"][0]
        content, finish_reason = choice["message"]["content"], choice.get("finish_reason")
    except (AttributeError, KeyError, IndexError, TypeError):
        content = finish_reason = None
    if content is None and finish_reason == "length":
        content = ""  # the server separates the reasoning, which was cut
    if not isinstance(content, str) or not isinstance(finish_reason, str | None):
        raise RewardFailure(f"{url}: the reply is no chat completion: {str(reply)[:100]!r}")
    return content, finish_reason
