"""From rows to tokens: prompts for generation and sequences for training. Dropped and truncated rows are counted."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from roll_core.data.end_tokens import reply_ends
from roll_core.data.media import OversizedImageError, load_image
from roll_core.data.processor import loaded_processor, processor_of
from roll_core.data.rows import (
    Rows,
    RowVideo,
    are_chats,
    has_response,
    messages_of,
    stored_messages,
    text_of,
    tools_of,
)
from roll_core.data.templates import JinjaTemplate, Segment, Template, load_template, texts_of, trained_replies
from roll_core.data.video import load_video
from roll_core.errors import DataError, UnsupportedError
from roll_core.types import Media, TrainSequence

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from roll_core.data.processor import Processor
    from roll_core.data.rows import Message, Row
    from roll_core.data.streamed import StreamedRows
    from roll_core.spec.config import DataArguments
    from roll_core.spec.rollout import Prompt
    from roll_core.types import TokenIds

log = logging.getLogger(__name__)

ANCHORS = ("\n", ":", "a")
"""Texts after which a tokenizer encodes a text without a blank of its own."""
SHOWN_REASONS = 5
"""Number of dropped rows whose reason the log has; the others are counted."""
Overlong = Literal["drop", "truncate"]


@dataclass(slots=True)
class Counts:
    """Numbers of kept, dropped and truncated rows."""

    kept: int = 0
    overlong_prompts: int = 0
    """Dropped: the prompt is longer than `prompt_length`."""
    overlong_responses: int = 0
    """Dropped: the response is longer than `response_length`."""
    truncated_responses: int = 0
    """Kept, but truncated to `response_length`: the end token is missing."""
    empty: int = 0
    """Dropped: no token to train on."""
    broken_images: int = 0
    """Dropped: an image or a video cannot be read (`broken_images: drop`)."""
    oversized_images: int = 0
    """Dropped: an image or a video exceeds `max_pixels`, `max_frames` or `max_video_pixels`, or the row
    `max_images` or `max_videos`."""
    without_response: int = 0
    """Dropped: no response, where a response is optional."""
    untrained_replies: int = 0
    """Replies, not rows: read, not trained, because the template removes their reasoning once messages follow."""

    def load_images(
        self, encoder: Encoder, messages: Sequence[Message], row: Row, data: DataArguments
    ) -> list[Message] | None:
        """`Encoder.load_images`; None for a row that is dropped because of its images, and counted."""
        try:
            return encoder.load_images(messages, row.where, row.folder)
        except DataError as error:
            is_oversized = isinstance(error, OversizedImageError)
            if not is_oversized and data.broken_images == "error":
                raise
            self.oversized_images += is_oversized
            self.broken_images += not is_oversized
            if self.broken_images + self.oversized_images <= SHOWN_REASONS:
                log.warning("row dropped: %s", error)
            return None

    def __str__(self) -> str:
        named = [f"{getattr(self, field.name)} {field.name.replace('_', ' ')}" for field in fields(self)]
        return ", ".join(text for text in named if not text.startswith("0 "))


def media_of(messages: Sequence[Mapping[str, Any]]) -> tuple[Media, ...]:
    """Images and videos of messages in the order of their places."""
    return tuple(media for message in messages for media in message.get("media", ()))


def _is_video(item: Any) -> bool:
    """True for a video, which may not have been read."""
    return bool(getattr(item, "kind", "") == "video")


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Add the row's place to errors of a chat template."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


class Encoder:
    """Tokenizer and chat template of the rows, with lossless encoding of text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataArguments, *, chats: bool | None = None) -> None:
        """`chats`: True if the rows have roles. Default: as `data` says."""
        self.tokenizer, self._data = tokenizer, data
        self.template: Template = load_template(
            data.template,
            tokenizer,
            chats=are_chats(data) if chats is None else chats,
            arguments=data.chat_template_kwargs,
        )
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-sequence token, which ends each response: set its eos_token")
        first = tokenizer("", add_special_tokens=True)["input_ids"][:1]
        # A chat template writes the beginning-of-sequence token itself. In plain text the tokenizer adds it.
        self._added = set(tokenizer.added_tokens_decoder)
        self.untrained_replies = 0
        """Number of encoded replies that are read, not trained: the template removes their reasoning, or reasoning
        before them, because later messages follow."""
        self.begins_with: list[int] = list(first) if first and first[0] == tokenizer.bos_token_id else []

    def prompt(
        self, messages: Sequence[Message], where: str, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, TokenIds]:
        """Prompt text, up to where generation starts, and its tokens. Raises `DataError`."""
        with _located(where):
            self._check_rendered(messages, tools)
            text = self.template.prompt(messages, tools)
        return text, self.begun(np.asarray(self.encode(self.expand(text, messages, where), where), dtype=np.int64))

    def expand(self, text: str, messages: Sequence[Mapping[str, Any]], where: str) -> str:
        """Text of the template with the tokens of the messages' images in place of their placeholders.

        Raises `DataError`.
        """
        processor = self._checked_processor(text, messages, where)
        return text if processor is None else processor.expand_next(text, iter(media_of(messages)))

    def _checked_processor(self, text: str, messages: Sequence[Mapping[str, Any]], where: str) -> Processor | None:
        """The processor of the messages' images; None without images and processor.

        Raises `DataError` if the placeholders in the text are not theirs.
        """
        media = media_of(messages)
        if self._processor is not None:
            self._processor.check_places(text, media, where)
        elif media:
            processor_of(self.tokenizer)  # raises if the model's processor cannot be loaded
            raise DataError(
                f"{where}: the row has {media[0].kind}s, but the model has no processor for them: it reads text"
            )
        return self._processor

    def load_images(self, messages: Sequence[Message], where: str, folder: Path) -> list[Message]:
        """Messages of a row with their images and videos as `Media`. `folder` is that of the row's file. Raises
        `DataError`."""
        items = [item for message in messages for item in message.get("media", ())]
        if not items:
            return list(messages)
        num_videos = sum(_is_video(item) for item in items)
        for kind, num, most in (
            ("image", len(items) - num_videos, self._data.max_images),
            ("video", num_videos, self._data.max_videos),
        ):
            if most is not None and num > most:
                raise OversizedImageError(f"{where}: the row has {num} {kind}s, but data_args.max_{kind}s is {most}")
        loaded = [
            {**message, "media": tuple(self._load(item, where, folder) for item in message["media"])}
            if message.get("media")
            else message
            for message in messages
        ]
        if self._processor is not None:
            with _located(where):
                for image in media_of(loaded):
                    self._processor.tokens_of(image)
        return loaded

    def _load(self, item: Any, where: str, folder: Path) -> Media:
        if not isinstance(item, RowVideo):
            return load_image(item, where, self._data, folder)
        if isinstance(item.value, Media):
            return item.value
        processor = processor_of(self.tokenizer)
        if processor is None or processor.video_processor is None:
            reads = "text" if processor is None else "text and images"
            raise UnsupportedError(f"{where}: the row has a video, but the model's processor reads {reads} alone")
        return load_video(item, where, self._data, folder, processor.video_processor)

    def is_media(self, tokens: TokenIds) -> Any:
        """bool `[L]`, True for tokens of images and videos."""
        ids = () if self._processor is None else self._processor.media_token_ids
        return np.isin(tokens, np.asarray(ids, dtype=np.int64))

    def places_of(self, tokens: TokenIds, media: Sequence[Media]) -> list[range]:
        """Positions from the first to the last token of each image and video in a sequence."""
        if self._processor is None:
            return []
        positions = {id: np.flatnonzero(tokens == id).tolist() for id in map(self._processor.token_id, media)}
        places = []
        for item in media:
            num, id = self._processor.num_features(item), self._processor.token_id(item)
            places.append(range(positions[id][0], positions[id][num - 1] + 1))
            positions[id] = positions[id][num:]
        return places

    @cached_property
    def _processor(self) -> Processor | None:
        return loaded_processor(self.tokenizer)

    def conversation(
        self, messages: Sequence[Message], where: str, tools: Sequence[Mapping[str, Any]] = (), *, context: int = 0
    ) -> tuple[TokenIds, Any]:
        """Tokens `[L]`, and a bool mask `[L]` of the model's own tokens, which are trained.

        The first `context` messages belong to the prompt: the mask excludes them. Raises `DataError`.
        """
        with _located(where):
            self._check_rendered(messages, tools)
            segments = self.template.segments(messages, tools, context=context)
        self.untrained_replies += len(trained_replies(messages, context)) - sum(segment.written for segment in segments)
        if isinstance(self.template, JinjaTemplate):
            segments = list(self._with_trained_ends(segments))
        segments = self._with_images(segments, messages, where)
        eos = str(self.tokenizer.eos_token)
        groups = [
            (written, "".join(segment.text + eos * segment.ends for segment in group))
            for written, group in groupby(segments, key=lambda segment: segment.written)
        ]
        pieces = self.encode_pieces([text for _, text in groups], where)
        tokens = self.begun(np.asarray(list(chain(*pieces)), dtype=np.int64))
        masks = [[written] * len(ids) for (written, _), ids in zip(groups, pieces, strict=True)]
        mask = np.asarray(list(chain(*masks)), dtype=np.bool_)
        return tokens, np.concatenate([np.zeros(len(tokens) - len(mask), dtype=np.bool_), mask])

    def _with_images(self, segments: Sequence[Segment], messages: Sequence[Message], where: str) -> list[Segment]:
        """The segments with the tokens of images in place of their placeholders, which the model only reads."""
        read = "".join(segment.text for segment in segments if not segment.written)
        processor = self._checked_processor(read, messages, where)
        if processor is None:
            return list(segments)
        for segment in segments:
            for token in processor.media_tokens:
                if segment.written and token in segment.text:
                    raise DataError(f"{where}: a reply contains {token!r}, a token of images, which no model may write")
        waiting = iter(media_of(messages))
        return [
            segment if segment.written else replace(segment, text=processor.expand_next(segment.text, waiting))
            for segment in segments
        ]

    def _with_trained_ends(self, segments: Sequence[Segment]) -> Iterator[Segment]:
        """The segments, without training of a token that ends a reply but not generation (gpt-oss: `<|end|>`)."""
        for segment in segments:
            closing = next((mark for mark in self._of_messages if segment.text.endswith(mark)), "")
            if segment.written and not segment.ends and closing:
                yield replace(segment, text=segment.text.removesuffix(closing))
                yield Segment(closing, written=False)
            else:
                yield segment

    @cached_property
    def _of_messages(self) -> frozenset[str]:
        return reply_ends(self.tokenizer)[1]

    def rendered(self, messages: Sequence[Message], where: str) -> TokenIds:
        """Tokens `[L]` of a conversation as the template renders it, including text after the last response."""
        if not isinstance(self.template, JinjaTemplate):
            return self.conversation(messages, where)[0]
        with _located(where):
            self._check_rendered(messages, ())
            text = self.template.conversation(messages)
        return self.begun(np.asarray(self.encode(self.expand(text, messages, where), where), dtype=np.int64))

    def _check_rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Raise `DataError` if the template leaves out a value of a message, or the tools."""
        missing = self.template.unrendered(messages, tools)
        if missing is not None:
            index, key = missing
            named = " (or reasoning, thinking)" if key == "reasoning_content" else ""
            place = f" of message {index + 1} ({messages[index]['role']})" if index is not None else ""
            raise DataError(
                f"the chat template does not render {key}{named}{place}, so the model would never see it: remove it"
                " from the row, write it into the content, or set data_args.template to native with a tokenizer whose"
                " template renders it"
            )

    def encode_pieces(self, texts: Sequence[str], where: str) -> list[list[int]]:
        """Token ids of each text, in the context of the texts before it. Raises `DataError`.

        The ids before a cut do not depend on what follows, as in generation. The joined texts are encoded at once and
        cut, because some tokenizers add a blank to the beginning of every encoded text. If a token reaches over a cut,
        the text after the cut is encoded apart.
        """
        text = "".join(texts)
        ids_of_text, marks = self._with_marks(text, where)
        pieces: list[list[int]] = []
        ids, done, cut = ids_of_text, 0, 0
        for number, piece in enumerate(texts[:-1], start=1):
            cut += len(piece)
            # An added token splits the text before any other rule, so the ids after it depend on the text after it.
            index, begin = max(((i, start) for i, start, end in marks if end <= cut), default=(0, 0))
            tail = self.encode(text[begin:cut], where)
            before = [*ids[:index], *tail]
            pieces.append(before[done:])
            done = len(before)
            if ids[:done] == before:
                continue
            rest = "".join(texts[number:])
            known = list(chain(*pieces))
            for anchor in ("", *ANCHORS):
                start = self.encode(anchor, where)
                text, ids, marks = anchor + rest, *self._with_marks(anchor + rest, where)
                done, cut = len(start), len(anchor)
                if ids[:done] == start and self.decode([*known, *ids[done:]]) == self.decode(ids_of_text):
                    break
            else:
                raise DataError(
                    f"{where}: the tokenizer has no tokens for {rest[:40]!r} alone, after {texts[number - 1][-40:]!r}:"
                    " end the text before it with a line break"
                )
        pieces.append(ids[done:])
        return pieces

    def encode(self, text: str, where: str) -> list[int]:
        """Tokens of a text. Raises `DataError` for characters that the tokenizer does not cover."""
        return self._with_marks(text, where)[0]

    def _with_marks(self, text: str, where: str) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Tokens of a text; index, begin and end of those that were added to the vocabulary, if the tokenizer knows."""
        if not text:
            return [], []
        offsets = bool(self.tokenizer.is_fast)
        try:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=offsets)
        except Exception as error:  # the library raises plain `Exception`
            raise DataError(f"{where}: {self._uncovered(text)}") from error
        ids: list[int] = encoded["input_ids"]
        unknown = self.tokenizer.unk_token_id
        if unknown is not None and unknown in ids and str(self.tokenizer.unk_token) not in text:
            raise DataError(f"{where}: {self._uncovered(text)}")
        if not offsets:
            return ids, []
        return ids, [(i, *encoded["offset_mapping"][i]) for i, id in enumerate(ids) if id in self._added]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, with special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def begun(self, tokens: TokenIds) -> TokenIds:
        """Tokens after the beginning-of-sequence token, if the tokenizer adds one that the text lacks."""
        if not self.begins_with or (len(tokens) and tokens[0] == self.begins_with[0]):
            return tokens
        return np.concatenate([np.asarray(self.begins_with, dtype=np.int64), tokens])

    def _uncovered(self, text: str) -> str:
        def known(character: str) -> bool:
            try:
                ids = self.tokenizer(character, add_special_tokens=False)["input_ids"]
            except Exception:  # see `encode`
                return False
            return self.tokenizer.unk_token_id is None or self.tokenizer.unk_token_id not in ids

        for token in self.tokenizer.added_tokens_decoder.values():
            text = text.replace(str(token), "")
        bad = sorted({char for char in text if not known(char)})
        shown = ", ".join(f"{char!r} (U+{ord(char):04X})" for char in bad[:5]) or "some of its text"
        return f"the tokenizer does not cover {shown}; extend its alphabet, or use a byte or bpe tokenizer"


