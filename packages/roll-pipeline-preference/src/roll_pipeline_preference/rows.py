"""Rows of preference data as chat messages: pairs of responses, and single responses with a label.

{"prompt": "2+2=", "chosen": "4", "rejected": "5"}          a pair; responses may also be lists of chat messages
{"prompt": "2+2=", "response": "5", "label": false}         a labelled response
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.data.rows import messages_of, need_column, stored_messages, text_of, with_images
from roll_core.errors import DataError

if TYPE_CHECKING:
    from roll_core.data.rows import Message, Row, Rows
    from roll_core.spec.config import DataArguments

MAX_MARGIN = 3e38
"""Largest margin, within the range of float32."""
LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


def are_pairs(rows: Rows, data: DataArguments) -> bool:
    """True if the rows have a column of chosen or rejected responses."""
    return data.chosen in rows.columns or data.rejected in rows.columns


def need_preferences(rows: Rows, data: DataArguments, *, unpaired: bool) -> None:
    """Raise `DataError` unless the rows have the columns of pairs, or with `unpaired` those of labelled responses."""
    if unpaired and not are_pairs(rows, data):
        need_column(data.label, rows)
        return
    if not are_pairs(rows, data) and data.label in rows.columns:
        raise DataError(
            f"{rows[0].where}: the rows are unpaired (column {data.label!r}), expected pairs with columns"
            f" {data.chosen!r} and {data.rejected!r}: set loss_type: kto, which trains on labelled responses"
        )
    for column in (data.chosen, data.rejected):
        need_column(column, rows)


def pair_of(row: Row, data: DataArguments, rows: Rows) -> tuple[list[Message], list[Message], list[Message]]:
    """Messages of the prompt, and of the chosen and the rejected response. Raises `DataError`.

    Responses are texts, or lists of chat messages that continue the prompt. If `prompt` is not a list too, the prompt
    is the lists' longest common prefix.
    """
    chosen, rejected = (_conversation(row, column, data, rows) for column in (data.chosen, data.rejected))
    pairs = zip(chosen, rejected, strict=False)
    shared = next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected)))
    if chosen == rejected:
        raise DataError(
            f"{row.where}: columns {data.chosen!r} and {data.rejected!r} have the same response: remove the row"
        )
    for column, messages in ((data.chosen, chosen), (data.rejected, rejected)):
        role = messages[shared]["role"] if shared < len(messages) else "nothing"
        if role != "assistant":
            raise DataError(
                f"{row.where}: column {column!r} has {role} at message {shared + 1}, where the two conversations begin"
                " to differ, expected a response of the assistant: both responses must follow the same prompt"
            )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def labelled_of(row: Row, data: DataArguments, rows: Rows) -> tuple[list[Message], list[Message], bool]:
    """Messages of the prompt and of the response, and True if the response is desirable. Raises `DataError`."""
    need_column(data.label, rows)
    value = row.values.get(data.label)
    label = LABELS.get(str(value).lower())
    if label is None:
        raise DataError(f"{row.where}: column {data.label!r} has {value!r}, expected true or false")
    if data.messages is not None:
        messages = messages_of(row, data, rows, response=True)
        _need_text(messages, row, data.messages)
        return messages[:-1], messages[-1:], label
    messages = _conversation(row, data.response, data, rows)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: turns[-1]], messages[turns[-1] :], label


def _conversation(row: Row, column: str, data: DataArguments, rows: Rows) -> list[Message]:
    """The prompt and the response in `column`, as messages. Raises `DataError`, also for an empty response."""
    need_column(column, rows)
    source = data.messages or data.prompt
    prompt_is_chat = isinstance(row.values.get(source), list)
    if data.query is not None and (prompt_is_chat or isinstance(row.values.get(column), list)):
        raise DataError(f"{row.where}: query: {data.query} follows a prompt's text, but the row has messages")
    as_chat = data.model_copy(update={"messages": source})
    if isinstance(row.values.get(column), list):
        column_data = data.model_copy(update={"messages": column, "system": None if prompt_is_chat else data.system})
        messages = [
            *(stored_messages(row, as_chat, rows, images=False) if prompt_is_chat else ()),
            *stored_messages(row, column_data, rows, images=False),
        ]
        messages = with_images(messages, row, data)
    else:
        prompt = messages_of(row, as_chat if prompt_is_chat else data, rows, response=False)
        messages = [*prompt, {"role": "assistant", "content": text_of(row, column, rows)}]
    _need_text(messages, row, column)
    return messages


def _need_text(messages: list[Message], row: Row, column: str) -> None:
    last = messages[-1]
    if last["role"] != "assistant":
        raise DataError(f"{row.where}: column {column!r} ends with a message of {last['role']}, expected the assistant")
    if not (last["content"].strip() or last.get("tool_calls")):
        raise DataError(f"{row.where}: column {column!r} has an empty response: remove the row")


def margin_of(row: Row, column: str, rows: Rows) -> float:
    """Margin of a pair in a column, a float32 of at least 0. Raises `DataError`."""
    need_column(column, rows)
    value = row.values.get(column)
    try:
        margin = float(value)  # type: ignore[arg-type]  # CSV has text
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{row.where}: column {column!r} has {value!r}, expected a number") from error
    if not 0 <= margin <= MAX_MARGIN:
        raise DataError(
            f"{row.where}: column {column!r} has {value!r}, expected the margin by which the chosen response is better:"
            " a finite number of at least 0"
        )
    return margin
