"""State of a request, and of each of its outputs, from arrival to completion; detection of stop strings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from roll_core.types import Completion, CompletionOutput, TopTokens

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

    from transformers import PreTrainedTokenizerBase

    from roll_core.types import Floats, GenerateRequest, RoutedExperts, SamplingParams
    from roll_infer_hf.runner import CachedPrompt

UNIFORMS = 128
"""Number of uniform numbers generated at once for one sequence."""
INCOMPLETE = "\ufffd"
"""Replacement character, which tokenizers return for bytes that do not form a complete character yet."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One output of a request: output `index` of `n`."""

    request: RunningRequest
    index: int
    uniforms: np.random.Generator
    """Counter-based generator (Philox, SC'11, doi:10.1145/2063384.2063405) with key `(seed, index)`. Token `t` uses the
    `t`-th number, so sampling is independent of the rest of the batch."""
    slot: int = -1
    """Slot of its tokens in `Batch` while it runs; -1 before and after."""
    routed_experts: list[RoutedExperts] = field(default_factory=list)
    """Experts of its tokens from the first prompt token on, in chunks `[tokens, M, K]`; empty if not requested."""
    output: CompletionOutput | None = None

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of its request."""
        return self.request.request.params

    def add_experts(self, computed: RoutedExperts | None) -> None:
        """Append the experts of tokens that have none yet; `computed` begins at the first prompt token.

        Tokens computed earlier under other weights keep the experts with which the following tokens were sampled.
        """
        if computed is not None and self.request.request.routed_experts:
            self.routed_experts.append(computed[sum(map(len, self.routed_experts)) :])

    def computed_experts(self, num_generated: int) -> RoutedExperts | None:
        """Experts of the prompt tokens and all but the last of `num_generated` generated tokens.

        None if they were not requested or no token was computed.
        """
        if not self.routed_experts:
            return None
        return np.concatenate(self.routed_experts)[: len(self.request.request.prompt_ids) + num_generated - 1]


@dataclass(eq=False, slots=True)
class RunningRequest:
    """A request from arrival to completion, with one `Sequence` for each of its `n` outputs."""

    request: GenerateRequest
    order: tuple[int, int]
    """`(priority, arrival number)`: lower is scheduled first."""
    end_ids: tuple[int, ...]
    """Token ids that end an output."""
    stops: StopStrings | None
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: Floats | None = None
    prompt_topk: TopTokens | None = None
    error: Exception | None = None

    @classmethod
    def make(
        cls,
        request: GenerateRequest,
        order: tuple[int, int],
        end_ids: tuple[int, ...],
        stops: StopStrings | None,
        seed: int,
    ) -> RunningRequest:
        """Create the request with its `n` sequences, each with a generator seeded by `(seed, index)`."""
        made = cls(request, order, end_ids, stops)
        key = seed % 2**64
        made.sequences = [
            Sequence(made, index, np.random.Generator(np.random.Philox(key=np.array([key, index], dtype=np.uint64))))
            for index in range(request.n)
        ]
        return made

    @property
    def done(self) -> bool:
        """True if the request failed or all its sequences have outputs."""
        return self.error is not None or all(sequence.output is not None for sequence in self.sequences)

    def take_logprobs(self, prompt: CachedPrompt) -> None:
        """Keep the requested logprobs of its prompt, which other requests may share."""
        self.prompt_logprobs, topk, k = prompt.logprobs, prompt.topk, self.request.prompt_topk
        if topk is not None and k:
            self.prompt_topk = TopTokens(ids=topk.ids[:, :k], logprobs=topk.logprobs[:, :k])

    def completion(self) -> Completion:
        """Completion of the request. Call only if every sequence has its output."""
        outputs = tuple(sequence.output for sequence in self.sequences if sequence.output is not None)
        return Completion(
            id=self.request.id,
            outputs=outputs,
            prompt_logprobs=self.prompt_logprobs,
            prompt_topk=self.prompt_topk,
        )


class StopStrings:
    """One set of stop strings for one tokenizer; shared by all requests with the same set."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Items[str]) -> None:
        self.strings = tuple(strings)
        self._tokenizer = tokenizer
        self._last = frozenset(string[-1] for string in strings)
        # A token has at least one byte, so a match spans at most as many tokens as it has bytes. Tokenizers decode the
        # first tokens of a text specially (a leading space, a truncated character): 8 more tokens cover that.
        self._window = max(len(string.encode()) for string in strings) + 8
        self._may_complete: dict[int, bool] = {}

    def match(self, tokens: Items[int]) -> str | None:
        """Stop string that the last of `tokens` completes; None if there is none.

        `tokens` is the whole response so far. If it completes several, returns the earliest in the text.
        """
        last = int(tokens[-1])
        possible = self._may_complete.get(last)
        if possible is None:
            possible = self._may_complete[last] = self._can_complete(last)
        if not possible:
            return None
        window = tokens[-self._window :]
        text = self._decode(window)
        if not any(string in text for string in self.strings):
            return None
        # The window may contain a stop string from before `min_new_tokens`, which does not end the response.
        before = _num_common(text, self._decode(window[:-1]))
        hits = []
        for order, string in enumerate(self.strings):
            offset = text.find(string, max(0, before - len(string) + 1))
            if offset >= 0:
                hits.append((offset, order, string))
        return min(hits)[2] if hits else None

    def _can_complete(self, token: int) -> bool:
        """True if the text of `token` may end a stop string.

        Decodes the token twice in a row, because tokenizers may strip the leading space of the first token.
        """
        text = self._decode([token, token])
        return not text or INCOMPLETE in text or any(character in text for character in self._last)

    def _decode(self, tokens: Items[int]) -> str:
        text = self._tokenizer.decode(
            [int(token) for token in tokens], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text if isinstance(text, str) else "".join(text)


def _num_common(first: str, second: str) -> int:
    """Number of leading characters that two texts have in common."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
