"""Registers the policy loss `acme`. Imports nothing heavy."""

from collections.abc import Iterator

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import PolicyLossProvider

ROLL_HOOK_API = 1


@hookimpl
def roll_policy_losses() -> Iterator[PolicyLossProvider]:
    """Policy loss `acme`."""
    yield PolicyLossProvider(
        name="acme",
        target="roll_loss_acme.loss:acme",
        config="roll_loss_acme.config:AcmeLossOptions",
        summary="Policy gradient, weighted by the importance ratio up to a cap",
    )
