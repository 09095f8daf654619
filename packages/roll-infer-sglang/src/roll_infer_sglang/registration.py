"""SGLang plugin (entry point `sglang.srt.plugins`): SGLang calls `register` in each process to add our sampler.

`register` also adds our hooks to SGLang's hook registry.
"""

from __future__ import annotations

import os

from roll_infer_sglang import hooks
from roll_infer_sglang.sampling import MEDIA_TOKENS

SAMPLING_BACKEND = "roll"
"""Name of our sampler in SGLang's registry, for the argument `sampling_backend`."""
FORCED_BACKEND = "ROLL_SGLANG_SAMPLING_BACKEND"
"""Environment variable of our server processes: a second name under which our sampler is registered. Needed for devices
on which SGLang ignores `sampling_backend` and uses a fixed one. Other SGLang servers are not affected."""
ON_CPU = "ROLL_SGLANG_ON_CPU"
"""Environment variable of our server processes: set if they run on a CPU."""


def register() -> None:
    """Register the sampler, whose module is imported on first use, and our hooks. May be called repeatedly."""
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in filter(None, (SAMPLING_BACKEND, os.environ.get(FORCED_BACKEND))):
        register_sampler_backend(name, _sampler)
    HookRegistry.register(hooks.AFTER_LOGITS, hooks.add_bias, HookType.AFTER)
    HookRegistry.register(hooks.BEFORE_ACTIVATION, hooks.store_in_dtype_of_model, HookType.BEFORE)
    if os.environ.get(ON_CPU):
        HookRegistry.register(hooks.AFTER_RELEASE, hooks.release_cache, HookType.AFTER)
    if os.environ.get(MEDIA_TOKENS):
        HookRegistry.register(hooks.LOAD_PROCESSOR, hooks.load_processor, HookType.REPLACE)
        HookRegistry.register(hooks.MAKE_PROCESSOR, hooks.make_processor, HookType.REPLACE)
    if os.environ.get(hooks.ADAPTER):
        HookRegistry.register(hooks.AFTER_LOADING, hooks.load_into_buffers, HookType.AFTER)
        HookRegistry.register(hooks.AFTER_NAMING, hooks.name_adapter, HookType.AFTER)


def _sampler() -> object:
    from roll_infer_sglang.sampler import ContractSampler

    return ContractSampler()
