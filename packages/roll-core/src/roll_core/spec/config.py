"""The configuration schema shared by all pipelines, with ROLL's key names.

A pipeline's schema subclasses `RunConfig`, a strategy's `StrategyConfig`, a reward's `RewardConfig`. All schemas are
frozen and reject unknown keys. Validation has no side effects: values are applied to the machine when a run starts.
Cross-field rules belong in `model_validator`s that raise `ValueError` and spell out the arithmetic.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping  # noqa: TC003 - pydantic reads the annotations of class variables
from dataclasses import dataclass
from functools import cache
from math import prod
from os.path import expanduser
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from roll_core.field_docs import document_fields
from roll_core.spec.devices import parse_device_mapping
from roll_core.spec.platform import EnvVar, RoleKind  # noqa: TC001 - pydantic reads the annotation

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Self

    from roll_core.spec.providers import ModelParallelism, Provider
    from roll_core.types import MediaKind, SamplingParams

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["fp32", "bf16", "fp16"]
AUTO = "auto"
"""Value of `executor` that chooses among the installed executors."""
WeightFormat = Literal["dtype", "fp8", "fp8_per_block"]
"""Format in which an engine receives weights. `dtype`: all tensors in its `model_args.dtype`. `fp8`: the layers'
matrices in E4M3 with one scale per row, all other tensors in that dtype. `fp8_per_block`: the same with one scale per
128 × 128 block, for experts, too."""


def _numbers_as_text(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        name: str(entry) if isinstance(entry, (int, float)) and not isinstance(entry, bool) else entry
        for name, entry in value.items()
    }


EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.()-]*$")]
EnvValue = Annotated[str, Field(pattern=r"^[^\x00]*$")]
EnvVars = Annotated[dict[EnvName, EnvValue], BeforeValidator(_numbers_as_text)]
"""Environment variables. Numbers are converted to text."""
Seed = Annotated[int, Field(ge=0, lt=2**64)]
MAX_NAME_BYTES = 255
"""Maximum length of a directory name on common file systems."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Marks a key that is read only if another key of its block is set: `Annotated[float, Needs("use_kl_loss")]`."""

    condition: str
    """Key or property of the block. The marked key is read if its value is true."""
    values: frozenset[str] = frozenset()
    """The marked key is read if the condition is one of these, or a list with one of them."""
    strict: bool = False
    """Refuse the key without the condition. Otherwise `check` warns about it."""
    remedy: str = ""
    """What to do so that the key is read. Default: `set <condition>`."""

    @property
    def meaning(self) -> str:
        """The condition, as in `loss_type kto or dpo`."""
        return f"{self.condition} {' or '.join(sorted(self.values))}".strip()

    def is_met(self, block: Config) -> bool:
        """True if the marked key of this block is read."""
        value = getattr(block, self.condition)
        if not self.values:
            return bool(value)
        return not self.values.isdisjoint(value if isinstance(value, (list, tuple)) else [value])


@dataclass(frozen=True, slots=True)
class MergedOnly:
    """Marks a key of `model_args` with which no engine loads the adapters unmerged."""

    reason: str


