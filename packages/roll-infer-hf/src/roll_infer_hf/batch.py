"""State of the running sequences: generated tokens, sampling of the next token, and end conditions.

Row `i` here is row `i` of the runner. The tokens of a sequence are recorded in its slot; the slot does not change when
rows move.

N rows    S slots    V vocabulary    T tokens of a response    U uniform numbers    E sets of end tokens
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from roll_core.types import CompletionOutput
from roll_infer_hf.sampler import ROW, sample, sampling_row, shaped_rows
from roll_infer_hf.sequence import UNIFORMS, Sequence

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from roll_core.types import FinishReason, RoutedExperts, TokenIds


class Batch:
    """The running batch, stored in arrays. Only rows with stop strings need per-token work in Python."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.rows: list[Sequence] = []
        self._sequences: list[Sequence | None] = []
        """Sequence in each slot; None for a free slot."""
        self._tokens_ST = np.zeros((0, 0), dtype=np.int64)
        self._logprobs_ST = np.zeros((0, 0), dtype=np.float32)
        self._versions_ST = np.zeros((0, 0), dtype=np.int32)
        self._counts_S = np.zeros(0, dtype=np.int64)
        self._uniforms_SU = np.zeros((0, UNIFORMS), dtype=np.float64)
        self._table_S = np.zeros(0, dtype=ROW)
        self._has_stops_S = np.zeros(0, dtype=np.bool_)
        self._end_set_S = np.zeros(0, dtype=np.int64)
        self._end_sets: list[tuple[int, ...]] = []
        self._ends_EV = np.zeros((0, vocab_size), dtype=np.bool_)
        """`[E, V]`: True for the end tokens of each set. Most requests share one set."""
        self._slots_N = np.zeros(0, dtype=np.int64)
        self._describe_rows()

    def __len__(self) -> int:
        return len(self.rows)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def join(self, sequences: list[Sequence]) -> None:
        """Append rows. A recalled sequence continues after its last generated token."""
        for each in sequences:
            if each.slot < 0:
                self._occupy(self._free_slot(each.params.max_new_tokens), each)
        self._set_rows([*self.rows, *sequences])

    def reorder(self, order: npt.NDArray[np.int64]) -> None:
        """Keep only the rows in `order` (old row numbers), in that order."""
        self._set_rows([self.rows[int(row)] for row in order])

    def tokens(self, sequence: Sequence) -> TokenIds:
        """Token ids of the prompt followed by the generated tokens."""
        prompt = np.ascontiguousarray(sequence.request.request.prompt_ids, dtype=np.int64)
        if sequence.slot < 0:
            return prompt
        return np.concatenate([prompt, self._tokens_ST[sequence.slot, : self._counts_S[sequence.slot]]])

    def last_tokens(self) -> npt.NDArray[np.int64]:
        """`[N]` last sampled token of each row, which the model has not computed yet."""
        last: npt.NDArray[np.int64] = self._tokens_ST[self._slots_N, self._counts_S[self._slots_N] - 1]
        return last

    def longest(self) -> int:
        """Maximum over rows of prompt length plus `max_new_tokens`; 0 without rows."""
        return max((len(each.request.request.prompt_ids) + each.params.max_new_tokens for each in self.rows), default=0)

    def finish(self, sequence: Sequence, reason: FinishReason, stop: str | int | None = None) -> None:
        """Set the sequence's output from its generated tokens and free its slot. The caller drops the row."""
        sequence.output = self.output_of(sequence, reason, stop)
        self.free(sequence)

    def output_of(self, sequence: Sequence, reason: FinishReason, stop: str | int | None = None) -> CompletionOutput:
        """Output with the tokens generated so far."""
        slot = sequence.slot
        tokens = slice(int(self._counts_S[slot]) if slot >= 0 else 0)
        row = max(slot, 0)
        return CompletionOutput(
            token_ids=self._tokens_ST[row : row + 1, tokens].flatten(),
            logprobs=self._logprobs_ST[row : row + 1, tokens].flatten(),
            versions=self._versions_ST[row : row + 1, tokens].flatten(),
            finish_reason=reason,
            stop=stop,
            routed_experts=sequence.computed_experts(tokens.stop),
        )

    def free(self, sequence: Sequence) -> None:
        """Free the slot."""
        if sequence.slot >= 0:
            self._sequences[sequence.slot] = None
            sequence.slot = -1

    def add_experts(self, routed_experts_NMK: RoutedExperts | None) -> None:
        """Append each row's routed experts for the token that was decoded last; for requests that want them."""
        if routed_experts_NMK is None:
            return
        for row, sequence in enumerate(self.rows):
            if sequence.request.request.routed_experts:
                sequence.routed_experts.append(routed_experts_NMK[row : row + 1])

    # -- one step ------------------------------------------------------------------------------------------------------

    def sample(
        self, logits_NV: Tensor, first: int, version: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Sample one token for each row from row `first` on and record it with its logprob and weight version.

        `logits_NV` has one row for each of these rows and is overwritten. Sets the output of sequences that end.

        Returns a mask over all rows, True for rows that continue, and the numbers of rows with non-finite logprobs.
        """
        rows = slice(first, None)
        slots_N = self._slots_N[rows]
        counts_N = self._counts_S[slots_N]
        for slot in slots_N[counts_N % UNIFORMS == 0]:
            sequence = self._sequences[slot]
            if sequence is not None:
                self._uniforms_SU[slot] = sequence.uniforms.random(UNIFORMS)
        uniforms_N = self._uniforms_SU[slots_N, counts_N % UNIFORMS]
        table_N = self._table_N[rows]
        banned_N = (counts_N < table_N["min_new"]) & self._has_ends_N[rows]
        shaped = np.flatnonzero(self._shaped_N[rows] | banned_N)
        sampled = sample(
            logits_NV,
            uniforms_N,
            table_N,
            shaped=shaped,
            seen_SV=self._seen(shaped, first, logits_NV.device) if len(shaped) and self._penalised else None,
            banned_SV=self._banned(shaped, banned_N, first, logits_NV.device) if banned_N.any() else None,
        )
        self._tokens_ST[slots_N, counts_N] = sampled.tokens_N
        self._logprobs_ST[slots_N, counts_N] = sampled.logprobs_N
        self._versions_ST[slots_N, counts_N] = version
        counts_N = counts_N + 1
        self._counts_S[slots_N] = counts_N
        broken = np.flatnonzero(~np.isfinite(sampled.logprobs_N)) + first
        continues = np.ones(len(self.rows), dtype=np.bool_)
        ended_N: npt.NDArray[np.bool_] = self._ends_EV[self._end_set_N[rows], sampled.tokens_N]
        for row in np.flatnonzero(ended_N) + first:
            self.finish(self.rows[row], "stop", int(sampled.tokens_N[row - first]))
            continues[row] = False
        for row in self._stop_string_rows[self._stop_string_rows >= first]:
            sequence = self.rows[row]
            num = counts_N[row - first]
            if continues[row] and sequence.request.stops is not None and num > sequence.params.min_new_tokens:
                stop = sequence.request.stops.found(self._tokens_ST[sequence.slot, :num])
                if stop is not None:
                    self.finish(sequence, "stop", stop)
                    continues[row] = False
        for row in np.flatnonzero(counts_N >= table_N["max_new"]) + first:
            if continues[row]:
                self.finish(self.rows[row], "length")
                continues[row] = False
        return continues, broken

    def _seen(self, shaped: npt.NDArray[np.int64], first: int, device: torch.device) -> Tensor:
        seen = torch.zeros((len(shaped), self._vocab_size), dtype=torch.bool)
        for i, row in enumerate(shaped + first):
            if self.rows[row].params.repetition_penalty != 1:
                seen[i, torch.from_numpy(self.tokens(self.rows[row]))] = True
        return seen.to(device)

    def _banned(
        self, shaped: npt.NDArray[np.int64], banned_N: npt.NDArray[np.bool_], first: int, device: torch.device
    ) -> Tensor:
        ends = self._ends_EV[self._end_set_N[shaped + first]] & banned_N[shaped][:, None]
        return torch.from_numpy(ends).to(device)

    # -- tables --------------------------------------------------------------------------------------------------------

    def _set_rows(self, rows: list[Sequence]) -> None:
        self.rows = rows
        self._slots_N = np.array([each.slot for each in rows], dtype=np.int64)
        self._describe_rows()

    def _describe_rows(self) -> None:
        """Cache per-row tables that change only when rows join or leave."""
        self._table_N = self._table_S[self._slots_N]
        self._shaped_N = shaped_rows(self._table_N)
        self._penalised = bool((self._table_N["penalty"] != 1).any())
        self._end_set_N = self._end_set_S[self._slots_N]
        self._has_ends_N = np.array([bool(ids) for ids in self._end_sets], dtype=np.bool_)[self._end_set_N]
        self._stop_string_rows = np.flatnonzero(self._has_stops_S[self._slots_N])

    def _occupy(self, slot: int, sequence: Sequence) -> None:
        sequence.slot = slot
        self._sequences[slot] = sequence
        self._counts_S[slot] = 0
        self._table_S[slot] = sampling_row(sequence.params)
        self._has_stops_S[slot] = sequence.request.stops is not None
        ids = sequence.request.end_ids
        if ids not in self._end_sets:
            self._end_sets.append(ids)
            ends = np.zeros((1, self._vocab_size), dtype=np.bool_)
            ends[0, list(ids)] = True
            self._ends_EV = np.concatenate([self._ends_EV, ends])
        self._end_set_S[slot] = self._end_sets.index(ids)

    def _free_slot(self, max_new_tokens: int) -> int:
        if max_new_tokens > self._tokens_ST.shape[1] or None not in self._sequences:
            slots = len(self._sequences) if None in self._sequences else max(16, 2 * len(self._sequences))
            width = max(max_new_tokens, self._tokens_ST.shape[1])
            self._tokens_ST = _grown(self._tokens_ST, slots, width)
            self._logprobs_ST = _grown(self._logprobs_ST, slots, width)
            self._versions_ST = _grown(self._versions_ST, slots, width)
            more = slots - len(self._sequences)
            self._counts_S = np.pad(self._counts_S, (0, more))
            self._table_S = np.concatenate([self._table_S, np.zeros(more, dtype=ROW)])
            self._has_stops_S = np.pad(self._has_stops_S, (0, more))
            self._end_set_S = np.pad(self._end_set_S, (0, more))
            self._uniforms_SU = _grown(self._uniforms_SU, slots, UNIFORMS)
            self._sequences += [None] * more
        return self._sequences.index(None)


def _grown(array: np.ndarray[tuple[int, int], np.dtype[np.generic]], rows: int, columns: int) -> np.ndarray:
    grown = np.zeros((rows, columns), dtype=array.dtype)
    grown[: array.shape[0], : array.shape[1]] = array
    return grown
