"""Executors: `local` runs workers in this process; `ray` runs them as Ray actors on one machine or many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from roll_core.plugins.requirements import check_extra

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.runtime.cluster.executors.base import Executor
    from roll_core.runtime.cluster.placement import Place
    from roll_core.spec.config import RunConfig
    from roll_core.spec.platform import Platform

ExecutorName = Literal["local", "ray"]


def choose_executor(config: RunConfig, places: Mapping[str, tuple[Place, ...]], *, apart: bool = False) -> ExecutorName:
    """Executor that the config names. For `auto`: `local` if every role fits into this process, otherwise `ray`.

    `local` requires that every role has one worker, on node 0, and that no role has its own Python environment. It also
    requires that `apart` is false: true means that weights cannot reach an engine within one process
    (`build.separate_processes_reason`).
    """
    if config.executor != "auto":
        return config.executor
    alone = all(len(workers) == 1 and workers[0].node == 0 for workers in places.values())
    foreign = any(role.environment for role in config.roles().values())
    return "local" if alone and not foreign and not apart else "ray"


def make_executor(name: ExecutorName, platform: Platform, *, slots_per_node: int) -> Executor:
    """Create an executor; the caller starts it. `slots_per_node` is the result of `placement.slots_per_node`.

    Raises `MissingRequirementError` for `ray` if Ray is not installed.
    """
    if name == "local":
        from roll_core.runtime.cluster.executors.local import LocalExecutor

        return LocalExecutor(platform, slots_per_node)
    check_extra("ray", what="executor: ray")
    from roll_core.runtime.cluster.executors.ray_executor import RayExecutor

    return RayExecutor(platform, slots_per_node)
