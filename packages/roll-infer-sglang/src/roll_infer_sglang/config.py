"""`strategy_config` of `sglang`: SGLang's engine arguments by their own names, except those that ROLL sets itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model

from roll_core.spec.config import PositiveInt
from roll_infer_sglang.arguments import PASSED_ON, REJECTED
from roll_modeling.engine_config import EngineConfig
from roll_modeling.model_table import has_experts, num_experts, sliding_window

PLAIN_BACKEND = "triton"
"""Value of `moe_runner_backend` for which SGLang does not convert experts after loading them."""
MIXTURES = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "ernie4_5_moe",
        "glm4_moe",
        "gpt_oss",
        "mixtral",
        "olmoe",
        "qwen2_moe",
        "qwen3_moe",
    }
)
"""Types of mixtures of experts that tests have published, read back and computed."""
IMAGE_TYPES = frozenset({"internvl", "qwen2_5_vl", "qwen3_vl"})
"""Types of models whose logprobs after images tests have compared with those of transformers."""
OTHER_IMAGE_TYPES = {
    "gemma3": "SGLang's attention to the tokens of an image is causal, except with its Triton kernels",
    "llava": "SGLang does not start",
}
"""Other types, each with the reason."""
WITHOUT_WINDOWS = frozenset({"mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2"})
"""Types whose SGLang code computes full attention in layers with a sliding window, with every `attention_backend`."""

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.types import MediaKind

    _EngineKeys = EngineConfig
else:
    _EngineKeys = create_model(
        "_EngineKeys", __base__=EngineConfig, **dict.fromkeys((*PASSED_ON, *REJECTED), (Any, None))
    )
    """All engine arguments of SGLang, so that unknown ones are rejected with the nearest name. SGLang validates values.
    """


class SglangConfig(_EngineKeys):
    """`strategy_config` of `sglang`. Keys that are not set keep SGLang's defaults unless stated otherwise."""

    engine = "SGLang"
    rejected = REJECTED
    length_key = "context_length"

    tp_size: PositiveInt | None = None
    """Tensor parallel size: number of slots over which each layer is sharded. Default: the worker's slots
    (`num_gpus_per_worker`)."""
    mem_fraction_static: float = Field(default=0.8, gt=0, lt=1)
    """Fraction of the device's free memory for weights and KV cache. On a CPU: of host memory."""
    max_total_tokens: PositiveInt | None = None
    """Maximum number of tokens in the KV cache; `mem_fraction_static` may limit it further. Default on a CPU: 65,536.
    """
    context_length: PositiveInt | None = None
    """Maximum sequence length, prompt plus response, in tokens. Default: the model's own limit."""
    max_running_requests: PositiveInt | None = None
    """Maximum number of sequences that are decoded in one batch; further sequences wait."""
    chunked_prefill_size: int | None = None
    """Maximum number of prompt tokens prefilled in one step; longer prompts are prefilled in chunks. -1 disables
    chunking."""
    page_size: PositiveInt | None = None
    """Number of tokens per page of the KV cache."""
    disable_radix_cache: bool = False
    """Disable the radix cache, which shares the prefill of common prompt prefixes. Each weight update clears it."""
    ep_size: PositiveInt = 1
    """Expert parallel size: number of groups over which the experts of a layer are distributed; it divides `tp_size`.
    The slots of a group shard its experts as they shard other layers."""
    moe_runner_backend: str | None = None
    """Kernels of experts. Only `triton`, the default, computes with weights in the form in which they are sent."""
    attention_backend: str | None = None
    """Attention kernels."""
    disable_cuda_graph: bool | None = None
    """Disable CUDA graphs."""
    schedule_policy: str = "fcfs"
    """Order in which waiting requests of equal priority are scheduled."""
    enable_priority_scheduling: bool = True
    """Schedule waiting requests by priority. Running requests are not preempted by requests of higher priority."""
    host: str = "127.0.0.1"
    """Address at which the server listens, including the OpenAI-compatible routes (`/v1`). All clients that can connect
    can generate. Updating weights and aborting requests of others need the worker's key."""

    def check_model(self, keys: Mapping[str, Any]) -> None:
        """Raise `ValueError` if the experts of this model cannot be distributed over the ranks, or be read back."""
        super().check_model(keys)
        if has_experts(keys):
            self.check_experts(keys, self.tp_size)
        elif self.ep_size != 1:
            raise ValueError(f"ep_size {self.ep_size} needs a mixture of experts, and this model has none")

    def check_images(self, keys: Mapping[str, Any], kind: MediaKind, prompt: int) -> None:
        """Raise `ValueError` unless tests have compared logprobs after images of models of this type."""
        model_type = keys.get("model_type")
        if isinstance(model_type, str) and model_type not in IMAGE_TYPES:
            why = OTHER_IMAGE_TYPES.get(model_type, "no test has compared its logprobs after images")
            raise ValueError(
                f"SGLang reads no images with a model of type {model_type}: {why}; use another engine, or a model of"
                f" type {', '.join(sorted(IMAGE_TYPES))}"
            )

    def check_positions(self, keys: Mapping[str, Any], prompt: int, response: int) -> None:
        """Also raise `ValueError` if prompt plus response exceeds a sliding window that SGLang ignores."""
        super().check_positions(keys, prompt, response)
        model_type, window = str(keys.get("model_type")), sliding_window(keys)
        # transformers' Qwen uses its window only if the config says so.
        used = keys.get("use_sliding_window", not model_type.startswith("qwen"))
        if model_type in WITHOUT_WINDOWS and used and window is not None and window < prompt + response:
            raise ValueError(
                f"SGLang computes full attention for a model of type {model_type}, whose sliding_window is {window}"
                f" tokens, fewer than prompt_length {prompt} + response_length {response} = {prompt + response}: lower"
                " them, or use another engine"
            )

    def check_experts(self, keys: Mapping[str, Any], num_slots: int | None) -> None:
        """Same for a mixture of experts on `num_slots` slots per worker; None if their number is not known."""
        if self.moe_runner_backend not in (None, PLAIN_BACKEND):
            raise ValueError(
                f"moe_runner_backend {self.moe_runner_backend} may store experts in a form that cannot be compared with"
                f" the sent weights; use {PLAIN_BACKEND}"
            )
        if num_slots is not None and num_slots % self.ep_size:
            raise ValueError(f"ep_size {self.ep_size} does not divide the worker's {num_slots} slots (tp_size)")
        if (experts := num_experts(keys)) % self.ep_size:
            raise ValueError(f"ep_size {self.ep_size} does not divide the model's {experts} experts")

    def check_architecture(self, keys: Mapping[str, Any]) -> str | None:
        """Same as the base class; also warn about mixtures of experts that no test has published."""
        reason = super().check_architecture(keys)
        if reason is None and has_experts(keys) and keys.get("model_type") not in MIXTURES:
            return "no test has published experts of this model_type to SGLang; the first publish compares its tensors"
        return reason

    def slots_per_worker(self) -> int | None:
        """Number of slots per worker: `tp_size`; None if it is not set and the role decides."""
        return self.tp_size
