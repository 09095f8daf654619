"""State of the running sequences: generated tokens, sampling of the next token, and end conditions.

Row `i` here is row `i` of the runner. The tokens of a sequence are recorded in its slot; the slot does not change when
rows move. A token is sampled on the device, where the next step reads it, and recorded once it has been copied to the
host. Rows may leave in between; what was sampled for them is then dropped.

N rows    S slots    V vocabulary    T tokens of a response    U uniform numbers    E sets of end tokens    W steps
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from roll_core.types import CompletionOutput
from roll_infer_hf.sampler import ROW, Sampler, sampling_row
from roll_infer_hf.sequence import UNIFORMS, Sequence

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from roll_core.types import FinishReason, RoutedExperts, TokenIds


SAMPLER_STEPS = 32
"""Maximum number of steps of one `Sampler`. At most half of `UNIFORMS`."""


@dataclass(eq=False, slots=True)
class SampledStep:
    """Tokens of one step on their way to the host."""

    rows_N: npt.NDArray[np.int64]
    """Present row of each token; -1 if the row has left the batch."""
    version: int
    """Weight version that the tokens were sampled with."""
    tokens_N: Tensor
    """On the host, as `logprobs_N`. Not to be read before `copied`."""
    logprobs_N: Tensor
    copied: torch.Event | None
    """None on a CPU, where nothing is copied."""
    experts_NMK: RoutedExperts | None
    """Experts of the tokens that the step computed; None if they are not recorded."""


class Batch:
    """The running batch, stored in arrays. Only rows with stop strings need per-token work in Python."""

    def __init__(self, vocab_size: int, device: torch.device, never: tuple[int, ...] = ()) -> None:
        """`never`: ids that are never sampled."""
        self._vocab_size, self._device, self._never = vocab_size, device, never
        self.rows: list[Sequence] = []
        self._sequences: list[Sequence | None] = []
        """Sequence in each slot; None for a free slot."""
        self._tokens_ST = np.zeros((0, 0), dtype=np.int64)
        self._logprobs_ST = np.zeros((0, 0), dtype=np.float32)
        self._versions_ST = np.zeros((0, 0), dtype=np.int32)
        self._counts_S = np.zeros(0, dtype=np.int64)
        self._num_sampled_S = np.zeros(0, dtype=np.int64)
        """Recorded tokens and those on their way to the host."""
        self._uniforms_SU = np.zeros((0, UNIFORMS), dtype=np.float64)
        """Uniform numbers of the next tokens: token `t` uses column `t % U`."""
        self._num_uniforms_S = np.zeros(0, dtype=np.int64)
        self._table_S = np.zeros(0, dtype=ROW)
        self._has_stops_S = np.zeros(0, dtype=np.bool_)
        self._end_set_S = np.zeros(0, dtype=np.int64)
        self._end_sets: list[tuple[int, ...]] = []
        self._ends_EV = np.zeros((0, vocab_size), dtype=np.bool_)
        """`[E, V]`: True for the end tokens of each set. Most requests share one set."""
        self._seen_SV = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        """Tokens of sequences with a repetition penalty; empty unless such sequences run."""
        self.last_tokens = torch.zeros(0, dtype=torch.int64, device=device)
        """`[N]` last sampled token of each row on the device, which the model has not computed yet."""
        self._steps: deque[SampledStep] = deque()
        self._sampler: Sampler | None = None
        self._set_rows([])

    def __len__(self) -> int:
        return len(self.rows)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def join(self, sequences: list[Sequence]) -> None:
        """Append rows. A recalled sequence continues after its last generated token."""
        for sequence in sequences:
            if sequence.slot < 0:
                self._occupy(self._free_slot(sequence.params.max_new_tokens), sequence)
            self._num_sampled_S[sequence.slot] = self._counts_S[sequence.slot]
            if sequence.params.repetition_penalty != 1:
                self._see(sequence)
        self._set_rows([*self.rows, *sequences])

    def reorder(self, order: npt.NDArray[np.int64]) -> None:
        """Keep only the rows in `order` (old row numbers), in that order."""
        places = np.full(len(self.rows) + 1, -1)  # the last one is that of row -1
        places[order] = np.arange(len(order))
        for step in self._steps:
            step.rows_N = places[step.rows_N]
        if not len(order):
            self._steps.clear()
            self._seen_SV = self._seen_SV.new_zeros(0, self._vocab_size)
        self.last_tokens = self.last_tokens[torch.from_numpy(order).to(self._device, non_blocking=True)]
        self._set_rows([self.rows[int(row)] for row in order])

    def tokens(self, sequence: Sequence) -> TokenIds:
        """Token ids of the prompt followed by the generated tokens."""
        prompt = np.ascontiguousarray(sequence.request.request.prompt_ids, dtype=np.int64)
        if sequence.slot < 0:
            return prompt
        return np.concatenate([prompt, self._tokens_ST[sequence.slot, : self._counts_S[sequence.slot]]])

    @property
    def num_unread(self) -> int:
        """Number of steps whose tokens are not recorded yet."""
        return len(self._steps)

    @property
    def can_continue(self) -> bool:
        """True if a row has sampled fewer than `max_new_tokens`."""
        return bool((self._num_sampled_S[self._slots_N] < self._table_N["max_new"]).any())

    def longest(self) -> int:
        """Maximum over rows of prompt length plus `max_new_tokens`; 0 without rows."""
        return max(
            (len(sequence.request.request.prompt_ids) + sequence.params.max_new_tokens for sequence in self.rows),
            default=0,
        )

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
        """Free the slot of a sequence."""
        if sequence.slot >= 0:
            self._sequences[sequence.slot] = None
            sequence.slot = -1

    # -- one step ------------------------------------------------------------------------------------------------------

    def sample(self, logits_NV: Tensor, first: int, version: int, experts_NMK: RoutedExperts | None = None) -> None:
        """Sample one token for each row from row `first` on, and begin to copy them to the host.

        `logits_NV` has one row for each of these rows and is overwritten. `experts_NMK` are the experts of the tokens
        whose logits these are, for requests that want them.
        """
        if self._sampler is None or self._sampler.num_steps_left == 0:
            self._sampler = self._make_sampler(first)
        tokens_N, logprobs_N = self._sampler.sample(logits_NV)
        self.last_tokens = torch.cat([self.last_tokens, tokens_N]) if first else tokens_N
        self._num_sampled_S[self._slots_N[first:]] += 1
        copied = None
        if self._device.type != "cpu":
            sampled_2N = torch.stack([tokens_N.int(), logprobs_N.view(torch.int32)]).to("cpu", non_blocking=True)
            tokens_N, logprobs_N = sampled_2N[0], sampled_2N[1].view(torch.float32)
            copied = torch.Event(self._device)
            copied.record()
        rows_N = np.arange(first, len(self.rows))
        self._steps.append(SampledStep(rows_N, version, tokens_N, logprobs_N, copied, experts_NMK))

    def record(self) -> tuple[SampledStep, npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Wait for the tokens of the oldest unread step and record them. Sets the output of sequences that end.

        Returns the step, reduced to the rows that are still present, a mask over all rows, True for rows that continue,
        and the numbers of rows with non-finite logprobs.
        """
        step = self._steps.popleft()
        if step.copied is not None:
            step.copied.synchronize()
        present_N = step.rows_N >= 0
        step.rows_N = rows_N = step.rows_N[present_N]
        tokens_N, logprobs_N = step.tokens_N.numpy()[present_N], step.logprobs_N.numpy()[present_N]
        slots_N = self._slots_N[rows_N]
        counts_N = self._counts_S[slots_N]
        self._tokens_ST[slots_N, counts_N] = tokens_N
        self._logprobs_ST[slots_N, counts_N] = logprobs_N
        self._versions_ST[slots_N, counts_N] = step.version
        counts_N = counts_N + 1
        self._counts_S[slots_N] = counts_N
        if step.experts_NMK is not None:
            for i, row in zip(np.flatnonzero(present_N), rows_N, strict=True):
                if self.rows[row].request.request.routed_experts:
                    self.rows[row].routed_experts.append(step.experts_NMK[i : i + 1])
        continues = np.ones(len(self.rows), dtype=np.bool_)
        ended_N: npt.NDArray[np.bool_] = self._ends_EV[self._end_set_N[rows_N], tokens_N]
        for i in np.flatnonzero(ended_N):
            self.finish(self.rows[rows_N[i]], "stop", int(tokens_N[i]))
            continues[rows_N[i]] = False
        for i in np.flatnonzero(self._has_stops_N[rows_N] & ~ended_N):
            sequence, num = self.rows[rows_N[i]], counts_N[i]
            if sequence.request.stops is not None and num > sequence.params.min_new_tokens:
                stop = sequence.request.stops.match(self._tokens_ST[sequence.slot, :num])
                if stop is not None:
                    self.finish(sequence, "stop", stop)
                    continues[rows_N[i]] = False
        for row in rows_N[counts_N >= self._table_N["max_new"][rows_N]]:
            if continues[row]:
                self.finish(self.rows[row], "length")
                continues[row] = False
        return step, continues, rows_N[~np.isfinite(logprobs_N)]

    def _make_sampler(self, first: int) -> Sampler:
        """Sampler of the rows from `first` on, until the end tokens of a row are no longer banned.

        Rows that join others are sampled apart only once.
        """
        slots_N, table_N, end_set_N = self._slots_N[first:], self._table_N[first:], self._end_set_N[first:]
        left_N = table_N["min_new"] - self._num_sampled_S[slots_N]
        banned = [(int(row), id_) for row in np.flatnonzero(left_N > 0) for id_ in self._end_sets[end_set_N[row]]]
        banned += [(row, id_) for row in range(len(table_N)) for id_ in self._never]
        num_steps = 1 if first else int(left_N[left_N > 0].min(initial=SAMPLER_STEPS))
        return Sampler(
            table_N,
            self._uniforms(slots_N, num_steps),
            self._device,
            vocab_size=self._vocab_size,
            banned_B2=np.array(banned) if banned else None,
            seen=(self._seen_SV, slots_N) if (table_N["penalty"] != 1).any() else None,
        )

    def _uniforms(self, slots_N: npt.NDArray[np.int64], num_steps: int) -> npt.NDArray[np.float64]:
        """`[W, N]` uniform numbers of the next `num_steps` tokens of each slot."""
        counts_N = self._num_sampled_S[slots_N]
        half = UNIFORMS // 2
        for slot in slots_N[counts_N + num_steps > self._num_uniforms_S[slots_N]]:
            sequence = self._sequences[slot]
            if sequence is not None:
                begin = self._num_uniforms_S[slot] % UNIFORMS
                self._uniforms_SU[slot, begin : begin + half] = sequence.uniforms.random(half)
                self._num_uniforms_S[slot] += half
        uniforms_WN: npt.NDArray[np.float64] = self._uniforms_SU[
            slots_N, (counts_N + np.arange(num_steps)[:, None]) % UNIFORMS
        ]
        return uniforms_WN

    # -- tables --------------------------------------------------------------------------------------------------------

    def _set_rows(self, rows: list[Sequence]) -> None:
        """Cache per-row tables that change only when rows join or leave."""
        self.rows = rows
        self._slots_N = np.array([sequence.slot for sequence in rows], dtype=np.int64)
        self._table_N = self._table_S[self._slots_N]
        self._end_set_N = self._end_set_S[self._slots_N]
        self._has_stops_N = self._has_stops_S[self._slots_N]
        self._sampler = None

    def _occupy(self, slot: int, sequence: Sequence) -> None:
        sequence.slot = slot
        self._sequences[slot] = sequence
        self._counts_S[slot] = self._num_uniforms_S[slot] = 0
        self._table_S[slot] = sampling_row(sequence.params)
        self._has_stops_S[slot] = sequence.request.stops is not None
        ids = sequence.request.end_ids
        if ids not in self._end_sets:
            self._end_sets.append(ids)
            ends = np.zeros((1, self._vocab_size), dtype=np.bool_)
            ends[0, list(ids)] = True
            self._ends_EV = np.concatenate([self._ends_EV, ends])
        self._end_set_S[slot] = self._end_sets.index(ids)

    def _see(self, sequence: Sequence) -> None:
        """Penalise exactly the tokens of the prompt and those recorded so far."""
        self._grow_seen()
        seen_V = self._seen_SV[sequence.slot].zero_()
        seen_V[torch.from_numpy(self.tokens(sequence)).to(self._device, non_blocking=True)] = True

    def _grow_seen(self) -> None:
        more = len(self._sequences) - len(self._seen_SV)
        self._seen_SV = torch.cat([self._seen_SV, self._seen_SV.new_zeros(more, self._vocab_size)])

    def _free_slot(self, max_new_tokens: int) -> int:
        if max_new_tokens > self._tokens_ST.shape[1] or None not in self._sequences:
            slots = len(self._sequences) if None in self._sequences else max(16, 2 * len(self._sequences))
            width = max(max_new_tokens, self._tokens_ST.shape[1])
            self._tokens_ST = _grown(self._tokens_ST, slots, width)
            self._logprobs_ST = _grown(self._logprobs_ST, slots, width)
            self._versions_ST = _grown(self._versions_ST, slots, width)
            more = slots - len(self._sequences)
            self._counts_S = np.pad(self._counts_S, (0, more))
            self._num_sampled_S = np.pad(self._num_sampled_S, (0, more))
            self._num_uniforms_S = np.pad(self._num_uniforms_S, (0, more))
            self._table_S = np.concatenate([self._table_S, np.zeros(more, dtype=ROW)])
            self._has_stops_S = np.pad(self._has_stops_S, (0, more))
            self._end_set_S = np.pad(self._end_set_S, (0, more))
            self._uniforms_SU = _grown(self._uniforms_SU, slots, UNIFORMS)
            self._sequences += [None] * more
            if len(self._seen_SV):
                self._grow_seen()
        return self._sequences.index(None)


def _grown(array: np.ndarray[tuple[int, int], np.dtype[np.generic]], rows: int, columns: int) -> np.ndarray:
    grown = np.zeros((rows, columns), dtype=array.dtype)
    grown[: array.shape[0], : array.shape[1]] = array
    return grown
