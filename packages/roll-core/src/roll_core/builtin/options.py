"""Options of the built-in policy losses and trackers. Imports nothing heavy."""

from __future__ import annotations

from roll_core.spec.config import Config, PositiveFloat, PositiveInt


class PolicyLossOptions(Config):
    """Options (`pg_options`) of the policy losses `ppo` and `vanilla`."""

    log_ratio_clamp: PositiveFloat = 20.0
    """Maximum absolute logarithm of the importance ratio; beyond it a token has no gradient."""


class TensorBoardOptions(Config):
    """Options of the TensorBoard tracker (`tracker_kwargs.tensorboard`)."""

    log_dir: str | None = None
    """Directory of the event files. Default: `tensorboard/` of the run directory."""
    flush_secs: PositiveInt = 30
    """Minimum time in seconds between two flushes of the event file."""
