"""Finds stop strings in the text of a response while it grows, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"
"""What tokenizers write for bytes that are no whole character yet."""


class StopStrings:
    """The stop strings of one set, for one tokenizer. Shared by all requests with that set."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self._tokenizer = tokenizer
        self._last = frozenset(string[-1] for string in strings)
        # A token holds at least one byte, so a match lies within as many tokens as it has bytes. Decoders treat the
        # first tokens of a text specially (a leading blank, a cut character): some more keep the match clear of them.
        self._window = max(len(string.encode()) for string in strings) + 8
        self._may_complete: dict[int, bool] = {}

    def found(self, tokens: Sequence[int]) -> str | None:
        """The stop string that the last of `tokens` (a whole response so far) completed, the earliest in the text."""
        last = int(tokens[-1])
        possible = self._may_complete.get(last)
        if possible is None:
            possible = self._may_complete[last] = self._can_complete(last)
        if not possible:
            return None
        text = self._decode(tokens[-self._window :])
        hits = [(text.find(string), order, string) for order, string in enumerate(self.strings) if string in text]
        return min(hits)[2] if hits else None

    def _can_complete(self, token: int) -> bool:
        """Whether the text of `token` could end a stop string. Decoded twice over, as its first place in a text may
        lose a blank."""
        text = self._decode([token, token])
        return not text or INCOMPLETE in text or any(character in text for character in self._last)

    def _decode(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            [int(token) for token in tokens], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text if isinstance(text, str) else "".join(text)