class Config(BaseModel):
    """Base of every schema: frozen, rejects unknown keys, does not convert strings to numbers."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        protected_namespaces=(),
        validate_default=True,
        defer_build=True,  # a command builds the validators of the schemas it reads
    )

    group_needs: ClassVar[Mapping[type[Config], tuple[Needs, ...]]] = {}
    """Bases whose keys are read only on conditions, with the conditions."""
    switches: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Accepted spellings of ROLL with a switch beside values: for each switch, its keys and their values if they are
    left out. `false` removes the keys."""

    @model_validator(mode="before")
    @classmethod
    def _apply_switches(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for switch in cls.switches.keys() & value.keys():
                if isinstance(value[switch], bool):
                    keys = cls.switches[switch]
                    written = {key: entry for key, entry in value.items() if key != switch}
                    value = (
                        {**keys, **written}
                        if value[switch]
                        else {key: written[key] for key in written if key not in keys}
                    )
        return value

    @model_validator(mode="after")
    def _keys_are_read(self) -> Self:
        for name, message in self.unread_keys(strict=True).items():
            raise invalid(message, getattr(self, name), name)
        return self

    def unread_keys(self, *, strict: bool = False) -> dict[str, str]:
        """Keys that nothing reads, each with what to do. Those with the value of their default do not count, because a
        stored config has all keys."""
        unread: dict[str, str] = {}
        for name, needs in _needs(type(self)):
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if needs.strict == strict and getattr(self, name) != default and not needs.is_met(self):
                unread[name] = f"is not read: {needs.remedy or f'set {needs.meaning}'}, or remove this key"
        return unread


def invalid(message: str, value: Any, *path: str) -> ValidationError:
    """Error at a key below the field, or in the schema, whose validator raises it."""
    problem = PydanticCustomError("value_error", "{message}", {"message": message})  # braces in the message are text
    return ValidationError.from_exception_data("config", [InitErrorDetails(type=problem, loc=path, input=value)])


@cache
def _needs(schema: type[Config]) -> list[tuple[str, Needs]]:
    """Conditions of the keys of a schema, in the order of the keys."""
    by_key = {name: needs for group, needs in schema.group_needs.items() for name in group.model_fields}
    return [
        (name, needs)
        for name, field in schema.model_fields.items()
        for needs in (
            *(annotation for annotation in field.metadata if isinstance(annotation, Needs)),
            *by_key.get(name, ()),
        )
    ]


NAMES = re.compile(r"[\w.\s,-]*")
"""Matches module names separated by commas. Text with other characters is a regular expression."""
EMBEDDINGS = frozenset({"embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in"})
"""Names of the input embedding in transformers' models."""


def _names(value: str | list[str] | None) -> tuple[str, ...]:
    listed = value.split(",") if isinstance(value, str) else value or ()
    return tuple(name.strip() for name in listed if name.strip())


class StrategyConfig(Config):
    """Base of the schemas that strategies provide for `strategy_args.strategy_config`."""

    def slots_per_worker(self) -> int | None:
        """Slots per worker, if the configuration determines it (tensor × pipeline parallel size); otherwise None."""
        return None

    def several_nodes_problem(self) -> str:
        """Infer strategies with a follower: reason why the slots of a worker must be on one node; empty if they may be
        on several."""
        return ""

    def serves_adapters(self) -> bool:
        """Infer strategies: True if the engine loads trained adapters separately instead of weights with merged
        adapters."""
        return False

    def weight_format(self) -> WeightFormat:
        """Infer strategies: the format in which the engine receives weights. `roll_core.spec.fp8` defines the
        fp8 format; the digests in receipts are those of the fp8 tensors."""
        return "dtype"

    def worker_environment(self) -> tuple[EnvVar, ...]:
        """Environment variables for the strategy's workers, in addition to the platform's, which they override. A value
        in the driver's environment takes precedence unless the variable is required. `system_envs` overrides both."""
        return ()

    def parallel_sizes(self) -> Mapping[ModelParallelism, int]:
        """Train strategies: configured size of each kind of model parallelism, for example `{"tensor_parallel": 2}`.
        `check` rejects a size above 1 of a kind that the provider does not declare."""
        return {}

    def ranks_per_replica(self) -> int:
        """Train strategies: number of ranks that hold one replica of the model, a divisor of the role's number of
        ranks. The product of `parallel_sizes` without `expert_parallel`, which reuses the same ranks."""
        return prod(size for kind, size in self.parallel_sizes().items() if kind != "expert_parallel")

    def replica_arithmetic(self) -> str:
        """`ranks_per_replica` as a product spelled out by config keys, for error messages."""
        return str(self.ranks_per_replica())

    def check_model(self, keys: Mapping[str, Any]) -> None:
        """Raise `ValueError` if the model cannot be partitioned or computed as configured; spell out the arithmetic.

        Not called for engines that receive no weights. `keys` are the keys of its transformers config that are known
        before anything is loaded.
        """

    def check_architecture(self, keys: Mapping[str, Any]) -> str | None:
        """Raise `ValueError` if the installed packages do not support the model's architecture. `keys` as for
        `check_model`. Return a warning for one that may not work, for example because it was never tried; else None.

        Of a role with its own `environment`, whose versions are unknown here, an error becomes a warning. Not called by
        `check --no-files`. Reads the packages' files instead of importing them; `roll_modeling.model_table` helps.
        """
        return None

    def check_adapters(self, keys: Mapping[str, Any], model_args: Mapping[str, Any]) -> str | None:
        """Train strategies: as `check_architecture`, for adapters on a model of this architecture. Called after it if
        the role trains adapters (LoRA). `model_args` are the mapping as written."""
        return None

    def check_scores(self, keys: Mapping[str, Any]) -> str | None:
        """Train strategies: as `check_architecture`, for a reward model of this architecture. Called after it if the
        role trains one."""
        return None

    def key_problems(self, model_type: str, overrides: Mapping[str, Any]) -> Mapping[str, str]:
        """Mistakes in `overrides`, keys of a transformers config that the config sets, each with its reason. Called
        where `check_architecture` is."""
        return {}

    def check_positions(self, keys: Mapping[str, Any], prompt: int, response: int) -> None:
        """Raise `ValueError`, with the arithmetic, if prompt and response together exceed the positions that the model
        can compute. Called where `check_architecture` is; `keys` as for `check_model`."""

    def check_images(self, keys: Mapping[str, Any], kind: MediaKind, prompt: int) -> None:
        """Infer strategies: raise `ValueError` if the engine does not read images, or videos, with this model, or none
        that fill a prompt of `prompt` tokens. Called for each kind that rows have and the provider reads; `keys` as for
        `check_model`."""

    def check_lengths(self, prompt: int, response: int) -> None:
        """Infer strategies: raise `ValueError`, with the arithmetic, if prompt and response together exceed the
        engine's maximum sequence length. Both are numbers of tokens."""

    def check_model_args(self, model_args: Mapping[str, Any]) -> None:
        """Train strategies: raise `ValueError` if keys of this config conflict with the role's `model_args`, or have no
        effect next to them. `model_args` are the mapping as written."""

    def check_router_replay(self, keys: Mapping[str, Any]) -> None:
        """Strategies with router replay: raise `ValueError`, with the requirements, if the strategy cannot return or
        replay the experts of this model. `keys` as for `check_model`; empty if nothing is known."""


OF_ADAPTERS = Needs("reads_adapter_keys", strict=True, remedy="set lora_target, which enables LoRA")


class ModelArguments(Config):
    """`model_args`: which model a role uses, and how it is computed."""

    model_name_or_path: str | None = None
    """Directory or hub id. Default: the pipeline's `pretrain`, unless `random_init` is set."""
    random_init: dict[str, Any] | None = None
    """Use a model with random weights. Keys of a transformers config, including `model_type`."""
    model_config_kwargs: dict[str, Any] = {}
    """Keys to override in the loaded model's config."""
    dtype: Dtype = "bf16"
    """Dtype of the computation."""
    attn_implementation: str = "auto"
    """`auto` selects the fastest exact implementation available. Otherwise a name that transformers knows."""
    disable_gradient_checkpointing: bool = False
    """Keep all activations: faster, but uses more memory."""
    trust_remote_code: bool = False
    """Run Python code that is stored with the model."""
    freeze: list[Literal["vision", "projector"]] = ["vision", "projector"]
    """Parts of a model with images that are not trained: the encoder of images, and the layers between it and the
    language model."""
    lora_target: str | list[str] | None = None
    """Train low-rank adapters (LoRA) on these linear layers and embeddings instead of the model's own weights. Names,
    `all-linear`, or a regular expression that matches whole paths."""
    lora_rank: Annotated[NonNegativeInt | None, OF_ADAPTERS] = 8
    """Rank of the adapters. 0 trains the whole model, whatever `lora_target` is."""
    lora_alpha: Annotated[PositiveFloat | None, OF_ADAPTERS] = None
    """The adapters' output is scaled by `lora_alpha / lora_rank`. Default: twice `lora_rank`."""
    rank_pattern: Annotated[dict[str, PositiveInt], OF_ADAPTERS] = {}
    """Ranks of some targets, by the end of their paths, for example `{q_proj: 32, 'layers.0.mlp.up_proj': 4}`. Keys may
    be regular expressions."""
    alpha_pattern: Annotated[dict[str, PositiveFloat], OF_ADAPTERS] = {}
    """`lora_alpha` of some targets, by keys as in `rank_pattern`."""
    use_rslora: Annotated[bool, OF_ADAPTERS] = False
    """Scale the adapters' output by `lora_alpha / √lora_rank` (rsLoRA)."""
    use_dora: Annotated[bool, OF_ADAPTERS, MergedOnly("also trains norms of whole weights")] = False
    """Train the norm of each row of the adapted weights too (DoRA)."""
    additional_target: Annotated[str | list[str] | None, OF_ADAPTERS, MergedOnly("also trains whole weights")] = None
    """Modules that are trained in full next to the adapters (`modules_to_save` of peft). Value and reward heads always
    are."""
    target_parameters: Annotated[str | list[str] | None, OF_ADAPTERS, MergedOnly("adapts parameters of experts")] = None
    """Parameters with adapters that belong to no linear layer: the fused tensors of experts, for example
    `[experts.gate_up_proj, experts.down_proj]`."""
    load_in_4bit: Annotated[
        bool, OF_ADAPTERS, MergedOnly("trains adapters of quantized weights, and the engine's are not quantized")
    ] = False
    """Store the frozen linear layers in 4 bits (NF4), which bitsandbytes dequantizes in each pass (QLoRA). Embeddings,
    output layer, norms, routers and fused experts keep `dtype`."""
    lora_export: Annotated[Literal["merged", "adapter"], OF_ADAPTERS] = "merged"
    """Content of `export/`: `merged`, the whole model with merged adapters; or `adapter`, only the adapters in peft's
    format."""

    @property
    def reads_adapter_keys(self) -> bool:
        """True if adapters are described, or disabled by their rank 0."""
        return self.lora_target is not None or self.lora_rank == 0

    @classmethod
    def merged_only(cls) -> dict[str, str]:
        """Keys whose adapters no engine loads unmerged, with the reason."""
        return {
            name: mark.reason
            for name, field in cls.model_fields.items()
            for mark in field.metadata
            if isinstance(mark, MergedOnly)
        }

    @property
    def trains_adapters(self) -> bool:
        """True if LoRA is enabled."""
        return self.lora_target is not None and bool(self.lora_rank)

    def lora_targets(self) -> str | tuple[str, ...]:
        """Module names, or a regular expression that matches whole paths."""
        if isinstance(self.lora_target, str) and not NAMES.fullmatch(self.lora_target):
            return self.lora_target
        return _names(self.lora_target)

    def extra_modules(self) -> tuple[str, ...]:
        """Module names of `additional_target`."""
        return _names(self.additional_target)

    def parameter_targets(self) -> tuple[str, ...]:
        """Parameter names of `target_parameters`."""
        return _names(self.target_parameters)

    @model_validator(mode="after")
    def _adapters_make_sense(self) -> ModelArguments:
        if self.lora_target is None:
            return self
        targets = self.lora_targets()
        if not targets:
            raise ValueError("lora_target is empty, expected module names, or all-linear for every linear layer")
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except re.error as error:
                raise ValueError(f"lora_target has neither names nor a valid regular expression: {error}") from error
        elif "all-linear" in targets and len(targets) > 1:
            raise ValueError("lora_target: all-linear includes every linear layer; remove the other names")
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, key):
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"{key}: {pattern!r} is not a valid regular expression: {error}") from error
        if self.use_dora and self.target_parameters:
            raise ValueError("use_dora does not apply to target_parameters, which are no linear layers; remove one")
        if self.use_dora and self.load_in_4bit:
            raise ValueError("use_dora needs the norms of unquantized weights; remove it, or load_in_4bit")
        if self.lora_export == "adapter" and self.random_init is not None:
            raise ValueError("lora_export: adapter needs a base model that can be loaded, not random_init; use merged")
        return self

    @field_validator("random_init")
    @classmethod
    def _model_type_is_a_name(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        model_type = (value or {}).get("model_type", "")
        if not isinstance(model_type, str):
            raise ValueError(f"found model_type {model_type!r}, expected a name, for example qwen3")
        return value

    def path(self, pretrain: str | None) -> str:
        """Directory or hub id of the model: its own, or the run's `pretrain`; empty for random weights."""
        return self.model_name_or_path or ("" if self.random_init else pretrain or "")

    @model_validator(mode="after")
    def _one_source(self) -> ModelArguments:
        if self.model_name_or_path is not None and self.random_init is not None:
            raise ValueError("model_name_or_path and random_init exclude each other: remove one of them")
        if self.random_init is not None and not {"model_type", "_class_name"} & self.random_init.keys():
            raise ValueError("random_init needs a model_type, for example qwen3, or the _class_name of a flow model")
        return self


class TrainingArguments(Config):
    """`training_args`: optimizer, schedule and batch sizes."""

    learning_rate: NonNegativeFloat = 5e-5
    """Peak learning rate. Other defaults: 1e-6 for the policies of rlvr and agentic, 1e-5 for their critics, 1e-5 in
    distill, 1e-6 in preference."""
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr", "polynomial", "inverse_sqrt"
    ] = "linear"
    """Learning rate schedule after warm-up; names as in transformers."""
    lr_scheduler_kwargs: dict[str, FiniteFloat] = {}
    """Further arguments of the schedule, for example `min_lr_rate`."""
    optimizer: str = "adamw"
    """Optimizer: `adamw`, `sgd`, `muon`, one of a plugin, or a function of your own, `my_module:function`."""
    optimizer_kwargs: dict[str, Any] = {}
    """Options of the optimizer, other than the keys of AdamW below."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW weight decay. Not applied to biases and norms."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW β₁, the decay of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW β₂, the decay of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW ε, added to the denominator."""
    per_device_train_batch_size: PositiveInt = 8
    """Sequences per microbatch on one data-parallel rank."""
    gradient_accumulation_steps: PositiveInt = 1
    """Microbatches per optimizer step. If rlvr, agentic or distill have neither this key nor
    `per_device_train_batch_size`, a batch is one optimizer step of microbatches of at most 8."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises from 0. As in transformers' schedules, the first one has
    learning rate 0. Takes precedence over `warmup_ratio`."""
    warmup_ratio: Fraction = 0.0
    """Warm-up as a fraction of all optimizer steps."""
    num_train_epochs: PositiveFloat = 1.0
    """Passes over the data. Used only if `max_steps` is not set. rlvr, agentic and distill have no passes over the data
    and refuse it: their `max_steps` counts batches."""