def encode_prompts(
    rows: Rows, data: DataArguments, tokenizer: PreTrainedTokenizerBase, *, prompt_length: int
) -> tuple[list[Prompt], Counts]:
    """Encode rows as prompts, in order, with the rows' ids.

    Prompts longer than `prompt_length` tokens are dropped. Raises `DataError`, also if no prompt remains.
    """
    from roll_core.spec.rollout import Prompt

    encoder = Encoder(tokenizer, data)
    counts = Counts()
    prompts: list[Prompt] = []
    for row in rows:
        messages = counts.load_images(encoder, messages_of(row, data, rows, response=False), row, data)
        if messages is None:
            continue
        text, tokens = encoder.prompt(messages, row.where, tools_of(row, data, rows))
        if len(tokens) == 0:
            raise DataError(f"{row.where}: the prompt has no token")
        if len(tokens) > prompt_length:
            counts.overlong_prompts += 1
            continue
        counts.kept += 1
        prompts.append(
            Prompt(
                id=row.id,
                tokens=tokens,
                text=text,
                media=media_of(messages),
                messages=messages,
                tag=row.tag,
                metadata=metadata_of(row, data, messages),
            )
        )
    report_counts("prompts", rows, counts)
    return prompts, counts


def metadata_of(row: Row, data: DataArguments, messages: Sequence[Message]) -> dict[str, Any]:
    """Columns of a row for its samples, without those of its images and videos: samples have them as `media`."""
    with_images = {data.images, data.videos, data.messages} if media_of(messages) else set()
    return {name: value for name, value in row.values.items() if name not in with_images}


