"""Registers the advantage estimator `acme`. Imports nothing heavy."""

from collections.abc import Iterator

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import AdvantageProvider

ROLL_HOOK_API = 1


@hookimpl
def roll_advantage_estimators() -> Iterator[AdvantageProvider]:
    """Advantage estimator `acme`."""
    yield AdvantageProvider(
        name="acme",
        target="roll_estimator_acme.estimator:acme",
        config="roll_estimator_acme.config:AcmeEstimatorOptions",
        needs_groups=True,
        summary="The share of a prompt's responses that is worse, less the share that is better",
    )
