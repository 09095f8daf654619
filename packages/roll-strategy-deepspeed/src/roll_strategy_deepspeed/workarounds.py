"""Workarounds for DeepSpeed 0.19. A test per workaround fails once it is no longer needed."""

from __future__ import annotations

import warnings
from typing import Any


def quiet_collectives() -> None:
    """Suppress the deprecation warning of torch 2.13 for the names of collectives that DeepSpeed uses."""
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


def build_nothing_at_start() -> None:
    """Prevent DeepSpeed from compiling operators. Call before DeepSpeed initializes the process group.

    On CPU, DeepSpeed compiles an inference operator when it first initializes a process group. That takes half a
    minute, needs a compiler, and leaves a lock if the process is killed meanwhile. Detecting compatible operators also
    runs the compiler several times. ROLL calls none of DeepSpeed's operators, so the list of compatible ones is set to
    empty.
    """
    import deepspeed

    # DeepSpeed computes the list when this name is first read.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})


def make_moments_known(engine: Any) -> None:
    """Stages 1 and 2: register the moments by parameter, which DeepSpeed otherwise does only after the first step.

    Without it, a state that is read or written before the first step has no moments.
    """
    engine.optimizer._lazy_init_hp_params_optimizer_state()
