"""Memory that is not pinned, on a host without an accelerator to copy it to.

SGLang's adapters ask for pinned memory there too, where torch has none. It is about the speed of copies to a device,
and no number depends on it.
"""

from __future__ import annotations

import functools

import torch

FACTORIES = ("empty", "tensor", "zeros")


def leave_unpinned():
    """In this process, from now on."""
    if torch.accelerator.is_available():
        return
    torch.Tensor.pin_memory = lambda self, device=None: self
    for name in FACTORIES:
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(factory):
    @functools.wraps(factory)
    def made(*arguments, pin_memory=False, **named):
        return factory(*arguments, **named)

    return made
