"""Hooks in SGLang: a trained LoRA adapter, the KV cache's memory on a CPU, and access control of the server.

* SGLang copies an adapter into its compute buffers when a request first uses it. `load_into_buffers` does so as soon as
  the adapter is loaded, so that the digests of a weight receipt describe the tensors that compute.
* OpenAI-compatible routes use the base model if a request names no adapter (`model:adapter`). With `name_adapter` they
  use the adapter, and the base model has its own name.
* Images are processed by `images.RunProcessor`.
* SGLang ignores the bias of an output layer (Phi, GPT-J). `add_bias` adds it.
* SGLang rounds parameters of Apertus' activation to bf16. `store_in_dtype_of_model` stores them in the model's dtype.
* SGLang's memory saver supports only CUDA. On a CPU its `release_memory_occupation` clears the KV cache but keeps the
  memory, which `release_cache` returns.
* Clients without the worker's key may generate, tokenize, and query health and metrics. By default SGLang protects only
  the routes that change weights. It returns its arguments, including the key, to any client. It also accepts adapters
  and logit processors from any client; logit processors are pickles and thus arbitrary code. Therefore `guard_routes`
  opens a fixed list of routes, and `reject_foreign_code` accepts no logit processor but our own.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

ADAPTER = "ROLL_SGLANG_ADAPTER"
"""Environment variable of our server processes: the name of the adapter that they serve."""
ADAPTER_SLOT = "_roll_adapter_slot"
"""Attribute of the model with the slot of the adapter that was loaded last."""
AFTER_LOADING = "sglang.srt.lora.lora_manager.LoRAManager.load_lora_adapter"
"""SGLang method after which `load_into_buffers` runs, in the processes that have the model."""
AFTER_NAMING = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase._resolve_lora_path"
"""SGLang method after which `name_adapter` runs, in the server process."""
AFTER_RELEASE = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation"
)
"""SGLang method after which `release_cache` runs, in the processes that have a KV cache."""
LOAD_PROCESSOR = "sglang.srt.utils.hf_transformers.processor.get_processor"
"""SGLang function that `load_processor` replaces, in all processes."""
MAKE_PROCESSOR = "sglang.srt.managers.multimodal_processor.get_mm_processor"
"""SGLang function that `make_processor` replaces, in all processes."""
BEFORE_ACTIVATION = "sglang.srt.layers.activation.XIELU.__init__"
"""SGLang method before which `store_in_dtype_of_model` runs, in the processes that have the model."""
AFTER_LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"
"""SGLang method after which `add_bias` runs, in the processes that have the model."""
AFTER_SETTINGS = "sglang.srt.entrypoints.engine._set_envs_and_config"
"""SGLang function after which `fork_processes` runs, in the server process, on a CPU."""
BEFORE_REQUEST = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
"""SGLang method before which `reject_foreign_code` runs, in the server process."""
OPEN = ("/v1/", "/generate", "/tokenize", "/detokenize", "/model_info", "/ping")
"""Path prefixes of routes that need no key; SGLang always leaves its health and metrics routes open too."""


def load_into_buffers(result: Any, manager: Any, adapter: Any) -> Any:
    """Copy a newly loaded adapter into the compute buffers and store its slot in the model.

    No request is running, so no adapter in use is evicted. Returns a failed result if copying fails.
    """
    if not result.success:
        return result
    try:
        manager.fetch_new_loras({adapter.lora_id})
    except Exception as error:  # the worker raises it; an exception here would end the engine
        manager.unload_lora_adapter(adapter)
        return manager.create_lora_update_result(success=False, error_message=f"{type(error).__name__}: {error}")
    setattr(manager.base_model, ADAPTER_SLOT, manager.memory_pool.get_buffer_id(adapter.lora_id))
    return result


def name_adapter(result: Any, serving: Any, model: str, requested: Any) -> Any:
    """Adapter for a request for `model`, unless the request names an adapter or the base model."""
    name = os.environ[ADAPTER]
    return name if result is None and model != base_name(name) else result


def base_name(role: str) -> str:
    """Name of the base model of a role that serves an adapter."""
    return f"{role}-base"


def load_processor(path: str, *arguments: Any, **options: Any) -> Any:
    """The tokenizer, from which `images.RunProcessor` loads the run's processor. SGLang's own needs torchvision."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    names = ("tokenizer_mode", "trust_remote_code", "revision")
    return get_tokenizer(path, **{name: options[name] for name in names if name in options})


def make_processor(config: Any, arguments: Any, tokenizer: Any, transport: Any, *others: Any, **options: Any) -> Any:
    """The processor of requests with images, whatever the model."""
    from roll_infer_sglang.images import RunProcessor

    return RunProcessor(config, arguments, tokenizer, transport, skip_mm_pool=True)


def store_in_dtype_of_model(*arguments: Any, **options: Any) -> tuple[Any, Any]:
    """Arguments of an activation whose parameters have the dtype in which the model is constructed."""
    import torch

    return arguments, {"dtype": torch.get_default_dtype()} | options


def add_bias(logits: Any, processor: Any, hidden: Any, head: Any, bias: Any = None, **options: Any) -> Any:
    """The logits of this rank's tokens, with the bias of the output layer `head`. `bias` is one that SGLang adds."""
    ignored = getattr(head, "bias", None)
    return logits if ignored is None or bias is not None else logits.add_(ignored)


def release_cache(result: Any, manager: Any, request: Any) -> None:
    """Return the KV cache's memory pages to the operating system. No request is running; the content is lost."""
    from roll_modeling.offload import release_pages

    pool = manager.scheduler.token_to_kv_pool_allocator.get_kvcache()
    for name in ("k_buffer", "v_buffer", "kv_buffer"):
        for cache in getattr(pool, name, None) or ():
            release_pages(cache)


def fork_processes(result: Any, arguments: Any) -> None:
    """Start SGLang's other processes by fork instead of spawn, so that they need not import SGLang again.

    It is safe only on a CPU: a forked process cannot use CUDA. The server process has computed nothing yet, so OpenMP
    has no threads that would be missing in the new processes.
    """
    multiprocessing.set_start_method("fork", force=True)


def guard_routes(app: FastAPI) -> None:
    """Require the worker's key for all routes that are not in `OPEN`. Call before the server is launched."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    for route in app.routes:
        endpoint = getattr(route, "endpoint", None)
        if endpoint is not None and not getattr(route, "path", "").startswith(OPEN):
            auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint)


def reject_foreign_code(manager: Any, request: Any, *arguments: Any, **named: Any) -> None:
    """Raise `ValueError` for logit processors other than our own; SGLang returns it as a client error."""
    from roll_infer_sglang.sampler import ParamsProcessor

    processor = getattr(request, "custom_logit_processor", None)
    if processor is not None and processor != ParamsProcessor.to_str():
        raise ValueError("custom_logit_processor is code, which this server does not accept")
