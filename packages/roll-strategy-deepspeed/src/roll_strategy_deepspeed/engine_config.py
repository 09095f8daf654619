"""The configuration for `deepspeed.initialize`, from the role's config and settings fixed by this strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_core.errors import UnsupportedError

if TYPE_CHECKING:
    from roll_core.spec.model import ModelSpec
    from roll_core.spec.train import TrainingSpec
    from roll_strategy_deepspeed.config import DeepSpeedConfig, ZeroConfig

AUTO = "auto"


def engine_config(config: DeepSpeedConfig, model: ModelSpec, training: TrainingSpec | None) -> dict[str, Any]:
    """Build the configuration dictionary for `deepspeed.initialize`.

    Raises `UnsupportedError` if `bf16.enabled` or `fp16.enabled` contradicts the model's dtype, and for fp16 training
    at stage 0.
    """
    for name, dtype in (("bf16", "bf16"), ("fp16", "fp16")):
        asked = getattr(config, name).enabled
        if asked != AUTO and asked != (model.dtype == dtype):
            raise UnsupportedError(
                f"strategy_config.{name}.enabled is {str(asked).lower()}, but model_args.dtype is {model.dtype};"
                " leave it out, the dtype decides"
            )
    stage = config.zero_optimization.stage
    if training is not None and model.dtype == "fp16" and not stage:
        # engine.backward scales the loss only for ZeRO's optimizers, but the stage-0 optimizer divides by the scale.
        raise UnsupportedError(
            "zero_optimization.stage 0 cannot train in fp16: DeepSpeed does not scale its loss; use 1"
        )
    engine_keys: dict[str, Any] = {
        # DeepSpeed requires these keys, but the strategy splits batches and calls `step` itself.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        # torch's fused AdamW needs no compiler and is as fast on the CPU as DeepSpeed's own.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero(config.zero_optimization),
        "communication_data_type": config.communication_data_type,
        "gradient_clipping": training.max_grad_norm if training is not None and clips_itself(config, model) else 0.0,
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # they wait for the device in each microbatch
        "bf16": {"enabled": model.dtype == "bf16"},
        "fp16": {**config.fp16.model_dump(), "enabled": model.dtype == "fp16"},
    }
    if stage and model.dtype != "fp32":
        # The 8 significand bits of bfloat16 lose precision when the gradients of many microbatches are summed.
        engine_keys["data_types"] = {"grad_accum_dtype": "fp32"}
    return engine_keys


def clips_itself(config: DeepSpeedConfig, model: ModelSpec) -> bool:
    """True if DeepSpeed clips gradients.

    In float32 at stage 0 it neither returns the gradient norm nor checks for infinities. There
    `workarounds.add_norm_and_clipping` does both.
    """
    return config.zero_optimization.stage > 0 or model.dtype != "fp32"


def _zero(zero: ZeroConfig) -> dict[str, Any]:
    offloads = ("offload_optimizer", "offload_param")
    zero_keys = {
        key: value for key, value in zero.model_dump(exclude=set(offloads)).items() if value not in (AUTO, None)
    }
    if zero.stage < 2:
        zero_keys["overlap_comm"] = False
    for name in offloads:
        if getattr(zero, name).device != "none":
            zero_keys[name] = getattr(zero, name).model_dump()
    return zero_keys
