"""Tokenizer functions for stop strings: decoding, and a check which stop strings SGLang accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_modeling.model import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.spec.model import ModelSpec


class Texts:
    """Decoding and encoding checks with one model's tokenizer."""

    def __init__(self, model: ModelSpec) -> None:
        self._tokenizer = load_tokenizer(model)
        self._writable: dict[str, bool] = {}

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens with special tokens and without cleanup of spaces."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def writable(self, text: str) -> bool:
        """True if the tokenizer can encode `text`.

        SGLang encodes every stop string and fails if it cannot. Such strings are not passed to SGLang; they are matched
        only in this process.
        """
        found = self._writable.get(text)
        if found is None:
            try:
                self._tokenizer.encode(text, add_special_tokens=False)
                found = True
            except Exception:  # tokenizers raises nothing narrower
                found = False
            self._writable[text] = found
        return found
