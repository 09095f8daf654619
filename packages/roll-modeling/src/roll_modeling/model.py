"""Builds a role's model from a Hugging Face directory, or with random weights for an architecture.

Trainer and embedded engine use the same functions, so their weights are bit-identical.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import logging
import threading
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from roll_core.data.end_tokens import end_ids, stored_end_ids
from roll_core.data.tokenizers import stored_tokenizer
from roll_core.errors import ModelError, UnsupportedError, one_line
from roll_core.spec.model import PROJECTORS
from roll_modeling.model_table import LEGACY_KEYS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from roll_core.spec.model import ModelSpec

log = logging.getLogger(__name__)

ModuleT = TypeVar("ModuleT", bound=nn.Module)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_model(spec: ModelSpec, *, device: str = "cpu") -> PreTrainedModel:
    """Load the model of `spec` in evaluation mode on `device`, with parameters in `spec.dtype`.

    Random weights are sampled in float32 on the host from `spec.seed` and then rounded. Equal seeds therefore give
    equal weights for every dtype and device. The global random state is unchanged. Tasks `value` and `reward` get a
    head with one output (see `scalar_head`). Raises `ModelError`.
    """
    config, tokenizer = _config_of(spec)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = _random_model(config, spec) if spec.random_init is not None else _stored_model(config, spec)
    if (model_tokenizer := tokenizer or _own_tokenizer(spec)) is not None:
        _set_token_ids(model, model_tokenizer, spec)
    return moved(model, device).eval()


def moved(module: ModuleT, device: str) -> ModuleT:
    """Move a module to a device. Parameters that were tied remain tied.

    `nn.Module.to` creates new parameters on devices whose tensors cannot replace those of the host in place, a new one
    for each name (pytorch issue 116255).
    """
    ties = tied_names(module)
    module.to(device)
    for first, *others in ties:
        parameter = module.get_parameter(first)
        for name in others:
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, parameter)
    check_ties(module, ties)
    return module


def tied_names(module: nn.Module) -> list[list[str]]:
    """Names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def check_ties(module: nn.Module, ties: Iterable[Sequence[str]]) -> None:
    """Raise `ModelError` if names that shared a parameter have different ones: an export would lose all but one."""
    for first, *others in ties:
        parameter = module.get_parameter(first)
        for name in others:
            if module.get_parameter(name) is not parameter:
                raise ModelError(
                    f"{name} was tied to {first}, and is a parameter of its own on {parameter.device}: this device or"
                    " strategy does not keep ties; please report it"
                )