OF_IMAGES = Needs("reads_images", remedy="set images or videos, the column with the images or videos")
OF_VIDEOS = Needs("reads_videos", remedy="set videos, the column with the videos")


RENDERER_ARGUMENTS = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "processor_kwargs",
    }
)
"""Parameters of transformers' `apply_chat_template`, and variables that it sets."""


def _of_the_template(value: dict[str, Any]) -> dict[str, Any]:
    if reserved := RENDERER_ARGUMENTS & value.keys():
        raise ValueError(f"found {min(reserved)}, which each rendering sets: only variables of the template itself")
    return value


COLUMN_FILTERS = ("from_json", "shuffled")
"""Filters of the templates in `data_args.columns` besides Jinja's own, see `roll_core.data.columns`."""


class DataArguments(Config):
    """`data_args`: data files, and the meaning of their columns."""

    file_name: str | list[str] | None = None
    """One or more files with one row per line or record. Names are literal (no globs) and relative to the working
    directory. `hf://OWNER/NAME[/SUBSET][?split=SPLIT&revision=REVISION]` is a data set of the Hugging Face Hub."""
    dataset_type: Literal["auto", "json", "parquet", "csv", "arrow"] = "auto"
    """File format. `auto` uses the file's suffix."""
    columns: Annotated[dict[str, str], Field(examples=[{"ground_truth": "{{ answer.split('####')[1] | trim }}"}])] = {}
    """Columns that Jinja templates compute from the other columns of a row. An expression alone keeps the type of its
    value; other templates are text."""
    prompt: str = "prompt"
    """Column with the prompt's text."""
    query: str | None = None
    """Column with text that follows the prompt's text on a new line, such as `input` of Alpaca's rows. It may be empty.
    """
    response: str = "response"
    """Column with the response's text (sft, and labelled responses of preference)."""
    chosen: str = "chosen"
    """Column with the better response of a pair (preference, reward_model): text, or a list of chat messages."""
    rejected: str = "rejected"
    """Column with the worse response of a pair."""
    label: str = "label"
    """Column that is true for desirable and false for undesirable responses (`loss_type: kto`)."""
    messages: str | None = None
    """Column with a list of chat messages, or its JSON. Replaces prompt and response."""
    system: str | None = None
    """Column with a system message."""
    images: str | None = None
    """Column with the images of a row: one or a list, in the order of their places (`<image>`) in the text. Without
    places they come before the first message's text. Images may also be content parts of `messages`."""
    videos: str | None = None
    """Column with the videos of a row: one or a list, in the order of their places (`<video>`) in the text. A video is
    a file, a directory of frames, or a list of them. Videos may also be content parts of `messages`."""
    image_roots: Annotated[list[str], OF_IMAGES] = []
    """Directories from which images and videos are read. Default: the directory of the data file. Relative paths begin
    there."""
    allow_urls: Annotated[bool, OF_IMAGES] = False
    """Fetch images and videos that rows name by an http or https URL, once: a cache keeps them for later runs. Any
    address is fetched, also one of your own network: set it only for rows that you trust."""
    max_pixels: Annotated[PositiveInt | None, OF_IMAGES] = None
    """Larger images and frames of videos are reduced to this number of pixels, or dropped (`oversized_images`).
    Default: only the model's processor reduces them."""
    min_pixels: Annotated[PositiveInt | None, OF_IMAGES] = None
    """Smaller images and frames of videos are enlarged to this number of pixels. Default: only the model's processor
    enlarges them."""
    max_images: Annotated[PositiveInt | None, OF_IMAGES] = None
    """Rows with more images are dropped. Default: no maximum."""
    max_videos: Annotated[PositiveInt | None, OF_VIDEOS] = None
    """Rows with more videos are dropped. Default: no maximum."""
    max_frames: Annotated[Annotated[int, Field(ge=2)] | None, OF_VIDEOS] = None
    """If more frames of a video would be sampled, sample at most this number, or drop the row (`oversized_images`).
    Default: the maximum of the model's processor."""
    max_video_pixels: Annotated[PositiveInt | None, OF_VIDEOS] = None
    """If the sampled frames of a video have more pixels together, reduce each frame, not below `min_pixels`, or drop
    the row (`oversized_images`). Default: no maximum."""
    video_fps: Annotated[PositiveFloat | None, OF_VIDEOS] = None
    """Frames that are sampled from a second of a video, and frames per second of lists of frames. Default: those of the
    model's processor, or 2."""
    oversized_images: Annotated[Literal["resize", "drop"], Needs("limits_size")] = "resize"
    """Images with more than `max_pixels` and videos with more than `max_frames` or `max_video_pixels`: `resize` reduces
    them, `drop` drops the row."""
    broken_images: Annotated[Literal["error", "drop"], OF_IMAGES] = "error"
    """Images and videos that cannot be read: `error` ends the run, `drop` drops the row. Dropped rows are counted."""
    tools: str | None = None
    """Column with the schemas of tools that the chat template describes to the model: a list, or its JSON, in the
    format of OpenAI's API."""
    tag: str = "tag"
    """Column with the domain."""
    id: str = "id"
    """Column with the row's id. Default: the row number."""
    template: Literal["native", "plain", "chatml", "qwen", "llama3"] = "native"
    """Chat template. `native`: the tokenizer's own; if it has none, prompts are used as they are and chats are an
    error. Otherwise a name from the docs. A named template is exported with the tokenizer."""
    chat_template_kwargs: Annotated[
        dict[str, Any], AfterValidator(_of_the_template), Needs("template", values=frozenset({"native"}), strict=True)
    ] = {}
    """Variables of the tokenizer's chat template, for example `enable_thinking: false`. Every rendering has them:
    rows, conversations with environments, and requests of agents."""
    domain_interleave_probs: dict[str, NonNegativeFloat] = {}
    """Fraction of each domain in a batch, by tag or by the key in `rewards` that scores its tags. Default: the
    fractions in the data. Remainders carry over: a domain with half a prompt per batch is in every second batch."""
    domain_interleave_schedule: dict[NonNegativeInt, dict[str, NonNegativeFloat]] = {}
    """Fractions of the domains in a batch by step, linear between these steps. Replaces `domain_interleave_probs`."""
    max_samples: PositiveInt | None = None
    """Use only the first `max_samples` rows."""

    @property
    def reads_images(self) -> bool:
        """True if rows may have images or videos: in a column, or in the content of messages."""
        return self.images is not None or self.reads_videos

    @property
    def reads_videos(self) -> bool:
        """True if rows may have videos: in a column, or in the content of messages."""
        return self.videos is not None or self.messages is not None

    @property
    def limits_size(self) -> bool:
        """True if images or videos may be too large."""
        return any(limit is not None for limit in (self.max_pixels, self.max_frames, self.max_video_pixels))

    @model_validator(mode="after")
    def _pixels_have_a_range(self) -> Self:
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels is {self.min_pixels}, more than max_pixels {self.max_pixels}")
        return self

    @model_validator(mode="after")
    def _shares_are_given_once(self) -> Self:
        if self.domain_interleave_schedule and self.domain_interleave_probs:
            raise ValueError("domain_interleave_schedule replaces domain_interleave_probs: remove one of them")
        for step, shares in self.domain_interleave_schedule.items():
            if not any(shares.values()):
                raise ValueError(
                    f"domain_interleave_schedule has no share at step {step}: at least one domain needs one"
                )
        return self

    @field_validator("columns")
    @classmethod
    def _columns_are_templates(cls, columns: dict[str, str]) -> dict[str, str]:
        if columns:
            with contextlib.suppress(ImportError):  # reading rows reports it
                from jinja2 import Environment, TemplateSyntaxError

                environment = Environment()
                environment.filters |= dict.fromkeys(COLUMN_FILTERS, str)
                for name, text in columns.items():
                    try:
                        environment.compile(text)
                    except TemplateSyntaxError as error:
                        raise ValueError(f"{name}: {error.message} in {text!r}") from error
        return columns

    @model_validator(mode="after")
    def _check_query(self) -> Self:
        if self.query is not None and self.messages is not None:
            raise ValueError(f"query: {self.query} follows a prompt's text, but rows have messages: {self.messages}")
        return self


