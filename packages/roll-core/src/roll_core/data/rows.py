"""Reads rows from files and data sets of the Hub, and names the file, row and column of any error.

JSON and CSV are read with the standard library, Parquet and Arrow with pyarrow. `roll-core check` reads the first rows
of a file, a run reads all of them.
"""

from __future__ import annotations

import csv
import glob
import importlib
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from roll_core.errors import DataError, closest
from roll_core.spec.rollout import IMAGE, Columns

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyarrow import RecordBatch

    from roll_core.spec.config import DataArguments
    from roll_core.types import MediaKind

ENDINGS = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
}
MAX_NESTING = 100
"""Maximum nesting of lists and objects in a JSON row. Deeper rows overflow the stack when they are sent to workers."""
_COMPRESSION = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ": "lzma", b"\x28\xb5\x2f\xfd": "zstd"}
"""First bytes of compressed files, and the modules that open them; pyarrow opens zstd."""
_COMPRESSED_ENDINGS = (".gz", ".bz2", ".xz", ".zst", ".zstd")
_ARROW_FILE = b"ARROW1"
"""First bytes of an Arrow file. A stream has none."""
_CORRUPTION = {"zlib": "error", "lzma": "LZMAError"}
"""Errors of corrupt compressed files that are no `OSError`, by their modules."""
# Possessive, and a string may lack its end: the time is linear in texts that are not JSON, too.
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder(strict=False)

MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of images, video and audio in data of vision-language models."""
IMAGE_PARTS = {"image": ("image", "url", "path", "base64"), "image_url": ("image_url",), "input_image": ("image_url",)}
"""Types of parts of a message's content that are images, and the keys that may have the image."""
PIXEL_KEYS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Keys of an image in the format of Qwen's tools."""
VIDEO_PARTS = {"video": ("video", "url", "path", "base64"), "video_url": ("video_url",), "input_video": ("video_url",)}
_PLACE = re.compile(rf"<(image|video)>(?!.*</\1>)|{IMAGE}", re.DOTALL)
_MEDIA = re.compile(
    r"<(image|video|audio)>(?!.*</\1>)"
    r"|<\|(?:image|video|audio|image_pad|video_pad|audio_pad|vision_start|image_\d+|audio_\d+)\|>"
    r"|<(?:image|video|audio)[_ ]?\d+>|<image_placeholder>|<start_of_image>|<ImageHere>|<IMG_CONTEXT>|\[IMG\]",
    re.DOTALL,
)
"""Places of images, videos and audio in a prompt. A pair of tags, as in SVG, is text."""
RATE_KEYS = ("fps", "sample_fps")
"""Keys of a video with its frames per second."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message's reasoning. Messages have it under the first."""
WEIGHT_KEYS = ("weight", "loss_weight")
MESSAGE_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", *REASONING_KEYS, *WEIGHT_KEYS}
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "tool": "tool",
    "observation": "tool",
}  # fmt: skip
"""Roles of messages by `from`, the key of ShareGPT."""
Message = dict[str, Any]
"""Chat message with the keys `role` and `content`."""
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """Row with its columns' values, a stable id, a domain (`tag`), and its location for error messages."""

    id: str
    tag: str
    where: str
    """Location such as `data/train.jsonl row 12`, counted from 1, with the path as in `file_name`."""
    values: Mapping[str, Any]
    """`Columns`: a dotted name finds a value in a column with a mapping."""
    folder: Path = Path()
    """Directory of the row's file, where relative paths of images begin."""


@dataclass(frozen=True, slots=True)
class RowVideo:
    """A video of a row that has not been read."""

    value: Any
    """Path, bytes, base64, a list of frames, or a mapping with one of them; None if a column has it."""
    fps: float | None = None
    """Rate of a list of frames, or the rate at which a file is sampled. Default: that of the processor."""
    kind: ClassVar = "video"


