"""Workarounds for vLLM 0.32. Each states its reason, and a test fails as soon as it is no longer needed."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.sample.sampler import Sampler

from roll_core.errors import UnsupportedError


class TemperedSampler(Sampler):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Sampler whose logprobs are under softmax(logits / temperature), before penalties and filters, as in the trainer.

    In vLLM 0.32 `logprobs_mode` selects the kind of logprobs for the whole engine. `raw` ignores the temperature;
    `processed` includes penalties and top-k, top-p and min-p. Neither matches the trainer if the temperature is not 1
    and filters are set. Prompt logprobs also use `compute_logprobs`, but outside of `forward`: they stay raw.
    """

    _temperature: Any = None
    """Temperature of each row during `forward`; None outside of it and if all rows are greedy."""

    def forward(self, logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample tokens; makes the temperatures available to `compute_logprobs`."""
        self._temperature = sampling_metadata.temperature
        try:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            self._temperature = None

    def compute_logprobs(self, logits: Any) -> Any:
        """Logprobs in float32, after division by the temperature. A temperature of 0 counts as 1."""
        if self._temperature is not None:
            logits = self.apply_temperature(logits.float().clone(), self._temperature, all_random=False)
        return super().compute_logprobs(logits)


def use_tempered_sampler(model_runner: Any) -> None:
    """Replace the model runner's sampler by a `TemperedSampler` with the same options.

    Raises `UnsupportedError` if the runner's sampler is not vLLM's standard `Sampler`.
    """
    own = model_runner.sampler
    if type(own) is not Sampler:
        raise UnsupportedError(
            f"vLLM samples with {type(own).__module__}.{type(own).__name__}, which returns no logprobs at the sampling"
            " temperature; remove VLLM_USE_V2_MODEL_RUNNER from system_envs, or set it to '0'"
        )
    model_runner.sampler = TemperedSampler(own.logprobs_mode, own.use_fp64_gumbel)


def pack_tied_heads(model: Any) -> None:
    """Repack output layers after an update, on a CPU.

    vLLM 0.32 packs a layer when the layer's own tensor has been loaded. An output layer tied to the embeddings has no
    tensor of its own, so it would keep computing with the old weights.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