class GeneratingArguments(Config):
    """`generating_args`: sampling parameters. By default the distribution is not truncated."""

    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy decoding."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: keep the smallest set of tokens whose total probability reaches this."""
    top_k: Annotated[int, Field(ge=-1)] = 0
    """Keep the k most likely tokens; 0 and -1 keep all."""
    min_p: Fraction = 0.0
    """Keep tokens whose probability is at least `min_p` times that of the most likely token."""
    repetition_penalty: PositiveFloat = 1.0
    """Repetition penalty; 1 disables it."""
    max_new_tokens: PositiveInt | None = None
    """Maximum length of a response in tokens. Default: `response_length`."""
    min_new_tokens: NonNegativeInt = 0
    """Minimum length of a response in tokens."""
    num_return_sequences: PositiveInt = 1
    """Responses per prompt. Rollouts use `num_return_sequences_in_group` instead."""
    stop_strings: list[str] = []
    """A response ends with the first of these."""
    seed: Seed | None = None
    """Sampling seed for repeatable evaluation, below 2^64. Rollouts derive their seeds from the run's `seed`."""

    @field_validator("stop_strings")
    @classmethod
    def _stops_have_characters(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("found '', expected text that ends a response: remove it")
        return value

    @model_validator(mode="after")
    def _lengths_are_in_order(self) -> Self:
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}")
        return self

    def sampling_params(self, *, default_max_new_tokens: int) -> SamplingParams:
        """Convert to the type that `Run.rollout`, `RolloutPlan` and `GenerateRequest` take.

        `default_max_new_tokens` applies if `max_new_tokens` is not set; pass `response_length`, for example.
        """
        from roll_core.types import SamplingParams

        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            max_new_tokens=self.max_new_tokens or default_max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            stop=tuple(self.stop_strings),
            seed=self.seed,
        )


class StrategyArguments(Config):
    """`strategy_args`: how a role computes."""

    strategy_name: str
    """Name of a train strategy, of its forward-only `_infer` variant, or of an infer strategy: see `roll-core
    plugins`."""
    strategy_config: dict[str, Any] = {}
    """The strategy's own keys, validated by its schema."""

    @field_validator("strategy_config", mode="before")
    @classmethod
    def _none_is_empty(cls, value: Any) -> Any:
        return {} if value is None else value


class EnvironmentConfig(Config):
    """`environment`: the Python environment of a role's workers. `environment: PATH` is short for `environment.python:
    PATH`."""

    python: str | None = None
    """Python interpreter, or the folder of a virtual environment. With `packages`: the interpreter, or its version such
    as `3.12`, for the new environment. Default: the driver's."""
    packages: list[str] = []
    """Packages that uv installs into a new environment: requirements, paths, `-e PATH`. The environment is cached by
    the digest of this list. roll-core and the plugin of the role's strategy are added automatically, in the driver's
    versions."""
    exclude: list[str] = []
    """Distributions to exclude even if `packages` require them."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"python": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _names_something(self) -> EnvironmentConfig:
        if not self.packages and not self.python:
            raise ValueError("needs python (an interpreter or the folder of a virtual environment) or packages")
        if self.exclude and not self.packages:
            raise ValueError("exclude has no effect without packages")
        return self


class WorkerConfig(Config):
    """One role: its model, its strategy and its slots. Schemas use the subclass for the role's kind."""

    kind: ClassVar[RoleKind]
    """Registry in which `strategy_name` is looked up: train strategies for `train` and `score`, infer strategies for
    `generate`, none for `reward`."""

    model_args: ModelArguments = ModelArguments()
    training_args: TrainingArguments = TrainingArguments()
    data_args: DataArguments = DataArguments()
    generating_args: GeneratingArguments = GeneratingArguments()
    strategy_args: StrategyArguments | None = None
    device_mapping: tuple[int, ...] | None = None
    """Slots: a list, or an expression such as `list(range(0,8))`. None for CPU roles, which set `world_size`
    instead."""
    num_gpus_per_worker: PositiveInt | None = None
    """Slots per worker. Default: determined by the strategy, otherwise 1."""
    world_size: PositiveInt | None = None
    """Number of workers of a role without `device_mapping`. Default: 1."""
    ranks_per_replica: PositiveInt | None = None
    """Ranks that share one replica of a trained or scored model. Default: determined by the strategy, otherwise 1. The
    data-parallel size is the number of ranks divided by it."""
    weight_format: WeightFormat = "dtype"
    """Weight format of a role that generates: all tensors in `model_args.dtype`, or the layers' matrices in fp8.
    Computed from `strategy_config`."""
    infer_batch_size: PositiveInt = 16
    """Sequences per microbatch if the role only computes logprobs or values."""
    use_dynamic_batching_in_train: bool = False
    """Fill microbatches up to `max_tokens_per_microbatch_in_train` tokens instead of by number of sequences."""
    max_tokens_per_microbatch_in_train: Annotated[PositiveInt | None, Needs("use_dynamic_batching_in_train")] = None
    """Maximum number of tokens of a training microbatch."""
    use_dynamic_batching_in_infer: bool = False
    """Fill microbatches up to `max_tokens_per_microbatch_in_infer` tokens instead of by `infer_batch_size`."""
    max_tokens_per_microbatch_in_infer: Annotated[PositiveInt | None, Needs("use_dynamic_batching_in_infer")] = None
    """Maximum number of tokens of a microbatch that is only scored."""
    is_offload_states: bool | None = None
    """Offload this role's states to the host while other roles on the same slots work. Default: the run's
    `is_offload_states`."""
    system_envs: EnvVars = {}
    """Environment variables of this role's workers. They override the pipeline's and the platform's."""
    environment: EnvironmentConfig | None = None
    """Python environment of this role's workers. Default: the driver's. Requires an executor that supports it, such
    as `ray`."""

    @field_validator("device_mapping", mode="before")
    @classmethod
    def _parse_devices(cls, value: Any) -> Any:
        return None if value is None else parse_device_mapping(value)

    @model_validator(mode="after")
    def _consistent(self) -> WorkerConfig:
        if self.device_mapping is None and self.num_gpus_per_worker is not None:
            raise ValueError("num_gpus_per_worker needs device_mapping, which is missing")
        if self.device_mapping is not None:
            if self.world_size is not None:
                raise ValueError("device_mapping and world_size exclude each other: remove world_size")
            per_worker = self.num_gpus_per_worker or 1
            if len(self.device_mapping) % per_worker:
                raise ValueError(
                    f"device_mapping has {len(self.device_mapping)} slots, expected a multiple of num_gpus_per_worker"
                    f" {per_worker}"
                )
        if self.model_args.trains_adapters and self.kind != "train":
            raise ValueError("model_args.lora_target has no effect: this role is not trained; remove it")
        for phase in ("train", "infer"):
            if getattr(self, f"use_dynamic_batching_in_{phase}") and (
                getattr(self, f"max_tokens_per_microbatch_in_{phase}") is None
            ):
                raise ValueError(f"use_dynamic_batching_in_{phase} needs max_tokens_per_microbatch_in_{phase}")
        return self