class Rows(list[Row]):
    """All rows of some files, in order. Raises `DataError` for duplicate ids."""

    def __init__(
        self,
        files: Iterable[tuple[str, Sequence[Values]]],
        data: DataArguments,
        revisions: Mapping[str, str] | None = None,
    ) -> None:
        """`files` are pairs of a file's path and its rows."""
        self.revisions = dict(revisions or {})
        """Commits of the data sets of the Hub, by their names in `file_name`."""
        self._data = data
        columns: dict[str, None] = {}
        files = list(files)
        # The number of a row without an id may be the id of another row.
        numbered = any(values.get(data.id) is not None for _, rows in files for values in rows)
        for name, rows in files:
            for number, values in enumerate(rows, start=1):
                columns.update(dict.fromkeys(values))
                self.add(name, number, values, id=f"row {len(self)}" if numbered else str(len(self)))
        self.find_columns(columns)
        first: dict[str, Row] = {}
        for row in self if data.id in columns else ():
            if first.setdefault(row.id, row) is not row:
                raise DataError(
                    f"{row.where}: column {data.id!r} has the id {row.id!r}, which {first[row.id].where} has too: ids"
                    " must be unique (data_args.id names another column)"
                )

    def add(self, name: str, number: int, values: Values, *, id: str) -> None:
        """Append row `number`, from 1, of the file `name`. `id` is its id if its column has none."""
        columns = Columns(values)
        row_id, tag = columns.get(self._data.id), columns.get(self._data.tag)
        self.append(
            Row(
                id=id if row_id is None else str(row_id),
                tag="" if tag is None else str(tag),
                where=f"{name} row {number}",
                folder=Path(name).parent,
                values=columns,
            )
        )

    def find_columns(self, columns: Iterable[str]) -> None:
        """Set `columns` to these, and to the dotted names of `data_args` that rows have."""
        names = {key: name for key, name in vars(self._data).items() if key != "file_name"}
        named = [name for name in names.values() if isinstance(name, str) and "." in name]
        self.columns = (*columns, *(name for name in named if any(name in row.values for row in self)))


def file_names(data: DataArguments) -> list[str]:
    """File names of `data`. Names are literal: `*`, `?` and `[` are no wildcards."""
    return [data.file_name] if isinstance(data.file_name, str) else list(data.file_name or ())


def is_hub_name(name: str) -> bool:
    """True if a name in `data_args.file_name` is a data set of the Hub or of ModelScope."""
    return name.startswith(("hf://", "modelscope://"))


def read_rows(data: DataArguments, revisions: Mapping[str, str] | None = None) -> Rows:
    """Read at most `max_samples` rows of the files in `data.file_name`, in order.

    Data sets of the Hub are read at the commits in `revisions`, if their names are in it. Raises `DataError`.
    """
    names = file_names(data)
    if not names:
        raise DataError("data_args.file_name is missing: name the files with the rows")
    left, files, commits = data.max_samples, [], {}
    for name in names:
        table = None
        if is_hub_name(name):
            from roll_core.data.hub import HubRows

            source = HubRows(name, (revisions or {}).get(name))
            commits[name], table = source.revision, source.all()
        records = list(islice(_rows_of(name, data, table), left))
        columns = dict.fromkeys(column for values in records for column in values)
        files.append((_shown(name), [{column: values.get(column) for column in columns} for values in records]))
        left = None if left is None else left - len(records)
    rows = Rows(files, data, commits)
    if not len(rows):
        raise DataError(f"{', '.join(names)}: no rows")
    return rows


def first_rows(name: str, data: DataArguments, count: int) -> Rows | None:
    """Read at most `count` rows of one file. None if that requires pyarrow, which is missing. Raises `DataError`.

    Of a data set of the Hub, no more than these rows are downloaded, and nothing is kept. None for one of ModelScope
    that is not in the cache.
    """
    table = None
    try:
        if is_hub_name(name):
            from roll_core.data.hub import first_hub_rows

            if (table := first_hub_rows(name)) is None:
                return None
        records = list(islice(_rows_of(name, data, table), count))
    except ModuleNotFoundError:
        return None
    if not records:
        raise DataError(f"{_shown(name)}: no rows")
    return Rows([(_shown(name), records)], data)


def _shown(name: str) -> str:
    """Name of a file in locations of rows."""
    return name if is_hub_name(name) else str(Path(name))


def text_of(row: Row, column: str, rows: Rows) -> str:
    """Text of a column. Raises `DataError`, naming the row or the nearest existing column."""
    need_column(column, rows)
    value = row.values.get(column)
    if not isinstance(value, str):
        content = "nothing" if value is None else f"{type(value).__name__} {_short(value)}"
        is_chat = isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]
        chat = f"; it has chats: set messages: {column}" if is_chat else ""
        raise DataError(f"{row.where}: column {column!r} must be text, but has {content}{chat}")
    return value


