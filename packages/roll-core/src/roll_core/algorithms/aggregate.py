"""Masked aggregation of per-token values to one scalar, in four modes, as shares of the global objective.

T flat tokens of a microbatch, S its sequences.

Denominators come from `micro.totals`, which count the whole optimizer step. The shares of all microbatches and ranks
therefore add up to the same objective, however the batch is split. They count rollouts, not rows: an objective does not
depend on the rows into which an episode is cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch

from roll_core.errors import DataError, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from roll_core.spec.train import MicroBatch

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""Values of the config key `loss_agg_mode`:

* `token-mean`: mean over all tokens; long rollouts weigh more (DAPO, arXiv:2503.14476 §3.3).
* `seq-mean-token-sum`: mean over rollouts of the sum over tokens.
* `seq-mean-token-mean`: mean over rollouts of the mean over tokens (GRPO, arXiv:2402.03300 eq. 3).
* `seq-mean-token-sum-norm`: mean over rollouts of the sum over tokens, divided by a constant, the maximum response
  length (Dr. GRPO, arXiv:2503.20783 §3).

A rollout is one row of the batch, unless `TrainSequence.rollout` joins several.
"""


def aggregate(values_T: Tensor, micro: MicroBatch, mode: Aggregation) -> Tensor:
    """Scalar share of this microbatch in the aggregate; 0 if no token is masked in.

    Values outside the mask are ignored and may be NaN. Raises `UnsupportedError` for an unknown mode.
    """
    return weighted_sum(values_T, token_weights(micro, mode))


def token_weights(micro: MicroBatch, mode: Aggregation) -> Tensor:
    """Weight of each token in the aggregate, `[T]`; 0 outside the mask. Raises `UnsupportedError` (unknown mode)."""
    totals, mask_T = micro.totals, micro.loss_mask_T
    if mode == "token-mean":
        return mask_T.float() / max(totals.tokens, 1)
    num_rollouts = max(totals.rollouts, 1)
    if mode == "seq-mean-token-sum":
        return mask_T.float() / num_rollouts
    if mode == "seq-mean-token-mean":
        lengths_S = micro.rollout_tokens_S.clamp(min=1)
        return mask_T.float() / (lengths_S * num_rollouts)[micro.segments_T]
    if mode == "seq-mean-token-sum-norm":
        return mask_T.float() / (max(totals.max_length, 1) * num_rollouts)
    raise UnsupportedError(f"unknown loss_agg_mode {mode!r}, expected {', '.join(get_args(Aggregation))}")


def stream_weights(micro: MicroBatch, name: str) -> Tensor:
    """Weight of each token in the mean over a stream, `[T]`; they add up to 1 over the optimizer step, or are all 0.

    Raises `DataError` if no sequence of the optimizer step has the stream.
    """
    if name not in micro.streams:
        raise DataError(
            f"the loss needs the stream {name!r}, but the sequences have {', '.join(micro.streams) or 'none'}: set"
            f" TrainSequence.streams, with weights of 0 if no token takes part"
        )
    return micro.streams[name] / (micro.totals.streams[name] or 1.0)


def weighted_sum(values_T: Tensor, weights_T: Tensor) -> Tensor:
    """Return `sum(weights * values)` over tokens with nonzero weight. NaN elsewhere affects no sum and no gradient."""
    return (torch.where(weights_T != 0, values_T, 0.0) * weights_T).sum()
