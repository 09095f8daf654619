"""Masks of tokens by their text: parts of a reply, matches of a pattern, and the messages of an environment.

ids       41 7 7 93 12        no text is encoded: spans are searched in the decoded text
text      ab<tool>c           and map to the tokens whose text they overlap
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from roll_core.types import Rollout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from roll_core.types import Bools, TokenIds, TurnRecord
    from roll_pipeline_agentic.chat_encoder import ChatEncoder, EncodedChat
    from roll_pipeline_agentic.config import ResponseMaskConfig

    Decode = Callable[[TokenIds], str]
    """Text of token ids, with special tokens."""

INCOMPLETE = "\ufffd"
"""Decoded instead of a character of which only some bytes are present."""


def is_invalid(metrics: Mapping[str, float]) -> bool:
    """True if the environment reports an invalid action: the metric `valid` of the turn is 0."""
    return metrics.get("valid") == 0


def mask_of_spans(ids: TokenIds, decode: Decode, spans: Iterable[tuple[int, int]]) -> Bools:
    """Mask of the tokens whose text overlaps one of `spans`, `(begin, end)` in characters of the decoded text.

    Decodes prefixes of `ids` in a binary search, so its cost grows with the logarithm of their number.
    """
    mask = np.zeros(len(ids), dtype=np.bool_)

    def num_chars(count: int) -> int:
        return len(decode(ids[:count]).rstrip(INCOMPLETE)) if count else 0

    for begin, end in spans:
        # The last token that begins at or before the span, then the first boundary at or after its end.
        first = bisect_left(range(len(ids)), begin, key=num_chars)
        if first and num_chars(first) > begin:
            first -= 1
        mask[first : max(bisect_left(range(len(ids)), end, key=num_chars), first + 1)] = True
    return mask


def mask_of_reply(ids: TokenIds, decode: Decode, pattern: str | None) -> Bools:
    """Mask of a reply's tokens in matches of `pattern`, or of all tokens without one."""
    if pattern is None:
        return np.ones(len(ids), dtype=np.bool_)
    return mask_of_spans(ids, decode, [match.span() for match in re.finditer(pattern, decode(ids), re.DOTALL)])


def mask_of_messages(ids: TokenIds, encoder: ChatEncoder, chat: EncodedChat, number: int) -> Bools | None:
    """Mask of the texts of the last `number` messages of `chat`, whose last tokens are `ids`.

    None if the template escapes or rewrites a text, or if the tokenizer decodes the messages to another text.
    """
    spans, text = encoder.spans_of_messages(chat, number), encoder.text(ids)
    if spans is None or not text.endswith(chat.text[spans[0][0] :] if spans else ""):
        return None
    shift = len(text) - len(chat.text)
    return mask_of_spans(ids, encoder.text, [(begin + shift, end + shift) for begin, end in spans])


def mask_rollout(rollout: Rollout, config: ResponseMaskConfig, encoder: ChatEncoder) -> Rollout:
    """Set the loss masks of a rollout's turns: the turns, and the parts or matches in them, that `config` selects."""
    last = len(rollout.turns) - 1

    def mask(index: int, turn: TurnRecord) -> Bools:
        ids = turn.sampled_ids
        if not (config.turns == "all" or (index == last if config.turns == "last" else not is_invalid(turn.metrics))):
            return np.zeros(len(ids), dtype=np.bool_)
        if config.parts is None:
            return mask_of_reply(ids, encoder.text, config.pattern)
        spans = encoder.spans(ids, turn.context_ids)
        return mask_of_spans(ids, encoder.text, [(begin, end) for begin, end, part in spans if part in config.parts])

    return Rollout(turns=tuple(replace(turn, loss_mask=mask(index, turn)) for index, turn in enumerate(rollout.turns)))