def are_chats(data: DataArguments) -> bool:
    """True if rows have roles: a column of messages, or a system message before the prompt."""
    return data.messages is not None or data.system is not None


def messages_of(row: Row, data: DataArguments, rows: Rows, *, response: bool) -> list[Message]:
    """Convert a row to chat messages.

    With `response`, the last message is the assistant's. Without it, trailing assistant messages are dropped. Raises
    `DataError`.
    """
    if data.messages is None:
        messages = [{"role": "user", "content": _prompt_text(row, data, rows)}]
        if response:
            messages.append({"role": "assistant", "content": text_of(row, data.response, rows)})
        return with_images(_with_system(messages, row, data, rows), row, data)
    messages = stored_messages(row, data, rows)
    if response and messages[-1]["role"] != "assistant":
        raise DataError(f"{row.where}: column {data.messages!r} must end with a message of the assistant")
    while not response and messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if all(message["role"] == "system" for message in messages):
        raise DataError(f"{row.where}: column {data.messages!r} has no message that a response could follow")
    return messages


def _prompt_text(row: Row, data: DataArguments, rows: Rows) -> str:
    prompt = text_of(row, data.prompt, rows)
    if data.query is None:
        return prompt
    need_column(data.query, rows)
    query = text_of(row, data.query, rows) if row.values.get(data.query) else ""
    return f"{prompt}\n{query}" if query else prompt


def has_response(row: Row, data: DataArguments, rows: Rows) -> bool:
    """True if the row has a response: a value in its column, or a last message of the assistant. Raises `DataError`."""
    if data.messages is None:
        return row.values.get(data.response) is not None
    return bool(stored_messages(row, data, rows)[-1]["role"] == "assistant")


def need_column(column: str, rows: Rows) -> None:
    """Raise `DataError` unless the rows have the column."""
    if column not in rows.columns:
        close = closest(column, rows.columns)
        shape, columns = shape_of(rows) if column in ("prompt", "response", "messages") else ("", {})
        keys = ", ".join(f"{key}: {name}" for key, name in columns.items())
        hint = f"did you mean {close!r}?" if close else f"there are {', '.join(map(repr, rows.columns))}"
        hint = f"rows of {shape} are read with data_args: {{{keys}}}" if shape else hint
        raise DataError(f"{rows[0].where.rsplit(' row ', 1)[0]}: no column {column!r}; {hint}")


def shape_of(rows: Rows) -> tuple[str, dict[str, str]]:
    """Name of the format of the first row, and the keys of `data_args` that read it; both empty for other formats."""
    values = rows[0].values
    if {"instruction", "output"} <= values.keys():
        query = {"query": "input"} if "input" in values else {}
        return "Alpaca", {"prompt": "instruction", **query, "response": "output"}
    others = {key: key for key in ("system", "tools") if values.get(key)}
    for column, value in values.items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and column not in ("chosen", "rejected"):
            if {"from", "value"} <= first.keys():
                return "ShareGPT", {"messages": column, **others}
            if "role" in first:
                return "OpenAI", {"messages": column, **others}
    return "", {}


def _with_system(messages: list[Message], row: Row, data: DataArguments, rows: Rows) -> list[Message]:
    if data.system is None:
        return messages
    return [{"role": "system", "content": text_of(row, data.system, rows)}, *messages]


def stored_messages(row: Row, data: DataArguments, rows: Rows, *, images: bool = True) -> list[Message]:
    """All messages of the row: its system column, then its `messages` column (a list or JSON). Raises `DataError`.

    Without `images`, the caller adds the images of the row by `with_images`.
    """
    column = data.messages
    if column is None:
        raise DataError("data_args.messages names no column")
    need_column(column, rows)
    value = row.values.get(column)
    if isinstance(value, str):
        value = _from_json(value, f"{row.where}: column {column!r}")
    if not isinstance(value, list) or not value:
        raise DataError(f"{row.where}: column {column!r} must be a list of messages, but has {_short(value)}")
    if any(isinstance(message, dict) and None in {**message, "content": ""}.values() for message in value):
        value = _without_nulls(value)
    messages = [
        _message(message, f"{row.where}: message {number} of column {column!r}")
        for number, message in enumerate(value, 1)
    ]
    messages = _with_system(messages, row, data, rows)
    return with_images(messages, row, data) if images else messages


