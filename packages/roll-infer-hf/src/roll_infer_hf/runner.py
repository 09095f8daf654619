"""Interface of model runners: chunked prefill of prompts, then decoding of one token per running row.

A runner owns the KV cache. It handles prompts and rows, but neither requests nor sampling:

    prefill(chunks)* -> join(prompts) -> { decode(tokens) | drop(rows) }* ,  forget(prompt) when no more rows will join

N rows    V vocabulary    P tokens of a prompt    M layers with experts    K top-k
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from roll_core.types import TopTokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    import numpy.typing as npt
    from torch import Tensor

    from roll_core.types import Floats, GenerateRequest, Media, RoutedExperts, TokenIds
    from roll_infer_hf.kv_cache import KVCache


@dataclass(eq=False, slots=True)
class CachedPrompt:
    """Prompt tokens whose keys and values are computed once and shared by every row that starts with them."""

    tokens: TokenIds
    media: tuple[Media, ...] = ()
    """Images of `tokens`."""
    logprobs_wanted: bool = False
    topk_wanted: int = 0
    """Number of most likely tokens to store with the logprobs."""
    donor: CachedPrompt | None = None
    """Prompt with the same first `donated` tokens, prefilled earlier or in the same call; None if nothing is shared."""
    donated: int = 0
    done: int = 0
    """Number of tokens prefilled so far."""
    cache: KVCache | None = None
    """Keys and values of the prompts that were first prefilled together and have equal lengths. Set by the runner."""
    slot: int = -1
    """Row of `cache`; -1 without a cache."""
    logprobs: Floats | None = None
    """`[P]` logprobs of the prompt tokens, 0 for the first; set by prefill if `logprobs_wanted`."""
    topk: TopTokens | None = None
    """`topk_wanted` most likely tokens; set by prefill beside `logprobs`."""
    routed_experts: RoutedExperts | None = None
    """`[P, M, K]` experts of each token; set by prefill if the runner records them."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def key(self) -> bytes:
        """Equal for prompts of equal keys and values."""
        return prompt_key(self.tokens, self.media)

    def store(self, start: int, logp_NV: Tensor) -> None:
        """Store the logprobs of the N tokens from `start`, given logprobs of all ids there."""
        if self.logprobs is None:
            self.logprobs = np.zeros(len(self), dtype=np.float32)
            shape = (len(self), self.topk_wanted)
            self.topk = TopTokens(ids=np.zeros(shape, dtype=np.int64), logprobs=np.zeros(shape, dtype=np.float32))
        span = slice(start, start + len(logp_NV))
        targets_N1 = torch.from_numpy(self.tokens[span, None]).to(logp_NV.device)
        self.logprobs[span] = logp_NV.gather(1, targets_N1)[:, 0].cpu().numpy()
        if self.topk is not None and self.topk_wanted:
            top = logp_NV.topk(self.topk_wanted, dim=1)
            self.topk.ids[span], self.topk.logprobs[span] = top.indices.cpu().numpy(), top.values.cpu().numpy()


def prompt_key(tokens: TokenIds, media: Sequence[Media]) -> bytes:
    """Token ids and digests of images: prompts with equal ids may have different images."""
    return b"".join([tokens.tobytes(), *(image.digest.encode() for image in media)])


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Chunk `[begin, end)` of a prompt's tokens, for one prefill call."""

    prompt: CachedPrompt
    begin: int
    end: int

    @property
    def last(self) -> bool:
        """True if this chunk completes the prompt."""
        return self.end == len(self.prompt)


class Runner(ABC):
    """One model on one device, with the KV cache of the sequences that it generates."""

    device: torch.device
    max_positions: int
    """Maximum sequence length of the model, in tokens."""
    vocab_size: int
    can_split: bool
    """True if prompts may be prefilled in chunks and may start after a prefix shared with a donor."""
    media_token_ids: tuple[int, ...] = ()
    """Ids that are never sampled, see `SamplingParams`."""
    reads_images: bool = False
    """True if prompts may have images."""
    routed_experts_NMK: RoutedExperts | None = None
    """Experts of the tokens that the last `decode` appended to the rows; None if the runner does not record them."""

    def check_media(self, request: GenerateRequest) -> None:
        """Process the request's images. Raises `DataError` if they do not fit its prompt."""
        return

    def activations(self, tokens: TokenIds, media: tuple[Media, ...] = ()) -> Mapping[str, Tensor]:
        """Activations of a prefill of `tokens`, see `InferStrategy.activations`. No row may be running."""
        prompt = CachedPrompt(tokens, media, logprobs_wanted=True)
        with self.recording() as activations:
            self.prefill([PromptChunk(prompt, 0, len(tokens))])
        self.forget(prompt)
        return activations

    @abstractmethod
    def recording(self) -> AbstractContextManager[dict[str, Tensor]]:
        """Context that records the activations of forward passes."""

    @abstractmethod
    def fits(self, num_rows: int, num_tokens: int) -> bool:
        """True if `num_rows` rows of `num_tokens` tokens each fit the KV cache at once."""

    @abstractmethod
    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Reserve cache for `num_rows` rows of `num_tokens` tokens. Called only if `fits` returns True for them."""

    @abstractmethod
    def prefill(self, chunks: Sequence[PromptChunk]) -> Tensor:
        """Compute the chunks and store their keys and values.

        Returns float32 logits `[completed, V]` after the last token of each prompt that is now complete, in the order
        of `chunks`.
        """

    @abstractmethod
    def join(self, prompts: Sequence[CachedPrompt]) -> None:
        """Append one row for each of `prompts`, which must be complete; a prompt may occur several times."""

    @abstractmethod
    def forget(self, prompt: CachedPrompt) -> None:
        """Release the prompt's keys and values; no further row will join for it."""

    @abstractmethod
    def decode(self, tokens_N: Tensor) -> Tensor:
        """Append a token to every row. Returns float32 logits `[N, V]` after it; the caller may overwrite them.

        `tokens_N` are int64 on the device.
        """

    @abstractmethod
    def drop(self, kept_N: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Keep the rows where `kept_N` is True. Returns the old row number of each remaining row."""

    def scrub(self, rows: npt.NDArray[np.int64]) -> None:
        """Clear the cache of `rows`, which have non-finite values and will be dropped, so they cannot affect others."""
        return

    @abstractmethod
    def refresh(self) -> None:
        """Use the model's new weights after an update. Running rows keep their keys and values."""

    @abstractmethod
    def release(self) -> None:
        """Free the KV cache and copies of weights. Called without rows and prompts; the next call must be `refresh`."""
