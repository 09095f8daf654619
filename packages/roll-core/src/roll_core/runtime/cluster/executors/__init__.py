"""Executors: where workers run. `local` keeps them in this process, `ray` makes them actors on one machine or many."""

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
    """What the config names; for `auto` local where every role has one worker, on this host and in this Python
    environment, else ray. `apart`: weights cannot reach an engine within one process (`build.kept_apart`)."""
    if config.executor != "auto":
        return config.executor
    alone = all(len(workers) == 1 and workers[0].node == 0 for workers in places.values())
    foreign = any(role.environment for role in config.roles().values())
    return "local" if alone and not foreign and not apart else "ray"


def make_executor(name: ExecutorName, platform: Platform, *, slots_per_node: int) -> Executor:
    """An executor that has not been started. `slots_per_node` is what `placement.slots_per_node` gives.

    Raises `MissingRequirementError` for `ray` where Ray is not installed.
    """
    if name == "local":
        from roll_core.runtime.cluster.executors.local import LocalExecutor

        return LocalExecutor(platform, slots_per_node)
    check_extra("ray", what="executor: ray")
    from roll_core.runtime.cluster.executors.ray_executor import RayExecutor

    return RayExecutor(platform, slots_per_node)