def empty_model(spec: ModelSpec) -> PreTrainedModel:
    """Build the model of `spec` with its parameters on the device `meta`, for callers that fill or describe them.

    All buffers have their values, including buffers that no file stores. Raises `ModelError`, and `UnsupportedError`
    for an architecture whose output layer must be replaced by a scalar head.
    """
    from transformers import GenerationConfig

    config, tokenizer = _config_of(spec)
    auto, replace_head = _model_class(config, spec)
    if replace_head:
        place = spec.path or f"random_init of {config.model_type}"
        raise UnsupportedError(f"{place}: its output layer must be replaced by a scalar head, after the model is built")
    with quiet():
        with parameters_on_meta():
            model: PreTrainedModel = auto.from_config(
                config, dtype=DTYPES[spec.dtype], trust_remote_code=spec.trust_remote_code
            )
        for _, parameter in kept_in_float32(model, chain(model.named_parameters(), model.named_buffers())):
            parameter.data = parameter.data.float()
        if model.can_generate() and (Path(spec.path) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(spec.path)
    if (model_tokenizer := tokenizer or _own_tokenizer(spec)) is not None:
        _set_token_ids(model, model_tokenizer, spec)
    return model.eval()


def load_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase:
    """Load the tokenizer from `spec.tokenizer`, or else from the model's directory. Raises `ModelError`."""
    from transformers import AutoTokenizer

    place = spec.tokenizer or spec.path
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(place, trust_remote_code=spec.trust_remote_code)
    except (StrictDataclassError, OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot load a tokenizer from {place!r}: {_line(error, 0)}") from error


def _own_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase | None:
    """Tokenizer beside the weights of a language model that does not use the run's; None if there is none."""
    if spec.task != "causal_lm" or not spec.path:
        return None
    with quiet():
        return stored_tokenizer(spec.path, trust_remote_code=spec.trust_remote_code)


def load_config(spec: ModelSpec) -> PreTrainedConfig:
    """Load a stored model's config and apply `spec.config_overrides`. Raises `ModelError`."""
    from transformers import AutoConfig

    if not spec.path:
        raise ModelError("a model needs a source: a path (model_name_or_path, pretrain) or random_init")
    folder = Path(spec.path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(f"{spec.path}: no config.json; it is not a directory that save_pretrained or an export wrote")
    try:
        config = AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
    except (StrictDataclassError, OSError, ValueError, KeyError) as error:
        hint = "" if folder.exists() else "; the directory does not exist, and the hub has no such model"
        raise ModelError(f"cannot load the model {spec.path!r}{hint}: {_line(error, 0)}") from error
    _override(config, spec.config_overrides, spec.path)
    return config


def layer_configs(config: PreTrainedConfig) -> list[Any]:
    """Config of each layer of the language model.

    Sizes may differ between layers (Gemma 4). transformers then refuses to read them from the model's own config.
    """
    text: Any = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):
        return list(text.per_layer_config)
    return [text] * (getattr(text, "num_hidden_layers", None) or 1)


def body_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head."""
    body: nn.Module = model.base_model
    # Llama 4's `base_model_prefix` names no attribute of it, so that its `base_model` is the whole model.
    return getattr(model, "model", body) if body is model else body


def text_parts(model: PreTrainedModel) -> list[nn.Module]:
    """Modules that a text passes: the model, or the language model and the head of one that also takes images or audio.

    Nothing else has gradients without images or audio, and an optimizer's weight decay would shrink it.
    """
    if model.config.get_text_config() is model.config:
        return [model]
    heads = getattr(model, "score", None), model.get_output_embeddings()
    return [model.get_decoder(), *(head for head in heads if head is not None)]


def image_parts(model: PreTrainedModel) -> dict[str, list[nn.Module]]:
    """Modules of `ModelSpec.freeze`: the encoder of images (`vision`), then the layers between it and the language
    model (`projector`), which some architectures have inside of the encoder. Empty for a model without images.
    """
    if model.config.get_text_config() is model.config:
        return {}
    body, encoder = body_of(model), model.get_encoder(modality="image")
    if not any(encoder is child for child in body.children()):
        return {}
    children = [*encoder.named_children(), *body.named_children()]
    return {
        "vision": [encoder],
        "projector": [module for name, module in children if any(word in name for word in PROJECTORS)],
    }


def trained_parameters(model: PreTrainedModel, spec: ModelSpec) -> Iterator[nn.Parameter]:
    """Parameters that are trained without adapters: those of the language model and its head, and of the image parts
    that `spec.freeze` leaves out."""
    for part in text_parts(model):
        yield from part.parameters()
    for name, parameters in _image_parameters(model).items():
        if name not in spec.freeze:
            yield from parameters.values()


def frozen_parameters(model: PreTrainedModel) -> frozenset[str]:
    """Names of the parameters of each image part in which no parameter is trained, not even an adapter's."""
    parts = _image_parameters(model).values()
    untrained = [part for part in parts if not any(parameter.requires_grad for parameter in part.values())]
    return frozenset(name for part in untrained for name in part)


def _image_parameters(model: PreTrainedModel) -> dict[str, dict[str, nn.Parameter]]:
    """Parameters of `image_parts` by name. A projector inside of the encoder belongs to `projector` alone."""
    parts = {
        name: {id(parameter) for module in modules for parameter in module.parameters()}
        for name, modules in image_parts(model).items()
    }
    if parts:  # the ends of an image's rows are a parameter of the model itself (LLaVA-NeXT, LLaVA-OneVision)
        parts["projector"] |= {id(parameter) for parameter in body_of(model).parameters(recurse=False)}
    parts = {name: ids - parts["projector"] if name == "vision" else ids for name, ids in parts.items()}
    named = list(model.named_parameters())
    return {part: {name: parameter for name, parameter in named if id(parameter) in ids} for part, ids in parts.items()}


def end_token_ids(
    config: PreTrainedConfig,
    generation_config: GenerationConfig | None,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[int, ...]:
    """Token ids that end a response: those of the generation config, or else of the config, and those with which
    training ends responses (`tokenizer` and its chat template).

    A loaded model's generation config has them all. Ids outside the vocabulary are dropped.
    """
    ids = end_ids(tokenizer, generation_config, config.get_text_config(), config)
    return tuple(token for token in ids if 0 <= token < vocab_size)


def scalar_head(model: PreTrainedModel) -> nn.Linear:
    """Layer with one output on the backbone of a `value` or `reward` model.

    With adapters, this is the wrapper that replaces the layer and has the same call signature. Raises `ModelError` if
    the model has no such layer.
    """
    heads: list[Any] = [getattr(model, "score", None), model.get_output_embeddings()]
    for head in heads:
        if isinstance(getattr(head, "original_module", head), nn.Linear) and head.out_features == 1:
            return cast("nn.Linear", head)
    raise ModelError(f"{type(model).__name__} has no layer with one output; it cannot compute values or scores")


def not_a_reward_model(spec: ModelSpec) -> ModelError:
    """Error for a checkpoint without the head of task `reward`."""
    return ModelError(
        f"{spec.path}: it has no scoring head (score.weight), so it is not a reward model: its scores would be random"
    )


def new_value_head(spec: ModelSpec, width: int) -> Tensor:
    """Initial value head of a critic built from a language model, `[1, width]` float32.

    Weights are normal with standard deviation 1 / (width + 1), so initial values are near 0 for every width. The result
    depends only on `spec.seed`, so callers that read the model tensor by tensor get the same head.
    """
    weight = torch.empty(1, width, dtype=torch.float32)
    return weight.normal_(0.0, 1.0 / (width + 1), generator=torch.Generator().manual_seed(spec.seed))


# -- configs -----------------------------------------------------------------------------------------------------------


def _config_of(spec: ModelSpec) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase | None]:
    """The checked config of a model, for its task and attention, and the tokenizer of `spec.tokenizer`."""
    tokenizer = load_tokenizer(spec) if spec.tokenizer else None
    with quiet():
        config = _random_config(spec, tokenizer) if spec.random_init is not None else load_config(spec)
    _check_sizes(config, tokenizer, spec)
    if spec.task != "causal_lm":
        config.num_labels = 1
    if spec.attn_implementation != "auto":
        config._attn_implementation = spec.attn_implementation
    return config, tokenizer


def _random_config(spec: ModelSpec, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING, AutoConfig

    keys = dict(spec.random_init or {})
    if spec.path:
        raise ModelError(f"a model has one source: path {spec.path!r} and random_init exclude each other")
    model_type = keys.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"random_init: unknown model_type {model_type!r}; {_nearest(str(model_type), CONFIG_MAPPING.keys())}"
        )
    config_class = CONFIG_MAPPING[model_type]
    _refuse_unknown(keys, config_class, f"random_init for {model_type}")
    text = keys
    if "text_config" in config_class.sub_configs:
        keys["text_config"] = text = dict(keys.get("text_config") or {})
    if "vocab_size" not in text:
        if tokenizer is None:
            raise ModelError("random_init: set vocab_size, or a tokenizer that determines it")
        text["vocab_size"] = len(tokenizer)
    if tokenizer is not None:
        for name in TOKEN_IDS:
            text.setdefault(name, getattr(tokenizer, name))
    try:
        return AutoConfig.for_model(model_type, **keys)
    except (StrictDataclassError, ValueError, TypeError, ZeroDivisionError) as error:
        raise ModelError(f"random_init for {model_type}: {_line(error, -1)}") from error


def _override(config: PreTrainedConfig, overrides: Mapping[str, Any], place: str) -> None:
    _refuse_unknown(
        overrides, type(config), f"model_config_kwargs for {place}", present=[k for k in vars(config) if k[0] != "_"]
    )
    for key, value in overrides.items():
        if key == "rope_theta" and isinstance(getattr(config, "rope_parameters", None), dict):
            # transformers 5 reads the base from rope_parameters and ignores the attribute rope_theta.
            config.rope_parameters = {**config.rope_parameters, "rope_theta": value}
        else:
            try:
                setattr(config, key, value)
            except (StrictDataclassError, ValueError, TypeError, AttributeError) as error:
                raise ModelError(f"model_config_kwargs for {place}: {key}: {_line(error, -1)}") from error


def _refuse_unknown(
    keys: Mapping[str, Any], config_class: type[PreTrainedConfig], where: str, present: Iterable[str] = ()
) -> None:
    """Raise `ModelError` for unknown keys. transformers silently keeps and ignores them, which would hide typos."""
    fields = dataclasses.fields(config_class) if dataclasses.is_dataclass(config_class) else ()
    known = {field.name for field in fields}
    known |= set(inspect.signature(config_class.__init__).parameters) | set(config_class.attribute_map)
    known |= LEGACY_KEYS | set(present)
    for key in keys:
        if key not in known:
            raise ModelError(f"{where}: unknown key {key!r}; {_nearest(key, known - {'self', 'kwargs', 'args'})}")


def _check_sizes(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None, spec: ModelSpec) -> None:
    text = config.get_text_config()
    where = spec.path or f"random_init for {config.model_type}"

    def size(name: str, config: PreTrainedConfig = text) -> int | None:
        value = getattr(config, name, None)
        return value if isinstance(value, int) else None

    for layer in layer_configs(config):
        names = ("hidden_size", "num_attention_heads", "num_key_value_heads")
        hidden, heads, kv_heads = (size(name, layer) for name in names)
        if hidden and heads and not size("head_dim", layer) and hidden % heads:
            raise ModelError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        if heads and kv_heads and heads % kv_heads:
            raise ModelError(
                f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
    layers, kinds = size("num_hidden_layers"), getattr(text, "layer_types", None)
    if layers and isinstance(kinds, (list, tuple)) and len(kinds) != layers:
        raise ModelError(f"{where}: num_hidden_layers is {layers}, but layer_types has {len(kinds)} entries; set both")
    vocab = size("vocab_size")
    if tokenizer is not None and vocab is not None and vocab < len(tokenizer):
        raise ModelError(
            f"{where}: vocab_size {vocab} is smaller than the tokenizer {spec.tokenizer!r}, which has"
            f" {len(tokenizer)} tokens; leave vocab_size out, or use the model's own tokenizer"
        )
    if spec.dtype not in DTYPES:
        raise ModelError(f"{where}: unknown dtype {spec.dtype!r}; use one of {', '.join(DTYPES)}")


# -- models ------------------------------------------------------------------------------------------------------------


def _model_class(config: PreTrainedConfig, spec: ModelSpec) -> tuple[Any, bool]:
    """The task's auto class, and True if the caller must replace the causal LM's head with a scalar head."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if spec.task not in ("causal_lm", "value", "reward"):
        raise ModelError(f"task {spec.task!r} is unknown; use causal_lm, value or reward")
    if spec.task != "causal_lm" and type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return AutoModelForSequenceClassification, False
    if spec.task == "reward":
        raise UnsupportedError(
            f"transformers has no sequence classifier of model_type {config.model_type}, so a reward model of this type"
            " could not be stored"
        )
    is_mixed = _loaded_with_images(config) and "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {})
    return AutoModelForImageTextToText if is_mixed else AutoModelForCausalLM, spec.task != "causal_lm"


def _loaded_with_images(config: PreTrainedConfig) -> bool:
    """True to load the class that also takes images: transformers has no class for text alone, or the checkpoint is of
    this one. Not if it has no body apart from its head (Llama 4).

    A checkpoint keeps all of its parts in an export, and their names, which engines read.
    """
    from transformers.models.auto import modeling_auto as auto

    if type(config) not in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return False
    if type(config) not in auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        return True
    full_class: type[PreTrainedModel] = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    if full_class.__name__ not in (config.architectures or ()):
        return False
    with torch.device("meta"):
        model = full_class(copy.deepcopy(config))
    return model.base_model is not model


def _random_model(config: PreTrainedConfig, spec: ModelSpec) -> PreTrainedModel:
    auto, replace_head = _model_class(config, spec)
    try:
        model = auto.from_config(config, dtype=torch.float32, trust_remote_code=spec.trust_remote_code)
    except (ValueError, TypeError, KeyError, RuntimeError, ZeroDivisionError, ImportError) as error:
        raise ModelError(f"cannot make a {config.model_type} for task {spec.task}: {one_line(error)}") from error
    if spec.task != "causal_lm":
        _new_head(model, replace_head, spec)
    _round(model, DTYPES[spec.dtype])
    return model


def _stored_model(config: PreTrainedConfig, spec: ModelSpec) -> PreTrainedModel:
    auto, replace_head = _model_class(config, spec)
    try:
        model, info = auto.from_pretrained(
            spec.path,
            config=config,
            dtype=DTYPES[spec.dtype],
            trust_remote_code=spec.trust_remote_code,
            output_loading_info=True,
        )
    except (StrictDataclassError, OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"cannot load the weights of {spec.path!r}: {_line(error, 0)}") from error
    missing = set(info["missing_keys"])
    head_is_new = spec.task != "causal_lm" and (replace_head or any(name.startswith("score.") for name in missing))
    missing -= {name for name in missing if spec.task != "causal_lm" and name.startswith("score.")}
    if missing:
        raise ModelError(
            f"{spec.path}: the checkpoint lacks {len(missing)} of the model's tensors, for example {min(missing)};"
            f" config.json may belong to another model"
        )
    if head_is_new:
        if spec.task == "reward" and not spec.new_head:
            raise not_a_reward_model(spec)
        log.info("%s: the scalar head is new", spec.path)
        _new_head(model, replace_head, spec)
    return model


def _new_head(model: PreTrainedModel, replace: bool, spec: ModelSpec) -> None:
    """Initialise the model's scalar head with `new_value_head`; with `replace`, put it in place of the output layer."""
    if replace:
        output = model.get_output_embeddings()
        if not isinstance(output, nn.Linear):
            raise ModelError(f"{type(model).__name__} has no linear output layer that a value head could replace")
        model.config.tie_word_embeddings = False
        weight = output.weight
        model.set_output_embeddings(
            nn.Linear(output.in_features, 1, bias=False, dtype=weight.dtype, device=weight.device)
        )
    head = scalar_head(model)
    with torch.no_grad():
        head.weight.copy_(new_value_head(spec, head.in_features))
        if head.bias is not None:
            head.bias.zero_()


def _round(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters to `dtype`, except those that the architecture keeps in float32. Buffers are unchanged."""
    if dtype == torch.float32:
        return
    float32_names = {name for name, _ in kept_in_float32(model, model.named_parameters())}
    for name, parameter in model.named_parameters():
        if name not in float32_names:
            parameter.data = parameter.data.to(dtype)
    config = getattr(model, "config", None)
    if config is not None:
        config.dtype = dtype


def kept_in_float32(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Select the tensors that the architecture keeps in float32 for every model dtype."""
    keep = tuple(f".{module}." for module in getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return ((name, tensor) for name, tensor in named if any(part in f".{name}." for part in keep))


def _set_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> None:
    """Set the ids of the tokenizer's special tokens in config and generation config, which engines and exports use.

    The generation config gets all end ids. A trained reward model has no padding token that is also an end token:
    transformers scores the last token that is not padding, so its score would not be at the end token.
    """
    config, generation_config = model.config.get_text_config(), getattr(model, "generation_config", None)
    ends = end_token_ids(model.config, generation_config, config.vocab_size, tokenizer)
    for place in (config, generation_config):
        if place is None:
            continue
        for name in TOKEN_IDS:
            value = getattr(tokenizer, name)
            if value is not None and not (name == "eos_token_id" and value in stored_end_ids(place)):
                setattr(place, name, value)
        if spec.task == "reward" and spec.new_head and getattr(place, "pad_token_id", None) in ends:
            place.pad_token_id = None
    if generation_config is not None and ends:
        generation_config.eos_token_id = ends[0] if len(ends) == 1 else list(ends)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move parameters of modules created in this thread to `meta` as soon as they are registered.

    Unlike `torch.device("meta")` this keeps the values of buffers. Buffers that no checkpoint stores (rotary
    frequencies) could not be restored otherwise.
    """
    register, thread = nn.Module.register_parameter, threading.get_ident()

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # A tied parameter is registered a second time and must remain the same object.
        if parameter is not None and not parameter.is_meta and threading.get_ident() == thread:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


# -- messages ----------------------------------------------------------------------------------------------------------


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and warnings; real problems raise.

    `save_pretrained` imports DeepSpeed if it is installed, used or not, and DeepSpeed warns that it finds no GPU.
    """
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    deepspeed = logging.getLogger("DeepSpeed")
    deepspeed.addFilter(_not_about_accelerators)
    try:
        yield
    finally:
        deepspeed.removeFilter(_not_about_accelerators)
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _not_about_accelerators(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Setting accelerator to")


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known keys are for example {', '.join(names[:8])}"


def _line(error: BaseException, index: int) -> str:
    """The first (0) or last (-1) line of a message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[index] if lines else type(error).__name__
