"""Registers the weight transport `acme`. Imports nothing heavy."""

from collections.abc import Iterator

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import WeightTransportProvider

ROLL_HOOK_API = 1


@hookimpl
def roll_weight_transports() -> Iterator[WeightTransportProvider]:
    """Weight transport `acme`. Priority 0: only a config that names it uses it."""
    yield WeightTransportProvider(
        name="acme",
        target="roll_transport_acme.transport:AcmeTransport",
        summary="A TCP connection to each engine",
        any_strategy=True,
    )
