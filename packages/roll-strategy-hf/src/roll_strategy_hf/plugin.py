"""Plugin hooks of the package: registers `hf_train` and the forward-only `hf_infer`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import TrainCapabilities, TrainProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1

HF_TRAIN = TrainProvider(
    name="hf_train",
    target="roll_strategy_hf.train:HFTrainStrategy",
    config="roll_strategy_hf.config:HFTrainConfig",
    summary="Trains Hugging Face models, one process per replica",
    memory="roll_strategy_hf.memory:training",
    capabilities=TrainCapabilities(
        tasks=("causal_lm", "value", "reward", "flow"),
        optimizers="any",
        gradient_checkpointing=True,
        data_parallel=True,
        offload=True,
        lora=True,
        adapter_export=True,
        load_in_4bit=True,
        topk=True,
        gathered=True,
        whole_vocabulary=True,
        ema=True,
        module_programs=True,
        portable_state=True,
        activations=True,
        any_world_size=True,
        router_replay=True,
        images=True,
        videos=True,
        weight_transports=("shared", "cuda_ipc", "shm", "collective", "disk"),
    ),
)
HF_INFER = replace(
    HF_TRAIN, name="hf_infer", summary="hf_train without optimizer, for roles that only score", forward_only=True
)


@hookimpl
def roll_train_strategies() -> Iterator[TrainProvider]:
    """Train strategies `hf_train` and `hf_infer`: Hugging Face models, one process per data-parallel replica."""
    yield from (HF_TRAIN, HF_INFER)
