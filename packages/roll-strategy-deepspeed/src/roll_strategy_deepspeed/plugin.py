"""Plugin entry point of the DeepSpeed strategies. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import FragmentProvider, TrainCapabilities, TrainProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1

CAPABILITIES = TrainCapabilities(
    tasks=("causal_lm", "value", "reward", "flow"),
    dtypes=("fp32", "bf16", "fp16"),
    gradient_checkpointing=True,
    data_parallel=True,
    lora=True,
    adapter_export=True,
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
    any_world_size=True,
    weight_transports=("cuda_ipc", "shm", "collective", "disk"),
)
DEEPSPEED_TRAIN = TrainProvider(
    name="deepspeed_train",
    target="roll_strategy_deepspeed.strategy:DeepSpeedStrategy",
    config="roll_strategy_deepspeed.config:DeepSpeedConfig",
    needs=("deepspeed>=0.19,<0.20",),
    summary="Trains Hugging Face models with DeepSpeed: ZeRO 0 to 3, CPU offload",
    capabilities=CAPABILITIES,
    memory="roll_strategy_deepspeed.memory:memory",
    platforms=("cpu", "cuda", "rocm", "npu"),
)
DEEPSPEED_INFER = replace(
    DEEPSPEED_TRAIN,
    name="deepspeed_infer",
    summary="deepspeed_train without optimizer, for roles that only score",
    forward_only=True,
)
FRAGMENTS = {
    "deepspeed_zero": "ZeRO 1: optimizer state is spread over the ranks",
    "deepspeed_zero2": "ZeRO 2: gradients as well",
    "deepspeed_zero3": "ZeRO 3: parameters as well",
    "deepspeed_zero3_cpuoffload": "ZeRO 3, parameters and optimizer state on the host",
}


@hookimpl
def roll_train_strategies() -> Iterator[TrainProvider]:
    """Provide `deepspeed_train` and its forward-only variant `deepspeed_infer`."""
    yield from (DEEPSPEED_TRAIN, DEEPSPEED_INFER)


@hookimpl
def roll_config_fragments() -> Iterator[FragmentProvider]:
    """Provide `strategy_config` presets for the `defaults:` list of a config."""
    for name, summary in FRAGMENTS.items():
        target = f"roll_strategy_deepspeed.fragments.config:{name}.yaml"
        yield FragmentProvider(name=name, target=target, summary=summary)
