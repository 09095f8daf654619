"""Converts a portable state to a model directory that transformers loads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from roll_core.errors import CheckpointMismatchError
from roll_modeling.expert_adapters import ExpertAdapters
from roll_modeling.export import write_model
from roll_modeling.lora import add_adapters
from roll_modeling.model import empty_model, load_model
from roll_modeling.portable_state import check_same, stored_buffers

if TYPE_CHECKING:
    from pathlib import Path

    from roll_core.spec.model import LoraSpec, ModelSpec
    from roll_core.spec.train import PortableState


def write_stored_state(
    state: PortableState, spec: ModelSpec, description: Path, out: Path, *, base_model: str | None = None
) -> None:
    """Write the whole model, or its adapters in the form given by the run's `lora_export`.

    `spec` and `description` (config and tokenizer) come from the run that wrote the state. `base_model` replaces the
    path of the run's base model. Raises `CheckpointMismatchError`.
    """
    if spec.lora is None:
        _write_whole(state, spec, description, out)
    else:
        _write_adapted(state, spec, spec.lora, description, out, base_model)


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
    check_same(state, {name: tuple(each.shape) for name, each in parameters.items()})
    buffers = stored_buffers(model)
    if lacking := buffers.keys() - state.buffers.keys():
        raise CheckpointMismatchError(
            f"{description.parent} lacks {min(lacking)}, a buffer that the model needs: resume that run,"
            " and convert its next checkpoint"
        )
    whole = {name: state.read(name).master.to(each.dtype) for name, each in parameters.items()}
    model.load_state_dict(whole | {name: state.buffers[name] for name in buffers}, strict=False, assign=True)
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
    shapes = {name: tuple(each.shape) for name, each in trained.items()} | of_experts.shapes
    check_same(state, shapes, adapters=adapters, identity=adapters.identity())
    for name, each in trained.items():
        each.data.copy_(state.read(name).master)
    if adapters.lora.export == "adapter":
        if of_experts.layers:
            adapters.also_targets(of_experts.names)
        adapters.export(out, trained | of_experts.factors())
    elif of_experts.layers:
        of_experts.write_merged(adapters, spec, out)
    else:
        write_model(model, spec, adapters.state_dict(), out)
