"""Adapters of experts, which transformers holds as one tensor and stores one by one: how a state that has them becomes
a model, or what peft loads.

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
class Place:
    """Of one expert's layer."""

    path: str
    """Of the layers of all experts, as the state names it: without the expert's number."""
    expert: int
    shape: tuple[int, int]
    """O, I."""


class ExpertAdapters:
    """Those of one state, which need not have any, on a model that has no adapters yet."""

    def __init__(self, model: PreTrainedModel, state: PortableState, lora: LoraSpec) -> None:
        """Raises `UnsupportedError` where transformers stores no tensors of single experts."""
        self._model, self._lora = model, lora
        self.places: dict[str, Place] = {}
        """By the name of the weight that transformers stores."""
        if any(len(shape) > 2 for name, shape in state.shapes.items() if f".lora_A.{ADAPTER}." in name):
            if not self._form.is_by_tensor:
                raise UnsupportedError(
                    f"the state has adapters of experts, and of a {model.config.model_type} transformers stores several"
                    " tensors as one: they cannot be converted here; export/ of the run has them"
                )
            self.places = dict(self._find(model, state))
        self.linear = {path for path, each in model.named_modules() if isinstance(each, nn.Linear)}
        # A state's factors are read whole, and those of gate and up come by turns.
        self._factor = lru_cache(maxsize=4)(lambda name: state.read(name).master)

    @cached_property
    def _form(self) -> StoredForm:
        """Asked first while the model has no adapters."""
        return StoredForm(self._model, {name: tuple(each.shape) for name, each in self._model.named_parameters()})

    def _find(self, model: PreTrainedModel, state: PortableState) -> Iterator[tuple[str, Place]]:
        for name, parameter in model.named_parameters():
            for stored, each in self._form.of(name, torch.empty(parameter.shape, device="meta")).items():
                for number in NUMBER.finditer(stored):
                    path = (stored[: number.start()] + stored[number.end() :]).removesuffix(".weight")
                    if _factor(path, "A") in state.shapes:
                        yield stored, Place(path=path, expert=int(number[1]), shape=(each.shape[0], each.shape[1]))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of what the state has of them."""
        numbers, rank = Counter(place.path for place in self.places.values()), self._lora.rank
        found: dict[str, tuple[int, ...]] = {}
        for place in self.places.values():
            outputs, inputs = place.shape
            found[_factor(place.path, "A")] = (numbers[place.path], rank, inputs)
            found[_factor(place.path, "B")] = (numbers[place.path], outputs, rank)
        return found

    def beside(self) -> LoraSpec:
        """The adapters of layers that the model has as such: a target may name both, as `gate_proj` does where some
        layers have no experts."""
        if isinstance(self._lora.targets, str):
            return self._lora
        experts = {place.path for place in self.places.values()}
        targets = tuple(name for name in self._lora.targets if not _names(name, experts) or _names(name, self.linear))
        return replace(self._lora, targets=targets)

    def write_merged(self, adapters: Adapters, spec: ModelSpec, out: Path) -> None:
        """The model that computes what it and all adapters do, stored as transformers stores it. `adapters` are those
        `beside` these, on the same model."""
        writer = PieceWriter(out)
        for name, buffer in stored_buffers(adapters.model).items():
            writer.add(name, buffer)
        for name, whole in adapters.merged():
            for stored, weight in self._form.of(name, whole).items():
                writer.add(stored, self._merged(stored, weight))
        writer.finish(spec)

    def apart(self) -> dict[str, Tensor]:
        """A and B of each expert, as peft calls them in a model that has experts as layers."""
        return {
            f"{stored.removesuffix('.weight')}.lora_{side}.{ADAPTER}.weight": self._of(place, side)
            for stored, place in self.places.items()
            for side in "AB"
        }

    @property
    def names(self) -> list[str]:
        """Of the layers, the last part: what peft's config has as targets."""
        return sorted({place.path.rpartition(".")[2] for place in self.places.values()})

    def _merged(self, stored: str, weight: Tensor) -> Tensor:
        place = self.places.get(stored)
        if place is None:
            return weight
        delta_OI = self._of(place, "B") @ self._of(place, "A")
        return delta_OI.mul_(self._lora.scale).add_(weight.float()).to(weight.dtype)

    def _of(self, place: Place, side: str) -> Tensor:
        stack: Tensor = self._factor(_factor(place.path, side))
        return stack[place.expert]


def _factor(path: str, side: str) -> str:
    return f"{path}.lora_{side}.{ADAPTER}.weight"


def _names(target: str, paths: set[str]) -> bool:
    """Whether a target is one of `paths`, or the end of one."""
    return any(path == target or path.endswith(f".{target}") for path in paths)
