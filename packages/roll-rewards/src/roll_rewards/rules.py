"""Rules that look at the response alone: its format, length and repetitions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.spec.rollout import RewardFunction
from roll_core.types import Reward

if TYPE_CHECKING:
    from roll_core.spec.rollout import RewardRequest
    from roll_rewards.config import FormatConfig, LengthPenaltyConfig, RepetitionPenaltyConfig


class Format(RewardFunction):
    """1 if the response matches a pattern, else 0."""

    config: FormatConfig

    @override
    def score(self, request: RewardRequest) -> Reward:
        match = re.fullmatch if self.config.match == "full" else re.search
        return Reward(value=float(match(self.config.format_pattern, request.response, re.DOTALL) is not None))


class LengthPenalty(RewardFunction):
    """0 up to `free_length` tokens, then linear to -1 at `max_length` tokens."""

    config: LengthPenaltyConfig

    @override
    def score(self, request: RewardRequest) -> Reward:
        num_tokens = len(request.sample.response_ids)
        return Reward(
            value=length_penalty(num_tokens, self.config.free_length, self.config.max_length),
            detail={"tokens": float(num_tokens)},
        )


class RepetitionPenalty(RewardFunction):
    """`max_penalty` times the share of repeated n-grams of words."""

    config: RepetitionPenaltyConfig

    @override
    def score(self, request: RewardRequest) -> Reward:
        share = repeated_share(request.response, self.config.ngram_size)
        return Reward(value=self.config.max_penalty * share, detail={"repeated_share": share})


def length_penalty(num_tokens: int, free_length: int, max_length: int) -> float:
    """`-clip((n - free) / (max - free), 0, 1)`, the shape of DAPO's soft overlong punishment (2503.14476, eq. 13).

    DAPO's reaches -1 at the end of the response's maximum length; here both lengths are free.
    """
    return 0.0 - min(max((num_tokens - free_length) / (max_length - free_length), 0.0), 1.0)


def repeated_share(text: str, size: int) -> float:
    """`1 - distinct / all` of the n-grams of words, in lower case (2502.03373, section 4.3).

    ROLL and open-r1 use the same formula. 0 if the text has fewer than `size` words.
    """
    words = text.lower().split()
    num_all = len(words) - size + 1
    if num_all <= 0:
        return 0.0
    return 1 - len({tuple(words[index : index + size]) for index in range(num_all)}) / num_all
