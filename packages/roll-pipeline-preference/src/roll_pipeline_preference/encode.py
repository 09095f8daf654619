"""Encodes pairs of responses, and labelled responses, as training sequences.

Both responses of a pair follow exactly the same prompt tokens: the prompt is encoded apart from its responses, and only
responses are truncated.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.data.encode import Counts, Encoder, Overlong, media_of, report_counts
from roll_core.data.rows import are_chats, tools_of
from roll_core.errors import DataError
from roll_core.types import TrainSequence
from roll_pipeline_preference.rows import are_pairs, labelled_of, margin_of, need_preferences, pair_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from roll_core.data.rows import Message, Row, Rows
    from roll_core.spec.config import DataArguments
    from roll_core.types import Floats, Media

log = logging.getLogger(__name__)

CHOSEN = "chosen"
"""Stream: 1 at the tokens of chosen or desirable responses."""
DESIRABLE = "desirable"
"""Stream of labelled responses: 1 at the last token of desirable ones, so that its total counts them."""
MARGIN = "margin"
"""Stream of pairs: the pair's margin at the last token of the chosen response."""


@dataclass(slots=True)
class PairCounts(Counts):
    """Numbers of kept, dropped and truncated pairs or labelled responses."""

    identical: int = 0
    """Dropped: a pair whose responses are equal after truncation."""


def encode_pairs(
    rows: Rows,
    data: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_length: int,
    response_length: int,
    overlong: Overlong = "drop",
    margin: str | None = None,
) -> tuple[list[TrainSequence], PairCounts]:
    """Encode pairs as sequences: the chosen one, then the rejected one, for each kept row.

    A pair is dropped if its prompt exceeds `prompt_length`, or with `drop` if a response exceeds `response_length`.
    `truncate` cuts responses at their end, and drops pairs that are then equal. `margin` names a column of numbers.
    Raises `DataError`.
    """
    need_preferences(rows, data, unpaired=False)
    encode = _PreferenceEncoder(rows, data, tokenizer, prompt_length, response_length, overlong)
    sequences: list[TrainSequence] = []
    for row in rows:
        prompt, *responses = pair_of(row, data, rows)
        value = margin_of(row, margin, rows) if margin is not None else 0.0
        encoded: list[tuple[Any, Any, tuple[Media, ...]] | None] = []
        for response in responses:
            encoded.append(encode(row, prompt, response))
            if encoded[-1] is None:
                break  # the pair is dropped, and counted once
        if encode.keeps(row, encoded):
            one, other = (response for response in encoded if response is not None)
            sequences.append(_sequence(f"{row.id}/chosen", *one, chosen=True, margin=value))
            sequences.append(_sequence(f"{row.id}/rejected", *other, chosen=False))
    report_counts("pairs", rows, encode.counts)
    return sequences, encode.counts


def encode_labelled(
    rows: Rows,
    data: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_length: int,
    response_length: int,
    overlong: Overlong = "drop",
) -> tuple[list[TrainSequence], PairCounts]:
    """Encode labelled responses as sequences. A pair becomes a desirable and an undesirable response.

    Lengths as in `encode_pairs`, for each response on its own. Raises `DataError`.
    """
    need_preferences(rows, data, unpaired=True)
    encode = _PreferenceEncoder(rows, data, tokenizer, prompt_length, response_length, overlong)
    paired = are_pairs(rows, data)
    sequences: list[TrainSequence] = []
    for row in rows:
        if paired:
            prompt, chosen, rejected = pair_of(row, data, rows)
            labelled = [("/chosen", chosen, True), ("/rejected", rejected, False)]
        else:
            prompt, response, label = labelled_of(row, data, rows)
            labelled = [("", response, label)]
        for suffix, response, desirable in labelled:
            encoded = encode(row, prompt, response)
            if encoded is not None and encode.keeps(row, [encoded]):
                sequences.append(_sequence(f"{row.id}{suffix}", *encoded, chosen=desirable, counted=True))
    num_desirable = sum(DESIRABLE in sequence.streams for sequence in sequences)
    if num_desirable in (0, len(sequences)):
        word = str(num_desirable > 0).lower()
        log.warning("%s and all other rows have label %s, but the loss compares responses of both", rows[0].where, word)
    report_counts("responses", rows, encode.counts)
    return sequences, encode.counts


