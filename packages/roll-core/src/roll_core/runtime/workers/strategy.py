"""What train and infer workers share: a provider's strategy, a worker's place among its peers, a vocabulary's size."""

from __future__ import annotations

import contextlib
from os.path import expanduser, isdir
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.plugins.requirements import check_requirements
from roll_core.plugins.targets import load_target, schema_of
from roll_core.spec.config import StrategyConfig
from roll_core.spec.model import MeshInfo, model_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.runtime.cluster.executors.base import Peers, Place
    from roll_core.spec.model import ModelSpec
    from roll_core.spec.providers import InferProvider, TrainProvider


def make_strategy(
    provider: TrainProvider | InferProvider, strategy_config: Mapping[str, Any], *arguments: Any, owner: str
) -> Any:
    """Construct a provider's strategy from the validated `strategy_config` and the strategy's other `arguments`.

    `owner` names the strategy and its package in errors. Raises `MissingRequirementError` if a package that the
    provider needs is not installed.
    """
    check_requirements(provider, owner=owner)
    schema = schema_of(provider, StrategyConfig, owner=owner)
    strategy_class = load_target(provider.target, owner=owner)
    return strategy_class(schema.model_validate(dict(strategy_config)), *arguments)


def mesh_info(role: str, place: Place, peers: Peers, *, backend: str, timeout_s: float) -> MeshInfo:
    """`MeshInfo` from the executor's place and peers. `timeout_s` is the timeout of collectives."""
    return MeshInfo(
        role=role,
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_indices[0] if place.local_indices else 0,
        device=place.device,
        backend=backend,
        master_addr=peers.master_addr,
        master_port=peers.master_port,
        secret=peers.secret,
        num_slots=max(1, len(place.slots)),
        num_threads=place.num_threads,
        timeout_s=timeout_s,
    )


def model_vocab_size(model: ModelSpec) -> int | None:
    """Vocabulary size of a model whose config has it and is on this host; None otherwise."""
    path = model.path
    if path and not isdir(expanduser(path)):
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        with contextlib.suppress(HFValidationError):
            cached = try_to_load_from_cache(path, "config.json")
            path = str(Path(cached).parent) if isinstance(cached, str) else ""
    model_args = {
        "random_init": None if model.random_init is None else dict(model.random_init),
        "model_config_kwargs": dict(model.config_overrides),
    }
    keys = model_keys(model_args, path)
    text = keys.get("text_config")
    vocab_size = keys.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return vocab_size if isinstance(vocab_size, int) else None