def with_images(messages: list[Message], row: Row, data: DataArguments) -> list[Message]:
    """The messages of a row with its images and videos: `media` has those of a message as the data has them, videos as
    `RowVideo`, in the order of their places `IMAGE` in its content.

    Raises `DataError` for media without a place or places without media, and for media that no model would see.
    """
    for column in MEDIA_COLUMNS:
        if row.values.get(column) and column not in (data.images, data.videos):
            raise DataError(f"{row.where}: column {column!r} has {_short(row.values[column])}, but {_unread(column)}")
    _place_media(messages, row, {"image": data.images, "video": data.videos})
    any_media = any(message.get("media") for message in messages)  # otherwise U+FFFC is text
    for number, message in enumerate(messages, 1):
        for kind in map(_missing_kind, message.get("media", ())):
            if kind:
                raise DataError(
                    f"{row.where}: message {number} ({message['role']}) has a part of type {kind} without {kind}, and"
                    f" no column of {kind}s is named: set data_args.{kind}s"
                )
        if any_media and message["content"].count(IMAGE) != len(message.get("media", ())):
            raise DataError(
                f"{row.where}: message {number} ({message['role']}) has {message['content'].count(IMAGE)} places for"
                f" images and videos (U+FFFC), but {len(message.get('media', ()))} of them"
            )
        if message.get("media") and message["role"] == "assistant":
            raise DataError(f"{row.where}: message {number} is of the assistant, which writes text, but has an image")
        media = None if message["role"] == "assistant" else _MEDIA.search(message["content"])
        if media is not None:
            named = data.videos if "video" in media[0] else data.images
            hint = "write <image> at the places of images, and <video> at those of videos"
            hint = hint if named and "audio" not in media[0] else _unread(media[0])
            raise DataError(f"{row.where}: message {number} ({message['role']}) has {media[0]!r}, but {hint}")
    return messages


def _unread(name: str) -> str:
    """Why the media of a column or placeholder are not read, and what to do."""
    if "audio" in name:
        return "models read text, images and videos alone: remove it"
    kind = "video" if "video" in name else "image"
    return f"no column of {kind}s is named: set data_args.{kind}s, or remove it"


def _missing_kind(item: object) -> str:
    """`image` or `video` for a place whose image or video is in a column; otherwise empty."""
    if isinstance(item, RowVideo):
        return "video" if item.value is None else ""
    return "image" if item is None else ""


def has_media(row: Row, data: DataArguments, kind: MediaKind) -> bool:
    """True if a row has images or videos: in their column, or as parts of messages."""
    column, types = (data.images, IMAGE_PARTS) if kind == "image" else (data.videos, VIDEO_PARTS)
    if column is not None and row.values.get(column):
        return True
    chats = [row.values.get(name) for name in (data.messages, data.prompt, data.chosen, data.rejected) if name]
    messages = [message for chat in chats if isinstance(chat, list) for message in chat if isinstance(message, dict)]
    parts = [part for message in messages for part in _list(message.get("content")) if isinstance(part, dict)]
    return any(part.get("type") in types for part in parts)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _place_media(messages: list[Message], row: Row, columns: Mapping[str, str | None]) -> None:
    """Put the images and videos of columns at their places: content parts without an image or video, `<image>` and
    `<video>` in the text, or else the beginning of the first message of the user."""
    values = {kind: _in_list(row.values.get(column)) for kind, column in columns.items() if column}
    values = {kind: [{} if item is None else item for item in of] for kind, of in values.items()}  # {}: none is read
    values = {kind: [_row_video(item) if kind == "video" else item for item in of] for kind, of in values.items()}
    waiting = {kind: iter(of) for kind, of in values.items()}
    num_places = Counter[str]()
    for message in messages if values else ():
        if message["role"] == "assistant":
            continue
        of_parts = iter(message.get("media", ()))
        media: list[Any] = []

        def place(match: re.Match[str], of_parts: Iterator[Any] = of_parts, media: list[Any] = media) -> str:
            item = next(of_parts, None) if match[1] is None else None
            kind = match[1] or _missing_kind(item)
            if match[1] and kind not in values:
                return match[0]
            num_places[kind] += kind in values
            media.append(next(waiting[kind], item) if kind in values else item)
            return IMAGE

        content = _PLACE.sub(place, message["content"])
        if media:
            message["content"], message["media"] = content, tuple(media)
    users = [message for message in messages if message["role"] == "user"]
    for kind in reversed(values):  # images come before videos
        if values[kind] and not num_places[kind] and users:
            users[0]["content"] = IMAGE * len(values[kind]) + users[0]["content"]
            users[0]["media"] = (*values[kind], *users[0].get("media", ()))
        elif num_places[kind] != len(values[kind]):
            raise DataError(
                f"{row.where}: column {columns[kind]!r} has {len(values[kind])} {kind}s, but the text has"
                f" {num_places[kind]} places for them"
            )


