"""`strategy_config`: keys of a DeepSpeed file, what they become for DeepSpeed, and what is refused."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from roll_core.errors import UnsupportedError
from roll_core.spec.model import ModelSpec
from roll_core.spec.train import TrainingSpec
from roll_strategy_deepspeed.config import DeepSpeedConfig
from roll_strategy_deepspeed.engine_config import engine_config
from roll_testing.errors import raises_error

TRAINING = TrainingSpec(learning_rate=1e-3, max_grad_norm=0.5)
FILE = {
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": False,
        "reduce_scatter": False,
        "reduce_bucket_size": 5e8,
        "allgather_partitions": False,
        "allgather_bucket_size": 2e8,
        "round_robin_gradients": True,
        "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 1e8,
        "stage3_max_reuse_distance": 1e7,
        "stage3_gather_16bit_weights_on_model_save": False,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
    "bf16": {"enabled": "auto"},
    "fp16": {
        "enabled": False,
        "loss_scale": 128.0,
        "initial_scale_power": 12,
        "loss_scale_window": 500,
        "hysteresis": 4,
        "min_loss_scale": 2,
    },
    "communication_data_type": "bf16",
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 100,
    "wall_clock_breakdown": False,
    "logprob_chunk_tokens": 64,
    "recompute_granularity": "full",
    "activation_offloading": True,
    "torch_compile": False,
    "moe_aux_loss_coeff": 0.001,
    "moe_z_loss_coeff": 0.001,
    "fused": False,
}
"""Every key, set to what is not its default where there is another that stage 3 allows."""


def given(*, dtype="fp32", training=TRAINING, **keys):
    return engine_config(DeepSpeedConfig.model_validate(keys), ModelSpec(path="somewhere", dtype=dtype), training)


def test_the_file_has_every_key():
    def check(schema: type[BaseModel], file: dict) -> None:
        assert set(file) == set(schema.model_fields)
        for name, field in schema.model_fields.items():
            if isinstance(field.default, BaseModel):
                check(type(field.default), file[name])

    check(DeepSpeedConfig, FILE)


def test_zero_keys_of_a_file_reach_deepspeed():
    zero = given(**FILE)["zero_optimization"]
    assert zero == FILE["zero_optimization"]
    assert all(type(each) is not float for each in zero.values())


def test_auto_and_missing_keys_are_left_to_deepspeed():
    keys = {key: "auto" for key, each in FILE["zero_optimization"].items() if isinstance(each, float | int)}
    keys = {key: each for key, each in keys.items() if key.endswith(("size", "parameters", "distance", "threshold"))}
    assert len(keys) == 7
    zero = given(zero_optimization={"stage": 2, **keys})["zero_optimization"]
    assert not set(keys) & set(zero)
    assert {"offload_optimizer", "offload_param", "overlap_comm"}.isdisjoint(zero)


def test_how_the_loss_is_scaled_reaches_deepspeed():
    found = given(dtype="fp16", zero_optimization={"stage": 1}, fp16={"hysteresis": 4, "loss_scale": 128})
    assert found["fp16"]["enabled"] is True
    assert found["fp16"]["hysteresis"] == 4
    assert found["fp16"]["loss_scale"] == 128.0
    assert found["bf16"] == {"enabled": False}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_added_up_in_float32_where_deepspeed_can(dtype, stage):
    assert given(dtype=dtype, zero_optimization={"stage": stage})["data_types"] == {"grad_accum_dtype": "fp32"}


def test_the_pipelines_norm_is_the_one_that_clips():
    assert given(zero_optimization={"stage": 1})["gradient_clipping"] == 0.5
    assert given(zero_optimization={"stage": 1}, training=None)["gradient_clipping"] == 0.0
    # In float32 at stage 0 this package clips by itself: twice would be too often.
    assert given()["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ({"zero_optimisation": {}}, ("zero_optimisation",)),
        ({"optimizer": {"type": "AdamW"}}, ("optimizer",)),
        ({"scheduler": {}}, ("scheduler",)),
        ({"train_batch_size": 8}, ("train_batch_size",)),
        ({"gradient_clipping": 1.0}, ("gradient_clipping",)),
        ({"zero_optimization": {"stage": 4}}, ("stage",)),
        ({"zero_optimization": {"reduce_bucket_size": 0.5}}, ("reduce_bucket_size",)),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, ("reduce_bucket_size",)),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, ("device",)),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ("offload_optimizer", "stage 1", "2", "3")),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, ("offload_param", "stage 3")),
        ({"fp16": {"loss_scale": -1}}, ("loss_scale",)),
        ({"zero_force_ds_cpu_optimizer": True}, ("zero_force_ds_cpu_optimizer",)),
        ({"wall_clock_breakdown": True}, ("wall_clock_breakdown",)),
    ],
)
def test_unsupported_keys_are_refused(keys, facts):
    with raises_error(ValidationError, *facts):
        DeepSpeedConfig.model_validate(keys)


@pytest.mark.parametrize(
    ("dtype", "keys"),
    [
        ("fp32", {"bf16": {"enabled": True}}),
        ("bf16", {"bf16": {"enabled": False}}),
        ("bf16", {"fp16": {"enabled": True}}),
    ],
)
def test_a_precision_that_contradicts_the_model_is_refused(dtype, keys):
    with raises_error(UnsupportedError, "model_args.dtype", dtype):
        given(dtype=dtype, **keys)


def test_float16_needs_a_stage_that_scales_the_loss():
    with raises_error(UnsupportedError, "stage 0", "fp16"):
        given(dtype="fp16")
    assert given(dtype="fp16", training=None)["fp16"]["enabled"] is True
