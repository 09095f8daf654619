"""General path of the engine: any causal language model that transformers loads, run through its own module and cache.

Rows of equal length that were prefilled together form a cohort and share one cache, so there is no padding. Positions,
windows, experts and recurrent states behave exactly as in transformers. Cohorts decode one after the other: this path
is exact and general, but slow. Architectures of the Llama family use `decoder.Decoder` instead.

Prompts with images and those without form cohorts of their own. Images are read in the prefill alone. Later tokens then
have explicit positions: their index plus a distance that depends on the row's images. The memory that transformers'
models have of this distance (`rope_deltas`) is that of the last prefill, whichever its rows.

N rows    L tokens    V vocabulary    M layers with experts    K top-k    A axes of positions
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll_core.errors import DataError, UnsupportedError, one_line
from roll_infer_hf.runner import CachedPrompt, PromptChunk, Runner
from roll_modeling.activations import recorded
from roll_modeling.model import layer_configs
from roll_modeling.model_table import CACHE_PARAMETERS
from roll_modeling.routing import RoutingRecorder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import numpy.typing as npt
    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.types import GenerateRequest, Media
    from roll_modeling.images import ImageReader


PROBE_TOKENS = 12
"""Number of tokens that are decoded at the start and compared with one pass over all of them."""


@dataclass(eq=False, slots=True)
class Cohort:
    """Rows that share one cache: `num` rows of `length` cached tokens each."""

    cache: Any
    num: int
    length: int = 0
    shifts_AN1: Tensor | None = None
    """Distance of the positions of later tokens to their indices; None if there is none, as without images."""

    def reorder(self, rows_N: Tensor) -> None:
        """Keep only these rows, in that order."""
        self.cache.reorder_cache(rows_N)
        self.num = len(rows_N)
        if self.shifts_AN1 is not None:
            self.shifts_AN1 = self.shifts_AN1[:, rows_N]


class ModuleRunner(Runner):
    """Runs prefill and decode through a transformers module."""

    can_split = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        cache_bytes: int,
        max_rows: int,
        images: ImageReader | None = None,
        record_experts: bool = False,
    ) -> None:
        """With `images`, prompts may have images. With `record_experts`, record the experts of each token.

        Raises `UnsupportedError` if the model has no cache, or if decoding with it differs from one pass over all
        tokens. With `record_experts` also raises it if the model has no experts or its routers are unknown.
        """
        self._model: Any = model
        self._recorder = RoutingRecorder(model) if record_experts else None
        self.device = model.device
        config: Any = model.config.get_text_config()
        self.max_positions = int(getattr(config, "max_position_embeddings", None) or 2**31)
        self.vocab_size = int(config.vocab_size)
        self._images = images
        if images is not None:
            self.reads_images = not images.unsupported
            self.media_token_ids = tuple(id for id in images.processor.media_token_ids if id < self.vocab_size)
        self._cache_bytes, self._max_rows = cache_bytes, max_rows
        self._token_bytes = sum(_token_bytes(layer, model.dtype.itemsize) for layer in layer_configs(model.config))
        parameters = inspect.signature(self._model.forward).parameters
        self._picks_rows = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self._cache_name = next((name for name in CACHE_PARAMETERS if name in parameters), "")
        if reason := self._unsupported():
            raise UnsupportedError(
                f"hf_infer does not support {config.model_type}: {type(model).__name__} of transformers {reason}; use"
                " another engine"
            )
        self._cohorts: list[Cohort] = []
        self._prompts: dict[CachedPrompt, tuple[Cohort, int]] = {}

    def check_media(self, request: GenerateRequest) -> None:
        """Process the request's images. Raises `DataError` if they do not fit its prompt."""
        if self._images is None:
            return
        self._images.processor.check(request)
        if not request.media:
            return
        tokens_L = torch.from_numpy(np.asarray(request.prompt_ids, dtype=np.int64))
        try:
            self._images.read(tokens_L, [len(tokens_L)], [request.media], ["of the prompt"])
        except DataError as error:
            raise DataError(f"request {request.id!r}: {error}") from error

    def recording(self) -> AbstractContextManager[dict[str, Tensor]]:
        """Record the activations of the module."""
        return recorded(self._model)

    def fits(self, num_rows: int, num_tokens: int) -> bool:
        """Estimate the cache size as that of an architecture that caches every position in every layer."""
        return num_rows <= self._max_rows and num_rows * num_tokens * self._token_bytes <= self._cache_bytes

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Do nothing: transformers' caches grow on demand."""

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PromptChunk]) -> Tensor:
        """Run one forward pass per prompt length; prompts of equal length form a cohort, or two if some have images."""
        groups: dict[tuple[int, bool], list[int]] = {}
        for i, chunk in enumerate(chunks):
            groups.setdefault((chunk.end, bool(chunk.prompt.media)), []).append(i)
        logits: list[Tensor | None] = [None] * len(chunks)
        for (length, _), members in groups.items():
            tokens = torch.from_numpy(np.stack([chunks[i].prompt.tokens for i in members])).to(self.device)
            cohort = Cohort(self._new_cache(), len(members))
            with_logprobs = any(chunks[i].prompt.logprobs_wanted for i in members)
            media_N = [chunks[i].prompt.media for i in members]
            outputs = self._forward(cohort, tokens, every=with_logprobs, media_N=media_N)
            experts = None if self._recorder is None else self._recorder.take()
            for row, i in enumerate(members):
                prompt = chunks[i].prompt
                prompt.done = length
                if experts is not None:
                    prompt.routed_experts = experts[row * length : (row + 1) * length]
                self._prompts[prompt] = (cohort, row)
                logits[i] = outputs[row, -1]
                if prompt.logprobs_wanted:
                    prompt.store(1, torch.log_softmax(outputs[row, :-1].float(), dim=-1))
        return torch.stack([row for row in logits if row is not None]).float()

    @torch.inference_mode()
    def join(self, prompts: Sequence[CachedPrompt]) -> None:
        """Append rows; consecutive prompts of one cohort become rows of one new cohort with a copy of the cache."""
        start = 0
        while start < len(prompts):
            source, _ = self._prompts[prompts[start]]
            end = start
            while end < len(prompts) and self._prompts[prompts[end]][0] is source:
                end += 1
            rows = torch.tensor([self._prompts[prompt][1] for prompt in prompts[start:end]], device=self.device)
            cohort = replace(source, cache=copy.deepcopy(source.cache))
            cohort.reorder(rows)
            self._cohorts.append(cohort)
            start = end

    def forget(self, prompt: CachedPrompt) -> None:
        """Drop the reference to the prompt's cohort; the cache is freed with the last prompt of the cohort."""
        self._prompts.pop(prompt, None)

    @torch.inference_mode()
    def decode(self, tokens_N: Tensor) -> Tensor:
        """Run one forward pass per cohort, one after the other."""
        logits, experts, start = [], [], 0
        for cohort in self._cohorts:
            tokens = tokens_N[start : start + cohort.num].unsqueeze(1)
            logits.append(self._forward(cohort, tokens, every=False)[:, -1])
            if self._recorder is not None:
                experts.append(self._recorder.take())
            start += cohort.num
        self.routed_experts_NMK = np.concatenate(experts) if experts else None
        return torch.cat(logits).float()

    @torch.inference_mode()
    def drop(self, kept_N: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Remove rows; the remaining rows keep their order."""
        start, left = 0, []
        for cohort in self._cohorts:
            rows = np.flatnonzero(kept_N[start : start + cohort.num])
            start += cohort.num
            if len(rows) == 0:
                continue
            if len(rows) < cohort.num:
                cohort.reorder(torch.from_numpy(rows).to(self.device))
            left.append(cohort)
        self._cohorts = left
        return np.flatnonzero(kept_N)

    def refresh(self) -> None:
        """Do nothing: the module reads its parameters at every call."""

    def release(self) -> None:
        """Do nothing: caches were freed with their rows and prompts."""

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def _unsupported(self) -> str:
        """Why this architecture cannot be decoded token by token; empty if it can."""
        if not self._cache_name:
            return "has no key-value cache, so each token would be sampled without the previous tokens"
        try:
            error, tolerance = self._decoding_error()
        except Exception as failure:  # architectures with a cache of their own fail in any way
            return f"fails with transformers' cache ({one_line(failure)})"
        if error <= tolerance:
            return ""
        return (
            f"decodes other logits with a cache than in one pass over all tokens: they differ by {error:.2g} of their"
            f" size, and rounding explains at most {tolerance:g}"
        )

    @torch.inference_mode()
    def _decoding_error(self) -> tuple[float, float]:
        """Relative error of the logits of tokens that are decoded one by one, and the largest one by rounding.

        Two cohorts take turns, so that the error is large for a layer that keeps its state in the module, where the
        states of cohorts mix. It is the median of the tokens, since in bfloat16 single tokens may be routed to other
        experts.
        """
        num_tokens = min(PROBE_TOKENS, self.max_positions)
        first = num_tokens - min(4, num_tokens // 2)
        tokens_2L = (torch.arange(2 * num_tokens, device=self.device) * 7 + 3).view(2, -1) % self.vocab_size
        cohorts = [Cohort(self._new_cache(), 1) for _ in tokens_2L]
        for cohort, row in zip(cohorts, tokens_2L, strict=True):
            self._forward(cohort, row[None, :first], every=False)
        errors: list[Tensor] = []
        whole_2LV: Tensor = self._model(input_ids=tokens_2L, use_cache=False).logits.float()
        for i in range(first, num_tokens):
            for row, cohort in enumerate(cohorts):
                found_V = self._forward(cohort, tokens_2L[row, None, i : i + 1], every=False)[0, -1].float()
                expected_V = whole_2LV[row, i]
                size = (expected_V - expected_V.mean()).norm().clamp_min(1e-6)
                errors.append((found_V - expected_V).norm() / size)
        error = float(torch.stack(errors).median()) if errors else 0.0
        return error, 1e-3 if self._model.dtype == torch.float32 else 0.1

    def _forward(
        self, cohort: Cohort, tokens_NL: Tensor, *, every: bool, media_N: Sequence[tuple[Media, ...]] = ()
    ) -> Tensor:
        """Logits `[N, L, V]`, or those of the last token `[N, 1, V]` unless `every`; appends to the cohort's cache.

        `media_N` are the images of each row, which are among the tokens.
        """
        more: dict[str, Any] = {"logits_to_keep": 1} if self._picks_rows and not every else {}
        more[self._cache_name] = cohort.cache
        end = cohort.length + tokens_NL.shape[1]
        if self._takes_positions:  # transformers' Bamba counts from 0 without them, also beside a cache
            positions_L = torch.arange(cohort.length, end, device=tokens_NL.device)
            more["position_ids"] = positions_L.expand(len(tokens_NL), -1)
            if cohort.shifts_AN1 is not None:
                more["position_ids"] = positions_L + cohort.shifts_AN1
        if any(media_N):
            more |= self._image_inputs(cohort, tokens_NL, media_N)
        result = self._model(input_ids=tokens_NL, use_cache=True, **more)
        cohort.length = end
        logits: Tensor = result.logits
        return logits

    def _image_inputs(self, cohort: Cohort, tokens_NL: Tensor, media_N: Sequence[tuple[Media, ...]]) -> dict[str, Any]:
        """What the model reads besides tokens. Sets the cohort's `shifts_AN1`."""
        reader, (num, length) = self._images, tokens_NL.shape
        assert reader is not None  # noqa: S101 - otherwise requests with images are refused
        images = reader.read(tokens_NL.flatten().cpu(), [length] * num, media_N, [f"row {i}" for i in range(num)])
        assert images is not None  # noqa: S101 - a row has some
        inputs: dict[str, Any] = dict(reader.types(images.types_T.view(num, length)))
        inputs["mm_encoder_outputs"] = reader.features(images)
        if images.positions_AT is not None:
            positions_ANL = images.positions_AT.view(-1, num, length)
            inputs["position_ids"] = positions_ANL
            shifts_N1 = positions_ANL.amax((0, 2))[:, None] + 1 - length
            cohort.shifts_AN1 = shifts_N1.expand(len(positions_ANL), -1, -1)
        return inputs


def _token_bytes(config: Any, itemsize: int) -> int:
    """Bytes of a token's keys and values in one layer."""
    heads = int(getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None) or 1)
    hidden = int(getattr(config, "hidden_size", None) or 0)
    query_heads = int(getattr(config, "num_attention_heads", None) or 1)
    size = int(getattr(config, "head_dim", None) or hidden // query_heads)
    return max(1, 2 * heads * size * itemsize)
