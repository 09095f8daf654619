"""What computes logits: prompts in pieces, then one token for each running row.

A runner owns the keys and values. It knows prompts and rows, but neither requests nor sampling:

    prefill(pieces)* -> join(prompts) -> { decode(tokens) | drop(rows) }* ,  forget(prompt) when no more rows will join
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from roll_core.types import Floats, RoutedExperts, TokenIds


@dataclass(eq=False, slots=True)
class Prompt:
    """Tokens whose keys and values are computed once, for every row that starts with them."""

    tokens: TokenIds
    logprobs_wanted: bool = False
    donor: Prompt | None = None
    """A prompt, computed before or in the same prefill, that begins with the same `donated` tokens."""
    donated: int = 0
    done: int = 0
    """Tokens computed so far."""
    slot: int = -1
    """Where its keys and values lie; the runner's business."""
    logprobs: Floats | None = None
    """`[P]` once it is computed, if wanted."""
    routed_experts: RoutedExperts | None = None
    """`[P, M, K]` once it is computed, where the runner records them."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `[begin, end)` of a prompt, to be computed now."""

    prompt: Prompt
    begin: int
    end: int

    @property
    def last(self) -> bool:
        """Whether it completes the prompt."""
        return self.end == len(self.prompt)


class Runner(ABC):
    """One model on one device, and the keys and values of what it is generating."""

    max_positions: int
    """Longest sequence that the model can place."""
    vocab_size: int
    can_split: bool
    """Whether prompts may be computed in pieces, and from where a donor's tokens end."""
    routed_experts_NMK: RoutedExperts | None = None
    """Of the tokens that the last `decode` appended to the rows, where the runner records them."""

    @abstractmethod
    def fits(self, num_rows: int, num_tokens: int) -> bool:
        """Whether so many rows of so many tokens each have room at once."""

    @abstractmethod
    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Make room for them. Called only if `fits`."""

    @abstractmethod
    def prefill(self, pieces: Sequence[Piece]) -> Tensor:
        """Compute the pieces; returns float32 logits after the last token of each prompt that is now complete,
        `[completed, V]`, in their order."""

    @abstractmethod
    def join(self, prompts: Sequence[Prompt]) -> None:
        """Append one row for each of `prompts`, which are complete; a prompt may stand there many times."""

    @abstractmethod
    def forget(self, prompt: Prompt) -> None:
        """No further row will join for `prompt`."""

    @abstractmethod
    def decode(self, tokens_N: npt.NDArray[np.int64]) -> Tensor:
        """Append a token to every row; returns float32 logits after it, `[N, V]`, which the caller may overwrite."""

    @abstractmethod
    def drop(self, kept_N: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Remove rows; returns which old row each row now is."""

    def scrub(self, rows: npt.NDArray[np.int64]) -> None:
        """Rows that will be dropped hold numbers that are not finite; see that they harm no other."""
        return

    @abstractmethod
    def refresh(self) -> None:
        """The model's weights are others now: take them, and forget what the old ones filled except running rows."""

    @abstractmethod
    def release(self) -> None:
        """Give back the memory of keys, values and copies of weights; there are neither rows nor prompts. `refresh`
        comes before anything else."""
