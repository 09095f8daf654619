"""Plugin entry point of the FSDP2 strategies.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import TrainCapabilities, TrainProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1

CAPABILITIES = TrainCapabilities(
    tasks=("causal_lm", "value", "reward"),
    dtypes=("fp32", "bf16"),
    gradient_checkpointing=True,
    data_parallel=True,
    tensor_parallel=True,
    context_parallel=True,
    expert_parallel=True,
    lora=True,
    adapter_export=True,
    offload=True,
    topk=True,
    router_replay=True,
    portable_state=True,
    any_world_size=True,
    weight_transports=("shared", "cuda_ipc", "shm", "collective", "disk"),
)
TARGET = "roll_strategy_fsdp2.strategy:FSDP2Strategy"
CONFIG = "roll_strategy_fsdp2.config:FSDP2Config"
NEEDS = ("torch>=2.13",)


@hookimpl
def roll_train_strategies() -> Iterator[TrainProvider]:
    """Provide `fsdp2_train` and `fsdp2_infer`.

    Each rank is one process on one slot. The ranks of a role shard the model.
    """
    yield TrainProvider(
        name="fsdp2_train",
        target=TARGET,
        config=CONFIG,
        summary="Trains Hugging Face models sharded over ranks by torch's FSDP2",
        needs=NEEDS,
        capabilities=CAPABILITIES,
        memory="roll_strategy_fsdp2.memory:memory",
    )
    yield TrainProvider(
        name="fsdp2_infer",
        target=TARGET,
        config=CONFIG,
        summary="fsdp2_train without optimizer, for roles that only score",
        needs=NEEDS,
        capabilities=CAPABILITIES,
        memory="roll_strategy_fsdp2.memory:memory",
        forward_only=True,
    )
