"""Configuration of `acme`. Imports nothing heavy."""

from typing import Literal

from roll_core.spec.config import InferWorkerConfig, PositiveInt, RewardRunConfig, TrainWorkerConfig


class AcmePipelineConfig(RewardRunConfig):
    """`pipeline: acme`. `rewards` and `validation` are keys of the base class."""

    pipeline: Literal["acme"]
    actor_train: TrainWorkerConfig
    """The policy. `data_args` are its prompts."""
    actor_infer: InferWorkerConfig
    """The engine that generates with the policy's weights."""
    max_steps: PositiveInt = 100
    """Number of steps."""
    rollout_batch_size: PositiveInt = 64
    """Prompts per step."""
    num_return_sequences_in_group: PositiveInt = 8
    """Responses per prompt."""
