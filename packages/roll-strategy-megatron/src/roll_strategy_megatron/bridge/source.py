"""Where a model's tensors come from: its files, one tensor at a time, or a model that was made in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.modeling.files import ModelFiles
from roll_core.modeling.model import empty_model, load_model

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
    """Safetensors files."""

    def __init__(self, places: Mapping[str, Path]) -> None:
        """`places` says which tensor stands in which."""
        self._places = places
        self.names = frozenset(places)
        self._stack, self._opened = ExitStack(), dict[Path, Any]()

    def get(self, name: str) -> Tensor:
        """Read now; the file stays open."""
        from safetensors import safe_open

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
    """The model as transformers describes it, without numbers where its files can be read, and its tensors."""
    if spec.random_init is None and Path(spec.path).is_dir():
        files = ModelFiles(Path(spec.path))
        if files.places:
            return empty_model(spec), FileSource(files.places)
    model = load_model(spec)
    tensors, buffers = dict(model.state_dict()), dict(model.named_buffers())
    model.to("meta")
    for name, buffer in buffers.items():  # rotary frequencies, which are made and not stored
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module).register_buffer(leaf, buffer, persistent=name in tensors)
    return model, MemorySource(tensors)
