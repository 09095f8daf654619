"""What SGLang does otherwise while it serves a trained adapter, through SGLang's registry of hooks.

* It would put an adapter where it computes when a request first asks for it; here that is done as soon as it is loaded,
  so that a receipt speaks of what computes.
* OpenAI's routes would answer with the model beneath where a request names no adapter (`model:adapter`); here that is
  the adapter, and the model beneath has a name of its own.
"""

from __future__ import annotations

import os
from typing import Any

ADAPTER = "ROLL_SGLANG_ADAPTER"
"""Variable of our servers' processes: the name of the adapter that they serve."""
AFTER_LOADING = "sglang.srt.lora.lora_manager.LoRAManager.load_lora_adapter"
"""What `put_in_place` follows, in the processes that hold weights."""
AFTER_NAMING = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase._resolve_lora_path"
"""What `name_adapter` follows, in the server's own process."""


def put_in_place(result: Any, manager: Any, adapter: Any) -> Any:
    """Nothing runs; so nobody's adapter is put out."""
    from roll_infer_sglang.held_adapter import SLOT

    if not result.success:
        return result
    try:
        manager.fetch_new_loras({adapter.lora_id})
    except Exception as error:  # the worker raises it; raised here it would end the engine
        manager.unload_lora_adapter(adapter)
        return manager.create_lora_update_result(success=False, error_message=f"{type(error).__name__}: {error}")
    setattr(manager.base_model, SLOT, manager.memory_pool.get_buffer_id(adapter.lora_id))
    return result


def name_adapter(result: Any, serving: Any, model: str, given: Any) -> Any:
    """The adapter that answers a request for `model`; what the request itself has named stands."""
    name = os.environ[ADAPTER]
    return name if result is None and model != beneath(name) else result


def beneath(role: str) -> str:
    """What the model beneath the adapter of a role is called."""
    return f"{role}-base"
