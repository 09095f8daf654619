"""A schema where torch is imported, which every command that reads a config would pay for."""

import torch

from roll_core.spec.config import StrategyConfig

FLOAT = torch.float32


class NoConfig(StrategyConfig):
    """No keys."""
