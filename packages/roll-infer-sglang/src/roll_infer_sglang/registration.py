"""What SGLang calls in each of its processes (entry point `sglang.srt.plugins`), so that it knows our part by name."""

from __future__ import annotations

import os

SAMPLING_BACKEND = "roll"
"""Name of the sampler in SGLang's registry; used where an engine asks for it."""
INSISTED_ON = "ROLL_SGLANG_SAMPLING_BACKEND"
"""Variable of our servers' processes: another name of the sampler, for a device on which SGLang asks for that one
whatever it is told. Servers of others keep their own."""


def register() -> None:
    """Name the sampler; its module is imported where an engine asks for it. May be called again."""
    from sglang.srt.layers.sampler import register_sampler_backend

    for name in filter(None, (SAMPLING_BACKEND, os.environ.get(INSISTED_ON))):
        register_sampler_backend(name, _sampler)


def _sampler() -> object:
    from roll_infer_sglang.sampler import ContractSampler

    return ContractSampler()
