"""Scheduler: selects the waiting sequences to admit, and the prompt chunks to prefill before the next decoding step.

    waiting ──enter()──► entering (prompts being prefilled) ──ready()──► running rows

First come, first served within a priority. No sequence overtakes the head of the queue, so none starves. A sequence is
admitted if a row is free and its longest possible length fits the KV cache together with the others. Running sequences
are never preempted for lack of memory.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

import numpy as np

from roll_infer_hf.runner import CachedPrompt, PromptChunk, prompt_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from roll_core.types import TokenIds
    from roll_infer_hf.runner import Runner
    from roll_infer_hf.sequence import Sequence


class Scheduler:
    """Queues of waiting and entering sequences of one engine."""

    def __init__(self, runner: Runner, *, token_budget: int, min_shared_prefix: int) -> None:
        self._runner = runner
        self._token_budget = token_budget
        self._min_shared = min_shared_prefix
        self.waiting: list[Sequence] = []
        """Waiting sequences, in scheduling order."""
        self.entering: dict[bytes, tuple[CachedPrompt, list[Sequence]]] = {}
        """Prompts being prefilled and the sequences that need them, by `prompt_key`."""
        self._joined: list[CachedPrompt] = []

    @property
    def busy(self) -> bool:
        """True if a sequence is waiting or its prompt is being prefilled."""
        return bool(self.waiting or self.entering)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Insert sequences into the waiting queue, behind sequences of equal order."""
        for sequence in sequences:
            bisect.insort(self.waiting, sequence, key=lambda sequence: sequence.request.order)

    def remove(self, unwanted: Callable[[Sequence], bool]) -> None:
        """Remove `unwanted` sequences that have not joined yet, and prompts that no other sequence needs."""
        self.waiting = [sequence for sequence in self.waiting if not unwanted(sequence)]
        for key, (prompt, sequences) in list(self.entering.items()):
            left = [sequence for sequence in sequences if not unwanted(sequence)]
            if left:
                self.entering[key] = (prompt, left)
            else:
                self._discard(key)

    def recall(self) -> None:
        """Return entering sequences to the queue: their prompts were prefilled with old weights."""
        for key, (_, sequences) in list(self.entering.items()):
            self._discard(key)
            self.add(sequences)

    def enter(self, num_running: int, longest: int, tokens_of: Callable[[Sequence], TokenIds]) -> None:
        """Admit waiting sequences, as many as fit together with `num_running` rows of at most `longest` tokens.

        `tokens_of` returns the tokens to prefill for a sequence: the prompt, and tokens generated before a recall.
        """
        num = num_running + sum(len(sequences) for _, sequences in self.entering.values())
        longest = max([longest, *(_longest(sequence) for _, group in self.entering.values() for sequence in group)])
        room = self._token_budget - sum(len(prompt) - prompt.done for prompt, _ in self.entering.values())
        entered = 0
        new: dict[bytes, CachedPrompt] = {}
        for sequence in self.waiting:
            length = max(longest, _longest(sequence))
            if not self._runner.fits(num + 1, length):
                break
            tokens = tokens_of(sequence)
            media = sequence.request.request.media
            key = prompt_key(tokens, media)
            if key not in self.entering and key not in new:
                # Prompts beyond the token budget would occupy memory before they are computed. A prompt longer than the
                # remaining budget is still admitted, so long prompts never block.
                if room <= 0:
                    break
                new[key] = CachedPrompt(tokens, media)
                room -= len(tokens)
            prompt, group = self.entering.get(key) or (new[key], [])
            if sequence.request.request.prompt_logprobs and sequence.request.prompt_logprobs is None:
                if prompt.done:
                    break
                prompt.logprobs_wanted, prompt.donor, prompt.donated = True, None, 0
                prompt.topk_wanted = max(prompt.topk_wanted, sequence.request.request.prompt_topk)
            self.entering[key] = (prompt, [*group, sequence])
            num, longest, entered = num + 1, length, entered + 1
        del self.waiting[:entered]
        if entered:
            self._runner.reserve(num, longest)
            self._share_prefixes(list(new.values()))

    def chunks(self) -> list[PromptChunk]:
        """Prompt chunks to prefill before the next decoding step, within the token budget; donors come first."""
        room = self._token_budget
        chosen: list[PromptChunk] = []
        for prompt, _ in sorted(self.entering.values(), key=lambda entry: _by_donor(entry[0])):
            begin = prompt.done or prompt.donated
            end = min(len(prompt), begin + room) if self._runner.can_split else len(prompt)
            if end <= begin:
                break
            chosen.append(PromptChunk(prompt, begin, end))
            room -= end - begin
            if room <= 0:
                break
        return chosen

    def ready(self, chunks: Iterable[PromptChunk]) -> list[tuple[CachedPrompt, list[Sequence]]]:
        """Remove and return the prompts that `chunks` complete, in that order, each with its sequences."""
        complete = []
        for chunk in chunks:
            if chunk.last:
                complete.append(self.entering.pop(chunk.prompt.key))
        return complete

    def release(self, joined: Iterable[CachedPrompt] = ()) -> None:
        """Release prompts whose rows have joined, as soon as no prompt that is yet to start has them as its donor."""
        donors = {id(prompt.donor) for prompt, _ in self.entering.values() if not prompt.done}
        self._joined += joined
        for prompt in self._joined:
            if id(prompt) not in donors:
                self._runner.forget(prompt)
        self._joined = [prompt for prompt in self._joined if id(prompt) in donors]

    def _discard(self, key: bytes) -> None:
        discarded, _ = self.entering.pop(key)
        for prompt, _ in self.entering.values():
            if prompt.donor is discarded and not prompt.done:
                prompt.donor, prompt.donated = None, 0
        self._runner.forget(discarded)

    def _share_prefixes(self, new: list[CachedPrompt]) -> None:
        """Assign donors: in lexical order each prompt shares its longest prefix with a neighbour, here the previous.

        Runners that split prompts read no images.
        """
        if not self._runner.can_split or self._min_shared == 0:
            return
        before: CachedPrompt | None = None
        for prompt in sorted(new, key=lambda prompt: prompt.tokens.tolist()):
            if before is not None and not prompt.logprobs_wanted:
                shared = min(_common(before.tokens, prompt.tokens), len(prompt) - 1)
                if shared >= self._min_shared:
                    prompt.donor, prompt.donated = before, shared
            before = prompt


def _longest(sequence: Sequence) -> int:
    return len(sequence.request.request.prompt_ids) + sequence.params.max_new_tokens


def _common(a: TokenIds, b: TokenIds) -> int:
    num = min(len(a), len(b))
    different = np.flatnonzero(a[:num] != b[:num])
    return int(different[0]) if len(different) else num


def _by_donor(prompt: CachedPrompt) -> int:
    depth = 0
    donor = prompt.donor
    while donor is not None:
        depth, donor = depth + 1, donor.donor
    return depth
