"""Where a model's tensors come from: its files, one tensor at a time, or a model that was made in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_modeling.files import ModelFiles
from roll_modeling.model import empty_model, load_model, new_value_head, not_a_reward_model, scalar_head

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import ModelSpec


class Source(ABC):
    """Tensors by Hugging Face's names."""

    names: frozenset[str]

    @abstractmethod
    def get(self, name: str) -> Tensor:
        """One of them, on the host."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more will be read."""


class FileSource(Source):
    """Safetensors files, and what was made because they lack it."""

    def __init__(self, places: Mapping[str, Path], made: Mapping[str, Tensor] | None = None) -> None:
        """`places` says which tensor stands in which."""
        self._places, self._made = places, made or {}
        self.names = frozenset((*places, *self._made))
        self._stack, self._opened = ExitStack(), dict[Path, Any]()

    def get(self, name: str) -> Tensor:
        """Read now; the file stays open."""
        from safetensors import safe_open

        if name in self._made:
            return self._made[name]
        place = self._places[name]
        if place not in self._opened:
            self._opened[place] = self._stack.enter_context(safe_open(place, framework="pt"))
        found: Tensor = self._opened[place].get_tensor(name)
        return found

    def close(self) -> None:
        """Close the files."""
        self._stack.close()


class MemorySource(Source):
    """Tensors that are there."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.names = frozenset(tensors)

    def get(self, name: str) -> Tensor:
        """The tensor itself."""
        return self._tensors[name]

    def close(self) -> None:
        """Let go of them."""
        self._tensors = {}


def open_source(spec: ModelSpec) -> tuple[PreTrainedModel, Source]:
    """The model as transformers describes it, its parameters without numbers, and its tensors."""
    if spec.random_init is None and Path(spec.path).is_dir():
        files = ModelFiles(Path(spec.path))
        if files.places:
            model = empty_model(spec)
            return model, _described(model, FileSource(files.places, _made(model, spec, files)))
    source = MemorySource(dict(load_model(spec).state_dict()))
    # Not the same model without its numbers: tied parameters would come apart.
    model = empty_model(spec)
    return model, _described(model, source)


def _described(model: PreTrainedModel, source: Source) -> Source:
    """`source`, whose buffers are the model's from here on: they are written again when it is exported."""
    for name, buffer in model.named_buffers():
        if name in source.names:
            buffer.copy_(source.get(name))
    return source


def head_name(model: PreTrainedModel) -> str:
    """Of the weight of the layer with one output that a model of task `value` or `reward` has."""
    head = scalar_head(model).weight
    name: str = next(name for name, each in model.named_parameters() if each is head)
    return name


def _made(model: PreTrainedModel, spec: ModelSpec, files: ModelFiles) -> dict[str, Tensor]:
    """The head of a critic that begins from a language model."""
    if spec.task == "causal_lm":
        return {}
    name = head_name(model)
    if name in files.places:
        return {}
    if spec.task == "reward":
        raise not_a_reward_model(spec)
    return {name: new_value_head(spec, model.get_parameter(name).shape[1])}