def tokenizer_texts(rows: Rows, data: DataArguments) -> Iterator[str]:
    """All texts of the rows as formatted by the template, which a tokenizer built for them must cover."""
    for row in rows:
        if tools := tools_of(row, data, rows):
            yield json.dumps(tools, ensure_ascii=False)
        for messages in _conversations(row, data, rows):
            yield from texts_of(messages, data.template)


def _conversations(row: Row, data: DataArguments, rows: Rows) -> Iterator[list[Message]]:
    """The prompt with its response, and the chosen and the rejected response of a pair."""
    pair = [column for column in (data.chosen, data.rejected) if column in rows.columns]
    prompt = data.messages or data.prompt
    for column in [*([prompt] if prompt in rows.columns or not pair else []), *pair]:
        value = row.values.get(column)
        if column == data.messages or isinstance(value, list):
            yield stored_messages(row, data.model_copy(update={"messages": column}), rows)
        elif column == prompt:
            yield messages_of(row, data, rows, response=isinstance(row.values.get(data.response), str))
        else:
            yield [{"role": "assistant", "content": text_of(row, column, rows)}]


def encode_sft(
    rows: Rows,
    data: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    require_response: bool = True,
    **limits: Any,
) -> tuple[list[TrainSequence], Counts]:
    """Encode rows as training sequences, in order, and report what was dropped. `limits` are those of `SFTEncoder`.

    A row without a response raises `DataError`, or is dropped if `require_response` is false. Raises `DataError` also
    if no row remains, unless every row lacks an optional response.
    """
    encoder = SFTEncoder(data, tokenizer, **limits)
    sequences = encoder.encode(rows, require_response=require_response)
    report_counts("rows", rows, encoder.counts)
    return sequences, encoder.counts


