"""Writes model directories that transformers loads: of a portable state, or of a base model and an exported adapter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from roll_core.errors import CheckpointMismatchError, UnsupportedError, one_line
from roll_core.spec.model import LoraSpec, ModelSpec
from roll_modeling.expert_adapters import ExpertAdapters
from roll_modeling.export import write_model
from roll_modeling.lora import ADAPTER, ADAPTERS, PREFIX, Adapters, add_adapters, base_name, stored_name
from roll_modeling.model import DTYPES, empty_model, load_config, load_model, quiet
from roll_modeling.pieces import ModelFiles, write_gathered
from roll_modeling.portable_state import check_same, stored_buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from peft import LoraConfig
    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.train import PortableState


def write_stored_state(
    state: PortableState,
    spec: ModelSpec,
    description: Path,
    out: Path,
    *,
    base_model: str | None = None,
    merged: bool = False,
) -> None:
    """Write the whole model, or its adapters in the form given by the run's `lora_export`, `merged` if asked.

    `spec` and `description` (config and tokenizer) come from the run that wrote the state. `base_model` replaces the
    path of the run's base model. Raises `CheckpointMismatchError`.
    """
    if spec.lora is None:
        _write_whole(state, spec, description, out)
    else:
        lora = replace(spec.lora, export="merged") if merged else spec.lora
        _write_adapted(state, spec, lora, description, out, base_model)


def _write_whole(state: PortableState, spec: ModelSpec, description: Path, out: Path) -> None:
    """Write the master weights, rounded to the model's dtype."""
    if not description.is_dir():
        raise CheckpointMismatchError(
            f"{description.parent} has no description of its model: transformers does not support it, so"
            " the checkpoint cannot be converted to a directory for transformers"
        )
    spec = replace(spec, path=str(description), random_init=None, config_overrides={}, tokenizer="")
    model = empty_model(spec)
    parameters = dict(model.named_parameters())
    check_same(state, {name: tuple(parameter.shape) for name, parameter in parameters.items()})
    buffers = stored_buffers(model)
    if lacking := buffers.keys() - state.buffers.keys():
        raise CheckpointMismatchError(
            f"{description.parent} lacks {min(lacking)}, a buffer that the model needs: resume that run,"
            " and convert its next checkpoint"
        )
    tensors = {name: state.read(name).master.to(parameter.dtype) for name, parameter in parameters.items()}
    model.load_state_dict(tensors | {name: state.buffers[name] for name in buffers}, strict=False, assign=True)
    model.tie_weights()
    write_model(model, spec, model.state_dict(), out)


def _write_adapted(
    state: PortableState, spec: ModelSpec, lora: LoraSpec, description: Path, out: Path, base_model: str | None
) -> None:
    """Write only the adapters, or the base model with merged adapters, as given by `lora_export`."""
    if description.is_dir():
        spec = replace(spec, tokenizer=str(description))
    if base_model is not None:
        spec = replace(spec, path=base_model, random_init=None)
    model = load_model(spec)
    of_experts = ExpertAdapters(model, state, lora)
    adapters = add_adapters(model, replace(spec, lora=of_experts.linear_spec()))
    trained = adapters.trained()
    shapes = {name: tuple(parameter.shape) for name, parameter in trained.items()} | of_experts.shapes
    check_same(state, shapes, adapters=adapters, identity=adapters.identity())
    for name, parameter in trained.items():
        parameter.data.copy_(state.read(name).master)
    if adapters.lora.export == "adapter":
        if of_experts.layers:
            adapters.also_targets(of_experts.names)
        adapters.export(out, trained | of_experts.factors())
    elif of_experts.layers:
        of_experts.write_merged(adapters, spec, out)
    else:
        write_model(model, spec, adapters.state_dict(), out)


def write_merged_adapter(
    adapter: Path, out: Path, *, base_model: str | None = None, trust_remote_code: bool = False
) -> None:
    """Write the base model with the LoRA adapter of the directory `adapter`, in peft's format, merged.

    The base model is `base_model`, or else the one that the adapter names; its dtype is kept. Its weights are read one
    at a time, unless transformers stores them in another form than its model has. Raises `CheckpointMismatchError`,
    `ModelError` and `UnsupportedError`.
    """
    from peft import inject_adapter_in_model

    config = _adapter_config(adapter)
    spec = _base_spec(adapter, config, base_model, trust_remote_code=trust_remote_code)
    model, read = _lazily_read(spec)
    names = [name for name, _ in model.named_parameters()]
    try:
        with quiet():
            inject_adapter_in_model(config, model, ADAPTER)
        adapters = Adapters(model, spec, config, names)
        _load_adapter(adapters, adapter, names)
    except (ValueError, RuntimeError, KeyError) as error:
        raise CheckpointMismatchError(
            f"{adapter} does not fit the base model {spec.path}: {one_line(error)}"
        ) from error

    by_id = {id(parameter): base_name(name) for name, parameter in model.named_parameters()}

    def whole(parameter: Tensor) -> Tensor:
        return read(by_id[id(parameter)]) if parameter.is_meta else parameter

    write_gathered(
        model,
        spec,
        out,
        adapters=adapters,
        exported=adapters.merged(whole),
        gather=whole,
        shape_of=lambda parameter: tuple(parameter.shape),
        writes=True,
    )


