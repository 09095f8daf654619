"""Adapters of experts in a portable state: merged into a model, or exported in the form that peft loads.

transformers keeps all experts of a layer in one tensor in memory, and stores them separately.

    in a state    ….experts.gate_proj.lora_A.default.weight [E, R, I]    ….lora_B.default.weight [E, O, R]
    stored        ….experts.3.gate_proj.weight [O, I]

Shapes: E experts, O outputs, I inputs, R rank.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import nn

from roll_core.errors import UnsupportedError
from roll_modeling.lora import ADAPTER
from roll_modeling.pieces import PieceWriter, StoredForm
from roll_modeling.portable_state import stored_buffers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import LoraSpec, ModelSpec
    from roll_core.spec.train import PortableState
    from roll_modeling.lora import Adapters

NUMBER = re.compile(r"\.(\d+)(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """Location of one expert's layer."""

    path: str
    """Path of the layer for all experts, as in the state: without the expert's number."""
    expert: int
    shape: tuple[int, int]
    """Shape (O, I) of the weight."""


class ExpertAdapters:
    """Expert adapters of one state (possibly none), for a model without adapters."""

    def __init__(self, model: PreTrainedModel, state: PortableState, lora: LoraSpec) -> None:
        """Raises `UnsupportedError` if transformers does not store the experts' tensors separately."""
        self._model, self._lora = model, lora
        self.layers: dict[str, ExpertLayer] = {}
        """Locations by the name of the weight that transformers stores."""
        if any(len(shape) > 2 for name, shape in state.shapes.items() if f".lora_A.{ADAPTER}." in name):
            if not self._form.is_by_tensor:
                raise UnsupportedError(
                    f"the state has adapters of experts, which cannot be converted: transformers stores several"
                    f" tensors of a {model.config.model_type} as one; use the run's export/ instead"
                )
            self.layers = dict(self._find(model, state))
        self.linear = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
        # A state's factors are read whole. The cache serves gate and up projections, which alternate.
        self._factor = lru_cache(maxsize=4)(lambda name: state.read(name).master)

    @cached_property
    def _form(self) -> StoredForm:
        """Stored form of the model; first evaluated while the model has no adapters."""
        return StoredForm(
            self._model, {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()}
        )

    def _find(self, model: PreTrainedModel, state: PortableState) -> Iterator[tuple[str, ExpertLayer]]:
        for name, parameter in model.named_parameters():
            for stored, part in self._form.of(name, torch.empty(parameter.shape, device="meta")).items():
                for number in NUMBER.finditer(stored):
                    path = (stored[: number.start()] + stored[number.end() :]).removesuffix(".weight")
                    if _factor(path, "A") in state.shapes:
                        yield (
                            stored,
                            ExpertLayer(path=path, expert=int(number[1]), shape=(part.shape[0], part.shape[1])),
                        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the experts' factors in the state, by name."""
        numbers, rank = Counter(layer.path for layer in self.layers.values()), self._lora.rank
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in self.layers.values():
            outputs, inputs = layer.shape
            shapes[_factor(layer.path, "A")] = (numbers[layer.path], rank, inputs)
            shapes[_factor(layer.path, "B")] = (numbers[layer.path], outputs, rank)
        return shapes

    def linear_spec(self) -> LoraSpec:
        """Configuration of the adapters on ordinary linear layers, without targets that are experts only.

        A target may name both, as `gate_proj` does if some layers have no experts.
        """
        if isinstance(self._lora.targets, str):
            return self._lora
        experts = {layer.path for layer in self.layers.values()}
        targets = tuple(name for name in self._lora.targets if not _names(name, experts) or _names(name, self.linear))
        return replace(self._lora, targets=targets)

    def write_merged(self, adapters: Adapters, spec: ModelSpec, out: Path) -> None:
        """Write the model with all adapters merged, as transformers stores it.

        `adapters` are those of `linear_spec`, on the same model.
        """
        writer = PieceWriter(out)
        for name, buffer in stored_buffers(adapters.model).items():
            writer.add(name, buffer)
        for name, tensor in adapters.merged():
            for stored, weight in self._form.of(name, tensor).items():
                writer.add(stored, self._merged(stored, weight))
        writer.finish(spec)

    def factors(self) -> dict[str, Tensor]:
        """A and B of each expert, under the names that peft uses for a model with separate expert layers."""
        return {
            f"{stored.removesuffix('.weight')}.lora_{side}.{ADAPTER}.weight": self._of(layer, side)
            for stored, layer in self.layers.items()
            for side in "AB"
        }

    @property
    def names(self) -> list[str]:
        """Last components of the layers' paths, which peft's config lists as targets."""
        return sorted({layer.path.rpartition(".")[2] for layer in self.layers.values()})

    def _merged(self, stored: str, weight: Tensor) -> Tensor:
        layer = self.layers.get(stored)
        if layer is None:
            return weight
        delta_OI = self._of(layer, "B") @ self._of(layer, "A")
        return delta_OI.mul_(self._lora.scale_of(layer.path)).add_(weight.float()).to(weight.dtype)

    def _of(self, layer: ExpertLayer, side: str) -> Tensor:
        stack: Tensor = self._factor(_factor(layer.path, side))
        return stack[layer.expert]


def _factor(path: str, side: str) -> str:
    return f"{path}.lora_{side}.{ADAPTER}.weight"


def _names(target: str, paths: set[str]) -> bool:
    """True if `target` is one of `paths`, or the last components of one."""
    return any(path == target or path.endswith(f".{target}") for path in paths)
