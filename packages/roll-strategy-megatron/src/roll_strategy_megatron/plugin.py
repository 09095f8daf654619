"""Plugin entry point of the Megatron strategies. Imports neither torch nor megatron-core."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import CheckProvider, TrainCapabilities, TrainProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1

CAPABILITIES = TrainCapabilities(
    tasks=("causal_lm", "value", "reward"),
    dtypes=("fp32", "bf16"),
    gradient_checkpointing=True,
    data_parallel=True,
    tensor_parallel=True,
    pipeline_parallel=True,
    context_parallel=True,
    expert_parallel=True,
    topk=True,
    gathered=True,
    whole_vocabulary=True,
    offload=True,
    portable_state=True,
    lora=True,
    adapter_export=True,
    any_world_size=True,
    router_replay=True,
    weight_transports=("cuda_ipc", "shm", "collective", "disk"),
)
MEGATRON_TRAIN = TrainProvider(
    name="megatron_train",
    target="roll_strategy_megatron.strategy:MegatronStrategy",
    config="roll_strategy_megatron.config:MegatronConfig",
    summary="Trains Hugging Face models with Megatron-Core: tensor, pipeline, context and expert parallel",
    needs=("megatron-core>=0.16.1,<0.20",),
    capabilities=CAPABILITIES,
    memory="roll_strategy_megatron.memory:memory",
    platforms=("cuda",),
)
MEGATRON_INFER = replace(
    MEGATRON_TRAIN,
    name="megatron_infer",
    config="roll_strategy_megatron.config:ScoringConfig",
    summary="megatron_train without optimizer, for roles that only score",
    forward_only=True,
)


@hookimpl
def roll_train_strategies() -> Iterator[TrainProvider]:
    """Provide `megatron_train` and its forward-only variant `megatron_infer`."""
    yield from (MEGATRON_TRAIN, MEGATRON_INFER)


@hookimpl
def roll_checks() -> Iterator[CheckProvider]:
    """Provide the `roll-core doctor` check for Transformer Engine and flash-attn."""
    yield CheckProvider(
        name="megatron_layers",
        target="roll_strategy_megatron.checks:layers",
        summary="Whether Transformer Engine and flash-attn are there, for roles on Megatron",
        platform="cuda",
    )
