"""LoRA adapter served by the engine: stores the published A and B, and merges them into the model's weights.

    publish:  A, B of each layer --> copied, digested --> W replaced by W + B A

The engine keeps the base weights of adapted layers. Each adapter is added to these base weights, so nothing
accumulates over updates. Each layer multiplies one merged matrix, so decoding costs the same as without adapters.

Shapes: I inputs and O outputs of a layer, R rank; W [O, I], A [R, I], B [O, R] with the LoRA scale included in B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roll_core.errors import MissingTensorError, UnexpectedTensorError
from roll_core.spec.weights import check_tensor, check_version, copy_digested
from roll_core.types import WeightReceipt
from roll_modeling.lora import target_layers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import LoraSpec
    from roll_core.types import TensorEntry, WeightManifest

SIDES = ("lora_A.weight", "lora_B.weight")


class HeldAdapter:
    """The single LoRA adapter of a model; the model serves its base weights until the first update."""

    def __init__(self, model: PreTrainedModel, lora: LoraSpec, *, role: str, rank: int) -> None:
        """Raises `ModelError` if the model does not have the layers that `lora` names."""
        self._who = f"{role or 'engine'} rank {rank}"
        self._weights: dict[str, Tensor] = {}
        self._transposed: set[str] = set()
        """Paths of layers that store W as `[I, O]` (transformers' `Conv1D`)."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in target_layers(model, lora):
            layer = model.get_submodule(path)
            weight = layer.get_parameter("weight")
            num_outputs, num_inputs = weight.shape
            if not isinstance(layer, torch.nn.Linear):  # transformers' Conv1D
                self._transposed.add(path)
                num_outputs, num_inputs = num_inputs, num_outputs
            self._weights[path] = weight
            self._shapes[f"{path}.{SIDES[0]}"] = (lora.rank, num_inputs)
            self._shapes[f"{path}.{SIDES[1]}"] = (num_outputs, lora.rank)
        self._beneath: dict[str, Tensor] = {}
        """Base weights W by layer path, for layers whose parameter holds merged weights."""
        self._held: dict[str, Tensor] = {}
        self.released = False
        """True if the adapter was released and no update has loaded another one yet."""
        self.torn = False
        """True if an update has started and has not completed."""

    @torch.no_grad()
    def update(
        self,
        version: int,
        current: int,
        manifest: WeightManifest,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        shared: bool,
    ) -> WeightReceipt:
        """Replace the loaded adapter and merge it into the weights. Raises subclasses of `WeightSyncError`.

        Sets `torn`; the caller clears it after it has refreshed the runner.

        Copies `shared` tensors too: they are small, and the trainer's next step would change A and B but not W + B A.
        """
        check_version(self._who, version, current, manifest)
        self.torn = True
        entries = {entry.name: entry for entry in manifest.tensors}
        held: dict[str, Tensor] = {}
        digests: dict[str, str] = {}
        for name, tensor in tensors:
            self._check(name, tensor, entries)
            held[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            digests[name] = copy_digested(held[name], tensor)
        self._refuse_missing(entries, held, version)
        self._held = held
        self._merge()
        self.released = False
        return WeightReceipt(version=version, digests=digests)

    @torch.no_grad()
    def release(self) -> None:
        """Drop the adapter and restore the base weights, which stay loaded because no update sends them."""
        self._held = {}
        self._merge()
        self._beneath = {}
        self.released = True

    def _check(self, name: str, tensor: Tensor, entries: dict[str, TensorEntry]) -> None:
        room, entry = self._shapes.get(name), entries.get(name)
        if room is None or entry is None:
            whose = "manifest" if room is not None else "model"
            raise UnexpectedTensorError(f"{self._who}: was sent {name}, for which the {whose} has no place")
        check_tensor(self._who, entry, tensor, room)

    def _refuse_missing(self, entries: dict[str, TensorEntry], held: dict[str, Tensor], version: int) -> None:
        if missing := sorted(entries.keys() - held.keys()):
            raise MissingTensorError(
                f"{self._who}: {missing[0]} was not sent of version {version} ({len(missing)} such tensors)"
            )
        for name in held:
            layer, _, side = name.rpartition(".lora_")
            other = f"{layer}.lora_{'B' if side.startswith('A') else 'A'}.weight"
            if other not in held:
                raise MissingTensorError(f"{self._who}: {other} is not in the manifest, but {name} is")

    def _merge(self) -> None:
        """Write W + B A into every adapted layer; computed in float32 and rounded once."""
        for path, weight in self._weights.items():
            a_RI, b_OR = (self._held.get(f"{path}.{side}") for side in SIDES)
            beneath = self._beneath.get(path)
            if a_RI is None or b_OR is None:
                if beneath is not None:
                    weight.copy_(beneath)
                continue
            if beneath is None:
                beneath = self._beneath[path] = weight.detach().clone()
            delta = b_OR.to(weight.device).float() @ a_RI.to(weight.device).float()
            weight.copy_((delta.T if path in self._transposed else delta).add(beneath.float()))