def _in_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def _row_video(value: Any) -> RowVideo:
    """A video with its rate, which a mapping may have."""
    rates = [value[key] for key in RATE_KEYS if value.get(key) is not None] if isinstance(value, dict) else []
    return RowVideo(value, rates[0] if rates else None)


def tools_of(row: Row, data: DataArguments, rows: Rows) -> list[dict[str, Any]]:
    """Schemas of the row's tools, in the format of OpenAI's API: a list or JSON; empty without tools.

    Raises `DataError`.
    """
    if data.tools is None:
        return []
    need_column(data.tools, rows)
    value = row.values.get(data.tools)
    if isinstance(value, str):
        value = _from_json(value, f"{row.where}: column {data.tools!r}")
    tools = _without_nulls(value) if _has_nulls(value) else value or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{row.where}: column {data.tools!r} must be a list of tools' schemas, but has {_short(value)}")
    return tools


def _message(value: object, where: str) -> Message:
    """A message with the keys that chat templates read, and `weight` 0 for a reply that is not trained.

    Raises `DataError`, also for any other key that has a value: nothing would read it.
    """
    raw = value if isinstance(value, dict) else {}
    if "from" in raw and "role" not in raw:
        raw = _of_sharegpt(raw, where)
    for key, unread in raw.items():
        if key not in MESSAGE_KEYS and unread not in (None, "", [], {}):
            hint = "write it as tool_calls" if key == "function_call" else "remove it, or write it into the content"
            raise DataError(f"{where} has the key {key!r} with {_short(unread)}, which nothing reads: {hint}")
    calls = raw.get("tool_calls") or []
    content, media = joined_parts(raw.get("content"), where)
    if not isinstance(raw.get("role"), str) or not (isinstance(content, str) or (calls and content is None)):
        raise DataError(f"{where} must have a role and a content, both text, but is {_short(value)}")
    message: Message = {"role": raw["role"], "content": content or ""}
    if media:
        message["media"] = media
    if calls:
        message["tool_calls"] = [_tool_call(call, where) for call in calls] if isinstance(calls, list) else None
        if raw["role"] != "assistant" or message["tool_calls"] is None:
            raise DataError(f"{where} has tool_calls, expected a list, in a message of the assistant: {_short(value)}")
    for key in ("tool_call_id", "name", *REASONING_KEYS):
        if raw.get(key) not in (None, ""):
            if not isinstance(raw[key], str):
                raise DataError(f"{where}: {key} must be text, but is {_short(raw[key])}")
            name = "reasoning_content" if key in REASONING_KEYS else key
            if message.setdefault(name, raw[key]) != raw[key]:
                raise DataError(f"{where} has {name} twice, and {key} differs: keep one of them")
    weights = {key: raw[key] for key in WEIGHT_KEYS if raw.get(key) is not None}
    for key, weight in weights.items():
        if weight not in (0, 1) or (weight and raw["role"] != "assistant"):
            expected = "0 or 1" if raw["role"] == "assistant" else "0, because only replies are trained"
            raise DataError(f"{where}: {key} is {_short(weight)}, expected {expected}")
    if weights and not all(weights.values()) and raw["role"] == "assistant":
        message["weight"] = 0
    return message


