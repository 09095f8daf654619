"""The choice of an executor: the one that the config names, or the suitable one with the highest priority."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_core.config.explain import Finding, plugin_finding
from roll_core.config.weight_transports import within_one_process
from roll_core.errors import PluginError, ProviderConflictError
from roll_core.spec.config import AUTO
from roll_core.spec.devices import parse_device_mapping
from roll_core.spec.providers import ExecutorProvider, InferProvider, TrainProvider

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from roll_core.config.parts import Parts
    from roll_core.config.source import KeyPath
    from roll_core.plugins.registry import Registry


def choose_executor(
    registry: Registry, executor: str, reason: str = "", *, environments: bool = False
) -> ExecutorProvider:
    """Executor that the config names. For `auto`: the one with the highest priority that can run the config's roles.

    `reason` is why their workers need several processes; empty if they fit into the driver's. `environments` is true if
    a role has its own Python environment. Raises `UnknownProviderError` if no installed executor can run them, and
    `ProviderConflictError` if two have the same highest priority.
    """
    if executor != AUTO:
        return registry.find(ExecutorProvider, executor)
    able = [
        provider
        for provider in registry.providers(ExecutorProvider)
        if provider.priority > 0
        and provider.in_process != bool(reason)
        and (provider.python_environments or not environments)
    ]
    best = [provider for provider in able if provider.priority == max(one.priority for one in able)]
    if not best:
        raise registry.no_part(ExecutorProvider, f"{reason}, which no installed executor supports")
    if len(best) > 1:
        owners = " and ".join(map(registry.owner, best))
        raise ProviderConflictError(f"{owners} have the same priority: choose one with executor")
    return best[0]


def check_executor(parts: Parts, roles: Mapping[KeyPath, Mapping[Any, Any]]) -> None:
    """Check the choice of an executor, as far as the config shows it. `roles`: raw values by path."""
    executor = parts.data.get("executor", AUTO)
    foreign = [path for path, role in roles.items() if role.get("environment") is not None]
    if executor == AUTO:
        several = [(path, key, why) for path, role in roles.items() for key, why in _several(role)]
        for path, key, why in several[:1]:
            try:
                choose_executor(parts.registry, AUTO, f"{'.'.join(path)} {why}", environments=bool(foreign))
            except PluginError as error:
                parts.findings.append(plugin_finding((*path, key), error))
        return
    provider = parts.find(ExecutorProvider, executor, ("executor",)) if isinstance(executor, str) else None
    if provider is not None and foreign and not provider.python_environments:
        names = ", ".join(".".join(path) for path in foreign)
        message = f"{provider.name} starts workers in the driver's Python environment, but {names} has its own"
        parts.report(("executor",), message, "remove it", code="ROLL-C014")


def separate_processes_finding(
    registry: Registry, trainer: TrainProvider, engine: InferProvider, data: Mapping[Any, Any], at_engine: KeyPath
) -> Finding | None:
    """A mistake in the choice of an executor if the pair's weights cannot be sent within one process."""
    executor, transport = data.get("executor", AUTO), data.get("weight_transport")
    if not isinstance(executor, str) or not isinstance(transport, str | None):
        return None
    missing: PluginError | None = None
    try:
        if not choose_executor(registry, executor, "its workers need several processes").in_process:
            return None
    except PluginError as error:
        missing = error
    try:
        why = within_one_process(registry, trainer, engine, directory=data.get("model_update_dir"), transport=transport)
    except PluginError:  # reported at the transport's own key
        return None
    if not why or (missing and executor != AUTO):
        return None
    if missing is None:
        message = f"{why}: executor {executor} has only one"
        return Finding(("executor",), message, "remove it", code="ROLL-C014")
    return plugin_finding(at_engine, registry.no_part(ExecutorProvider, why))


def _several(role: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """Keys of a role that need more than one process, each with the reason."""
    if role.get("environment") is not None:
        yield "environment", "has its own Python environment"
    size, per_worker = role.get("world_size"), role.get("num_gpus_per_worker")
    per_worker = 1 if per_worker is None else per_worker
    if type(size) is int and size > 1:
        yield "world_size", f"has {size} workers"
    try:
        slots = parse_device_mapping(role.get("device_mapping")) or ()
    except ValueError:  # reported by the validation of the role
        return
    if type(per_worker) is int and len(slots) > per_worker > 0:
        yield "device_mapping", f"has {len(slots) // per_worker} workers"
