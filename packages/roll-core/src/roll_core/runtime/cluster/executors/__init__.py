"""Executors: they start the workers of a run. `local` runs them in this process; plugins offer others.

Imports little: a worker in a Python environment of its own has no YAML reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.plugins.registry import Registry
    from roll_core.runtime.cluster.executors.base import Executor
    from roll_core.runtime.cluster.placement import Place
    from roll_core.spec.config import RunConfig
    from roll_core.spec.platform import Platform
    from roll_core.spec.providers import ExecutorProvider


def executor_of(
    config: RunConfig, registry: Registry, places: Mapping[str, tuple[Place, ...]], apart: str = ""
) -> ExecutorProvider:
    """Executor that the config names. For `auto`, see `choose_executor`.

    Roles fit into one process if each has one worker, on node 0 alone, and none has its own Python environment. `apart`
    is the reason why weights cannot reach an engine within one process (`build.separate_processes_reason`).
    """
    from roll_core.config.executors import choose_executor

    reasons = [f"{name} has its own Python environment" for name, role in config.roles().items() if role.environment]
    environments = bool(reasons)
    reasons += [f"{role} has {len(workers)} workers" for role, workers in places.items() if len(workers) != 1]
    reasons += [f"{role} is on node {workers[0].node}" for role, workers in places.items() if workers[0].node]
    reasons += [f"{role} is on several nodes" for role, workers in places.items() if workers[0].followers]
    reasons += [apart] if apart else []
    return choose_executor(registry, config.executor, reasons[0] if reasons else "", environments=environments)


def make_executor(provider: ExecutorProvider, owner: str, platform: Platform, *, slots_per_node: int) -> Executor:
    """Create an executor; the caller starts it. `slots_per_node` is the result of `placement.slots_per_node`.

    Raises `MissingRequirementError` if its requirements are not installed.
    """
    from roll_core.plugins.requirements import check_requirements
    from roll_core.plugins.targets import load_class
    from roll_core.runtime.cluster.executors.base import Executor

    check_requirements(provider, owner=owner)
    base: type[Executor] = Executor  # type: ignore[type-abstract]
    return load_class(provider.target, base, owner=owner)(platform, slots_per_node)