class SFTEncoder:
    """Encodes rows with prompt and response as training sequences.

    The prompt is everything before the first token that the model writes. The response is the rest, which may contain
    several turns; only the model's turns are trained.

    * A prompt longer than `prompt_length` drops the row.
    * A response longer than `response_length` drops the row (`drop`) or is cut at its end (`truncate`).
    * With `on_prompt`, all tokens except the first are trained.
    """

    def __init__(
        self,
        data: DataArguments,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_length: int,
        response_length: int,
        overlong: Overlong = "drop",
        on_prompt: bool = False,
    ) -> None:
        self._data, self._encoder = data, Encoder(tokenizer, data)
        self._prompt_length, self._response_length = prompt_length, response_length
        self._overlong, self._on_prompt = overlong, on_prompt
        self.counts = Counts()
        """Numbers of all rows that were encoded so far."""

    def encode(self, rows: Rows, *, require_response: bool = True) -> list[TrainSequence]:
        """The sequences of the rows that are kept, in order. Raises `DataError`."""
        encoded = (self._encode(row, rows, require_response) for row in rows)
        sequences = [sequence for sequence in encoded if sequence is not None]
        self.counts.untrained_replies = self._encoder.untrained_replies
        return sequences

    def _encode(self, row: Row, rows: Rows, require_response: bool) -> TrainSequence | None:
        data, encoder, counts = self._data, self._encoder, self.counts
        if not require_response and not has_response(row, data, rows):
            counts.without_response += 1
            return None
        messages = counts.load_images(encoder, messages_of(row, data, rows, response=True), row, data)
        if messages is None:
            return None
        tokens, mask = encoder.conversation(messages, row.where, tools_of(row, data, rows))
        if not mask.any():
            counts.empty += 1
            return None
        num_prompt = int(mask.argmax())
        if num_prompt > self._prompt_length:
            counts.overlong_prompts += 1
            return None
        end = num_prompt + self._response_length
        if len(tokens) > end:
            # A truncated row would lose the tokens of an image, but not its features.
            if self._overlong == "drop" or encoder.is_media(tokens[end:]).any():
                counts.overlong_responses += 1
                return None
            counts.truncated_responses += 1
            tokens, mask = tokens[:end], mask[:end]
        mask[:1] = False  # the first token has no context to predict it from
        if not mask.any():
            counts.empty += 1
            return None
        counts.kept += 1
        if self._on_prompt:
            if any(message.get("weight") == 0 for message in messages):
                raise DataError(f"{row.where}: a message has weight 0, but train_on_prompt trains every message")
            mask[1:] = ~encoder.is_media(tokens[1:])
        return TrainSequence(id=row.id, tokens=tokens, media=media_of(messages), loss_mask=mask)