def _load_adapter(adapters: Adapters, folder: Path, names: Iterable[str]) -> None:
    """Load the stored factors and whole modules in float32; `names` are those of the base model's parameters.

    Raises `KeyError` if the files have other tensors than the model.
    """
    from peft.utils import set_peft_model_state_dict

    stored = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / ADAPTERS).items()}
    trained = adapters.trained()
    loaded = {name: stored.pop(key) for name in trained if (key := stored_name(name)) in stored}
    for name in (*names, *(f"{name.removesuffix('.weight')}.base_layer.weight" for name in names)):
        stored.pop(name, None)  # peft stores embeddings beside their adapters
    adapters.model.load_state_dict(loaded, strict=False, assign=True)
    if stored:  # in the form of another version of transformers, which peft converts
        for name in trained.keys() - loaded.keys():
            trained[name].data = trained[name].data.float()
        result = set_peft_model_state_dict(adapters.model, stored, ADAPTER)
        stored = dict.fromkeys(result.unexpected_keys)
        loaded |= dict.fromkeys(trained.keys() - set(result.missing_keys))
    if odd := [*stored, *(trained.keys() - loaded.keys())]:
        raise KeyError(f"{min(odd)} is in only one of them")


def _adapter_config(adapter: Path) -> LoraConfig:
    from peft import LoraConfig, PeftConfig

    try:
        config = PeftConfig.from_pretrained(str(adapter))
    except (OSError, ValueError, TypeError, KeyError, json.JSONDecodeError) as error:
        raise CheckpointMismatchError(
            f"{adapter}: its adapter_config.json cannot be read: {one_line(error)}"
        ) from error
    if not isinstance(config, LoraConfig) or config.task_type not in (None, "CAUSAL_LM"):
        kind = config.task_type if isinstance(config, LoraConfig) else config.peft_type
        raise UnsupportedError(f"{adapter}: only LoRA adapters of causal language models are merged, not {kind}")
    if not (adapter / ADAPTERS).is_file():
        raise CheckpointMismatchError(f"{adapter} has no {ADAPTERS}")
    config.inference_mode = True
    return config


def _base_spec(adapter: Path, config: LoraConfig, base_model: str | None, *, trust_remote_code: bool) -> ModelSpec:
    """Spec of the base model, in its own dtype, with the tokenizer of the adapter if it has one."""
    path = base_model or config.base_model_name_or_path
    if not path:
        raise CheckpointMismatchError(f"{adapter} names no base model: give --base-model")
    has_tokenizer = (adapter / "tokenizer_config.json").is_file()
    lora = LoraSpec(targets=(), rank=config.r, alpha=config.lora_alpha)
    spec = ModelSpec(path=path, trust_remote_code=trust_remote_code, lora=lora)
    dtype = load_config(spec).dtype or torch.float32
    names = {value: name for name, value in DTYPES.items()}
    if dtype not in names:
        raise UnsupportedError(f"{path}: weights in {dtype} cannot be merged with an adapter")
    return replace(spec, dtype=names[dtype], tokenizer=str(adapter) if has_tokenizer else "")


def _lazily_read(spec: ModelSpec) -> tuple[PreTrainedModel, Callable[[str], Tensor]]:
    """Model with parameters on the device `meta`, and a function that reads one of them by its name.

    The model has all its weights, and the function is not called, if its files have them under other names.
    """
    files = ModelFiles(Path(spec.path)) if Path(spec.path).is_dir() else None
    model = empty_model(spec) if files is not None and files.places else None
    if model is None or files is None or any(name not in files.places for name, _ in model.named_parameters()):
        return load_model(spec), dict[str, "Tensor"]().__getitem__
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}

    def read(name: str) -> Tensor:
        with safe_open(files.places[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor.to(dtypes.get(name, tensor.dtype))

    for name, buffer in model.named_buffers():
        if name in files.places:
            buffer.copy_(read(name))
    return model, read
