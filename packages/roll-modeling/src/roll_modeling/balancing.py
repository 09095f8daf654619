"""Auxiliary losses of transformers' routers: load balancing and z-loss, for each trained sequence by itself.

    microbatch  ─► TaskModel.outputs: begin ─► router ─► hook: losses, attached to the weights of the chosen experts
                   TaskModel.loss: metrics              backward pass of these weights ─► gradient of the losses

The gradient therefore does not depend on how a batch is split into microbatches. Formulas and sources:
docs/algorithms.md.

N tokens of one call, in the order in which the router receives them    E experts    K top-k    S sequences
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from roll_modeling.routing import Routers

if TYPE_CHECKING:
    from torch import Tensor, nn

    from roll_modeling.strategy_config import HuggingFaceConfig

METRICS = ("load_balancing_loss", "router_z_loss")
"""Names of the metrics: means over layers and sequences, without coefficients."""


class RouterBalancing:
    """Adds the losses of a model's routers to the gradient of the microbatch that `begin` announced.

    A microbatch lasts from one `begin` to the next, including its backward pass.
    """

    def __init__(
        self, model: nn.Module, config: HuggingFaceConfig, *, group: dist.ProcessGroup | None, scale: float
    ) -> None:
        """The ranks of `group` share the tokens of a sequence. The strategy multiplies losses by `scale`.

        Attach it after `RoutingReplay`, whose weights it needs. Raises `UnsupportedError` for unknown routers.
        """
        self._routers = Routers(model, config.router_loss)
        self._coefficients = (config.moe_aux_loss_coeff, config.moe_z_loss_coeff)
        self._group, self._scale = group, scale
        self._members_N: Tensor | None = None
        self._routers.hook(self._attach)

    def begin(self, members_N: Tensor | None, num_sequences: int = 0, num_trained: int = 1) -> None:
        """Start a microbatch of `num_sequences`, in a step with `num_trained` trained sequences.

        `members_N` has the sequence of each token in the order of the routers, -1 for padding and for sequences that
        are not trained. None adds no losses.
        """
        self._members_N, self._num_sequences, self._num_trained = members_N, num_sequences, max(num_trained, 1)
        self._counted: set[int] = set()
        self._means_2: Tensor | None = None

    def metrics(self) -> dict[str, Tensor]:
        """Shares of this microbatch of the step's metrics. Collective over the group."""
        means_2 = self._means_2
        if means_2 is None:
            return {}
        if self._group is not None:
            dist.all_reduce(means_2, group=self._group)
        shares_2 = means_2 / len(self._routers.modules)
        return {name: share for name, share, used in zip(METRICS, shares_2, self._coefficients, strict=True) if used}

    def _attach(
        self, layer: int, router: Any, logits_NE: Tensor, weights_NK: Tensor, indices_NK: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        if self._members_N is None or not torch.is_grad_enabled():
            return None
        losses_2 = self._losses(logits_NE, self._members_N) / self._num_trained
        if layer not in self._counted:  # recomputed layers call their router twice
            self._counted.add(layer)
            detached_2 = losses_2.detach()
            self._means_2 = detached_2 if self._means_2 is None else self._means_2 + detached_2
        objective = losses_2[0] * self._coefficients[0] + losses_2[1] * self._coefficients[1]
        attached: Tensor = _Attached.apply(weights_NK, objective * self._scale)  # type: ignore[no-untyped-call]
        return attached, indices_NK

    def _losses(self, logits_NE: Tensor, members_N: Tensor) -> Tensor:
        """Load-balancing loss and z loss, `[2]`, summed over sequences; this rank's part of shared sequences."""
        scores_NE = self._routers.formulas.scores(logits_NE)
        num_tokens, num_experts = scores_NE.shape
        spare = num_tokens - len(members_N)  # tokens that `Backbone` appends
        members_N = torch.cat([members_N, members_N.new_full((spare,), -1)]) if spare else members_N
        rows_N = members_N.where(members_N >= 0, self._num_sequences)  # the last row is dropped
        chosen_NE = torch.zeros_like(scores_NE).scatter_(1, scores_NE.topk(self._routers.top_k).indices, 1.0)
        counts_SE = torch.cat([chosen_NE, torch.ones_like(chosen_NE[:, :1])], dim=1)
        counts_SE = self._by_sequence(counts_SE, rows_N)
        if self._group is not None:
            dist.all_reduce(counts_SE, group=self._group)
        lengths_S1 = counts_SE[:, -1:].clamp(min=1)
        used_SE = counts_SE[:, :-1] * (num_experts / self._routers.top_k) / lengths_S1
        balance = (used_SE * self._by_sequence(scores_NE, rows_N) / lengths_S1).sum()
        squares_N1 = logits_NE.float().logsumexp(dim=1, keepdim=True).square()
        return torch.stack([balance, (self._by_sequence(squares_N1, rows_N) / lengths_S1).sum()])

    def _by_sequence(self, values_NX: Tensor, rows_N: Tensor) -> Tensor:
        sums_SX = values_NX.new_zeros(self._num_sequences + 1, values_NX.shape[1])
        return sums_SX.index_add(0, rows_N, values_NX)[:-1]


class _Attached(torch.autograd.Function):
    """The first argument, whose backward pass gives the second one a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, weights_NK: Tensor, objective: Tensor) -> Tensor:
        return weights_NK.view_as(weights_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=torch.float32, device=grads[0].device)
