"""The sequences that run: what they have generated, what is drawn next, and when each one ends.

Rows follow the runner's rows. What a sequence has generated is recorded in its slot, which stays when rows move.

N rows    S slots    V vocabulary
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from roll_infer_hf.sampler import ROW, draw, sampling_row, shaped_rows
from roll_infer_hf.sequence import UNIFORMS, Sequence, make_output

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from roll_core.types import CompletionOutput, FinishReason, RoutedExperts, TokenIds


class Batch:
    """Bookkeeping in arrays: nothing is done token by token in Python, except for rows with stop strings."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.rows: list[Sequence] = []
        self._sequences: list[Sequence | None] = []
        """By slot."""
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
        """One row for each set of end tokens; most requests have the same."""
        self._slots_N = np.zeros(0, dtype=np.int64)
        self._describe_rows()

    def __len__(self) -> int:
        return len(self.rows)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def join(self, sequences: list[Sequence]) -> None:
        """Append rows. A sequence that was recalled goes on where it was."""
        for each in sequences:
            if each.slot < 0:
                self._occupy(self._free_slot(each.params.max_new_tokens), each)
        self._set_rows([*self.rows, *sequences])

    def reorder(self, order: npt.NDArray[np.int64]) -> None:
        """The rows that are left, and where they are now."""
        self._set_rows([self.rows[int(row)] for row in order])

    def tokens(self, sequence: Sequence) -> TokenIds:
        """The prompt and what has been generated."""
        prompt = np.ascontiguousarray(sequence.request.request.prompt_ids, dtype=np.int64)
        if sequence.slot < 0:
            return prompt
        return np.concatenate([prompt, self._tokens_ST[sequence.slot, : self._counts_S[sequence.slot]]])

    def last_tokens(self) -> npt.NDArray[np.int64]:
        """`[N]`, drawn but not yet computed."""
        last: npt.NDArray[np.int64] = self._tokens_ST[self._slots_N, self._counts_S[self._slots_N] - 1]
        return last

    def longest(self) -> int:
        """Tokens of the longest possible row."""
        return max((len(each.request.request.prompt_ids) + each.params.max_new_tokens for each in self.rows), default=0)

    def finish(self, sequence: Sequence, reason: FinishReason, stop: str | int | None = None) -> None:
        """Make the output of what was generated so far and give up the slot; its row is for the caller to drop."""
        sequence.output = self.output_of(sequence, reason, stop)
        self.give_up(sequence)

    def output_of(self, sequence: Sequence, reason: FinishReason, stop: str | int | None = None) -> CompletionOutput:
        """What was generated so far."""
        slot = sequence.slot
        num = int(self._counts_S[slot]) if slot >= 0 else 0
        at = max(slot, 0)
        return make_output(
            self._tokens_ST[at : at + 1, :num].reshape(-1),
            self._logprobs_ST[at : at + 1, :num].reshape(-1),
            self._versions_ST[at : at + 1, :num].reshape(-1),
            reason,
            stop,
            sequence.computed_experts(num),
        )

    def give_up(self, sequence: Sequence) -> None:
        """Free the slot."""
        if sequence.slot >= 0:
            self._sequences[sequence.slot] = None
            sequence.slot = -1

    def note_experts(self, routed_experts_NMK: RoutedExperts | None) -> None:
        """Of the token that each row was given last."""
        if routed_experts_NMK is None:
            return
        for row, sequence in enumerate(self.rows):
            if sequence.request.request.routed_experts:
                sequence.routed_experts.append(routed_experts_NMK[row : row + 1])

    # -- one step ------------------------------------------------------------------------------------------------------

    def draw(self, logits_NV: Tensor, first: int, version: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """One token for each row from `first` on; `logits_NV` has a row for each of them and is overwritten.

        Returns which of all rows go on, and the rows whose logits are not finite. Ended sequences have their output.
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
        drawn = draw(
            logits_NV,
            uniforms_N,
            table_N,
            shaped=shaped,
            seen_SV=self._seen(shaped, first, logits_NV.device) if len(shaped) and self._penalised else None,
            banned_SV=self._banned(shaped, banned_N, first, logits_NV.device) if banned_N.any() else None,
        )
        self._tokens_ST[slots_N, counts_N] = drawn.tokens_N
        self._logprobs_ST[slots_N, counts_N] = drawn.logprobs_N
        self._versions_ST[slots_N, counts_N] = version
        counts_N = counts_N + 1
        self._counts_S[slots_N] = counts_N
        broken = np.flatnonzero(~np.isfinite(drawn.logprobs_N)) + first
        goes_on = np.ones(len(self.rows), dtype=np.bool_)
        ended_N: npt.NDArray[np.bool_] = self._ends_EV[self._end_set_N[rows], drawn.tokens_N]
        for row in np.flatnonzero(ended_N) + first:
            self.finish(self.rows[row], "stop", int(drawn.tokens_N[row - first]))
            goes_on[row] = False
        for row in self._stop_string_rows[self._stop_string_rows >= first]:
            sequence = self.rows[row]
            num = counts_N[row - first]
            if goes_on[row] and sequence.request.stops is not None and num > sequence.params.min_new_tokens:
                stop = sequence.request.stops.found(self._tokens_ST[sequence.slot, :num])
                if stop is not None:
                    self.finish(sequence, "stop", stop)
                    goes_on[row] = False
        for row in np.flatnonzero(counts_N >= table_N["max_new"]) + first:
            if goes_on[row]:
                self.finish(self.rows[row], "length")
                goes_on[row] = False
        return goes_on, broken

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
        """What is the same from step to step until rows come or go."""
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