def _of_sharegpt(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """A message of ShareGPT (`from`, `value`) with the keys `role` and `content`. Raises `DataError`."""
    others = {key: value for key, value in raw.items() if key not in ("from", "value")}
    role = SHAREGPT_ROLES.get(str(raw["from"]))
    if role is None:
        raise DataError(f"{where}: from is {_short(raw['from'])}, expected one of {', '.join(SHAREGPT_ROLES)}")
    return {"role": role, "content": raw.get("value"), **others}


def joined_parts(content: object, where: str) -> tuple[object, tuple[Any, ...]]:
    """The text of a content that is a list of parts, with `IMAGE` for each image and video, and the images and videos.

    An image is None if a column has it. Videos are `RowVideo`. Any other content is returned as it is. Raises
    `DataError`.
    """
    if not isinstance(content, list):
        return content, ()
    texts: list[str] = []
    media: list[Any] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str) or kind in ("text", "input_text"):
            text = part if isinstance(part, str) else part.get("text")
            if not isinstance(text, str):
                raise DataError(f"{where}: a part of type {kind} has no text, but {_short(part)}")
            texts.append(text)
        elif kind in IMAGE_PARTS:
            check_pixels(part, where)
            key = next((key for key in IMAGE_PARTS[kind] if part.get(key) is not None), "")
            media.append({key: part[key]} if key == "base64" else part.get(key))
            texts.append(IMAGE)
        elif kind in VIDEO_PARTS:
            has_video = any(part.get(key) is not None for key in VIDEO_PARTS[kind])
            media.append(_row_video(part) if has_video else RowVideo(None))
            texts.append(IMAGE)
        else:
            raise DataError(f"{where}: models read parts of type text, image and video, not {_short(part)}")
    return "".join(texts), tuple(media)


def check_pixels(image: Mapping[Any, Any], where: str) -> None:
    """Raise `DataError` if the mapping of an image has a size of its own, as for Qwen's tools: nothing reads it."""
    if unread := [key for key in PIXEL_KEYS if image.get(key) is not None]:
        raise DataError(
            f"{where}: an image has the key {unread[0]!r}, which nothing reads: set data_args.min_pixels or max_pixels"
            " instead"
        )


def _tool_call(value: object, where: str) -> dict[str, Any]:
    """A tool call in the format of OpenAI's API, whose arguments are an object or its JSON. Raises `DataError`."""
    function = value.get("function") if isinstance(value, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str):
        arguments = _from_json(arguments, f"{where}: arguments in tool_calls")
    if not isinstance(value, dict) or not isinstance(function, dict) or not isinstance(arguments, dict):
        raise DataError(
            f"{where}: an item of tool_calls must be {{'function': {{'name': ..., 'arguments': {{...}}}}}},"
            f" but is {_short(value)}"
        )
    if not isinstance(function.get("name"), str):
        raise DataError(f"{where}: the function of an item of tool_calls must have a name, but is {_short(function)}")
    return {**value, "type": "function", "function": {**function, "arguments": arguments}}


def _from_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is text but not JSON: {error}") from error


# -- files -------------------------------------------------------------------------------------------------------------


def _rows_of(name: str, data: DataArguments, table: Iterator[Values] | None) -> Iterator[Values]:
    """Rows of `table`, or else of the file `name`, as `RowReader` returns them.

    Raises `DataError`, and `ModuleNotFoundError` without pyarrow.
    """
    rows = _file_rows(Path(name), data) if table is None else table
    return map(RowReader(name, data).row, rows, count(1))


class RowReader:
    """Computes the columns of `data.columns` for the rows of one file, and removes the nulls that pad chats of tables.

    Raises `DataError`.
    """

    def __init__(self, name: str, data: DataArguments) -> None:
        self.shown = _shown(name)
        """Name of the file in locations of rows."""
        kind = format_of(Path(name)) if data.dataset_type == "auto" else data.dataset_type
        is_table = is_hub_name(name) or kind in ("parquet", "arrow")
        self._chats = {data.messages, data.tools, data.prompt, data.chosen, data.rejected} if is_table else set()
        self._compute = None
        if data.columns:
            from roll_core.data.columns import ColumnExpressions

            self._compute = ColumnExpressions(data.columns, self.shown)

    def row(self, values: Values, number: int) -> Values:
        """Row `number`, from 1."""
        computed = values if self._compute is None else self._compute(values, number)
        return {column: _without_nulls(value) if column in self._chats else value for column, value in computed.items()}


