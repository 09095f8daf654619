"""Gradients are added up over replicas while the last microbatch's backward pass still runs (`overlap_grad_reduce`).

Megatron begins with a bucket as soon as its gradients are there, and ends with it at the step. Its own loop calls for
gradients once per step; here there may be several calls, and any but the first finds a sum in this rank's share of each
bucket, and what was its own part of the sums in the others' shares:

    call 1    g1 of this rank        --sum over ranks-->    own share: G1    others' shares: dropped
    call 2    own share: G1 + g2, others' shares: g2        --sum over ranks-->    own share: G1 + G2
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.distributed.param_and_grad_buffer import shard_buffer

if TYPE_CHECKING:
    from collections.abc import Sequence


class OverlappedReduction:
    """Of a rank's runs of layers, each wrapped in Megatron's data parallelism."""

    def __init__(self, runs: Sequence[Any]) -> None:
        self._groups: list[Any] = [
            each for run in runs for each in (*run.bucket_groups, *run.expert_parallel_bucket_groups)
        ]
        self._under_way = False

    def begin(self) -> None:
        """Before a call whose last backward pass begins with it. Waits for the call before."""
        for group in self._groups if self._under_way else ():
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None
                _keep_own_share(group)
            group.reset()
        self._under_way = True

    def wait(self) -> None:
        """Until nothing writes into the buffers."""
        for group in self._groups:
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()

    def forget(self) -> None:
        """What the gradients were; the buffers are the caller's to clear."""
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
