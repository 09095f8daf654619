"""What stop strings take: the text of tokens, and which strings SGLang can be told of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_modeling.model import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.spec.model import ModelSpec


class Texts:
    """Of one tokenizer."""

    def __init__(self, model: ModelSpec) -> None:
        self._tokenizer = load_tokenizer(model)
        self._writable: dict[str, bool] = {}

    def decode(self, tokens: Sequence[int]) -> str:
        """Nothing left out, nothing cleaned up."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def writable(self, text: str) -> bool:
        """Whether the tokenizer has tokens for it. SGLang counts those of every stop string that it is told of, and
        fails where there are none; such a string is looked for only when the response is done."""
        found = self._writable.get(text)
        if found is None:
            try:
                self._tokenizer.encode(text, add_special_tokens=False)
                found = True
            except Exception:  # tokenizers raises nothing narrower
                found = False
            self._writable[text] = found
        return found
