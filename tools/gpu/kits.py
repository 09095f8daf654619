"""The conformance kits on the platform that `ROLL_GPU_PLATFORM` names: what `./run gpu` has pytest run."""

from __future__ import annotations

import os
from typing import ClassVar

from roll_testing import InferStrategyConformance, TrainStrategyConformance

PLATFORM = os.environ["ROLL_GPU_PLATFORM"]


class TestHFTrain(TrainStrategyConformance):
    """One rank per GPU."""

    name = "hf_train"
    platform = PLATFORM


class TestFSDP2(TrainStrategyConformance):
    """One rank per GPU."""

    name = "fsdp2_train"
    platform = PLATFORM


class TestDeepSpeed(TrainStrategyConformance):
    """ZeRO 0 to 3, one rank per GPU."""

    name = "deepspeed_train"
    platform = PLATFORM
    variants: ClassVar = {f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)}


class TestMegatron(TrainStrategyConformance):
    """Without parallelism inside the model, which one GPU does not have."""

    name = "megatron_train"
    platform = PLATFORM


class TestHFInferTorch(InferStrategyConformance):
    """Decodes with torch's operators."""

    name = "hf_infer"
    platform = PLATFORM
    variants: ClassVar = {"torch": {"kernels": "torch"}}
    tight_config: ClassVar = {"kv_cache_gib": 2**-10}
    adapter_config: ClassVar = {"enable_lora": True}


class TestHFInferCompiled(InferStrategyConformance):
    """Decodes with kernels compiled for the device."""

    name = "hf_infer"
    platform = PLATFORM
    variants: ClassVar = {"compiled": {"kernels": "compiled"}}
    tight_config: ClassVar = {"kv_cache_gib": 2**-10}
    adapter_config: ClassVar = {"enable_lora": True}
