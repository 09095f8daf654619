"""Blocks of keys of a role: model, training, data, generation, strategy. With ROLL's names."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    field_validator,
    model_validator,
)

from roll_core.field_docs import document_fields
from roll_core.spec.config.base import (
    Config,
    Dtype,
    FiniteFloat,
    Fraction,
    MergedOnly,
    Needs,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
)

if TYPE_CHECKING:
    from typing import Self

    from roll_core.types import SamplingParams


NAMES = re.compile(r"[\w.\s,-]*")
"""Matches module names separated by commas. Text with other characters is a regular expression."""
EMBEDDINGS = frozenset({"embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in"})
"""Names of the input embedding in transformers' models."""


def _names(value: str | list[str] | None) -> tuple[str, ...]:
    listed = value.split(",") if isinstance(value, str) else value or ()
    return tuple(name.strip() for name in listed if name.strip())


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


def template_variables(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse variables that each rendering sets. Validator of `chat_template_kwargs`."""
    if reserved := RENDERER_ARGUMENTS & value.keys():
        raise ValueError(f"found {min(reserved)}, which each rendering sets: only variables of the template itself")
    return value


COLUMN_FILTERS = ("from_json", "shuffled")
"""Filters of the templates in `data_args.columns` besides Jinja's own, see `roll_core.data.columns`."""


class DataArguments(Config):
    """`data_args`: data files, and the meaning of their columns."""

    file_name: str | list[str] | None = None
    """One or more files with one row per line or record. Names are literal (no globs) and relative to the working
    directory. `hf://OWNER/NAME[/SUBSET][?split=SPLIT&revision=REVISION]` is a data set of the Hugging Face Hub,
    and `modelscope://…` one of ModelScope."""
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
        dict[str, Any], AfterValidator(template_variables), Needs("template", values=frozenset({"native"}), strict=True)
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


class FilterArguments(Config):
    """`query_filter_config.filter_args`: conditions that a group must meet to be trained on."""

    threshold_down: float = 0.0
    """`mean_filter`: lower bound (exclusive) of a group's mean reward."""
    threshold_up: float = 1.0
    """`mean_filter`: upper bound (exclusive) of a group's mean reward."""
    std_threshold: NonNegativeFloat = 0.0
    """`std_filter`: lower bound (exclusive) of the standard deviation of a group's rewards."""


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


document_fields(__name__)
