"""SGLang plugin (entry point `sglang.srt.plugins`): SGLang calls `register` in each process to add our sampler.

`register` also adds our hooks to SGLang's hook registry.
"""

from __future__ import annotations

import os

from roll_infer_sglang.adapter_hooks import ADAPTER, AFTER_LOADING, AFTER_NAMING, name_adapter, put_in_place

SAMPLING_BACKEND = "roll"
"""Name of our sampler in SGLang's registry, for the argument `sampling_backend`."""
INSISTED_ON = "ROLL_SGLANG_SAMPLING_BACKEND"
"""Environment variable of our server processes: a second name under which our sampler is registered. Needed for devices
on which SGLang ignores `sampling_backend` and uses a fixed one. Other SGLang servers are not affected."""
HOST_CACHE = "ROLL_SGLANG_HOST_CACHE"
"""Environment variable of our server processes: set if the KV cache is in host memory, see `host_cache`."""


def register() -> None:
    """Register the sampler, whose module is imported on first use, and our hooks. May be called repeatedly."""
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in filter(None, (SAMPLING_BACKEND, os.environ.get(INSISTED_ON))):
        register_sampler_backend(name, _sampler)
    if os.environ.get(HOST_CACHE):
        from roll_infer_sglang.host_cache import AFTER, release

        HookRegistry.register(AFTER, release, HookType.AFTER)
    if os.environ.get(ADAPTER):
        HookRegistry.register(AFTER_LOADING, put_in_place, HookType.AFTER)
        HookRegistry.register(AFTER_NAMING, name_adapter, HookType.AFTER)


def _sampler() -> object:
    from roll_infer_sglang.sampler import ContractSampler

    return ContractSampler()
