"""Latent attention on a CPU, by the code that decodes.

SGLang computes prompts by a second code, with keys and values of every head. Its attention in torch, which the tests
use, reads keys and values from the cache, which has the latent ones: the numbers are wrong, or shapes differ.
"""

from __future__ import annotations

from standin import change


def absorb_always():
    """In this process, from now on."""
    change("sglang.srt.models.deepseek_common.attention_backend_handler", _register)


def _register(module):
    def latent(attention, batch):
        return module.AttnForwardMethod.MLA

    module.AttentionBackendRegistry.register("torch_native", latent)
