"""The ranks of a role in Megatron's process groups.

    order of the ranks: tensor, context, expert, data, pipeline; tensor-parallel ranks are adjacent

A replica of the model consists of all ranks with the same data-parallel index. Its first rank is the leader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from typing_extensions import override

from roll_core.errors import PlacementError
from roll_core.types import DataRank
from roll_modeling.process_group import ProcessGroup

if TYPE_CHECKING:
    from roll_core.spec.model import MeshInfo
    from roll_strategy_megatron.config import MegatronConfig


class Parallel(ProcessGroup):
    """Process groups of this rank, from construction to `close`.

    Megatron's groups are global to the process, so roles that share a process share them.
    """

    def __init__(self, mesh: MeshInfo, config: MegatronConfig) -> None:
        """Join the groups.

        Collective. Raises `PlacementError` if the parallel sizes do not divide the number of ranks.
        """
        check_sizes(mesh, config)
        super().__init__(mesh)
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=config.tensor_model_parallel_size,
                pipeline_model_parallel_size=config.pipeline_model_parallel_size,
                virtual_pipeline_model_parallel_size=config.runs_per_stage if config.runs_per_stage > 1 else None,
                context_parallel_size=config.context_parallel_size,
                expert_model_parallel_size=config.expert_model_parallel_size,
                expert_tensor_parallel_size=config.expert_tensor_parallel_size,
                distributed_timeout_minutes=max(1, round(mesh.timeout_s / 60)),
                create_gloo_process_groups=False,
            )
            # Layers look up these random states by name, although they are not used: dropout is off.
            model_parallel_cuda_manual_seed(0)
        self.tp: Any = parallel_state.get_tensor_model_parallel_group()
        self.pp: Any = parallel_state.get_pipeline_model_parallel_group()
        self.cp: Any = parallel_state.get_context_parallel_group()
        self.dp: Any = parallel_state.get_data_parallel_group()
        self.ep: Any = parallel_state.get_expert_model_parallel_group()
        self.etp: Any = parallel_state.get_expert_tensor_parallel_group()

    @property
    def data_rank(self) -> DataRank:
        """Data-parallel rank; all ranks of a replica work on the same microbatches."""
        leads = self.tp.rank() == 0 and self.cp.rank() == 0 and self.pp.rank() == 0
        return DataRank(index=self.dp.rank(), size=self.dp.size(), leader=leads)

    @property
    def place_in_stage(self) -> tuple[int, int]:
        """Index of this rank among the adjacent ranks of its stage, and their number."""
        size = dist.get_world_size() // int(self.pp.size())
        return dist.get_rank() % size, size

    @property
    def replicas_share_experts(self) -> bool:
        """True if a group of ranks that share experts (adjacent ranks) contains ranks of several replicas."""
        replica, experts = self.tp.size() * self.cp.size(), self.ep.size() * self.etp.size()
        return bool(replica % experts)

    def from_stage(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        """Broadcast `tensor` from one stage to the others, in place. Collective over the stages."""
        if self.pp.size() > 1:
            dist.broadcast(tensor, dist.get_global_rank(self.pp, stage), group=self.pp)
        return tensor

    def object_from_last_stage(self, value: Any) -> Any:
        """Broadcast a picklable object from the last stage. Collective over the stages."""
        if self.pp.size() == 1:
            return value
        box = [value]
        last = dist.get_global_rank(self.pp, self.pp.size() - 1)
        dist.broadcast_object_list(box, last, group=self.pp, device=self.device)
        return box[0]

    @override
    def close(self) -> None:
        if self.is_last and parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        super().close()


def joined(share: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
    """All-gather the shards of a group and concatenate them along `dim`. Collective over the group.

    Returns `share` itself for a group of one rank. Peak memory is the full tensor once if `dim` is 0, otherwise twice.
    """
    if group.size() == 1:
        return share
    shares = share.new_empty(group.size(), *share.shape)
    dist.all_gather_into_tensor(shares, share[None].contiguous(), group=group)
    return shares.movedim(0, dim).flatten(dim, dim + 1)


def check_sizes(mesh: MeshInfo, config: MegatronConfig) -> None:
    """Raise `PlacementError` with the computed sizes if the parallel sizes do not divide the number of ranks."""
    replica = config.ranks_per_replica()
    if mesh.world_size % replica:
        raise PlacementError(
            f"role {mesh.role}: {mesh.world_size} ranks are not a multiple of {config.replica_arithmetic()} ="
            f" {replica}, the ranks of one replica of the model"
        )
    expert_tp = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    stage = mesh.world_size // config.pipeline_model_parallel_size
    if stage % (expert_tp * config.expert_model_parallel_size):
        raise PlacementError(
            f"role {mesh.role}: the {stage} ranks of a stage are not a multiple of expert_tensor_parallel_size"
            f" {expert_tp} × expert_model_parallel_size {config.expert_model_parallel_size}"
        )
