"""Hooks in SGLang's hook registry that change how it serves a trained LoRA adapter.

* SGLang copies an adapter into its compute buffers when a request first uses it. The hook does so as soon as the
  adapter is loaded. So the digests of a weight receipt describe the tensors that compute.
* OpenAI-compatible routes use the base model if a request names no adapter (`model:adapter`). With the hook they use
  the adapter, and the base model has its own name.
"""

from __future__ import annotations

import os
from typing import Any

ADAPTER = "ROLL_SGLANG_ADAPTER"
"""Environment variable of our server processes: the name of the adapter that they serve."""
AFTER_LOADING = "sglang.srt.lora.lora_manager.LoRAManager.load_lora_adapter"
"""SGLang method after which the hook `put_in_place` runs, in the processes that hold weights."""
AFTER_NAMING = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase._resolve_lora_path"
"""SGLang method after which the hook `name_adapter` runs, in the server process."""


def put_in_place(result: Any, manager: Any, adapter: Any) -> Any:
    """Copy a newly loaded adapter into the compute buffers and store its slot in the model.

    No request is running, so no adapter in use is evicted. Returns a failed result if copying fails.
    """
    from roll_infer_sglang.held_adapter import SLOT

    if not result.success:
        return result
    try:
        manager.fetch_new_loras({adapter.lora_id})
    except Exception as error:  # the worker raises it; an exception here would end the engine
        manager.unload_lora_adapter(adapter)
        return manager.create_lora_update_result(success=False, error_message=f"{type(error).__name__}: {error}")
    setattr(manager.base_model, SLOT, manager.memory_pool.get_buffer_id(adapter.lora_id))
    return result


def name_adapter(result: Any, serving: Any, model: str, given: Any) -> Any:
    """Adapter for a request for `model`, unless the request names an adapter or the base model."""
    name = os.environ[ADAPTER]
    return name if result is None and model != beneath(name) else result


def beneath(role: str) -> str:
    """Name of the base model of a role that serves an adapter."""
    return f"{role}-base"
