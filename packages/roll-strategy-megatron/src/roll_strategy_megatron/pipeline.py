"""The way of microbatches through the stages, back and forth: Megatron's schedules, which here know how long each
microbatch is.

    one run of layers per stage      stage 0: [0 1]         stage 1: [2 3]          0 -> 1
    two (interleaved)                stage 0: [0] [2]       stage 1: [1] [3]        0 -> 1 -> 0 -> 1
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatron.core.transformer.transformer_config import TransformerConfig

    from roll_strategy_megatron.packing import Passage

Shape = list[int]
"""Of what a stage passes on: tokens of a rank, 1, hidden size."""


class Pipeline:
    """Of a rank's runs of layers; `group` are the stages."""

    def __init__(self, config: TransformerConfig, runs: Sequence[Any], group: Any) -> None:
        self.config, self.runs, self.group = config, list(runs), group
        stages, num_runs = group.size(), len(self.runs)
        self.multiple = stages if num_runs > 1 else 1
        """What the number of microbatches has to be a multiple of."""
        self._schedule: Any = get_forward_backward_func(pp_size=stages, vp_size=num_runs if num_runs > 1 else None)

    def run(self, step: Callable[..., Any], passages: Sequence[Passage], *, backward: bool) -> list[Any]:
        """`step(iterator of passages, run of layers)` for each passage and run; what it returned beside the loss, of
        each passage, on the last stage; empty on others. Collective over the stages."""
        options: dict[str, Any] = {}
        if self.group.size() > 1:
            options = {
                "p2p_communicator": KnownShapes(self.group, self.config, self._shapes(passages), len(self.runs)),
                "pg_collection": ProcessGroupCollection.use_mpu_process_groups(
                    ["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"]
                ),
            }
        found: list[Any] = self._schedule(
            forward_step_func=step,
            data_iterator=[iter(passages) for _ in self.runs],
            model=self.runs,
            num_microbatches=len(passages),
            seq_length=1,
            micro_batch_size=1,
            forward_only=not backward,
            **options,
        )
        return found

    def _shapes(self, passages: Sequence[Passage]) -> list[Shape]:
        cut = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        return [[each.packing.tokens_1L.shape[1] // cut, 1, self.config.hidden_size] for each in passages]


class KnownShapes(P2PCommunicator):  # type: ignore[misc]
    """Sends and receives between stages. Where microbatches differ in length, Megatron has each stage ask the other for
    every tensor's shape, and waits for the device to know it. Here all ranks of a replica have all microbatches, and a
    stage receives them in the order of Megatron's table, whichever way they go."""

    def __init__(self, group: Any, config: TransformerConfig, shapes: Sequence[Shape], num_runs: int) -> None:
        super().__init__(pp_group=group, config=config)
        table = get_schedule_table(len(shapes), num_runs, config.microbatch_group_size_per_vp_stage)
        every = [shapes[micro] for micro, _ in table]
        # Nothing comes in to where the way begins: the first run of the first stage, the last one's of the last.
        inner = [shapes[micro] for micro, run in table if run > 0]
        self._forward = iter(inner if group.rank() == 0 else every)
        self._backward = iter(inner if group.rank() == group.size() - 1 else every)

    def _communicate_shapes(
        self, tensor_send_next: object, tensor_send_prev: object, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape, Shape]:
        """Of what comes from the stage before, and of what comes back from the one after."""
        none = [0, 0, 0]
        return next(self._forward) if recv_prev else none, next(self._backward) if recv_next else none
