"""Router replay: Megatron's routers use the expert choices of the inference engine, by Megatron's `RouterReplay` hook.

    forward pass of microbatch i     each router uses the experts of i, and keeps them if its layer is recomputed
    backward pass of microbatch i    each recomputed layer uses the experts that were kept first

Several microbatches are in flight on a stage; their backward passes run in the order of their forward passes.
Megatron's own replay needs a manual switch between these passes, for all routers of a process together.

Each router counts the replayed experts that it would not have chosen. A token passes through the routers of all stages,
so the counts are summed over the ranks of a replica after all microbatches.

Shapes: T flat tokens, L tokens of this rank, N of them from whose state an output is computed, M MoE layers of the
whole model, K top-k.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from roll_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from megatron.core.models.gpt import GPTModel
    from torch import Tensor

    from roll_strategy_megatron.packing import Passage, RoutedExperts
    from roll_strategy_megatron.parallel import Parallel

    TopK = Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]]


class GivenExperts:
    """Replacement of Megatron's `RouterReplay` in one router."""

    def __init__(self) -> None:
        self.now: Tensor | None = None
        """Experts `[L, K]` of the current forward pass; -1 lets the router choose.

        None lets it choose for all tokens.
        """
        self.missed_L: Tensor | None = None
        """Replayed experts of the current pass that the router would not have chosen, counted per token.

        None without replay.
        """
        self.forward = self.trains = False
        """`forward`: True during a forward pass. `trains`: True if a backward pass follows."""
        self.again: deque[Tensor | None] = deque()
        """Experts of the forward passes whose layers the backward passes will recompute."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        """The scores and the indices of each token's experts, both `[L, K]`. Megatron's routers call this method."""
        given_LK = self._given()
        own_scores_LK, own_LK = compute_topk(scores, topk, num_groups, group_topk)
        if given_LK is None:
            return own_scores_LK, own_LK
        known_LK = given_LK >= 0
        if self.missed_L is not None:  # not during recomputation
            self.missed_L += (known_LK & ~(given_LK[:, :, None] == own_LK[:, None]).any(-1)).sum(-1)
        indices_LK = given_LK.where(known_LK, own_LK)
        return scores.gather(1, indices_LK), indices_LK

    def _given(self) -> Tensor | None:
        if not self.forward:
            return self.again.popleft()
        if self.trains and not torch.is_grad_enabled():  # layers to be recomputed first run without gradients
            self.again.append(self.now)
        return self.now


class RouterReplay:
    """Router replay of one model chunk."""

    def __init__(self, run: GPTModel) -> None:
        config = run.config
        every = config.moe_layer_freq
        mixtures = every if isinstance(every, list) else [1] * config.num_layers
        self.num_layers, self.top_k, self.num_experts = sum(mixtures), config.moe_router_topk, config.num_moe_experts
        self.missed: list[Tensor | None] = []
        """Per forward pass since `forget`, `[L]`: how many replayed experts this chunk's routers would not have chosen.

        With sequence parallelism, only tokens that this rank routes are counted.
        """
        self._share = (run.pg_collection.tp.rank(), run.pg_collection.tp.size()) if config.sequence_parallel else (0, 1)
        self._routers: dict[int, GivenExperts] = {}
        for layer in run.decoder.layers:
            if (router := getattr(layer.mlp, "router", None)) is not None:
                router.router_replay = replayed = GivenExperts()
                self._routers[sum(mixtures[: layer.layer_number - 1])] = replayed
        self._layers = list(self._routers)

    def check(self, routed_experts_TMK: Tensor) -> None:
        """Raise `DataError` if the experts are those of a different model."""
        _, layers, top_k = routed_experts_TMK.shape
        if (layers, top_k) != (self.num_layers, self.top_k):
            raise DataError(
                f"the engine chose {top_k} experts in each of {layers} layers, this model {self.top_k} in each of"
                f" {self.num_layers}: it serves another model, or counts other layers"
            )
        if len(routed_experts_TMK) and int(routed_experts_TMK.max()) >= self.num_experts:
            raise DataError(
                f"the engine chose expert {int(routed_experts_TMK.max())}, this model has {self.num_experts}"
            )

    def forget(self) -> None:
        """Drop the counts, and the experts kept for passes that were aborted."""
        self.missed = []
        for router in self._routers.values():
            router.again.clear()

    @contextmanager
    def forward(self, routed: RoutedExperts | None, *, trains: bool) -> Iterator[None]:
        """Use the experts `routed` in forward passes inside the context. `trains`: a backward pass will follow."""
        mine, missed_L, of_mine = None, None, None
        if routed is not None:  # sequence parallelism: each rank routes a slice
            rank, size = self._share
            mine = routed.of(self._layers, rank, size)
            missed_L = torch.zeros(len(routed.places_L), dtype=torch.int32, device=routed.device)
            of_mine = missed_L.chunk(size)[rank]
        self.missed.append(missed_L)
        for index, router in enumerate(self._routers.values()):
            router.now, router.forward, router.trains = None if mine is None else mine[:, index], True, trains
            router.missed_L = of_mine
        try:
            yield
        finally:
            for router in self._routers.values():
                router.now = router.missed_L = None
                router.forward = False


def disagreements(
    replays: Sequence[RouterReplay], passages: Sequence[Passage], parallel: Parallel, *, sequence_parallel: bool
) -> list[Tensor | None]:
    """`TokenOutputs.routing_disagreement_T` of each microbatch, on every rank; None for those without replayed experts.

    Call it after the microbatches have passed through all model chunks. Collective over the replica.
    """
    shares_T: list[Tensor | None] = [None] * len(passages)
    indices = [index for index, passage in enumerate(passages) if passage.packing.routed_experts is not None]
    if not indices:
        return shares_T
    every = []
    for index in indices:
        packing = passages[index].packing
        missed_L = torch.stack([missed for run in replays if (missed := run.missed[index]) is not None]).sum(0)
        missed_T = missed_L.new_zeros(passages[index].micro.num_tokens)
        every.append(missed_T.index_copy(0, packing.places_N, missed_L[packing.rows_N]))
    together = torch.cat(every)
    for group in (parallel.cp, parallel.pp, *([parallel.tp] if sequence_parallel else [])):
        dist.all_reduce(together, group=group)
    shares = together.float() / (replays[0].num_layers * replays[0].top_k)
    for index, share_T in zip(indices, shares.split([len(tokens_T) for tokens_T in every]), strict=True):
        shares_T[index] = share_T
    return shares_T
