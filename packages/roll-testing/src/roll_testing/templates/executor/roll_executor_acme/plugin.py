"""Registers the executor `acme`. Imports nothing heavy."""

from collections.abc import Iterator

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import ExecutorProvider

ROLL_HOOK_API = 1


@hookimpl
def roll_executors() -> Iterator[ExecutorProvider]:
    """Executor `acme`. Priority 0: only a config that names it uses it."""
    yield ExecutorProvider(
        name="acme",
        target="roll_executor_acme.executor:AcmeExecutor",
        summary="Each worker in a process of its own on this host",
    )