def _file_rows(path: Path, data: DataArguments) -> Iterator[Values]:
    """Rows of a file as they are. Raises `DataError`, and `ModuleNotFoundError` without pyarrow."""
    kind: str = data.dataset_type
    if not path.is_file():
        raise DataError(f"{path}: {_where_else(path)}")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    if kind == "auto":
        kind = format_of(path) or ""
        if not kind:
            raise DataError(
                f"{path}: the ending {path.suffix!r} does not indicate a format: set data_args.dataset_type to json,"
                " parquet, csv or arrow"
            )
    try:
        if kind in ("parquet", "arrow"):
            yield from _arrow_rows(path, kind)
        else:
            yield from _json_rows(path) if kind == "json" else _csv_rows(path)
    except _read_errors() as error:
        raise DataError(f"{path} cannot be read as {kind}: {error}") from error


def format_of(path: Path) -> str | None:
    """Format of a file by its ending, before that of a compressed file; None if the ending is unknown."""
    return ENDINGS.get(_ending(path))


def _ending(path: Path) -> str:
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in _COMPRESSED_ENDINGS else suffix


def _read_errors() -> tuple[type[Exception], ...]:
    """Errors of files that cannot be read: truncated ones (`EOFError`) and corrupt ones, if their module is loaded."""
    corrupt = [getattr(sys.modules[name], error) for name, error in _CORRUPTION.items() if name in sys.modules]
    return (OSError, EOFError, *corrupt)


def _open(path: Path) -> IO[str]:
    """Open a text file that may be compressed. Bytes that are not UTF-8 become surrogates."""
    first = _first_bytes(path)
    module = next((module for magic, module in _COMPRESSION.items() if first.startswith(magic)), "io")
    if module == "zstd":
        import pyarrow

        file = pyarrow.input_stream(str(path), compression="zstd")
    else:
        file = importlib.import_module(module).open(path, "rb")
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")


def _first_bytes(path: Path) -> bytes:
    """First bytes of a file, which tell its format."""
    with path.open("rb") as file:
        return file.read(8)


def _json_rows(path: Path) -> Iterator[Values]:
    """Rows of a file with one object per line, or with one list of objects."""
    with _open(path) as file:
        lines = (line for line in file if line.strip())
        first = next(lines, "")
        is_list = first.lstrip().startswith("[")
        texts = _items(path, first + file.read()) if is_list else chain([first], lines) if first else ()
        for number, text in enumerate(texts, start=1):
            yield json_row(path, number, text)


def json_row(path: Path, number: int, text: str) -> dict[str, Any]:
    """The object of row `number`, from 1. Raises `DataError`."""
    _check_text(path, f"row {number}", text)
    if text.count("[") + text.count("{") > MAX_NESTING and _nesting(text) > MAX_NESTING:
        raise DataError(f"{path}: {_too_deep(number)}")
    try:
        row = _DECODER.decode(text.strip())
    except ValueError as error:  # also a number of too many digits
        raise DataError(f"{path}: row {number} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}: row {number} must be an object with columns, but is {_short(row)}")
    return row


def _items(path: Path, text: str) -> Iterator[str]:
    """Text of each item of a JSON list."""
    position = _after_space(text, text.index("[") + 1)
    number = 0
    while text[position : position + 1] != "]":
        number += 1
        try:
            _, end = _DECODER.raw_decode(text, position)
        except RecursionError as error:
            raise DataError(f"{path}: {_too_deep(number)}") from error
        except ValueError as error:  # as in `_json_rows`
            raise DataError(f"{path}: row {number} is not JSON: {error}") from error
        yield text[position:end]
        position = _after_space(text, end)
        if text[position : position + 1] == ",":
            position = _after_space(text, position + 1)
        elif text[position : position + 1] != "]":
            raise DataError(f"{path}: row {number} is followed by neither a comma nor the end of the list")
    if text[position + 1 :].strip():
        raise DataError(f"{path}: there is text after the end of the list: write one object per line, or one list")


def _nesting(text: str) -> int:
    """Maximum nesting of lists and objects in JSON text."""
    return max(
        accumulate({"[": 1, "{": 1, "]": -1, "}": -1}.get(bracket[0], 0) for bracket in _BRACKETS.finditer(text))
    )


def _too_deep(number: int) -> str:
    return f"row {number} is nested deeper than {MAX_NESTING} levels of lists and objects"


def _after_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return position if space is None else space.end()


