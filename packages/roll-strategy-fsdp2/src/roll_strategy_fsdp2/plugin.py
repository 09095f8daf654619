"""Plugin entry point of the FSDP2 strategies.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import TrainCapabilities, TrainProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1

CAPABILITIES = TrainCapabilities(
    tasks=("causal_lm", "value", "reward", "flow"),
    dtypes=("fp32", "bf16"),
    gradient_checkpointing=True,
    optimizers="sharded",
    data_parallel=True,
    tensor_parallel=True,
    context_parallel=True,
    expert_parallel=True,
    lora=True,
    adapter_export=True,
    load_in_4bit=True,
    offload=True,
    topk=True,
    gathered=True,
    whole_vocabulary=True,
    ema=True,
    module_programs=True,
    router_replay=True,
    images=True,
    videos=True,
    portable_state=True,
    activations=True,
    any_world_size=True,
    weight_transports=("shared", "cuda_ipc", "shm", "collective", "disk"),
)
FSDP2_TRAIN = TrainProvider(
    name="fsdp2_train",
    target="roll_strategy_fsdp2.strategy:FSDP2Strategy",
    config="roll_strategy_fsdp2.config:FSDP2Config",
    summary="Trains Hugging Face models sharded over ranks by torch's FSDP2",
    needs=("torch>=2.13",),
    capabilities=CAPABILITIES,
    memory="roll_strategy_fsdp2.memory:memory",
)
FSDP2_INFER = replace(
    FSDP2_TRAIN,
    name="fsdp2_infer",
    summary="fsdp2_train without optimizer, for roles that only score",
    forward_only=True,
)


@hookimpl
def roll_train_strategies() -> Iterator[TrainProvider]:
    """Provide `fsdp2_train` and `fsdp2_infer`.

    Each rank is one process on one slot. The ranks of a role shard the model.
    """
    yield from (FSDP2_TRAIN, FSDP2_INFER)