class EncodedSequences:
    """Training sequences of rows that stay on the disk. Raises `DataError`, also if as many rows as there are were read
    and all were dropped."""

    def __init__(self, rows: StreamedRows, encoder: SFTEncoder) -> None:
        self._rows, self._encoder, self._num_read = rows, encoder, 0

    def __len__(self) -> int:
        """Number of rows, also of those that `read` drops."""
        return len(self._rows)

    def read(self, numbers: Sequence[int]) -> list[TrainSequence]:
        """Sequences of the rows with these numbers, from 0, in order. Dropped rows are missing."""
        rows = self._rows.read(numbers)
        self._num_read += len(rows)
        sequences = self._encoder.encode(rows)
        if self._encoder.counts.kept == 0 and self._num_read >= len(self):
            report_counts("rows", rows, self._encoder.counts)
        return sequences


def report_counts(what: str, rows: Rows, counts: Counts) -> None:
    """Log the counts. Raises `DataError` if no row is kept."""
    if counts.kept == 0 and counts.without_response < len(rows):
        is_long = counts.overlong_prompts or counts.overlong_responses
        hint = "; increase prompt_length or response_length" if is_long else ""
        file = rows[0].where.rsplit(" row ", 1)[0]
        raise DataError(f"{file}: none of {len(rows)} {what} can be used: {counts}{hint}")
    log.info("%d %s: %s", len(rows), what, counts)
