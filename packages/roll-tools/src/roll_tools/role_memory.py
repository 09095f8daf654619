"""Memory of each role in each activity, from the strategies' formulas, the sizes of models and the numbers of a config.

Sizes come from the config or from local files. Nothing is downloaded, and no weights are loaded.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.config.loading import strategy_config
from roll_core.config.weight_transports import load_transport
from roll_core.data.modelscope import cached_copy, selects_modelscope
from roll_core.data.templates import control_tokens
from roll_core.data.tokenizers import tokens_of_template
from roll_core.errors import ModelError, PluginError, RollError, one_line
from roll_core.plugins.targets import load_target
from roll_core.runtime.cluster.placement import slots_of
from roll_core.runtime.workers.build import model_spec, offloads, provider_of
from roll_core.spec.config import EngineRewardConfig
from roll_core.spec.model import is_hub_id
from roll_core.spec.plan import DTYPE_BYTES, ComparedModel, MemoryEstimate, MemoryInput, MemoryItem
from roll_core.spec.providers import RewardProvider
from roll_core.spec.transport import WeightSizes
from roll_tools.sizes import model_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.plugins.registry import Registry
    from roll_core.spec.config import RunConfig, WorkerConfig
    from roll_core.spec.model import LoraSpec, ModelSize, ModelSpec
    from roll_core.spec.module_program import ModelLibrary
    from roll_core.spec.pipeline import RoleSpec
    from roll_core.spec.plan import Activity, MemorySaving
    from roll_core.spec.providers import InferProvider, TrainProvider
    from roll_tools.placement import Placement

SPECIAL_TOKENS = 2
"""Number of special tokens of tokenizers that ROLL trains (`data.tokenizers`)."""
BYTES = 256
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
    savings: tuple[MemorySaving, ...] = ()
    offloads: bool = False
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


def predict(
    config: RunConfig, registry: Registry, placement: Placement, slot_bytes: int | None
) -> tuple[RoleMemory, ...]:
    """Predict the memory of every role that has a model (all except rewards)."""
    return tuple(
        _role_memory(role, provider, config, registry, placement, slot_bytes)
        for role in placement.pipeline.roles
        if not isinstance(provider := provider_of(role.name, config, registry), RewardProvider)
    )


def _role_memory(
    role: RoleSpec,
    provider: TrainProvider | InferProvider,
    config: RunConfig,
    registry: Registry,
    placement: Placement,
    slot_bytes: int | None,
) -> RoleMemory:
    worker = config.roles()[role.name]
    owner = registry.owner(provider)
    memory = RoleMemory(
        role=role.name, kind=role.kind, strategy=provider.name, workers=len(placement.places[role.name])
    )
    try:
        question = _question(role, worker, config, registry, placement, provider, slot_bytes)
        formula = load_target(provider.memory, owner=owner) if provider.memory else _by_parameters
        try:
            estimate: MemoryEstimate = formula(question)
        except Exception as error:  # an error in a plugin's formula must end neither a plan nor a run
            raise PluginError(f"{owner}: {provider.memory} failed: {type(error).__name__}: {error}") from error
        buffers = _sync_buffers(role, config, placement, question)
    except RollError as error:
        return replace(memory, unknown=str(error))
    return replace(
        memory,
        parameters=question.model.parameters,
        uses=(*estimate.uses, *buffers),
        savings=estimate.savings,
        # An engine to which no role publishes could not load its weights again.
        offloads=offloads(role, config, registry, placement.platform)
        and (role.kind != "generate" or bool(role.model_from)),
    )


def _by_parameters(question: MemoryInput) -> MemoryEstimate:
    """Estimate of a strategy that gives none: the whole model on each rank, without what a pass computes."""
    size, trained = DTYPE_BYTES[question.dtype], question.trained_parameters
    states = [("weights", size, question.model.parameters + question.added_parameters)]
    states += [("gradients", 4, trained), ("optimizer", 8 if size == 4 else 12, trained)] if question.trains else []
    return MemoryEstimate(
        uses=tuple(
            MemoryItem(
                what=what,
                num_bytes=bytes_each * count,
                formula=f"by parameters alone, because the strategy gives no estimate: {bytes_each} × {count}",
                offloads=True,
            )
            for what, bytes_each, count in states
        )
    )


def _question(
    role: RoleSpec,
    worker: WorkerConfig,
    config: RunConfig,
    registry: Registry,
    placement: Placement,
    provider: TrainProvider | InferProvider,
    slot_bytes: int | None,
) -> MemoryInput:
    spec = model_spec(role, config, Path())
    size = _library_size(spec) if spec.library else size_of(spec, config)
    added = adapter_parameters(size, spec.lora) if spec.lora is not None else 0
    keys = worker.strategy_args.strategy_config if worker.strategy_args is not None else {}
    strategy = strategy_config(provider, keys, owner=registry.owner(provider))
    strategy.check_model_args(worker.model_args.model_dump(exclude_unset=True))
    places = placement.places[role.name]
    return MemoryInput(
        model=size,
        config=strategy,
        task=spec.task,
        dtype=spec.dtype,
        trains=role.kind == "train",
        trained_parameters=0 if role.kind != "train" else (added or size.parameters - size.frozen(spec.freeze)),
        averages=role.ema_decay is not None,
        added_parameters=added,
        quantized_parameters=_quantized_parameters(size, spec.lora) if role.kind == "train" else 0,
        gradient_checkpointing=spec.gradient_checkpointing,
        on_host=placement.platform.slots_share_cores or not any(place.slots for place in places),
        slot_bytes=slot_bytes,
        world_size=len(places),
        num_slots=max(1, *(len(slots_of([place])) for place in places)),
        image_tokens=_image_tokens(worker, config, size),
        trains_vision=size.vision is not None and spec.lora is None and "vision" not in spec.freeze,
        **_micro_batches(role, worker, config, placement, size),
        prompt_tokens=_prompt_tokens(worker, config),
        logprob_tokens=config.response_length if placement.pipeline.one_response else None,
        outputs=math.ceil(_outputs(worker, placement) / len(places)),
        random_weights=spec.random_init is not None,
        shares_weights=_borrows(role, config, placement),
        compared=_compared(role, config, placement),
    )


def _compared(role: RoleSpec, config: RunConfig, placement: Placement) -> ComparedModel | None:
    planned = placement.pipeline.comparisons.get(role.name)
    if planned is None:
        return None
    spec = model_spec(next(other for other in placement.pipeline.roles if other.name == planned.role), config, Path())
    return ComparedModel(hidden_size=size_of(spec, config).hidden_size, dtype=spec.dtype, num_arrays=planned.num_arrays)


def _sync_buffers(
    role: RoleSpec, config: RunConfig, placement: Placement, question: MemoryInput
) -> tuple[MemoryItem, ...]:
    """Buffers of the first weight sync in which the role takes part, as estimated by its transport."""
    link = next((link for link in placement.weights if role.name in link), None)
    if link is None:
        return ()
    size = DTYPE_BYTES[config.roles()[link[1]].model_args.dtype]
    sizes = WeightSizes(
        total_bytes=size
        * (question.model.parameters - question.model.frozen(config.roles()[link[0]].model_args.freeze)),
        largest_bytes=size * question.model.largest_matrix,
        bucket_bytes=config.model_update_buffer_size_mb << 20,
    )
    buffers = load_transport(placement.weights[link].provider).buffers(sizes)
    act: Activity = "publish" if role.name == link[0] else "receive"
    num_bytes = buffers.sender_bytes if role.name == link[0] else buffers.receiver_bytes
    if not num_bytes:
        return ()
    return (
        MemoryItem(what="sync buffers", num_bytes=num_bytes, formula=buffers.formula, during=(act,), on=buffers.on),
    )


def _prompt_tokens(worker: WorkerConfig, config: RunConfig) -> int:
    """Tokens of the longest prompt. That of an engine reward contains the policy's prompt and response."""
    return config.prompt_length + (config.response_length if isinstance(worker, EngineRewardConfig) else 0)


