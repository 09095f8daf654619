"""Sampler for SGLang with the parameter semantics of ROLL's infer contract; runs in the engine processes.

SGLang's own sampler differs in three ways:

* top-p counts probability mass that top-k has already removed;
* a seed has an effect only with SGLang's deterministic kernels;
* masked end tokens (`min_new_tokens`) change the logprobs;
* tokens of images may be sampled.

SGLang supports custom samplers (`register_sampler_backend`) and custom parameters for them (`custom_params`). These
parameters reach the sampler only if the request has a logit processor, here `ParamsProcessor`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from roll_infer_sglang.distribution import filtered, seeded_choice
from roll_infer_sglang.sampling import ENDS, MEDIA_TOKENS, MIN_NEW, SEED

if TYPE_CHECKING:
    from torch import Tensor


class ParamsProcessor(CustomLogitProcessor):  # type: ignore[misc]  # SGLang is untyped to mypy
    """Logit processor that changes nothing; makes SGLang pass a request's `custom_params` to the sampler."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        """Return the logits unchanged; called by SGLang."""
        return logits


class ContractSampler(Sampler):  # type: ignore[misc]  # SGLang is untyped to mypy
    """Sampler with ROLL's semantics of top-p, seeds, `min_new_tokens` and tokens of images.

    B requests of a batch, V tokens of the vocabulary.
    """

    _media_tokens: ClassVar = [int(id) for id in os.environ.get(MEDIA_TOKENS, "").split(",") if id]
    """Ids that are never sampled."""

    _seeded: tuple[Tensor, Tensor] | None = None
    """Batch rows of requests with a seed, and their seeds; set during `forward`."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        positions: Any,
    ) -> Any:
        """Sample one token `[B]` per request; `positions[b]` is the sequence position of the last existing token."""
        logits_BV = logits_output.next_token_logits
        params = _params(sampling_info, len(logits_BV))
        masked = self._masked(logits_BV, params, positions)
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

    def _masked(self, logits_BV: Tensor, params: list[dict[str, Any]], positions: Tensor) -> Tensor | None:
        """Logits `[B, V]` without tokens of images, and without ends of responses shorter than `min_new_tokens`.

        None if nothing is masked.
        """
        rows = [row for row, request in enumerate(params) if MIN_NEW in request]
        if not rows and not self._media_tokens:
            return None
        masked = logits_BV.clone()
        masked[:, self._media_tokens] = float("-inf")
        if not rows:
            return masked
        least = torch.tensor([params[row][MIN_NEW] for row in rows], device=positions.device)
        early = positions[torch.tensor(rows, device=positions.device)] + 1 < least
        for row, is_early in zip(rows, early.tolist(), strict=True):
            if is_early:
                masked[row, params[row][ENDS]] = float("-inf")
        return masked

    def _sample_from_probs(
        self, probs: Tensor, sampling_info: Any, positions: Tensor, simple_sampling_case: bool
    ) -> tuple[Tensor, None]:
        """Apply top-k, then top-p of the remaining mass, then min-p, and sample."""
        weights_BV = (
            probs
            if simple_sampling_case
            else filtered(probs, sampling_info.top_ks, sampling_info.top_ps, sampling_info.min_ps)
        )
        tokens = torch.multinomial(weights_BV, num_samples=1).view(-1)
        if self._seeded is not None:
            rows, seeds = self._seeded
            tokens[rows] = seeded_choice(weights_BV[rows], seeds, positions[rows])
        return tokens.to(torch.int32), None


def _params(sampling_info: Any, num: int) -> list[dict[str, Any]]:
    customs = sampling_info.custom_params if sampling_info.has_custom_logit_processor else None
    return [custom or {} for custom in customs or [None] * num]


def _seeds(params: list[dict[str, Any]], device: torch.device) -> tuple[Tensor, Tensor] | None:
    rows = [row for row, request in enumerate(params) if SEED in request]
    if not rows:
        return None
    return torch.tensor(rows, device=device), torch.tensor([params[row][SEED] for row in rows], device=device)
