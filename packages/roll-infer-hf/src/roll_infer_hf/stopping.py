"""Detection of stop strings in a response during token-by-token generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"
"""Replacement character, which tokenizers return for bytes that do not form a complete character yet."""


class StopStrings:
    """One set of stop strings for one tokenizer; shared by all requests with the same set."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self._tokenizer = tokenizer
        self._last = frozenset(string[-1] for string in strings)
        # A token has at least one byte, so a match spans at most as many tokens as it has bytes. Tokenizers decode the
        # first tokens of a text specially (a leading space, a truncated character): 8 more tokens cover that.
        self._window = max(len(string.encode()) for string in strings) + 8
        self._may_complete: dict[int, bool] = {}

    def found(self, tokens: Sequence[int]) -> str | None:
        """Stop string that the last of `tokens` completes; None if there is none.

        `tokens` is the whole response so far. If several stop strings match, returns the earliest in the text.
        """
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
        """True if the text of `token` may end a stop string.

        Decodes the token twice in a row, because tokenizers may strip the leading space of the first token.
        """
        text = self._decode([token, token])
        return not text or INCOMPLETE in text or any(character in text for character in self._last)

    def _decode(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            [int(token) for token in tokens], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text if isinstance(text, str) else "".join(text)
