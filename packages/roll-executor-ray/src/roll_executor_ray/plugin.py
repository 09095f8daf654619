"""Hooks that provide this package's parts. Does not import Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import CheckProvider, ExecutorProvider, KnownErrorsProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1


@hookimpl
def roll_executors() -> Iterator[ExecutorProvider]:
    """Register the executor `ray`."""
    yield ExecutorProvider(
        name="ray",
        target="roll_executor_ray.executor:RayExecutor",
        summary="Each worker in its own process, on one machine or many",
        needs=("ray>=2.48",),
        priority=10,
        python_environments=True,
        address_variable="RAY_ADDRESS",
        placement_timeout_s=120,
    )


@hookimpl
def roll_checks() -> Iterator[CheckProvider]:
    """Checks of the cluster and of roles' Python environments."""
    for name, summary in (
        ("ray_cluster", "Whether RAY_ADDRESS accepts connections"),
        ("environments", "Whether the Python environments of the config's roles have what the roles need"),
    ):
        yield CheckProvider(name=name, target=f"roll_executor_ray.checks:{name}", summary=summary)


@hookimpl
def roll_known_errors() -> Iterator[KnownErrorsProvider]:
    """Known errors of Ray, with remedies."""
    yield KnownErrorsProvider(
        name="ray", target="roll_executor_ray.known_errors:KNOWN_ERRORS", summary="Errors of Ray's start"
    )
