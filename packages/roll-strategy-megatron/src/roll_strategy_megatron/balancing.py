"""Auxiliary losses of MoE routers: load balancing and z-loss.

They are computed per sequence, so that their gradient does not depend on how a batch is split into microbatches;
Megatron's own are computed per microbatch. S is the number of trained sequences of a step, L the number of tokens of a
sequence. A router with scores `p` and logits `z` sends each token to K of E experts:

    f_e = E / (K · L) · number of tokens sent to e        P_e = 1 / L · sum over tokens of p_e
    load balance = 1 / S · sum over sequences and experts of f_e · P_e              arXiv:2412.19437, (17) to (20)
    z            = 1 / S · sum over sequences of 1 / L · sum over tokens of logsumexp(z)²     arXiv:2202.08906, (5)

Every MoE layer adds both, times their coefficients, to the objective. The load-balancing loss is 1 if all experts are
used equally, and at most E / K if all tokens are sent to the same experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter

if TYPE_CHECKING:
    from torch import Tensor

METRICS = ("load_balancing_loss", "router_z_loss")
"""Names of the metrics: means over layers, without coefficients."""


@dataclass(kw_only=True)
class Balancing:
    """State shared by a rank's routers."""

    aux_coeff: float
    z_coeff: float
    num_routers: int
    """Number of routers of the whole model."""
    device: torch.device

    def begin(self, num_sequences: int) -> None:
        """Reset for `forward_backward`, in a step with `num_sequences` trained sequences over all replicas."""
        self._weights_2 = torch.tensor([self.aux_coeff, self.z_coeff], device=self.device) / num_sequences
        self._means_2 = torch.zeros(2, device=self.device)
        self._share = 1.0 / (num_sequences * self.num_routers)

    def objective(self, losses_2: Tensor) -> Tensor:
        """A router's contribution to the objective, from this rank's tokens of a microbatch.

        `losses_2` are the load-balancing loss and the z-loss, summed over sequences.
        """
        self._means_2 += losses_2.detach() * self._share
        return torch.dot(losses_2, self._weights_2)

    def metrics(self) -> dict[str, float]:
        """This replica's contribution to `METRICS` since `begin`. Collective over the ranks of a replica."""
        for group in (parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()):
            dist.all_reduce(self._means_2, group=group)
        enabled = (self.aux_coeff > 0, self.z_coeff > 0)
        return {name: mean for name, mean, here in zip(METRICS, self._means_2.tolist(), enabled, strict=True) if here}


class BalancedRouter(TopKRouter):  # type: ignore[misc]
    """Router that adds its auxiliary losses if a padding mask marks the tokens of each sequence."""

    def __init__(self, *, balancing: Balancing, **options: Any) -> None:
        super().__init__(**options)
        self.balancing = balancing

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route tokens, as `TopKRouter.routing`.

        `padding_mask` is `[L, S]` if given: True if a token of this rank belongs to a trained sequence. Recomputed
        layers call this method twice, the first time without gradients.
        """
        if padding_mask is not None and torch.is_grad_enabled():
            losses_2 = self._losses(logits.flatten(0, -2), padding_mask.T.float())
            logits = MoEAuxLossAutoScaler.apply(logits, self.balancing.objective(losses_2))
        routes: tuple[Tensor, Tensor] = super().routing(logits)
        return routes

    def _losses(self, logits_LE: Tensor, members_SL: Tensor) -> Tensor:
        """The load-balancing loss and the z-loss, `[2]`, summed over sequences; this rank's part for sequences split
        over ranks."""
        chosen_LE, scores_LE = compute_routing_scores_for_aux_loss(logits_LE, self.topk, self.score_function)
        counts_SE = torch.cat([members_SL @ chosen_LE.float(), members_SL.sum(dim=1, keepdim=True)], dim=1)
        dist.all_reduce(counts_SE, group=self.tp_cp_group)
        lengths_S1 = counts_SE[:, -1:].clamp(min=1)
        used_SE = counts_SE[:, :-1] / lengths_S1 * (chosen_LE.shape[1] / self.topk)
        balance = (used_SE * (members_SL @ scores_LE.float()) / lengths_S1).sum()
        squares_L1 = logits_LE.float().logsumexp(dim=1, keepdim=True).square()
        return torch.stack([balance, ((members_SL @ squares_L1) / lengths_S1).sum()])
