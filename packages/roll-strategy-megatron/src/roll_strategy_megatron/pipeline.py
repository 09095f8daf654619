"""Pipeline parallelism by Megatron's schedules, with the length of each microbatch known in advance.

| chunks per stage | stage 0 | stage 1 | path of a microbatch |
|---|---|---|---|
| one | layers 0 1 | layers 2 3 | 0 -> 1 |
| two (interleaved) | layers 0, 2 | layers 1, 3 | 0 -> 1 -> 0 -> 1 |
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
"""Shape of the hidden states sent between stages: tokens of a rank, 1, hidden size."""


class Pipeline:
    """Pipeline schedule of a rank's model chunks (`runs`); `group` contains one rank per stage."""

    def __init__(self, config: TransformerConfig, runs: Sequence[Any], group: Any) -> None:
        self.config, self.runs, self.group = config, list(runs), group
        stages, num_runs = group.size(), len(self.runs)
        self.multiple = stages if num_runs > 1 else 1
        """The number of microbatches must be a multiple of this."""
        self._schedule: Any = get_forward_backward_func(pp_size=stages, vp_size=num_runs if num_runs > 1 else None)

    def run(self, step: Callable[..., Any], passages: Sequence[Passage], *, backward: bool) -> list[Any]:
        """Run `step(iterator of passages, model chunk)` for each passage and chunk. Collective over the stages.

        On the last stage, returns what `step` returned beside the loss, per passage; on the others, an empty list.
        """
        options: dict[str, Any] = {}
        if self.group.size() > 1:
            options = {
                "p2p_communicator": KnownShapes(self.group, self.config, self._shapes(passages), len(self.runs)),
                "pg_collection": ProcessGroupCollection.use_mpu_process_groups(
                    ["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"]
                ),
            }
        results: list[Any] = self._schedule(
            forward_step_func=step,
            data_iterator=[iter(passages) for _ in self.runs],
            model=self.runs,
            num_microbatches=len(passages),
            seq_length=1,
            micro_batch_size=1,
            forward_only=not backward,
            **options,
        )
        return results

    def _shapes(self, passages: Sequence[Passage]) -> list[Shape]:
        cut = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        return [[passage.packing.tokens_1L.shape[1] // cut, 1, self.config.hidden_size] for passage in passages]


class KnownShapes(P2PCommunicator):  # type: ignore[misc]
    """Point-to-point communication between stages with known shapes.

    For microbatches of different lengths, Megatron's stages exchange the shape of every tensor, which synchronizes with
    the device. Here all ranks of a replica have all microbatches. A stage receives them in the order of Megatron's
    schedule table in both directions.
    """

    def __init__(self, group: Any, config: TransformerConfig, shapes: Sequence[Shape], num_runs: int) -> None:
        super().__init__(pp_group=group, config=config)
        table = get_schedule_table(len(shapes), num_runs, config.microbatch_group_size_per_vp_stage)
        every = [shapes[micro] for micro, _ in table]
        # The first chunk of the first stage receives nothing in the forward pass, the last chunk of the last stage
        # nothing in the backward pass.
        inner = [shapes[micro] for micro, run in table if run > 0]
        self._forward = iter(inner if group.rank() == 0 else every)
        self._backward = iter(inner if group.rank() == group.size() - 1 else every)

    def _communicate_shapes(
        self, tensor_send_next: object, tensor_send_prev: object, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape, Shape]:
        """Shapes of the tensors received from the previous stage (forward) and from the next stage (backward)."""
        none = [0, 0, 0]
        return next(self._forward) if recv_prev else none, next(self._backward) if recv_next else none
