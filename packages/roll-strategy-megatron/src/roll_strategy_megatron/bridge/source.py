"""Sources of a model's tensors: checkpoint files, read one tensor at a time, or a model in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_modeling.model import empty_model, load_model, new_value_head, not_a_reward_model, scalar_head
from roll_modeling.pieces import ModelFiles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import ModelSpec


class Source(ABC):
    """Tensors by Hugging Face names."""

    names: frozenset[str]

    @abstractmethod
    def get(self, name: str) -> Tensor:
        """Return a tensor, on the host."""

    @abstractmethod
    def close(self) -> None:
        """Release the source after the last read."""


class FileSource(Source):
    """Tensors in safetensors files, and tensors created because the files lack them."""

    def __init__(self, places: Mapping[str, Path], made: Mapping[str, Tensor] | None = None) -> None:
        """`places` maps each tensor to its file; `made` are the created tensors."""
        self._places, self._made = places, made or {}
        self.names = frozenset((*places, *self._made))
        self._stack, self._opened = ExitStack(), dict[Path, Any]()

    def get(self, name: str) -> Tensor:
        """Read a tensor; its file stays open."""
        from safetensors import safe_open

        if name in self._made:
            return self._made[name]
        place = self._places[name]
        if place not in self._opened:
            self._opened[place] = self._stack.enter_context(safe_open(place, framework="pt"))
        tensor: Tensor = self._opened[place].get_tensor(name)
        return tensor

    def close(self) -> None:
        """Close the files."""
        self._stack.close()


class MemorySource(Source):
    """Source of tensors that are in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.names = frozenset(tensors)

    def get(self, name: str) -> Tensor:
        """Return the tensor without copying."""
        return self._tensors[name]

    def close(self) -> None:
        """Drop the references to the tensors."""
        self._tensors = {}


def open_source(spec: ModelSpec) -> tuple[PreTrainedModel, Source]:
    """transformers' model on the meta device, and the source of its tensors."""
    if spec.random_init is None and Path(spec.path).is_dir():
        files = ModelFiles(Path(spec.path))
        if files.places:
            model = empty_model(spec)
            return model, _described(model, FileSource(files.places, _made(model, spec, files)))
    source = MemorySource(dict(load_model(spec).state_dict()))
    # A new model, because moving the loaded one to the meta device would untie its parameters.
    model = empty_model(spec)
    return model, _described(model, source)


def _described(model: PreTrainedModel, source: Source) -> Source:
    """Copy the source's buffers into the model, which writes them again on export. Returns `source`."""
    for name, buffer in model.named_buffers():
        if name in source.names:
            buffer.copy_(source.get(name))
    return source


def head_name(model: PreTrainedModel) -> str:
    """Name of the weight of the one-output layer of a model with task `value` or `reward`."""
    head = scalar_head(model).weight
    name: str = next(name for name, parameter in model.named_parameters() if parameter is head)
    return name


def _made(model: PreTrainedModel, spec: ModelSpec, files: ModelFiles) -> dict[str, Tensor]:
    """A new scalar head, for a critic or a trained reward model initialized from a language model.

    Raises the error of `not_a_reward_model` for another reward model without head.
    """
    if spec.task == "causal_lm":
        return {}
    name = head_name(model)
    if name in files.places:
        return {}
    if spec.task == "reward" and not spec.new_head:
        raise not_a_reward_model(spec)
    return {name: new_value_head(spec, model.get_parameter(name).shape[1])}
