"""The choice of a weight transport: the available one with the highest priority, or the one that the config names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from roll_core.config.explain import Finding
from roll_core.errors import PluginError, UnsupportedError
from roll_core.plugins.targets import load_class
from roll_core.spec.providers import WeightTransportProvider
from roll_core.spec.transport import RoleFacts, WeightTransport, WorkerFacts, one_process

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from roll_core.config.source import KeyPath
    from roll_core.plugins.registry import Registry
    from roll_core.spec.providers import InferProvider, TrainProvider


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """The transport between two roles, and why those with a higher priority are not used."""

    provider: WeightTransportProvider
    passed_over: tuple[str, ...]


@lru_cache
def load_transport(provider: WeightTransportProvider) -> WeightTransport:
    """The transport of a record, one object per process."""
    base: type[WeightTransport] = WeightTransport  # type: ignore[type-abstract]
    return load_class(provider.target, base, owner=f"weight transport {provider.name!r}")()


def choose_transport(
    registry: Registry,
    sender: RoleFacts,
    receiver: RoleFacts,
    transport: str | None = None,
    *,
    rejected: Mapping[str, str] | None = None,
) -> TransportChoice:
    """The transport between two roles. `rejected`: transports that failed their self-test, with the reason.

    Raises `UnsupportedError` with the reason for each transport that either strategy lists.
    """
    listed: list[str] = []
    others: list[str] = []
    for provider in _candidates(registry, transport):
        reason = (rejected or {}).get(provider.name) or _unavailable(provider, sender, receiver)
        if not reason:
            return TransportChoice(provider, tuple(listed))
        for_receiver = provider.any_strategy or provider.name in receiver.weight_transports
        (listed if for_receiver or transport else others).append(f"{provider.name}: {reason}")
    mentioned = [reason for reason in others if reason.partition(":")[0] in sender.weight_transports]
    reasons = "; ".join(listed + mentioned) or "they list none in common"
    remedy = "run them in separate processes" if one_process(sender, receiver) else "place them differently"
    raise UnsupportedError(
        f"no weight transport connects {sender.role} and {receiver.role} here ({reasons}): {remedy}, or choose"
        " strategies that share one"
    )


def common_transports(registry: Registry, sender: RoleFacts, receiver: RoleFacts) -> list[WeightTransportProvider]:
    """Transports that both strategies work with, by priority, wherever their workers are."""
    return [provider for provider in _candidates(registry, None) if not _unlisted(provider, sender, receiver)]


def within_one_process(
    registry: Registry,
    trainer: TrainProvider,
    engine: InferProvider,
    *,
    directory: str | None = None,
    transport: str | None = None,
) -> str:
    """Reason why weights cannot be sent within one process; empty if they can."""
    sender, receiver = (_in_one_process(provider, directory) for provider in (trainer, engine))
    try:
        choose_transport(registry, sender, receiver, transport)
    except UnsupportedError as error:
        if directory:
            return "model_update_dir needs trainers and engines in separate processes"
        if transport:
            return str(error)
        names = ", ".join(provider.name for provider in common_transports(registry, sender, receiver))
        return f"{trainer.name} sends weights to {engine.name} by {names}, which need separate processes"
    return ""


def weight_finding(
    registry: Registry, trainer: TrainProvider, engine: InferProvider, data: Mapping[Any, Any], at_engine: KeyPath
) -> Finding | None:
    """A mistake in the config `data` that leaves the pair without a weight transport. `at_engine`: key of the engine's
    strategy."""
    directory, transport_name = data.get("model_update_dir"), data.get("weight_transport")
    transport = transport_name if isinstance(transport_name, str) else None
    sender, receiver = (_in_one_process(provider, directory) for provider in (trainer, engine))
    try:
        candidates = list(_candidates(registry, transport))
    except PluginError:  # reported at the key itself
        return None
    reasons = {provider.name: _unsuitable(provider, sender, receiver) for provider in candidates}
    if not all(reasons.values()):
        return None
    common = common_transports(registry, sender, receiver)
    key_path: KeyPath = (
        ("weight_transport",) if transport else ("model_update_dir",) if directory and common else at_engine
    )
    why = "; ".join(f"{provider.name}: {reasons[provider.name]}" for provider in (candidates if transport else common))
    message = f"no weight transport connects {trainer.name} and {engine.name}: {why or 'they list none in common'}"
    sends, receives = (", ".join(side.weight_transports) or "none" for side in (sender, receiver))
    hint = f"{trainer.name} sends by {sends}, {engine.name} receives by {receives}"
    return Finding(key_path, message, hint, code="ROLL-C030")


def _candidates(registry: Registry, transport: str | None) -> Iterator[WeightTransportProvider]:
    if transport:
        yield registry.find(WeightTransportProvider, transport)
        return
    usable = [provider for provider in registry.providers(WeightTransportProvider) if provider.priority > 0]
    yield from sorted(usable, key=lambda provider: -provider.priority)


def _unavailable(provider: WeightTransportProvider, sender: RoleFacts, receiver: RoleFacts) -> str | None:
    """Reason why a transport cannot connect two roles; the record is compared before the module is imported."""
    if reason := _unsuitable(provider, sender, receiver):
        return reason
    if provider.in_process != one_process(sender, receiver):
        return "the workers are in different processes" if provider.in_process else "the workers are in one process"
    return load_transport(provider).available(sender, receiver)


def _unsuitable(provider: WeightTransportProvider, sender: RoleFacts, receiver: RoleFacts) -> str:
    """Reason why a transport cannot connect two roles, wherever their workers are; empty if it can."""
    if reason := _unlisted(provider, sender, receiver):
        return reason
    if bool(sender.directory) == provider.uses_directory:
        return ""
    return "it needs model_update_dir" if provider.uses_directory else "it does not use model_update_dir, which is set"


def _unlisted(provider: WeightTransportProvider, sender: RoleFacts, receiver: RoleFacts) -> str:
    for kind, side in (("train", sender), ("infer", receiver)):
        if not side.weight_transports:
            return f"the {kind} strategy has no weight transports"
        if not provider.any_strategy and provider.name not in side.weight_transports:
            return f"the {kind} strategy does not list it"
    return ""


def _in_one_process(provider: TrainProvider | InferProvider, directory: str | None) -> RoleFacts:
    worker = WorkerFacts(host="", pid=0)
    transports = provider.capabilities.weight_transports
    return RoleFacts(role=provider.name, workers=(worker,), weight_transports=transports, directory=directory or "")
