"""Gradient reduction over replicas during the backward pass of the last microbatch (`overlap_grad_reduce`).

Megatron starts to reduce a bucket once its gradients are complete, and waits for it in the optimizer step. Its own
training loop accumulates gradients once per step; here several calls of `forward_backward` may precede a step. After a
reduce-scatter, this rank's shard of a bucket contains the sum, and the other shards contain this rank's own, already
reduced gradients. These are zeroed before the next call, so that they are not reduced twice:

    call 1    g1 of this rank        --sum over ranks-->    own shard: G1    other shards: zeroed
    call 2    own shard: G1 + g2, other shards: g2          --sum over ranks-->    own shard: G1 + G2
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.distributed.param_and_grad_buffer import shard_buffer

if TYPE_CHECKING:
    from collections.abc import Sequence


class OverlappedReduction:
    """Overlapped reduction for a rank's model chunks, each wrapped in Megatron's `DistributedDataParallel`."""

    def __init__(self, runs: Sequence[Any]) -> None:
        self._groups: list[Any] = [
            each for run in runs for each in (*run.bucket_groups, *run.expert_parallel_bucket_groups)
        ]
        self._under_way = False

    def begin(self) -> None:
        """Call before `forward_backward`. Blocks on the reductions of the previous call."""
        for group in self._groups if self._under_way else ():
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None
                _keep_own_share(group)
            group.reset()
        self._under_way = True

    def wait(self) -> None:
        """Block until no reduction writes into the gradient buffers."""
        for group in self._groups:
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()

    def forget(self) -> None:
        """Reset the state of the reductions. The caller clears the gradient buffers."""
        self.wait()
        for group in self._groups:
            group.grad_reduce_handle = None
        self._under_way = False


def _keep_own_share(group: Any) -> None:
    for bucket in group.buckets:
        shares = shard_buffer(bucket.grad_data, group.intra_distributed_optimizer_instance_size)
        for rank, share in enumerate(shares):
            if rank != group.intra_distributed_optimizer_instance_rank:
                share.zero_()
