"""SGLang's sampler with the contract's meaning of its parameters; runs in the engine's processes.

Its own differs in three things (0.5.20): top-p counts mass that top-k has already cut, a seed has an effect only with
its deterministic kernels, and masked end tokens (`min_new_tokens`) change the logprobs. SGLang offers a place for other
samplers (`register_sampler_backend`), and for parameters that only they know (`custom_params`, which reach a sampler
with requests that bring a logit processor: `Carrier`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from roll_infer_sglang.distribution import kept, seeded_choice
from roll_infer_sglang.sampling import ENDS, MIN_NEW, SEED

if TYPE_CHECKING:
    from torch import Tensor


class Carrier(CustomLogitProcessor):  # type: ignore[misc]  # SGLang is untyped to mypy
    """Changes nothing; a request that brings one has its `custom_params` handed to the sampler."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        """Called by SGLang."""
        return logits


class ContractSampler(Sampler):  # type: ignore[misc]  # SGLang is untyped to mypy
    """B requests of a batch, V tokens of the vocabulary."""

    _seeded: tuple[Tensor, Tensor] | None = None
    """Rows of the batch whose requests have a seed, and the seeds, while tokens are drawn."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        positions: Any,
    ) -> Any:
        """Draw; `positions[b]` is the place in its sequence of the token before the one that is drawn."""
        logits_BV = logits_output.next_token_logits
        params = _params(sampling_info, len(logits_BV))
        masked = self._mask_ends(logits_BV, params, positions)
        self._seeded = _seeds(params, logits_BV.device)
        try:
            if masked is None:
                return super().forward(
                    logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
                )
            logits_output.next_token_logits = masked
            tokens = super().forward(
                logits_output, sampling_info, False, top_logprobs_nums, token_ids_logprobs, positions
            )
        finally:
            self._seeded = None
        if return_logprob:
            logprobs = torch.log_softmax(logits_BV.float() / sampling_info.temperatures, dim=-1)
            self.output_logprob_processor.compute_logprobs(
                logprobs, top_logprobs_nums, token_ids_logprobs, tokens
            ).write_output_to(logits_output)
        return tokens

    def _mask_ends(self, logits_BV: Tensor, params: list[dict[str, Any]], positions: Tensor) -> Tensor | None:
        """The logits without end tokens where a response is still too short for one; None where there is no such."""
        rows = [row for row, each in enumerate(params) if MIN_NEW in each]
        if not rows:
            return None
        masked = logits_BV.clone()
        least = torch.tensor([params[row][MIN_NEW] for row in rows], device=positions.device)
        early = positions[torch.tensor(rows, device=positions.device)] + 1 < least
        for row, is_early in zip(rows, early.tolist(), strict=True):
            if is_early:
                masked[row, params[row][ENDS]] = float("-inf")
        return masked

    def _sample_from_probs(
        self, probs: Tensor, sampling_info: Any, positions: Tensor, simple_sampling_case: bool
    ) -> tuple[Tensor, None]:
        """Top-k, top-p of what is left, min-p, draw."""
        weights_BV = (
            probs
            if simple_sampling_case
            else kept(probs, sampling_info.top_ks, sampling_info.top_ps, sampling_info.min_ps)
        )
        tokens = torch.multinomial(weights_BV, num_samples=1).view(-1)
        if self._seeded is not None:
            rows, seeds = self._seeded
            tokens[rows] = seeded_choice(weights_BV[rows], seeds, positions[rows])
        return tokens.to(torch.int32), None


def _params(sampling_info: Any, num: int) -> list[dict[str, Any]]:
    given = sampling_info.custom_params if sampling_info.has_custom_logit_processor else None
    return [each or {} for each in given or [None] * num]


def _seeds(params: list[dict[str, Any]], device: torch.device) -> tuple[Tensor, Tensor] | None:
    rows = [row for row, each in enumerate(params) if SEED in each]
    if not rows:
        return None
    return torch.tensor(rows, device=device), torch.tensor([params[row][SEED] for row in rows], device=device)
