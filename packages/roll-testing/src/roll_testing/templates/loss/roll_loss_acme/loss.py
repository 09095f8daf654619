"""Policy loss `acme`. T tokens of a microbatch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from roll_core.errors import DataError
from roll_core.spec.algorithms import PolicyLossParams
from roll_core.spec.train import MicroBatch
from roll_loss_acme.config import AcmeLossOptions


def acme(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> tuple[Tensor, Mapping[str, Tensor]]:
    """`L = -sg(min(r, cap)) A logprob`. Values outside `micro.loss_mask_T` are arbitrary: replace them first."""
    options = AcmeLossOptions(**params.options)
    if micro.advantages_T is None:
        raise DataError("acme needs advantages, but the batch has none")
    old_T = logprobs_T.detach() if micro.old_logprobs_T is None else micro.old_logprobs_T
    ratio_T = torch.where(micro.loss_mask_T, logprobs_T - old_T, 0.0).detach().clamp(-20, 20).exp()
    advantages_T = torch.where(micro.loss_mask_T, micro.advantages_T, 0.0)
    learnt_T = torch.where(micro.loss_mask_T, logprobs_T, 0.0)
    capped_T = (ratio_T > options.cap).float()
    return -ratio_T.clamp(max=options.cap) * advantages_T * learnt_T, {"ratio": ratio_T, "capped": capped_T}
