"""Modules that the processes of tested ranks import once, their environment, and ranks that train in float16."""

from __future__ import annotations

PRELOAD = (
    # Compiles functions when it is imported, and for that imports the whole of torch's compiler: two seconds.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    # What an engine imports when it is made.
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.module_inject.auto_ep_comm",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "packaging.requirements",
    "peft",
    "safetensors.torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.optimization",
    "roll_modeling.model_table",
    "roll_modeling.lora",
    "roll_testing.programs",
    "roll_strategy_deepspeed.config",
    "roll_strategy_deepspeed.strategy",
    "deepspeed_programs",
)
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}


def in_float16(rank, case, function, *arguments):
    """`function` on this rank, as on a processor with instructions for float16: torch has slower ways for others."""
    import deepspeed

    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    return function(rank, case, *arguments)
