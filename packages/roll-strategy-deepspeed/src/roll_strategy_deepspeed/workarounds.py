"""Around what DeepSpeed does at 0.19; each says what it is for, and a test says when it is no longer needed."""

from __future__ import annotations

import warnings
from typing import Any


def quiet_collectives() -> None:
    """DeepSpeed calls collectives by names that torch 2.13 deprecates, and torch says so at every call."""
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


def build_nothing_at_start() -> None:
    """On the host DeepSpeed compiles an operator for inference when it first meets a process group: half a minute, a
    compiler, and a lock that outlives a process that was killed meanwhile. And to know what it could compile, it runs
    the compiler several times. Nothing here calls an operator of its own, so none is declared as one that this machine
    can have. Call before DeepSpeed meets the process group."""
    import deepspeed

    # DeepSpeed looks for them when this name is first read.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})


def make_moments_known(engine: Any) -> None:
    """Stages 1 and 2: moments are found by a parameter's name only once DeepSpeed has listed them, which it does after
    the first step of all. A state that is read or written before would have none."""
    engine.optimizer._lazy_init_hp_params_optimizer_state()
