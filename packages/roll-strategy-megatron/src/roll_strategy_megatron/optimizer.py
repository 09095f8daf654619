"""Megatron's distributed optimizer: each data-parallel rank updates a shard of its model-parallel rank's parameters.

gradients of all calls --summed over ranks--> norm --> clip --> AdamW on float32 shards --> all-gather of the weights
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.utils import local_multi_tensor_l2_norm

from roll_core.spec.train import StepStats
from roll_modeling.optimizer import MOMENTS, moments, schedule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from roll_core.spec.train import TrainingSpec
    from roll_strategy_megatron.config import MegatronConfig

KINDS = ("master", *MOMENTS)
"""State kept of each parameter, in float32: the master weight and the Adam moments."""


def norm_of_all(
    _chunk_size: int, _overflow: Tensor, tensor_lists: Sequence[list[Tensor]], _per_tensor: bool
) -> tuple[Tensor, None]:
    """Norm of the gradients, `[1]`, in Megatron's signature, for environments without Transformer Engine and Apex.

    Megatron's own substitute waits for the device once per gradient.
    """
    norms = [norm for tensors in tensor_lists for norm in torch._foreach_norm(tensors)]
    return torch.stack(norms).norm().view(1), None


class Optimizer:
    """Optimizer of a rank's model chunks, each wrapped in Megatron's `DistributedDataParallel`."""

    def __init__(
        self,
        runs: list[Any],
        training: TrainingSpec,
        dtype: torch.dtype,
        config: MegatronConfig,
        partial: Sequence[nn.Parameter] = (),
    ) -> None:
        """The gradients of `partial` are partial sums over the ranks that shard an expert."""
        if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
            clip_grads.l2_norm_impl = norm_of_all
        self.runs, self.training, self.partial = runs, training, partial
        self.schedule = schedule(training)
        self.step_count = 0
        self.reduction = OverlappedReduction(runs) if runs[0].ddp_config.overlap_grad_reduce else None
        self.mcore: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=training.learning_rate,
                min_lr=0.0,
                weight_decay=training.weight_decay,
                adam_beta1=training.adam_beta1,
                adam_beta2=training.adam_beta2,
                adam_eps=training.adam_epsilon,
                clip_grad=training.max_grad_norm,
                use_distributed_optimizer=True,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                optimizer_cpu_offload=config.optimizer_cpu_offload,
                optimizer_offload_fraction=config.optimizer_offload_fraction,
                overlap_cpu_optimizer_d2h_h2d=config.overlap_cpu_optimizer_d2h_h2d,
            ),
            runs,
            use_gloo_process_groups=False,
        )
        self._mains = {
            parameter: (chained, main)
            for chained in self.mcore.chained_optimizers
            for parameter, main in _mains(chained)
        }
        self._stepped = {
            main: pair for chained in self.mcore.chained_optimizers for main, pair in _stepped(chained.optimizer)
        }

    def begin(self) -> None:
        """Call before passes that accumulate gradients."""
        if self.reduction is not None:
            self.reduction.begin()

    def settle(self) -> None:
        """Block until no reduction writes into the gradients."""
        if self.reduction is not None:
            self.reduction.wait()

    def step(self) -> StepStats:
        """Reduce and clip gradients, run the optimizer step and clear the gradients. Collective.

        If the gradient norm is not finite, the step is skipped.
        """
        finalize_model_grads(self.runs)
        for parameter in self.partial:
            gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]  # Megatron's buffer
            dist.all_reduce(gradient, group=parallel_state.get_expert_tensor_parallel_group())
        self.mcore.prepare_grads()
        norm = float(self.mcore.get_grad_norm())
        learning_rate = self.training.learning_rate * self.schedule(self.step_count)
        skipped = not math.isfinite(norm)
        if not skipped:
            self._clip(norm)
            for group in self.mcore.param_groups:
                group["lr"] = learning_rate
                group["weight_decay"] = self.training.weight_decay * group["wd_mult"]
            self.mcore.step_with_ready_grads()
            self.step_count += 1
        self.clear()
        return StepStats(grad_norm=norm, learning_rate=learning_rate, skipped=skipped)

    def clear(self) -> None:
        """Drop the gradients."""
        if self.reduction is not None:
            self.reduction.forget()
        for run in self.runs:
            run.zero_grad_buffer()
        self.mcore.zero_grad()

    def _clip(self, norm: float) -> None:
        """Clip the gradients of dense layers and of experts by their common norm. Their ranks differ."""
        if not self.training.max_grad_norm:
            return
        for chained in self.mcore.chained_optimizers:
            clip_grad_by_total_norm_fp32(chained.get_parameters(), self.training.max_grad_norm, norm)

    # -- what is kept --------------------------------------------------------------------------------------------------

    def whole(self, parameter: nn.Parameter, kind: str) -> Tensor:
        """One of `KINDS` in the parameter's shape, gathered from the data-parallel ranks. Collective over these."""
        full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        shard = self._own(parameter)
        if shard is not None:
            start, end, states = shard
            full[start:end] = states[kind]
        dist.all_reduce(full, group=_replicas(parameter))
        return full.view(parameter.shape)

    @torch.no_grad()
    def put(self, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
        """Store one of `KINDS`: the inverse of `whole`. Setting the master weight also sets the parameter."""
        shard = self._own(parameter)
        if shard is not None:
            start, end, states = shard
            states[kind].copy_(value.reshape(-1)[start:end])
            if kind == "master":
                states["stepped"].copy_(states["master"])
        if kind == "master":
            parameter.copy_(value)

    def restored(self, step_count: int) -> None:
        """Continue at `step_count`. Call after all state was stored by `put`."""
        self.step_count = step_count
        for optimizer in {optimizer for optimizer, _ in self._stepped.values()}:
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"].fill_(float(step_count))
            # torch's AdamW counts steps per parameter. Those of Transformer Engine and Apex, which Megatron prefers if
            # installed, count steps per group.
            if not isinstance(optimizer, torch.optim.AdamW):
                for group in optimizer.param_groups:
                    group["step"] = step_count
        self.clear()

    def gradients(self) -> list[Tensor]:
        """This rank's gradient buffers."""
        return [buffer.grad_data for run in self.runs for buffer in (*run.buffers, *run.expert_parallel_buffers)]

    def states(self) -> list[Tensor]:
        """Optimizer state on the device: this rank's moments, and master weights that do not share memory with the
        parameters.

        Float32 parameters are their own master weights. State that Megatron keeps on the host is excluded.
        """
        weights = {parameter.untyped_storage()._cdata for parameter in self._mains}
        tensors: list[Tensor] = [main for main in self._stepped if main.untyped_storage()._cdata not in weights]
        for main, (optimizer, stepped) in self._stepped.items():
            if stepped is main:
                # With CPU offload, Megatron stores the master weight once more among the moments.
                tensors += [value for value in optimizer.state.get(main, {}).values() if value is not main]
        return [value for value in tensors if isinstance(value, torch.Tensor)]

    def _own(self, parameter: nn.Parameter) -> tuple[int, int, dict[str, Tensor]] | None:
        """Start and end of this rank's shard in a flattened parameter, and its state; None if this rank has no
        shard."""
        if parameter not in self._mains:
            return None
        owner, main = self._mains[parameter]
        span = owner._get_model_param_range_map(parameter)["param"]
        optimizer, stepped = self._stepped[main]
        moment_shards = dict(zip(MOMENTS, moments(optimizer, stepped), strict=True))
        return span.start, span.end, {"master": main, "stepped": stepped, **moment_shards}


def _mains(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The parameters with a shard on this rank, and the master weight of each shard.

    Megatron's `model_param_group_index_map` is wrong for a group with parameters in bf16 and in float32 (LoRA beside
    modules trained in full): its optimizer has the float32 ones first.
    """
    for parameters, masters in (
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
    ):
        for group, mains in zip(parameters, masters, strict=True):
            yield from zip(group, mains, strict=True)


def _stepped(optimizer: Any) -> Iterator[tuple[Tensor, tuple[Any, Tensor]]]:
    """For each tensor in Megatron's optimizer: the torch optimizer that updates it, and the tensor that this one
    updates.

    The latter is the tensor itself or, with CPU offload, its copy on the host.
    """
    if not isinstance(optimizer, HybridDeviceOptimizer):
        groups = optimizer.param_groups if optimizer is not None else []
        yield from ((parameter, (optimizer, parameter)) for group in groups for parameter in group["params"])
        return
    for inner in optimizer.sub_optimizers:
        for group in inner.param_groups:
            yield from (
                (optimizer.inner_param_to_orig_param[parameter], (inner, parameter)) for parameter in group["params"]
            )


def _replicas(parameter: nn.Parameter) -> Any:
    """The ranks over which a parameter is replicated and its optimizer state is sharded.

    Experts have a group of their own.
    """
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


class OverlappedReduction:
    """Gradient reduction over replicas during the backward pass of the last microbatch (`overlap_grad_reduce`).

    Megatron starts to reduce a bucket once its gradients are complete, and waits for it in the optimizer step. Its own
    training loop accumulates gradients once per step; here several calls of `forward_backward` may precede a step.
    After a reduce-scatter, this rank's shard of a bucket contains the sum, and the other shards contain this rank's
    own, already reduced gradients. These are zeroed before the next call, so that they are not reduced twice:

        call 1    g1 of this rank        --sum over ranks-->    own shard: G1    other shards: zeroed
        call 2    own shard: G1 + g2, other shards: g2          --sum over ranks-->    own shard: G1 + G2
    """

    def __init__(self, runs: Sequence[Any]) -> None:
        self._groups: list[Any] = [
            bucket_group for run in runs for bucket_group in (*run.bucket_groups, *run.expert_parallel_bucket_groups)
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
