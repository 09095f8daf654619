"""Idle passes, by which a rank without microbatches participates in collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from roll_core.data.pack import pack
from roll_core.types import TrainSequence

if TYPE_CHECKING:
    from torch import Tensor

    from roll_core.spec.train import MicroBatch, TokenOutputs


def nothing(outputs: TokenOutputs) -> Tensor:
    """A loss of 0 that depends on every output that a real loss may depend on."""
    parts = (outputs.logprobs_T, outputs.entropy_T, outputs.values_T)
    return sum((each.sum() * 0.0 for each in parts if each is not None and each.requires_grad), torch.zeros(()))


def idle_micro() -> MicroBatch:
    """A microbatch of one dummy sequence with two tokens."""
    mask = np.array([False, True])
    return pack([TrainSequence(id="idle", tokens=np.zeros(2, dtype=np.int64), loss_mask=mask)])[0]
