"""The plan of a config: where its workers run, what memory they take, and whether the run would start and fit.

Uses the same `place_roles`, `executor_of` and memory formulas as a run, with the roles of the pipeline's plan.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_core.api import overrides_located
from roll_core.config import load
from roll_core.errors import PlacementError, RollError
from roll_core.host import free_memory_bytes
from roll_core.plugins.registry import load_registry
from roll_core.spec.providers import PipelineProvider
from roll_tools.placement import place
from roll_tools.run_plan import Capacity, plan_with, prediction
from roll_tools.suggestion import smallest_change

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.config import LoadedConfig
    from roll_core.config.loading import ConfigSource
    from roll_core.config.overrides import Overrides
    from roll_core.plugins.registry import Registry
    from roll_core.runtime.run.active_run import ActiveRun
    from roll_core.spec.platform import Platform
    from roll_tools.run_plan import Plan
    from roll_tools.suggestion import Proposal

log = logging.getLogger(__name__)

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A config with its plan, and the smallest change that makes it fit in memory."""

    loaded: LoadedConfig
    plan: Plan
    proposal: Proposal | None
    """None if the plan fits or no change helps."""

    @property
    def fits(self) -> bool:
        """True if every worker has a place and no known memory is exceeded."""
        return self.plan.starts and not self.plan.over


def plan(
    config: ConfigSource,
    overrides: Overrides = (),
    *,
    nodes: int | None = None,
    slot_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    disabled_plugins: Sequence[str] = (),
) -> PlannedRun:
    """Compute placement and memory of each role, without starting a run. The first two arguments are those of `run`.

    `nodes` and the free memory of a slot and of a host, in GiB, replace what is detected here. Raises `ConfigError`
    with all mistakes, and `PlacementError` if no placement can be computed.
    """
    registry = load_registry(disabled_plugins)
    with overrides_located():
        loaded = load(config, overrides, registry)
    slot, host = (None if gib is None else int(gib * GIB) for gib in (slot_memory_gib, host_memory_gib))
    run_plan = make_plan(loaded, registry, num_nodes=nodes, slot_bytes=slot, host_bytes=host)
    proposal = smallest_change(loaded.config, registry, run_plan) if run_plan.over else None
    return PlannedRun(loaded=loaded, plan=run_plan, proposal=proposal)


def make_plan(
    loaded: LoadedConfig,
    registry: Registry,
    *,
    num_nodes: int | None = None,
    slot_bytes: int | None = None,
    host_bytes: int | None = None,
) -> Plan:
    """Make the plan of a config.

    `num_nodes`, `slot_bytes` and `host_bytes` describe the machines and override what is detected on this host. With
    any of them, the run need not be possible on this host. Raises `PlacementError` if no placement can be computed.
    """
    elsewhere = any(amount is not None for amount in (num_nodes, slot_bytes, host_bytes))
    placement = place(loaded.config, loaded.pipeline, registry, num_nodes=num_nodes, elsewhere=elsewhere)
    if slot_bytes is not None and placement.platform.slots_share_cores:
        raise PlacementError(
            f"slot memory was given, but slots of platform {placement.platform.name} have no memory of their own: set"
            " platform to the other machine's (such as platform=cuda), or give only the memory of the host"
        )
    if host_bytes is None and placement.here:
        host_bytes = free_memory_bytes()
    if slot_bytes is None and placement.here and not placement.platform.slots_share_cores:
        slot_bytes = _free_on_slots(placement.platform)
    return plan_with(loaded.config, registry, placement, Capacity(host=host_bytes, slot=slot_bytes))


def _free_on_slots(platform: Platform) -> int | None:
    """Free bytes of the slot with the least free memory; None if unknown."""
    try:
        slots = [platform.memory(index) for index in range(platform.device_count())]
    except RollError:
        return None
    return min((slot["total"] - slot["used"] for slot in slots), default=None)


def write_prediction(run: ActiveRun) -> None:
    """Write the predicted memory of a run to `prediction.json`. A run does not depend on it: failures are logged."""
    from roll_tools.saved_record import PREDICTION

    config, registry = run.config, run.registry
    try:
        placement = place(config, registry.find(PipelineProvider, config.pipeline), registry)
        predicted = prediction(plan_with(config, registry, placement, Capacity(host=None, slot=None)))
        (run.dir / PREDICTION).write_text(json.dumps(predicted), encoding="utf-8")
    except (RollError, OSError) as error:
        log.info("memory of the run is not predicted: %s", error)
