"""Whether weights have a way from a trainer to an engine, as far as their capabilities and a config tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_core.config.explain import Finding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.config.source import KeyPath
    from roll_core.spec.providers import InferProvider, TrainProvider


def without_a_way(
    trainer: TrainProvider, engine: InferProvider, data: Mapping[Any, Any], at_engine: KeyPath
) -> Finding | None:
    """What leaves the pair without a weight transport, in the config `data` that names the engine at `at_engine`."""
    common = _common(trainer, engine)
    pair = f"{trainer.name} and {engine.name}"
    if not common:
        message = f"{pair} have no weight transport in common"
        offered, taken = trainer.capabilities.weight_transports, engine.capabilities.weight_transports
        return Finding(at_engine, message, f"one sends by {_words(offered)}, the other takes them by {_words(taken)}")
    directory = data.get("model_update_dir") is not None
    if directory and "disk" not in common:
        message = f"asks for the weight transport disk, which {pair} do not share"
        return Finding(("model_update_dir",), message, f"leave it out; they share {_words(common)}")
    why = within_one_process(trainer, engine, directory=directory)
    if data.get("executor") == "local" and why:
        return Finding(("executor",), f"{why}: executor local has only one", "leave it out, or write ray")
    return None


def within_one_process(trainer: TrainProvider, engine: InferProvider, *, directory: bool) -> str:
    """Why weights cannot travel where both are in one process; empty if they can. `directory`: `model_update_dir` is
    given."""
    if directory:
        return "model_update_dir is for trainers and engines in processes of their own"
    common = _common(trainer, engine)
    if "shared" in common:
        return ""
    return f"{trainer.name} brings its weights to {engine.name} by {_words(common)}, between processes of their own"


def _common(trainer: TrainProvider, engine: InferProvider) -> list[str]:
    offered = trainer.capabilities.weight_transports
    return [each for each in engine.capabilities.weight_transports if each in offered]


def _words(transports: Sequence[str]) -> str:
    return ", ".join(transports) or "none"
