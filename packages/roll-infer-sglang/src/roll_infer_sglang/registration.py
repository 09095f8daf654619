"""What SGLang calls in each of its processes (entry point `sglang.srt.plugins`), so that it knows our part by name."""

from __future__ import annotations

import os

from roll_infer_sglang.adapter_hooks import ADAPTER, AFTER_LOADING, AFTER_NAMING, name_adapter, put_in_place

SAMPLING_BACKEND = "roll"
"""Name of the sampler in SGLang's registry; used where an engine asks for it."""
INSISTED_ON = "ROLL_SGLANG_SAMPLING_BACKEND"
"""Variable of our servers' processes: another name of the sampler, for a device on which SGLang asks for that one
whatever it is told. Servers of others keep their own."""
HOST_CACHE = "ROLL_SGLANG_HOST_CACHE"
"""Variable of our servers' processes: keys and values lie in the host's memory, see `host_cache`."""


def register() -> None:
    """Name the sampler, whose module is imported where an engine asks for it, and our hooks. May be called again."""
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
