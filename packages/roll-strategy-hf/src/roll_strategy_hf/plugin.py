"""Plugin hooks of the package: registers `hf_train` and the forward-only `hf_infer`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import (
    TrainCapabilities,
    TrainProvider,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1

HF_TRAIN = TrainCapabilities(
    tasks=("causal_lm", "value", "reward"),
    gradient_checkpointing=True,
    data_parallel=True,
    offload=True,
    lora=True,
    adapter_export=True,
    topk=True,
    portable_state=True,
    any_world_size=True,
    router_replay=True,
    weight_transports=("shared", "cuda_ipc", "shm", "collective", "disk"),
)


@hookimpl
def roll_train_strategies() -> Iterator[TrainProvider]:
    """Train strategies `hf_train` and `hf_infer`: Hugging Face models, one process per data-parallel replica."""
    yield TrainProvider(
        name="hf_train",
        target="roll_strategy_hf.train:HFTrainStrategy",
        config="roll_strategy_hf.config:HFTrainConfig",
        summary="Trains Hugging Face models, one process per replica",
        capabilities=HF_TRAIN,
        memory="roll_strategy_hf.memory:training",
    )
    yield TrainProvider(
        name="hf_infer",
        target="roll_strategy_hf.train:HFTrainStrategy",
        config="roll_strategy_hf.config:HFTrainConfig",
        summary="hf_train without optimizer, for roles that only score",
        capabilities=HF_TRAIN,
        memory="roll_strategy_hf.memory:training",
        forward_only=True,
    )