def mismatched(sequences: Sequence[TrainSequence], where: str) -> list[TrainSequence]:
    """Each prompt with the response of the next sequence that has another prompt, cyclically.

    The pairing depends only on the data, not on batches. Raises `DataError`, which names the rows' place `where`, if
    all sequences have the same prompt.
    """
    starts = [int(sequence.loss_mask.argmax()) for sequence in sequences]
    prompts = [
        (sequence.tokens[:start].tobytes(), [media.digest for media in sequence.media])
        for sequence, start in zip(sequences, starts, strict=True)
    ]
    count = len(sequences)
    if all(prompt == prompts[0] for prompt in prompts):
        raise DataError(
            f"{where} and all other rows have the same prompt, expected at least two prompts for the KL term of kto:"
            " add rows, or use loss_type: apo_zero_unpaired"
        )
    partner = [0] * count
    for index in reversed(range(2 * count)):  # twice around: the last ones find theirs at the beginning
        i, following = index % count, (index + 1) % count
        partner[i] = following if prompts[i] != prompts[following] else partner[following]
    return [
        TrainSequence(
            id=f"{sequence.id}/mismatched",
            tokens=np.concatenate([sequence.tokens[: starts[i]], sequences[j].tokens[starts[j] :]]),
            media=sequence.media,
            loss_mask=np.concatenate([sequence.loss_mask[: starts[i]], sequences[j].loss_mask[starts[j] :]]),
        )
        for i, (sequence, j) in enumerate(zip(sequences, partner, strict=True))
    ]


class _PreferenceEncoder:
    """Encodes a prompt and a response, within the lengths, and counts dropped rows."""

    def __init__(
        self,
        rows: Rows,
        data: DataArguments,
        tokenizer: PreTrainedTokenizerBase,
        prompt_length: int,
        response_length: int,
        overlong: Overlong,
    ) -> None:
        self.tokenizer, self.encoder, self.chats = tokenizer, Encoder(tokenizer, data), are_chats(data)
        self.rows, self.data, self.counts = rows, data, PairCounts()
        self.prompt_length, self.response_length, self.overlong = prompt_length, response_length, overlong

    def __call__(
        self, row: Row, prompt: list[Message], response: list[Message]
    ) -> tuple[Any, Any, tuple[Media, ...]] | None:
        """Tokens, mask of the response's own tokens, and images. None, counted, if the row is dropped.

        Raises `DataError` for the first row with messages if the tokenizer has no chat template.
        """
        columns = (self.data.prompt, self.data.chosen, self.data.rejected, self.data.response)
        if not self.chats and any(isinstance(row.values.get(column), list) for column in columns):
            self.encoder, self.chats = Encoder(self.tokenizer, self.data, chats=True), True
        if any(message.get("weight") == 0 for message in response):
            raise DataError(
                f"{row.where}: a message of a response has weight 0, but preferences train all of a response"
            )
        if media_of(response):
            raise DataError(f"{row.where}: a response has an image, but only prompts of preferences have images")
        loaded = self.counts.load_images(self.encoder, prompt, row, self.data)
        if loaded is None:
            return None
        tools = tools_of(row, self.data, self.rows)
        tokens, mask = self.encoder.conversation([*loaded, *response], row.where, tools, context=len(prompt))
        start = int(mask.argmax())
        if start == 0:
            raise DataError(f"{row.where}: the prompt has no token")
        if start > self.prompt_length:
            self.counts.overlong_prompts += 1
            return None
        end = start + self.response_length
        if len(tokens) > end:
            if self.overlong == "drop":
                self.counts.overlong_responses += 1
                return None
            self.counts.truncated_responses += 1
        return tokens[:end], mask[:end], media_of(loaded)

    def keeps(self, row: Row, responses: Sequence[tuple[Any, Any, tuple[Media, ...]] | None]) -> bool:
        """Count the row, and return True if all its responses were encoded and differ."""
        encoded = [response for response in responses if response is not None]
        if len(encoded) < len(responses):
            return False
        if len(encoded) == 2:
            (tokens, mask, _), (other, other_mask, _) = encoded
            start = int(mask.argmax())
            if start != int(other_mask.argmax()) or not np.array_equal(tokens[:start], other[:start]):
                raise DataError(
                    f"{row.where}: the chat template renders the prompt differently for the two responses: set"
                    " data_args.template to a named template"
                )
            if np.array_equal(tokens, other):
                self.counts.identical += 1
                return False
        self.counts.kept += 1
        return True


def _sequence(
    id: str,
    tokens: Any,
    mask: Any,
    media: tuple[Media, ...],
    *,
    chosen: bool,
    margin: float = 0.0,
    counted: bool = False,
) -> TrainSequence:
    last = np.zeros(len(tokens), dtype=np.float32)
    streams: dict[str, Floats] = {CHOSEN: mask.astype(np.float32) if chosen else last.copy()}
    last[-1] = 1.0
    if margin:
        streams[MARGIN] = last * np.float32(margin)
    if counted and chosen:
        streams[DESIRABLE] = last
    return TrainSequence(id=id, tokens=tokens, media=media, loss_mask=mask, streams=streams)
