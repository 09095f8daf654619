"""Around what vLLM does at 0.32; each says what it is for, and a test says when it is no longer needed."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.sample.sampler import Sampler

from roll_core.errors import UnsupportedError


class TemperedSampler(Sampler):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Logprobs under softmax(logits / temperature), before penalties and filters: what a trainer computes.

    vLLM 0.32 has two kinds (`logprobs_mode`), for the engine as a whole: `raw` ones leave the temperature out, and
    `processed` ones put penalties and top-k, top-p, min-p in. Neither is the behaviour policy's at other temperatures
    than 1 and with filters. Prompt logprobs go through `compute_logprobs` too, but outside of `forward`: they stay raw.
    """

    _temperature: Any = None
    """Of each row, while tokens are drawn; None where all rows are greedy."""

    def forward(self, logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """Draw, with the temperatures at hand."""
        self._temperature = sampling_metadata.temperature
        try:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            self._temperature = None

    def compute_logprobs(self, logits: Any) -> Any:
        """In float32. A temperature of 0 counts as 1."""
        if self._temperature is not None:
            logits = self.apply_temperature(logits.float().clone(), self._temperature, all_random=False)
        return super().compute_logprobs(logits)


def use_tempered_sampler(model_runner: Any) -> None:
    """Put ours in the place of the runner's own sampler, made in the same way."""
    own = model_runner.sampler
    if type(own) is not Sampler:
        raise UnsupportedError(
            f"vLLM draws tokens with {type(own).__module__}.{type(own).__name__} here, which does not report logprobs"
            " at the temperature; set VLLM_USE_V2_MODEL_RUNNER: '0' in system_envs, or leave it out"
        )
    model_runner.sampler = TemperedSampler(own.logprobs_mode, own.use_fp64_gumbel)


def pack_tied_heads(model: Any) -> None:
    """Pack output layers anew after an update, on a CPU.

    vLLM 0.32 packs a layer when its own tensor has been loaded. An output layer that shares the embeddings' has none,
    so it would go on computing with the old weights.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
