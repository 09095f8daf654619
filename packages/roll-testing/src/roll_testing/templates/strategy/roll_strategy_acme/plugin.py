"""Registers the train strategy `acme`. Imports nothing heavy."""

from collections.abc import Iterator

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import TrainCapabilities, TrainProvider

ROLL_HOOK_API = 1

ACME = TrainProvider(
    name="acme",
    target="roll_strategy_acme.strategy:AcmeStrategy",
    config="roll_strategy_acme.config:AcmeStrategyConfig",
    summary="Trains a transformers model on one device",
    capabilities=TrainCapabilities(
        tasks=("causal_lm", "value", "reward"),
        dtypes=("fp32",),
        topk=True,
        gathered=True,
        weight_transports=("shared", "shm", "collective", "disk"),
    ),
)


@hookimpl
def roll_train_strategies() -> Iterator[TrainProvider]:
    """Train strategy `acme`."""
    yield ACME