def _image_tokens(worker: WorkerConfig, config: RunConfig, size: ModelSize) -> int:
    """Most tokens of images in a prompt: all of it, or as many as `max_images` of `max_pixels` have."""
    most = 0
    for data in (role.data_args for role in config.roles().values()):
        if size.vision is None or data.images is None:
            continue
        tokens = _prompt_tokens(worker, config)
        if data.max_images and data.max_pixels and size.vision.pixels_per_token:
            tokens = min(tokens, data.max_images * -(-data.max_pixels // size.vision.pixels_per_token))
        most = max(most, tokens)
    return most


def _outputs(worker: WorkerConfig, placement: Placement) -> int:
    """Sequences that the role's workers sample or score in a phase."""
    return placement.pipeline.outputs * (worker.num_replies if isinstance(worker, EngineRewardConfig) else 1)


def _micro_batches(
    role: RoleSpec, worker: WorkerConfig, config: RunConfig, placement: Placement, size: ModelSize
) -> dict[str, int]:
    """Largest microbatches of a role, if every sequence is as long as the config allows."""
    args = worker.training_args
    max_new_tokens = worker.generating_args.max_new_tokens if role.kind == "generate" else None
    if isinstance(worker, EngineRewardConfig):
        max_new_tokens = worker.sampling_params().max_new_tokens
    longest = _prompt_tokens(worker, config) + (max_new_tokens or config.response_length)
    if role.library:
        longest = role.row_tokens
    if size.max_positions:
        longest = min(longest, size.max_positions)
    per_rank = args.per_device_train_batch_size * args.gradient_accumulation_steps
    train_sequences = args.per_device_train_batch_size
    if worker.use_dynamic_batching_in_train and worker.max_tokens_per_microbatch_in_train is not None:
        train_sequences = max(1, min(per_rank, worker.max_tokens_per_microbatch_in_train // longest))
    score_sequences = worker.infer_batch_size
    if worker.use_dynamic_batching_in_infer and worker.max_tokens_per_microbatch_in_infer is not None:
        score_sequences = max(1, worker.max_tokens_per_microbatch_in_infer // longest)
    replicas = max(1, len(placement.places[role.name]) // (worker.ranks_per_replica or 1))
    at_once = math.ceil(placement.pipeline.outputs / replicas) or worker.infer_batch_size
    return {
        "longest": longest,
        "train_sequences": train_sequences,
        "train_tokens": train_sequences * longest * role.calls_with_gradients,
        "num_micro_batches": math.ceil(per_rank / train_sequences),
        "score_tokens": min(score_sequences, at_once) * longest,
    }


def _borrows(role: RoleSpec, config: RunConfig, placement: Placement) -> bool:
    """True if an engine uses the trainer's tensors: in one process, on one device, with nothing to cast or merge."""
    choice = placement.weights.get((role.model_from, role.name))
    if choice is None or not choice.provider.in_process:
        return False
    slots = [slots_of(placement.places[name]) for name in (role.model_from, role.name)]
    if slots[0] != slots[1] and not placement.platform.slots_share_cores:
        return False
    trainer, engine = config.roles()[role.model_from], config.roles()[role.name]
    return trainer.model_args.dtype == engine.model_args.dtype and not trainer.model_args.trains_adapters


# -- sizes of models ---------------------------------------------------------------------------------------------------


def _model_folder(path: str, config: RunConfig) -> Path:
    """The model's directory, or its snapshot in the cache of the Hub or of ModelScope. Raises `ModelError` if neither
    exists."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if is_hub_id(path) and selects_modelscope(config.system_envs):
        if (cached := cached_copy("model", path)) is not None:
            return cached
        raise ModelError(
            f"{path} is neither a directory nor in the cache of ModelScope, and a plan downloads nothing: run"
            f" modelscope download --model {path} config.json"
        )
    if is_hub_id(path):
        from huggingface_hub import try_to_load_from_cache

        config_file = try_to_load_from_cache(path, "config.json")
        if isinstance(config_file, str):
            return Path(config_file).parent
        raise ModelError(
            f"{path} is neither a directory nor in the Hugging Face cache, and a plan downloads nothing: run"
            f" hf download {path} config.json, or set the model to a directory that has its config.json"
        )
    raise ModelError(f"directory {path} does not exist: start the run that writes it first")


def size_of(spec: ModelSpec, config: RunConfig) -> ModelSize:
    """Size of a model from `random_init` or from its local or cached `config.json`.

    Raises `ModelError` if the size cannot be determined from these.
    """
    if spec.random_init is not None:
        keys = dict(spec.random_init)
        if "vocab_size" not in keys:
            keys["vocab_size"] = _vocab_size(config)
        return model_size(keys, task=spec.task)
    folder = _model_folder(spec.path, config)
    file = folder / "config.json"
    try:
        keys = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    try:
        return model_size({**keys, **spec.config_overrides}, task=spec.task, folder=folder)
    except ModelError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise ModelError(f"{file} does not describe a model: {one_line(error)}") from error


def _library_size(spec: ModelSpec) -> ModelSize:
    library: ModelLibrary = load_target(spec.library, owner=f"model library {spec.library}")()
    return library.size(spec)


def _vocab_size(config: RunConfig) -> int:
    """Vocabulary size of the tokenizer that a run would train. Raises `ModelError` if it depends on data or a model."""
    tokenizer = config.tokenizer
    if tokenizer is None:
        raise ModelError(
            "random_init has no vocab_size, and a plan does not read stored tokenizers: set random_init.vocab_size"
        )
    if tokenizer.kind == "bpe":
        return tokenizer.vocab_size
    if tokenizer.kind == "char" and tokenizer.alphabet is None:
        raise ModelError("tokenizer.alphabet is missing, and a plan does not read the data: set tokenizer.alphabet")
    templates = {worker.data_args.template for worker in config.roles().values()}
    marks = {token for template in templates for token in control_tokens(template)}
    if tokenizer.chat_template is not None:
        marks |= set(tokens_of_template(Path(tokenizer.chat_template).expanduser().read_text(encoding="utf-8")))
    special = SPECIAL_TOKENS + len(marks)
    return special + (BYTES if tokenizer.kind == "byte" else len(set(tokenizer.alphabet or "")))


def adapter_parameters(size: ModelSize, lora: LoraSpec) -> int:
    """Number of LoRA parameters, plus those of `extra_modules`, which are trained in full.

    Each target matrix adds `rank × (inputs + outputs)`, and with DoRA its outputs. Those of fused experts are estimated
    for experts of equal width.
    """
    ends = {"embed_tokens": (size.vocab_size, size.hidden_size), "lm_head": (size.hidden_size, size.vocab_size)}
    count = 0
    for index, layer in enumerate(size.layers):
        for linear in layer.linears:
            path = f"model.layers.{index}.{linear.path}"
            if _is_target(path, lora.targets):
                count += lora.rank_of(path) * (linear.inputs + linear.outputs) + lora.use_dora * linear.outputs
        if lora.parameters and layer.experts and layer.chosen:
            # gate_up_proj and down_proj of experts of width w have rank × (2 × hidden + 3 × w) of 3 × hidden × w.
            width = layer.active_width / layer.chosen
            per_weight = 2 / (3 * width) + 1 / size.hidden_size
            count += math.ceil(lora.max_rank * layer.experts * per_weight * min(1, len(lora.parameters) / 2))
    if lora.targets != ("all-linear",):
        for name, (inputs, outputs) in ends.items():
            if _is_target(f"model.{name}", lora.targets):
                count += lora.rank_of(f"model.{name}") * (inputs + outputs) + lora.use_dora * outputs
    return count + sum(inputs * outputs for name, (inputs, outputs) in ends.items() if name in lora.extra_modules)


def _quantized_parameters(size: ModelSize, lora: LoraSpec | None) -> int:
    """Number of parameters of the layers that `load_in_4bit` quantizes."""
    if lora is None or not lora.load_in_4bit:
        return 0
    return sum(
        linear.inputs * linear.outputs
        for index, layer in enumerate(size.layers)
        for linear in layer.linears
        if not _is_target(f"model.layers.{index}.{linear.path}", lora.extra_modules)
    )


def _is_target(path: str, targets: str | Sequence[str]) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, path) is not None
    return tuple(targets) == ("all-linear",) or any(path == name or path.endswith(f".{name}") for name in targets)