def _csv_rows(path: Path) -> Iterator[Values]:
    """Rows of a file with a header. All values are text: 007 is not a number, and NA is not missing."""
    csv.field_size_limit(sys.maxsize)
    with _open(path) as file:
        records = csv.reader(file, delimiter="\t" if _ending(path) == ".tsv" else ",")
        try:
            header: list[str] = []
            for number, record in enumerate(record for record in records if record):
                _check_text(path, f"row {number}" if number else "the header", *record)
                if number and len(record) > len(header):
                    raise DataError(
                        f"{path}: row {number} has {len(record)} values, but the header has {len(header)} columns"
                    )
                if number:
                    yield dict(zip(header, record, strict=False))
                    continue
                header = record
                _check_header(path, header)
        except csv.Error as error:
            raise DataError(f"{path}: line {records.line_num} is not CSV: {error}") from error


def _check_header(path: Path, header: Sequence[str]) -> None:
    """Raise `DataError` if two columns have the same name."""
    if twice := [name for name, times in Counter(header).items() if name and times > 1]:
        raise DataError(f"{path}: the header has column {twice[0]!r} more than once: rename one of them")


def _arrow_rows(path: Path, kind: str) -> Iterator[Values]:
    """Rows of a Parquet file, or of an Arrow stream or file."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        if kind == "parquet":
            file = pyarrow.parquet.ParquetFile(path)
            batches, header = file.iter_batches(batch_size=1024), file.schema_arrow.names
        elif _first_bytes(path).startswith(_ARROW_FILE):
            file = pyarrow.ipc.open_file(str(path))
            batches, header = map(file.get_batch, range(file.num_record_batches)), file.schema.names
        else:
            file = pyarrow.ipc.open_stream(str(path))
            batches, header = file, file.schema.names
        with file:
            _check_header(path, header)
            for batch in batches:
                try:
                    batch.validate(full=True)  # pyarrow reads memory that is not its own where offsets are wrong
                except pyarrow.ArrowInvalid as error:
                    row = number + 1 + next(_invalid_rows(batch), 0)
                    raise DataError(f"{path}: row {row} is corrupt: {str(error).splitlines()[0]}") from error
                yield from batch.to_pylist()
                number += len(batch)
    except DataError:
        raise
    except (ValueError, OverflowError, pyarrow.ArrowException) as error:  # also a timestamp that Python cannot hold
        raise DataError(f"{path}: cannot be read as {kind}: {str(error).splitlines()[0]}") from error


def _invalid_rows(batch: RecordBatch) -> Iterator[int]:
    """Rows of a batch that are invalid by themselves."""
    import pyarrow

    for index in range(len(batch)):
        try:
            batch.slice(index, 1).validate(full=True)
        except pyarrow.ArrowInvalid:
            yield index


def _has_nulls(value: Any) -> bool:
    """True if a schema has null keywords or properties, which a padded table gives it. A default may be null."""
    if isinstance(value, dict):
        nulls = {key for key, item in value.items() if item is None} - {"default", "const"}
        return bool(nulls) or any(map(_has_nulls, value.values()))
    return isinstance(value, list) and any(map(_has_nulls, value))


def _without_nulls(value: Any) -> Any:
    """A value whose structs have no null fields. All structs of a column have the fields of all its rows, so that an
    argument of another row's tool would be a null argument of this row's. JSON lines of such a table have the nulls."""
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _check_text(path: Path, what: str, *texts: str) -> None:
    """Raise `DataError` for text that is not UTF-8."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a surrogate, see `_open`
            byte = ord(text[error.start]) - 0xDC00
            raise DataError(f"{path}: {what} is not UTF-8: byte 0x{byte:02x}; save the file as UTF-8") from error


def _short(value: object) -> str:
    """Representation of a value in a message, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _where_else(path: Path) -> str:
    if path.is_dir():
        return "is a directory; name the files in it"
    folder = path.parent
    if not folder.is_dir():
        return f"no such file; there is no directory {folder} either (paths are relative to {Path.cwd()})"
    matches = sorted(glob.glob(str(path)))
    if matches:
        shown = ", ".join(matches[:3]) + (", …" if len(matches) > 3 else "")
        return f"no such file; names are not patterns, so list the files: file_name: [{shown}]"
    close = closest(path.name, [file.name for file in folder.iterdir()])
    return f"no such file; did you mean {close!r}?" if close else f"no such file in {folder.resolve()}"
