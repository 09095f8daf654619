"""Memory of each role in each activity, from the strategies' formulas and the numbers of a config."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.config.loading import strategy_config
from roll_core.config.weight_transports import load_transport
from roll_core.errors import PluginError, RollError
from roll_core.plugins.targets import load_target
from roll_core.runtime.planning.models import adapter_parameters, size_of
from roll_core.runtime.workers.build import model_spec, offloads, provider_of
from roll_core.spec.plan import DTYPE_BYTES, MemoryInput, MemoryItem
from roll_core.spec.transport import WeightSizes

if TYPE_CHECKING:
    from roll_core.plugins.registry import Registry
    from roll_core.runtime.planning.placing import Placing
    from roll_core.spec.config import RunConfig, WorkerConfig
    from roll_core.spec.pipeline import RoleSpec
    from roll_core.spec.plan import Activity, MemoryEstimate, MemorySaving, ModelSize
    from roll_core.spec.providers import InferProvider, TrainProvider

ACTS: dict[str, tuple[Activity, ...]] = {
    "train": ("start", "score", "publish", "backward", "step", "save"),
    "score": ("start", "score"),
    "generate": ("start", "receive", "generate"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """Memory of one worker of a role, the one that uses most."""

    role: str
    kind: str
    strategy: str
    workers: int
    parameters: int = 0
    uses: tuple[MemoryItem, ...] = ()
    levers: tuple[MemorySaving, ...] = ()
    makes_room: bool = False
    """True if the role offloads or frees memory while other roles use its slots."""
    unknown: str = ""
    """Reason why the memory is unknown; empty if it is known."""

    def taken(self, act: Activity) -> list[MemoryItem]:
        """Uses of memory during an activity."""
        return [use for use in self.uses if not use.during or act in use.during]

    def num_bytes(self, act: Activity, on: str = "") -> int:
        """Total bytes during an activity, on `device` or `host`, or on both if `on` is empty."""
        return sum(use.num_bytes for use in self.taken(act) if not on or use.on == on)

    @property
    def acts(self) -> tuple[Activity, ...]:
        """Activities of a role of this kind."""
        return ACTS.get(self.kind, ())


def predict(config: RunConfig, registry: Registry, placing: Placing, slot_bytes: int | None) -> tuple[RoleMemory, ...]:
    """Predict the memory of every role that has a model (all except rewards)."""
    return tuple(
        _role_memory(role, config, registry, placing, slot_bytes)
        for role in placing.pipeline.roles
        if role.kind != "reward"
    )


def _role_memory(
    role: RoleSpec, config: RunConfig, registry: Registry, placing: Placing, slot_bytes: int | None
) -> RoleMemory:
    worker = config.roles()[role.name]
    provider = provider_of(role, worker, registry)
    found = RoleMemory(role=role.name, kind=role.kind, strategy=provider.name, workers=len(placing.places[role.name]))
    if not provider.memory:
        return _replace(found, unknown=f"{registry.owner(provider)} does not say how much memory it takes")
    try:
        question = _question(role, worker, config, registry, placing, provider, slot_bytes)
        answer = _ask(provider, question, owner=registry.owner(provider))
    except RollError as error:
        return _replace(found, unknown=str(error))
    return RoleMemory(
        role=found.role,
        kind=found.kind,
        strategy=found.strategy,
        workers=found.workers,
        parameters=question.model.parameters,
        uses=(*answer.uses, *_sync_buffers(role, config, placing, question)),
        levers=answer.levers,
        makes_room=offloads(role, config, registry, placing.platform),
    )


def _ask(provider: TrainProvider | InferProvider, question: MemoryInput, *, owner: str) -> MemoryEstimate:
    formula = load_target(provider.memory, owner=owner)
    try:
        answer: MemoryEstimate = formula(question)
    except Exception as error:  # an error in a plugin's formula must end neither a plan nor a run
        raise PluginError(f"{owner}: {provider.memory} failed: {type(error).__name__}: {error}") from error
    return answer


def _replace(found: RoleMemory, *, unknown: str) -> RoleMemory:
    return RoleMemory(role=found.role, kind=found.kind, strategy=found.strategy, workers=found.workers, unknown=unknown)


def _question(
    role: RoleSpec,
    worker: WorkerConfig,
    config: RunConfig,
    registry: Registry,
    placing: Placing,
    provider: TrainProvider | InferProvider,
    slot_bytes: int | None,
) -> MemoryInput:
    spec = model_spec(role, config, Path())
    size = size_of(spec, config)
    added = adapter_parameters(size, spec.lora) if spec.lora is not None else 0
    keys = worker.strategy_args.strategy_config if worker.strategy_args is not None else {}
    strategy = strategy_config(provider, keys, owner=registry.owner(provider))
    strategy.check_model_args(worker.model_args.model_dump(exclude_unset=True))
    batch = _Batches(role, worker, config, placing, size)
    places = placing.places[role.name]
    return MemoryInput(
        model=size,
        config=strategy,
        task=role.task,
        dtype=spec.dtype,
        trains=role.kind == "train",
        trained_parameters=0 if role.kind != "train" else (added or size.parameters),
        added_parameters=added,
        gradient_checkpointing=spec.gradient_checkpointing,
        on_host=placing.platform.slots_share_cores or not any(place.slots for place in places),
        slot_bytes=slot_bytes,
        world_size=len(places),
        num_slots=max(1, *(len(place.slots) for place in places)),
        train_tokens=batch.train_tokens,
        train_sequences=batch.train_sequences,
        num_micro_batches=batch.num_micro_batches,
        score_tokens=batch.score_tokens,
        longest=batch.longest,
        prompt_tokens=config.prompt_length,
        outputs=math.ceil(placing.pipeline.outputs / len(places)),
        random_weights=spec.random_init is not None,
        shares_weights=_borrows(role, config, placing),
    )


def _sync_buffers(role: RoleSpec, config: RunConfig, placing: Placing, question: MemoryInput) -> tuple[MemoryItem, ...]:
    """Buffers of the first weight sync in which the role takes part, as estimated by its transport."""
    link = next((link for link in placing.weights if role.name in link), None)
    if link is None:
        return ()
    size = DTYPE_BYTES[config.roles()[link[1]].model_args.dtype]
    sizes = WeightSizes(
        total_bytes=size * question.model.parameters,
        largest_bytes=size * question.model.largest_matrix,
        bucket_bytes=config.model_update_buffer_size_mb << 20,
    )
    buffers = load_transport(placing.weights[link].provider).buffers(sizes)
    act: Activity = "publish" if role.name == link[0] else "receive"
    num_bytes = buffers.sender_bytes if role.name == link[0] else buffers.receiver_bytes
    if not num_bytes:
        return ()
    return (
        MemoryItem(what="sync buffers", num_bytes=num_bytes, formula=buffers.formula, during=(act,), on=buffers.on),
    )


class _Batches:
    """Largest microbatches of a role, assuming that every sequence is as long as the config allows."""

    def __init__(
        self, role: RoleSpec, worker: WorkerConfig, config: RunConfig, placing: Placing, size: ModelSize
    ) -> None:
        args = worker.training_args
        answer = worker.generating_args.max_new_tokens if role.kind == "generate" else None
        self.longest = config.prompt_length + (answer or config.response_length)
        if size.max_positions:
            self.longest = min(self.longest, size.max_positions)
        per_rank = args.per_device_train_batch_size * args.gradient_accumulation_steps
        budget = worker.max_tokens_per_microbatch_in_train if worker.use_dynamic_batching_in_train else None
        if budget is None:
            self.train_sequences = args.per_device_train_batch_size
        else:
            self.train_sequences = max(1, min(per_rank, budget // self.longest))
        self.train_tokens = self.train_sequences * self.longest
        self.num_micro_batches = math.ceil(per_rank / self.train_sequences)
        replicas = max(1, len(placing.places[role.name]) // (worker.ranks_per_replica or 1))
        at_once = math.ceil(placing.pipeline.outputs / replicas) or worker.infer_batch_size
        budget = worker.max_tokens_per_microbatch_in_infer if worker.use_dynamic_batching_in_infer else None
        sequences = worker.infer_batch_size if budget is None else max(1, budget // self.longest)
        self.score_tokens = min(sequences, at_once) * self.longest


def _borrows(role: RoleSpec, config: RunConfig, placing: Placing) -> bool:
    """True if an engine uses the trainer's own tensors: in one process, with nothing to cast or merge."""
    choice = placing.weights.get((role.model_from, role.name))
    if choice is None or not choice.provider.in_process:
        return False
    trainer, engine = config.roles()[role.model_from], config.roles()[role.name]
    return trainer.model_args.dtype == engine.model_args.dtype and not trainer.model_args.trains_adapters