class TrainWorkerConfig(WorkerConfig):
    """A role whose model is trained."""

    kind: ClassVar[RoleKind] = "train"
    trains_scores: ClassVar[bool] = False
    """True for a reward model: its checkpoints are those of a sequence classifier."""


class ScoreWorkerConfig(WorkerConfig):
    """A role whose model only computes logprobs, values or scores."""

    kind: ClassVar[RoleKind] = "score"


class InferWorkerConfig(WorkerConfig):
    """A role that generates."""

    kind: ClassVar[RoleKind] = "generate"
    receives_weights: ClassVar[bool] = True
    """False if no role publishes weights to it. It then keeps the weights of its own model, which it cannot offload."""
    scores_sequences: ClassVar[bool] = False
    """True if whole sequences are its prompts. An engine samples one token after a prompt that it only scores."""


class FilterArguments(Config):
    """`query_filter_config.filter_args`: conditions that a group must meet to be trained on."""

    threshold_down: float = 0.0
    """`mean_filter`: lower bound (exclusive) of a group's mean reward."""
    threshold_up: float = 1.0
    """`mean_filter`: upper bound (exclusive) of a group's mean reward."""
    std_threshold: NonNegativeFloat = 0.0
    """`std_filter`: lower bound (exclusive) of the standard deviation of a group's rewards."""


class QueryFilterConfig(Config):
    """`rewards.<domain>.query_filter_config`: selects the groups to train on (dynamic sampling)."""

    type: Literal["no_filter", "mean_filter", "std_filter"] = "no_filter"
    """Filter by the mean or the standard deviation of a group's rewards. The next prompt of the domain replaces a
    filtered group."""
    filter_args: FilterArguments = FilterArguments()
    """Thresholds, exclusive."""

    @model_validator(mode="after")
    def _band(self) -> QueryFilterConfig:
        args = self.filter_args
        if self.type == "mean_filter" and not args.threshold_down < args.threshold_up:  # nor if one is NaN
            raise ValueError(
                f"mean_filter keeps means between threshold_down {args.threshold_down:g} and threshold_up"
                f" {args.threshold_up:g}, an empty range"
            )
        return self


class ProcessKeys(Config):
    """Keys of rewards that score in processes of their own."""

    timeout_s: PositiveFloat = 10.0
    """Maximum seconds to score one sample. After that its process is killed and the sample counts as failed."""
    processes: PositiveInt = 8
    """Maximum number of processes per worker, each with the reward loaded. More are started as responses queue up. A
    reward whose provider declares `enforces_timeout` may score without processes."""
    start_timeout_s: PositiveFloat = 300.0
    """Maximum seconds to load the reward in a process."""
    max_retries: NonNegativeInt = 2
    """Retries after scoring a sample failed, on another worker if there are several. After the last retry the sample is
    excluded."""


