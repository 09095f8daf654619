"""Around what DeepSpeed does at 0.19; each says what it is for, and a test says when it is no longer needed."""

from __future__ import annotations

import warnings


def quiet_collectives() -> None:
    """DeepSpeed calls collectives by names that torch 2.13 deprecates, and torch says so at every call."""
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


def build_nothing_at_start() -> None:
    """On the host DeepSpeed compiles an operator for inference when it first meets a process group: half a minute, a
    compiler, and a lock that outlives a process that was killed meanwhile. Nothing here calls it, so it is declared as
    one that this machine cannot have. Call before DeepSpeed meets the process group."""
    import deepspeed

    builder = deepspeed.get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        deepspeed.ops.__compatible_ops__[builder.NAME] = False
