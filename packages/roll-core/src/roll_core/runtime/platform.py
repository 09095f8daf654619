"""Which hardware a run is on: what the config names, else what is found, the platform of highest priority first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.errors import PlacementError
from roll_core.plugins.targets import load_target
from roll_core.spec.providers import PlatformProvider

if TYPE_CHECKING:
    from roll_core.plugins.registry import Registry
    from roll_core.spec.platform import Platform


def select_platform(registry: Registry, wanted: str | None) -> Platform:
    """The platform of this run. Raises `PlacementError` where it is not there, or where two found ones tie."""
    if wanted is not None:
        platform = _make(registry.find(PlatformProvider, wanted))
        probe = platform.probe()
        if not probe.found:
            raise PlacementError(f"platform {wanted} is asked for but not here: {probe.why}")
        return platform
    providers = sorted(registry.providers(PlatformProvider), key=lambda each: -each.priority)
    looked: list[str] = []
    found: list[tuple[PlatformProvider, Platform]] = []
    for provider in providers:
        if found and provider.priority < found[0][0].priority:
            break
        platform = _make(provider)
        probe = platform.probe()
        looked.append(f"{provider.name}: {probe.why}")
        if probe.found:
            found.append((provider, platform))
    if not found:
        raise PlacementError("no platform was found. " + "; ".join(looked))
    if len(found) > 1:
        names = " and ".join(provider.name for provider, _ in found)
        raise PlacementError(f"platforms {names} are both here with the same priority: choose one with platform:")
    return found[0][1]


def _make(provider: PlatformProvider) -> Platform:
    made: Platform = load_target(provider.target, owner=f"platform {provider.name}")()
    return made
