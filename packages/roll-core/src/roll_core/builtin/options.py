"""What can be configured about the built-in policy losses and trackers. Light."""

from __future__ import annotations

from roll_core.spec.config import Config, PositiveFloat, PositiveInt


class PolicyLossOptions(Config):
    """`pg_options` of `ppo` and `vanilla`."""

    log_ratio_clamp: PositiveFloat = 20.0
    """Largest absolute logarithm of the importance ratio; beyond it a token has no gradient."""


class TensorBoardOptions(Config):
    """`tracker_kwargs.tensorboard`."""

    log_dir: str | None = None
    """Folder of the event files; `tensorboard/` of the run directory where not given."""
    flush_secs: PositiveInt = 30
    """Longest time in seconds that a step stays in memory."""