class RewardConfig(ProcessKeys, WorkerConfig):
    """`rewards.<domain>`: one reward. Schemas of specific rewards subclass this."""

    kind: ClassVar[RoleKind] = "reward"
    zero_or_one: ClassVar[bool] = False
    """True if every value is 0 or 1, before `weight`."""

    reward: str
    """Name of the reward: see `roll-core plugins`."""
    tag_included: list[str] = []
    """Domains (tags) that this reward scores. Default: its own key."""
    weight: FiniteFloat = 1.0
    """Factor by which the value is multiplied."""
    query_filter_config: QueryFilterConfig = QueryFilterConfig()
    """Which of its groups to train on."""

    def columns(self) -> Mapping[str, str]:
        """Columns that each row it scores must have, by the key of this config that names the column."""
        return {}

    def check_row(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        """Problems in the columns of a row that it scores, by the key of this config that names the column.

        `roll-core check` and `run` call this for the first rows of each file before anything starts.
        """
        return {}

    def check_code(self, columns: Collection[str] | None, timeout_s: float) -> Mapping[str, str]:
        """Problems in user code that scores rows with these columns, by the key of this config that names the code.

        `columns` is None if they are unknown. `roll-core check` and `run` call this before anything starts. Never
        imports the code into this process. Raises `TimeoutError` if checking takes longer than `timeout_s`.
        """
        return {}


class RoleRewardConfig(RewardConfig):
    """A reward that is a role with a model. Base of the schemas of such rewards."""

    group_needs: ClassVar[Mapping[type[Config], tuple[Needs, ...]]] = {
        ProcessKeys: (
            Needs("has_processes", strict=True, remedy="set rpc_timeout, which limits each call of the model"),
        )
    }

    strategy_args: StrategyArguments
    """How the model computes."""

    @property
    def has_processes(self) -> bool:
        """False: the model computes in the role's workers."""
        return False


class EngineRewardConfig(RoleRewardConfig):
    """A reward computed from the replies of a model that generates: a role with an infer strategy.

    A plugin's reward whose schema subclasses this one is a `roll_core.spec.rollout.EngineReward`.
    """

    kind: ClassVar[RoleKind] = "generate"

    strategy_args: StrategyArguments
    """How the model generates: an infer strategy."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_of_the_template)] = {}
    """Variables of the model's chat template, for example `enable_thinking: false`."""

    @property
    def num_replies(self) -> int:
        """Replies per sample."""
        return self.generating_args.num_return_sequences

    def sampling_params(self) -> SamplingParams:
        """Sampling parameters of the replies. Their seeds derive from the run's and the sample's id."""
        return self.generating_args.sampling_params(default_max_new_tokens=1024)


class ModelRewardConfig(RoleRewardConfig):
    """`reward: model`: the score of a reward model. The reward is a role with a model, like `reference`.

    A plugin's reward whose schema subclasses this one gets the outputs of such a model, too.
    """

    kind: ClassVar[RoleKind] = "score"

    strategy_args: StrategyArguments
    """How the model computes: a train strategy, or its forward-only `_infer` variant."""
    input: Literal["auto", "tokens", "text"] = "auto"
    """`tokens`: the token ids of prompt and response, as sampled. `text`: the prompt's messages and the response's
    text, in the chat template and the tokens of the reward model's own tokenizer. `auto`: `tokens` if both tokenizers
    have the same vocabulary and chat template, or the reward model has no tokenizer; otherwise `text`."""

    @model_validator(mode="after")
    def _is_a_model(self) -> ModelRewardConfig:
        if self.model_args.model_name_or_path is None and self.model_args.random_init is None:
            raise ValueError("model_args names no model: set model_name_or_path to a reward model")
        if self.input == "text" and self.model_args.random_init is not None:
            raise ValueError("input is text, but random_init has no tokenizer of its own: set input: tokens")
        return self


Rewards = dict[str, SerializeAsAny[RewardConfig]]
"""Reward configs by domain. They are saved with the keys of their own schemas."""


class CustomEnvConfig(Config):
    """`custom_envs.<tag>`: an environment or an agent, and its options. Base of the schemas of such entries."""

    environment: str = ""
    """Name of the environment: see `roll-core plugins`. Or your own class, `module:Class`."""
    env_config: dict[str, Any] = {}
    """Options of the environment. Each environment has its own; those of your own class are its parameters."""
    python: str = ""
    """Interpreter that runs the environment, for example of a virtual environment of its own. Default: the driver's."""
    agent: str = ""
    """Name of an agent, which calls the policy at an endpoint. Or your own function or class, `module:function`.

    With an environment as well, the agent writes the replies to its messages.
    """
    agent_config: dict[str, Any] = {}
    """Options of the agent: those of the function are its parameters after `task` and `session`."""

    @model_validator(mode="before")
    @classmethod
    def _accept_env_type(cls, value: Any) -> Any:
        """ROLL calls the key `env_type`."""
        if isinstance(value, dict) and "env_type" in value and "environment" not in value:
            return {("environment" if key == "env_type" else key): entry for key, entry in value.items()}
        return value

    @model_validator(mode="after")
    def _environment_or_agent(self) -> CustomEnvConfig:
        if not self.environment and not self.agent:
            raise ValueError("neither environment nor agent is given: name an environment, an agent, or both")
        for part, options in (("environment", "env_config"), ("agent", "agent_config")):
            if getattr(self, options) and not getattr(self, part):
                raise ValueError(f"{options} has no effect without {part}")
        return self


class TokenizerConfig(Config):
    """`tokenizer`: create a tokenizer, for models trained from scratch. Otherwise the model's own is loaded."""

    kind: Literal["char", "byte", "bpe"]
    """`char`: one token per character of `alphabet`. `byte`: one token per byte. `bpe`: byte-pair merges learned from
    the data."""
    alphabet: str | None = None
    """Characters of a `char` tokenizer. Default: those of the training data."""
    vocab_size: Annotated[int, Field(ge=260)] = 1024
    """Size of a `bpe` tokenizer in tokens, special tokens included."""
    chat_template: str | None = None
    """File with a Jinja chat template, for conversations with tools (`data_args.template: native`).

    Each `<|…|>` in it becomes one token. Default: none.
    """


class ValidationConfig(Config):
    """`validation`: held-out prompts. Every `eval_steps` steps, responses to them are generated and scored."""

    data_args: DataArguments
    generating_args: GeneratingArguments = GeneratingArguments()
    """Sampling parameters of the evaluation, independent of the rollouts'."""


GuardAction = Literal["error", "warn", "off"]


class GuardConfig(Config):
    """`guards.<id>`: action when the guard trips. `guards.<id>: warn` is short for `guards.<id>.action: warn`."""

    action: GuardAction = "error"
    """`error` ends the run, `warn` logs a warning and continues, `off` disables the guard."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"action": value}
        if value is False:  # YAML 1.1 reads a bare `off` as false
            return {"action": "off"}
        return value


class WarningGuardConfig(GuardConfig):
    """A guard that only warns by default."""

    action: GuardAction = "warn"
    """`error` ends the run, `warn` logs a warning and continues, `off` disables the guard."""


PROBE_BOUNDS: dict[WeightFormat, float] = {"dtype": 0.05, "fp8": 0.3, "fp8_per_block": 0.3}
"""Default thresholds for random tokens, most of which are unlikely, in nats. docs/guards.md has the measurements."""
GAP_BOUNDS: dict[WeightFormat, float] = {"dtype": 0.05, "fp8": 0.1, "fp8_per_block": 0.1}
"""Default thresholds for sampled tokens, in nats."""


class LogprobProbeConfig(GuardConfig):
    """`guards.logprob_probe`."""

    every: PositiveInt = 10
    """Steps between two probes. The first publish, and the first publish with changed weights, are also probed."""
    threshold: PositiveFloat | None = None
    """Maximum mean absolute difference of logprobs, in nats. Default: 0.05, or 0.3 for an fp8 engine. bf16 engines
    differ by about 0.01, fp32 engines by less than 1e-4."""
    error_threshold: PositiveFloat = 0.5
    """Above this, in nats, the run ends even if the action is `warn`. Also the bound for the few sampled tokens. A
    larger `threshold` replaces it."""

    def bound(self, weight_format: WeightFormat) -> float:
        """Threshold for an engine that receives weights in this format."""
        return PROBE_BOUNDS[weight_format] if self.threshold is None else self.threshold

    def error_bound(self, weight_format: WeightFormat) -> float:
        """Threshold above which the run ends, whatever the action is."""
        return max(self.error_threshold, self.bound(weight_format))


class LogprobGapConfig(WarningGuardConfig):
    """`guards.logprob_gap`."""

    threshold: PositiveFloat | None = None
    """Maximum mean absolute difference of logprobs, in nats. Default: 0.05, or 0.1 for an fp8 engine."""
    error_threshold: PositiveFloat = 0.3
    """Above this, in nats, the run ends even if the action is `warn`. A larger `threshold` replaces it."""

    def bound(self, weight_format: WeightFormat) -> float:
        """Threshold for an engine that receives weights in this format."""
        return GAP_BOUNDS[weight_format] if self.threshold is None else self.threshold

    def error_bound(self, weight_format: WeightFormat) -> float:
        """Threshold above which the run ends, whatever the action is."""
        return max(self.error_threshold, self.bound(weight_format))


class RewardFailuresConfig(GuardConfig):
    """`guards.reward_failures`."""

    threshold: Fraction = 0.2
    """Maximum fraction of the samples scored since the last step whose reward could not be computed, retries
    included."""


class AdvantageSizeConfig(WarningGuardConfig):
    """`guards.advantage_size`."""

    threshold: PositiveFloat = 100.0
    """Maximum absolute advantage and loss, as a multiple of the batch's largest absolute reward, or of 1 if all are
    smaller."""


class FallingRewardConfig(WarningGuardConfig):
    """`guards.falling_reward`."""

    after: NonNegativeInt = 20
    """Number of steps at the start of a run whose scores are ignored."""
    window: Annotated[int, Field(ge=8, le=1000)] = 50
    """Number of last steps in which a trend of `score/mean` is tested."""
    p_value: Annotated[float, Field(gt=0, lt=0.5)] = 1e-5
    """Maximum probability of such a trend in noise, in one test. Each step is a test."""
    val_window: Annotated[int, Field(ge=5, le=1000)] = 8
    """Number of last evaluations in which a trend of `val/score/mean` is tested."""
    val_p_value: Annotated[float, Field(gt=0, lt=0.5)] = 0.001
    """Maximum probability of such a trend in noise, in one test. Each evaluation is a test."""
    threshold: Fraction = 0.1
    """Minimum fall over the window, as a fraction of the range of the run's scores."""


class GuardsConfig(Config):
    """`guards`: checks while a run progresses. Pipelines with their own guards use a subclass."""

    weights_unchanged: GuardConfig = GuardConfig()
    """Optimizer steps with a gradient were published, but no weight differs from the previous version."""
    zero_gradient: WarningGuardConfig = WarningGuardConfig()
    """There were non-zero advantages, but the gradient was exactly zero."""
    weight_manifest: GuardConfig = GuardConfig()
    """A receiver does not have exactly the tensors that were published to it."""
    logprob_probe: LogprobProbeConfig = LogprobProbeConfig()
    """On fixed probe tokens, engine and trainer compute different logprobs although both should have the same
    weights."""
    logprob_gap: LogprobGapConfig = LogprobGapConfig()
    """On rollout tokens, engine and trainer compute different logprobs although both had the same weights."""
    reward_failures: RewardFailuresConfig = RewardFailuresConfig()
    """Too many samples have no reward because scoring failed."""
    non_finite: GuardConfig = GuardConfig()
    """A loss, gradient or logprob is NaN or infinite."""
    zero_steps: GuardConfig = GuardConfig()
    """The run has no steps to do: none are configured, or the run in the checkpoint has finished all of them."""
    staleness: GuardConfig = GuardConfig()
    """A group is trained on more steps after it was started than `async_generation_ratio` allows."""
    token_round_trip: GuardConfig = GuardConfig()
    """The tokens or the mask sent to the trainer differ from those that the engine generated."""
    all_groups_filtered: WarningGuardConfig = WarningGuardConfig()
    """A step has no group with a learning signal: all were filtered, failed, or have equal rewards."""
    advantage_size: AdvantageSizeConfig = AdvantageSizeConfig()
    """Advantages or the policy's loss are out of proportion to the rewards."""
    falling_reward: FallingRewardConfig = FallingRewardConfig()
    """The reward of training samples or of the validation falls over a window of steps."""
    dead_worker: GuardConfig = GuardConfig()
    """A worker process exited or stopped responding."""


class RouterArguments(Config):
    """`router_args`: how requests are distributed over an engine's replicas."""

    router_name: Literal["least_loaded", "prompt_affinity", "sticky"] = "least_loaded"
    """`least_loaded`: the replica with the fewest running outputs. `prompt_affinity`: the replica that had the prompt
    before, unless it is full or much busier than another. `sticky`: always that replica."""


class ProfileConfig(Config):
    """`profile`: timelines of torch's profiler."""

    roles: list[str] = Field(min_length=1)
    """Roles that train or score, each with workers in processes of its own."""
    steps: list[PositiveInt] = Field(min_length=2, max_length=2)
    """First and last profiled step, counted from 1. Profiled steps are slower, and their events stay in host memory."""
    memory: bool = False
    """Also record each allocation and release, in bytes, with the total on its device."""

    @field_validator("steps")
    @classmethod
    def _in_order(cls, value: list[int]) -> list[int]:
        if value[0] > value[1]:
            raise ValueError(f"found {value}, expected the first step and the last one")
        return value


class CheckpointStoreConfig(Config):
    """`checkpoint_store`: where copies of checkpoints are written. Written as text, it is `url`."""

    url: str = Field(pattern=r"^[A-Za-z][\w+.-]*://")
    """URL of fsspec: `s3://bucket/prefix`, `gs://…`, `file:///…`. Copies are below `<url>/<exp_name>`."""
    required: bool = False
    """Fail the run if a checkpoint cannot be copied. Otherwise it warns and continues."""
    storage_options: dict[str, Any] = {}
    """Options of the file system, such as `endpoint_url`. Credentials belong in its environment variables."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_url(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _file_system_is_installed(cls, value: str) -> str:
        import fsspec

        try:
            fsspec.get_filesystem_class(value.partition("://")[0])
        except (ImportError, ValueError) as error:
            raise ValueError(f"found {value.partition('://')[0]}://, which fsspec cannot open: {error}") from error
        return value


class BestCheckpointConfig(Config):
    """`save_best`: which checkpoint is the best. Written as text, it is `metric`."""

    metric: str = Field(pattern=r"^[^-\s]\S*$")
    """Metric of a step, as in `metrics.jsonl`. Metrics that start with `val/` are of the held-out data."""
    mode: Literal["max", "min"] | None = None
    """`min`: lower is better. Default: `min` for losses, perplexities, divergences and failures, otherwise `max`.
    `-val/x` means `{metric: val/x, mode: min}`."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_metric(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return {"metric": value[1:], "mode": "min"} if value.startswith("-") else {"metric": value}


MAX_LEARNING_RATE = 1e-3
"""Learning rate of AdamW above which `roll-core check` warns; ten times as much for models of random weights."""
MAX_OPTIMIZER_STEPS = 8
"""Optimizer steps per batch above which `roll-core check` warns."""


class RunConfig(Config):
    """Keys of every run. A pipeline's schema adds its roles and its algorithm."""

    policy_role: ClassVar[str] = ""
    """Trained role whose weights generating roles receive; empty if none does."""
    multi_turn: ClassVar[bool] = False
    """True if rollouts have several turns, which advantage estimators can credit."""
    group_size_key: ClassVar[str] = ""
    """Dotted key with the number of samples of a prompt; empty if none are compared."""
    row_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Keys of `data_args` that name a required column, by the key above `data_args`: `{"sft_train": ("prompt",
    "response")}`. Rows without a response are prompts, whose responses `rewards` scores. `roll-core check` does not
    check the columns of other rows."""
    learning_rates: ClassVar[Mapping[str, float]] = {}
    """Default learning rate of trained roles by name. Others have that of `training_args`."""
    unread: ClassVar[Mapping[str, str]] = {}
    """Keys of roles that the pipeline cannot use, with what to do instead, for hints."""

    pipeline: str
    """Pipeline to run: see `roll-core plugins`."""
    exp_name: str = Field(default="roll", pattern=r"^[\w.-]+$")
    """Name of the experiment, at most 255 bytes. Runs are written to `<output_dir>/<exp_name>/<number>`."""
    output_dir: str = "./output"
    """Parent folder of run directories."""
    seed: Seed = 42
    """Seed of all random numbers, below 2^64."""
    executor: str = AUTO
    """Executor that starts the workers: see `roll-core plugins`. `local`: everything in this process. `auto`: `local`
    if every role has one worker and weights can be transferred within one process, otherwise the installed executor
    with the highest priority."""
    platform: str | None = None
    """Hardware platform. Default: detected."""
    num_gpus_per_node: PositiveInt | None = None
    """Slots per node. Default: the number that the platform detects on this host."""
    max_steps: PositiveInt | None = None
    """Number of pipeline steps."""
    save_steps: NonNegativeInt = 50
    """Steps between checkpoints; the last step is always saved. 0 writes one only after SIGTERM."""
    max_ckpt_to_keep: NonNegativeInt = 0
    """Number of checkpoints to keep, over all attempts of a run that were resumed from each other; older ones are
    deleted, except the best one of `save_best`. 0 keeps all."""
    save_best: BestCheckpointConfig | None = None
    """Metric of the best checkpoint, such as `val/score/mean`. A step that improves it is saved, whatever `save_steps`
    is, and `max_ckpt_to_keep` does not delete it."""
    checkpoint_store: CheckpointStoreConfig | None = None
    """Copy complete checkpoints in the background to this URL, such as `s3://bucket/prefix`. `max_ckpt_to_keep` and
    `save_best` apply there too."""
    portable_checkpoints: bool = False
    """Also write the training state in a format that all strategies load. Needed to continue under another strategy or
    to convert a checkpoint to a model. 12 bytes per trained parameter."""
    eval_steps: NonNegativeInt = 10
    """Steps between validations; also before the first step and after the last. 0 disables validation."""
    logging_steps: PositiveInt = 1
    """Steps between metrics in trackers, and between lines on the console. Evaluations and the last step are always
    logged. `metrics.jsonl` gets every step."""
    export_model: bool = True
    """At the end, write `export/`, a directory that transformers loads."""
    resume_from_checkpoint: bool | str = False
    """`true`: resume from the newest valid checkpoint of this experiment. `auto`: the same, but start from the
    beginning if there is none. Or a path to a run or a checkpoint, or the URL of
    one in a `checkpoint_store`."""
    preemption_timeout: NonNegativeFloat = 120.0
    """Seconds after SIGTERM to finish the current step and write its checkpoint. 0 ends the run at once, as Ctrl-C
    does."""
    profile: ProfileConfig | None = None
    """Write a timeline of some steps for each rank of some roles: `{roles: [actor_train], steps: [3, 5]}`."""
    track_with: list[str] = ["tensorboard"]
    """Metrics trackers. `metrics.jsonl` is always written as well."""
    tracker_kwargs: dict[str, dict[str, Any]] = {}
    """Options by tracker."""
    pretrain: str | None = None
    """Model directory or hub id, for every role that does not set its own model."""
    tokenizer: TokenizerConfig | None = None
    """Create a tokenizer. Default: load the model's own."""
    prompt_length: PositiveInt = 1024
    """Maximum prompt length in tokens. Longer rows are dropped and counted."""
    response_length: PositiveInt = 1024
    """Maximum response length in tokens."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Global 2-norm to which gradients are clipped; 0 disables clipping."""
    is_offload_states: bool = True
    """Offload roles that share slots while they are idle: weights, gradients and optimizer state move to the host,
    engines sleep. `false` keeps everything on the device, which is faster if it fits."""
    rpc_timeout: PositiveFloat = 3600.0
    """Timeout in seconds of calls to workers. Generation has no timeout: see `replica_timeout`."""
    replica_timeout: PositiveFloat = 900.0
    """Seconds without new tokens or responses after which a busy engine replica is killed and replaced. If the engine
    does not report progress, only responses count, and they may take `rpc_timeout`. Also the timeout for an idle
    replica's reply to health checks, and for an engine to sleep and to wake."""
    router_args: RouterArguments = RouterArguments()
    """How requests are distributed over an engine's replicas."""
    max_running_requests: PositiveInt | None = None
    """Maximum number of responses that one engine replica generates concurrently; each is a separate request. Further
    requests wait for the first free replica. With `router_name: least_loaded` a group is then distributed over
    replicas, each of which computes the prompt; with the other routers it stays on one. Default: no limit; a group is
    one request, and the engine queues requests."""
    model_update_timeout: PositiveFloat = 120.0
    """Seconds within which every engine must confirm that it has the published weights."""
    model_update_buffer_size_mb: PositiveInt = 1024
    """Maximum bucket size of weight transfers, in MiB."""
    model_update_dir: str | None = None
    """Transfer weights as files in this folder, or below this URL (`s3://…`, anything that fsspec supports), with the
    transport `disk`. For hosts that cannot connect to each other. Trainer and engines must be able to reach it."""
    weight_transport: str | None = None
    """Weight transport between trainer and engines, for example `shm`. Default: the available one with the highest
    priority."""
    system_envs: EnvVars = {}
    """Environment variables of all workers."""
    guards: GuardsConfig = GuardsConfig()
    """Actions when a run goes wrong without failing, by guard id."""
    deterministic: bool = True
    """Request deterministic kernels from the libraries while training roles compute, so that a resumed run equals an
    uninterrupted one bit for bit. An operator without one on the device is an error that names it."""

    @field_validator("exp_name")
    @classmethod
    def _names_a_directory(cls, value: str) -> str:
        size = len(value.encode("utf-8", "surrogatepass"))
        if size > MAX_NAME_BYTES:
            raise ValueError(f"found {size} bytes, expected at most {MAX_NAME_BYTES}: it is the name of a directory")
        if not value.strip("."):
            raise ValueError(f"found {value}, which cannot be the name of a new directory: add a letter")
        return value

    @field_validator("output_dir")
    @classmethod
    def _is_a_path(cls, value: str) -> str:
        if "\0" in value:
            raise ValueError(f"found {value!r}, expected a path: it contains the character NUL")
        if expanduser(value).startswith("~"):
            raise ValueError(f"found {value}, which is in the home of an unknown user: write ./{value} for that name")
        return value

    @field_validator("track_with", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        if value is None:
            return []
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _set_learning_rates(self) -> Self:
        for role, rate in self.learning_rates.items():
            self.set_training_defaults(role, learning_rate=rate)
        return self

    def set_training_defaults(self, role: str, **defaults: Any) -> None:
        """Set what the `training_args` of a role leave out. Only for validators: later, the config does not change."""
        worker = getattr(self, role, None)
        if isinstance(worker, WorkerConfig):
            missing = {
                key: value for key, value in defaults.items() if key not in worker.training_args.model_fields_set
            }
            args = worker.training_args.model_copy(update=missing)
            # Models are frozen for everybody else.
            object.__setattr__(self, role, worker.model_copy(update={"training_args": args}) if missing else worker)

    @model_validator(mode="after")
    def _profiled_roles_run_torch(self) -> Self:
        able = [name for name, role in self.roles().items() if role.kind in ("train", "score")]
        for name in self.profile.roles if self.profile is not None else ():
            if name not in able:
                raise ValueError(f"profile.roles: found {name}, expected roles that train or score: {', '.join(able)}")
        return self

    @model_validator(mode="after")
    def _best_is_measured(self) -> Self:
        if self.save_best is not None and self.save_best.metric.startswith("val/"):
            if not self.eval_steps:
                raise ValueError(
                    f"save_best: {self.save_best.metric} is measured on held-out data, but eval_steps is 0: set it to"
                    " the steps between validations"
                )
            if "validation" in type(self).model_fields and getattr(self, "validation", None) is None:
                raise ValueError(
                    f"save_best: {self.save_best.metric} is measured on held-out data, but there is none: add"
                    " validation, or name a metric of training"
                )
        return self

    @property
    def replays_experts(self) -> bool:
        """True if router replay is enabled: in training, the routers of `policy_role` repeat the engine's choices."""
        return False

    def capabilities(self) -> Mapping[str, tuple[str, ...]]:
        """Capabilities that the strategies of roles must declare, by role: flags of `TrainCapabilities` or
        `InferCapabilities`. `roll-core check` and `run` refuse other strategies. Called on a valid config."""
        return {}

    def optimizer_steps(self) -> Mapping[str, int]:
        """Optimizer steps per batch of each trained role, for `roll-core check`. Called on a valid config."""
        return {name: 1 for name, role in self.roles().items() if role.kind == "train"}

    def training_warnings(self) -> Mapping[str, str]:
        """Like `warnings`, about the training arguments of all roles."""
        warnings: dict[str, str] = {}
        from_scratch = any(role.model_args.random_init for role in self.roles().values())
        bound = MAX_LEARNING_RATE * (10 if from_scratch else 1)
        for name, role in self.roles().items():
            if role.kind != "train":
                continue
            args, key = role.training_args, f"{name}.training_args"
            if args.learning_rate > bound:
                warnings[f"{key}.learning_rate"] = (
                    f"found {args.learning_rate:g}, expected at most {bound:g} for AdamW: pretrained models need 1e-6"
                    " to 1e-4"
                )
            if self.max_steps is not None and args.num_train_epochs != 1 and not self.unread:
                warnings[f"{key}.num_train_epochs"] = f"is not read: max_steps is {self.max_steps}. Remove one of them"
            num_steps = self.optimizer_steps().get(name, 1)
            if num_steps > MAX_OPTIMIZER_STEPS:
                warnings[f"{key}.gradient_accumulation_steps"] = (
                    f"{num_steps} optimizer steps per batch, expected at most {MAX_OPTIMIZER_STEPS}: all but the first"
                    " train on samples of older weights. Raise it, or per_device_train_batch_size"
                )
        return warnings

    def warnings(self, parts: Mapping[str, Provider]) -> Mapping[str, str]:
        """Dotted keys whose values are valid but probably unintended, each with the reason and a remedy.

        `parts` has the provider records of `adv_estimator` and `pg_variant`, by key. `roll-core check` prints the
        warnings with the key's position, a run logs them. Called on a valid config.
        """
        return {}

    @classmethod
    def check_rows(cls, key: str, rows: Any, data: DataArguments, values: Mapping[Any, Any]) -> None:
        """Raise `DataError` for rows that the pipeline cannot use, if `row_keys` cannot express its requirements.

        `rows` are the first `roll_core.data.rows.Rows` of a file, and `key` is the key above its `data_args`. `values`
        are the config's values as written, which may be invalid. `roll-core check` and `run` call this before anything
        is built.
        """

    def file_problems(self) -> Mapping[str, str]:
        """Problems of files that the config names, by dotted key. Called on a valid config by `roll-core check` and
        `run`, but not with `--no-files`: validators read no files."""
        return {}

    @classmethod
    def tool_problems(cls, values: Mapping[Any, Any]) -> Mapping[str, str]:
        """Dotted keys because of which the policy cannot use the tools of an environment, each with the reason.

        `values` are the config's values as written, which may be invalid. `roll-core check` and `run` call this if an
        environment has tools (`EnvironmentProvider.tools`) and no agent.
        """
        return {}

    def roles(self) -> dict[str, WorkerConfig]:
        """All roles of this config by dotted name (`actor_train`, `rewards.math`), in the order of the schema."""
        configs: dict[str, WorkerConfig] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, WorkerConfig):
                configs[name] = value
            elif isinstance(value, dict):
                configs.update({f"{name}.{k}": v for k, v in value.items() if isinstance(v, WorkerConfig)})
        return configs


class RewardKeys(Config):
    """The rewards of responses."""

    rewards: Rewards = Field(default_factory=dict)
    """Rewards by domain. A row's tag selects its reward; a single reward scores all rows."""


class RewardRunConfig(RewardKeys, RunConfig):
    """Keys of pipelines that generate responses to prompts and score them with `rewards`. Base of their schemas."""

    validation: ValidationConfig | None = None
    """Held-out prompts. Default: no validation."""
    val_batch_size: PositiveInt = 1024
    """Prompts per batch in an evaluation."""


class AdvantageOptions(Config):
    """Base of the schemas of `adv_options` (`AdvantageProvider.config`)."""

    @property
    def min_samples(self) -> int:
        """Samples that each prompt needs at least."""
        return 1


document_fields(__name__)
