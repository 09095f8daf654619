"""The ranks of one role, initialized for torch.distributed and DeepSpeed."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from roll_core.errors import UnsupportedError
from roll_modeling.process_group import ProcessGroup
from roll_strategy_deepspeed.workarounds import build_nothing_at_start, quiet_collectives

if TYPE_CHECKING:
    from roll_core.spec.model import MeshInfo


class Ranks(ProcessGroup):
    """The ranks in `mesh`: one process group, also registered with DeepSpeed."""

    def __init__(self, mesh: MeshInfo) -> None:
        """Join the group. Collective. Raises `WorkerError` if this process already belongs to another group."""
        self.device = torch.device(mesh.device)
        self._prepare_deepspeed()
        super().__init__(mesh)

    @override
    def close(self) -> None:
        from deepspeed import comm

        if self.is_last and comm.is_initialized():
            # This also destroys torch's process group, and clears DeepSpeed's reference to it.
            comm.destroy_process_group()
        super().close()

    def _prepare_deepspeed(self) -> None:
        """Set the environment variables that DeepSpeed reads. It reads `DS_ACCELERATOR` at import."""
        os.environ["DS_ACCELERATOR"] = self.device.type
        os.environ["LOCAL_RANK"] = str(self.device.index or 0)
        with warnings.catch_warnings():
            # These warnings concern modules that are not used here.
            warnings.simplefilter("ignore")
            import deepspeed
        device_type = deepspeed.get_accelerator().device_name()
        if device_type != self.device.type:
            raise UnsupportedError(
                f"this process imported DeepSpeed for {device_type}, this role needs {self.device.type}:"
                " use another process"
            )
        build_nothing_at_start()
        quiet_collectives()
