"""Registers the inference engine `acme`. Imports nothing heavy."""

from collections.abc import Iterator

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import InferCapabilities, InferProvider

ROLL_HOOK_API = 1

ACME = InferProvider(
    name="acme",
    target="roll_infer_acme.strategy:AcmeEngine",
    config="roll_infer_acme.config:AcmeEngineConfig",
    summary="transformers' generate, one request at a time",
    capabilities=InferCapabilities(
        dtypes=("fp32", "bf16"),
        free_seeds=True,
        weight_transports=("shared", "shm", "collective", "disk"),
    ),
)


@hookimpl
def roll_infer_strategies() -> Iterator[InferProvider]:
    """Inference engine `acme`."""
    yield ACME
