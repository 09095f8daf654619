"""Reserves the slots of a run on a Ray cluster: one bundle per node, in one placement group.

A bundle is as large as the highest slot in use on its node requires, so that local slot `i` is the `i`-th device of the
bundle. On accelerators one actor holds all devices of the bundle, and workers request none from Ray. Roles may then
share slots in any way, and no other job of the cluster gets them meanwhile.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_core.errors import PlacementError
from roll_core.runtime.cluster.placement import no_such_slot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.runtime.cluster.executors.base import GroupSpec
    from roll_core.spec.platform import Platform

ANY_SHARE = 0.001
"""Smallest amount of a resource that Ray counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedNode:
    """Bundle of one node in the placement group."""

    bundle: int
    device_ids: tuple[str, ...] = ()
    """Device ids of the node's slots, by local index; empty if workers are not restricted to devices."""


class Reservation:
    """Reservation of a run's slots on a Ray cluster."""

    def __init__(self, platform: Platform, slots_per_node: int, deadline_s: float) -> None:
        self._platform = platform
        self._slots_per_node = slots_per_node
        self._deadline_s = deadline_s
        self._group: Any = None
        self._holders: list[Any] = []
        self.nodes: dict[int, ReservedNode] = {}

    async def take(self, specs: Sequence[GroupSpec]) -> None:
        """Reserve the slots. Raises `PlacementError` if they do not exist, or are not free within the deadline."""
        import ray
        from ray.util.placement_group import placement_group

        needs = self._slots_needed(specs)
        present = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._check_existence(specs, needs, present)
        nodes = sorted(needs)
        cores = min(float(node.get("CPU", 0)) for node in present)
        bundles = [self._bundle(needs[node], cores) for node in nodes]
        strategy = "STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK"
        self._group = placement_group(bundles, strategy=strategy)
        await self._until(asyncio.wrap_future(self._group.ready().future()), bundles)
        for bundle, node in enumerate(nodes):
            ids = await self._hold(bundle, needs[node]) if self._platform.visible_devices and needs[node] else ()
            self.nodes[node] = ReservedNode(bundle=bundle, device_ids=tuple(ids))

    def strategy(self, node: int) -> Any:
        """Ray's scheduling strategy for a worker on this node."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=self.nodes[node].bundle
        )

    def release(self) -> None:
        """Release the slots. May be called several times."""
        import ray
        from ray.util.placement_group import remove_placement_group

        holders, self._holders = self._holders, []
        for holder in holders:
            ray.kill(holder)
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    def _slots_needed(self, specs: Sequence[GroupSpec]) -> dict[int, int]:
        """Number of slots to reserve on each node: up to the highest one in use."""
        needs: dict[int, int] = {}
        for spec in specs:
            for place in spec.places:
                highest = max(place.local_indices, default=-1)
                needs[place.node] = max(needs.get(place.node, 0), highest + 1)
        return needs

    def _check_existence(
        self, specs: Sequence[GroupSpec], needs: Mapping[int, int], present: Sequence[Mapping[str, float]]
    ) -> None:
        """Raise `PlacementError` for the first slot that does not exist, by role and slot.

        Assumes that the nodes with the most slots serve the node indices that need the most.
        """
        counts = sorted((count for count in map(self._slots_of, present) if count), reverse=True)
        # A node index beyond the last node gets no slots.
        there = (node for node in needs if needs[node] and node < len(counts))
        by_need = sorted(there, key=lambda node: (-needs[node], node))
        available = dict(zip(by_need, counts, strict=False))
        for spec in specs:
            for place in spec.places:
                for slot, local in zip(place.slots, place.local_indices, strict=True):
                    if place.node >= len(counts) or local >= available[place.node]:
                        raise PlacementError(self._no_such_slot(spec.role, slot, counts))

    def _no_such_slot(self, role: str, slot: int, counts: Sequence[float]) -> str:
        per_node = self._slots_per_node
        if counts and min(counts) >= per_node:
            return no_such_slot(role, slot, self._platform, per_node, len(counts))
        resource = self._platform.resource_name
        have = ", ".join(f"{count:g}" for count in counts) or "none"
        return (
            f"{role} uses slot {slot}, which is slot {slot % per_node} of node {slot // per_node} if nodes have"
            f" {per_node} slots (num_gpus_per_node), but Ray's nodes have {resource}: {have}"
        )

    def _slots_of(self, node: Mapping[str, float]) -> float:
        return self._slots_per_node if self._platform.slots_share_cores else node.get(self._platform.resource_name, 0)

    def _bundle(self, slots: int, cores: float) -> dict[str, float]:
        if slots == 0:
            return {"CPU": ANY_SHARE}
        if self._platform.slots_share_cores:
            return {"CPU": max(ANY_SHARE, min(float(slots), cores))}
        return {self._platform.resource_name: float(slots)}

    async def _until(self, ready: asyncio.Future[Any], bundles: Sequence[Mapping[str, float]]) -> None:
        import ray

        try:
            await asyncio.wait_for(ready, self._deadline_s)
        except TimeoutError:
            resource = next(iter(bundles[0]))
            amounts = ", ".join(f"{bundle[resource]:g}" for bundle in bundles)
            total = ray.cluster_resources().get(resource, 0)
            free = ray.available_resources().get(resource, 0)
            raise PlacementError(
                f"the slots are not free: Ray could not reserve {resource} on {len(bundles)} nodes ({amounts}) within"
                f" {self._deadline_s:g} s. {free:g} of {total:g} in the cluster are free: wait for other jobs, or use"
                " fewer slots"
            ) from None

    async def _hold(self, bundle: int, slots: int) -> Sequence[str]:
        """Let an actor take all slots of a bundle. Returns their device ids."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from roll_executor_ray.actors import SlotHolder

        resource = self._platform.resource_name
        amount = {"num_gpus": slots} if resource == "GPU" else {"resources": {resource: slots}}
        where = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=bundle)
        holder = ray.remote(SlotHolder).options(num_cpus=0, scheduling_strategy=where, **amount).remote()
        self._holders.append(holder)
        variable = self._platform.visible_devices
        claimed = holder.device_ids.remote(resource, variable, slots)
        try:
            ids: list[str] = await asyncio.wait_for(asyncio.wrap_future(claimed.future()), self._deadline_s)
        except TimeoutError:
            raise PlacementError(
                f"other processes use the devices of {resource} that Ray reserved: fewer than {slots} were free within"
                f" {self._deadline_s:g} s"
            ) from None
        if len(ids) != slots:  # more, if a variable RAY_EXPERIMENTAL_NOSET_… keeps Ray from assigning devices
            raise PlacementError(
                f"the node has {len(ids)} devices of {resource}, expected {slots}: {ids}. Set {variable} for Ray's node"
                " to its devices, or do not set it"
            )
        return ids
