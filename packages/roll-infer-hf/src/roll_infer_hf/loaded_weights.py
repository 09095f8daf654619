"""Loaded weights of the engine by Hugging Face name, and their replacement in a weight update.

The weights are the parameters of the engine's own model. An update copies the received tensors into them and computes
each digest from the engine's memory afterwards. If the tensors are live parameters of a trainer in this process, the
engine uses them directly, without a copy. Sibling projections are shared only if all of them are live and adjacent in
memory (`layout`). Otherwise the fused matrix would be a copy, and digests would not describe the multiplied memory.

With a LoRA adapter the update has A and B of each layer. They are merged into the base weights, of which the engine
keeps a copy, so nothing accumulates over updates and decoding costs the same as without adapters:

    A, B of each layer --> copied, digested --> W replaced by W + B A

Shapes: I inputs and O outputs of a layer, R rank; W [O, I], A [R, I], B [O, R] with the LoRA scale included in B.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch
from typing_extensions import override

from roll_core.errors import UnsupportedError
from roll_core.spec.weights import Digests, check_version
from roll_core.types import WeightReceipt
from roll_modeling.layout import SIBLINGS, adjacent
from roll_modeling.lora import target_layers
from roll_weight_transports.buckets import Incoming
from roll_weight_transports.comparing import (
    SIDES,
    compare,
    compare_adapter,
    entries,
    refuse,
    refuse_adapter,
    unsent_digests,
)
from roll_weight_transports.digests import use_compiled_digests

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from roll_core.spec.model import LoraSpec
    from roll_core.types import WeightManifest

ENGINE = "hf_infer"


class Replaceable(ABC):
    """What a weight update replaces: all parameters, or an adapter."""

    def __init__(self, role: str, rank: int) -> None:
        self._role, self._rank = role, rank
        self.who = f"{role or 'engine'} rank {rank}"
        self.released = False
        """True after `release`, until an update completes."""
        self.incomplete = False
        """True if an update has started and has not completed: the weights may be of two versions."""
        self._digests: Mapping[str, str] = {}
        """Digests of the loaded tensors; empty if an update has not completed."""

    def update(
        self,
        version: int,
        current: int,
        manifest: WeightManifest,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        shared: bool,
    ) -> WeightReceipt:
        """Replace the weights by `tensors`. Raises subclasses of `WeightSyncError`.

        Sets `incomplete`; the caller clears it after it has refreshed the runner. With `shared`, uses tensors of the
        right dtype and device without a copy where possible.
        """
        check_version(self.who, version, current, manifest)
        self.compare(manifest)
        unsent = unsent_digests(self.who, manifest, {} if self.released else self._digests)
        self._digests = {}
        if not shared:
            use_compiled_digests()
        self.incomplete = True
        replaced = self.replace(manifest, Incoming(self.who, manifest, iter(tensors)), shared=shared)
        self._digests, self.released = {**unsent, **replaced}, False
        return WeightReceipt(version=version, digests=self._digests, role=self._role, rank=self._rank)

    @abstractmethod
    def compare(self, manifest: WeightManifest) -> None:
        """Raise `WeightSyncError` if the manifest does not match the model. Changes nothing."""

    @abstractmethod
    def replace(self, manifest: WeightManifest, incoming: Incoming, *, shared: bool) -> Mapping[str, str]:
        """Replace the weights. Returns the digests of the engine's memory by name."""

    @abstractmethod
    def release(self) -> None:
        """Free memory, and drop references to a trainer's tensors."""


class _Parameter(NamedTuple):
    """Location of a tensor, see `roll_weight_transports.comparing.EngineTensor`."""

    keys: tuple[int, ...]
    shape: tuple[int, ...]


class LoadedWeights(Replaceable):
    """All parameters of one model."""

    def __init__(self, model: nn.Module, *, role: str, rank: int) -> None:
        super().__init__(role, rank)
        self._loaded: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        """Parameters and buffers by name; tied parameters occur under each of their names."""
        self._buffers = model.state_dict().keys() - self._loaded.keys()
        self._loaded.update(model.state_dict(keep_vars=True))
        self._needed = {name for name, _ in model.named_parameters()}
        self._live: set[int] = set()
        """Ids of parameters whose memory the engine does not own: shared with a trainer, or released for sleep."""

    @override
    def compare(self, manifest: WeightManifest) -> None:
        def locate(name: str) -> _Parameter:
            loaded = self._loaded[name]
            return _Parameter((id(loaded),), tuple(loaded.shape))

        needed = ((name, locate(name)) for name in sorted(self._needed))
        refuse(self.who, ENGINE, manifest, [compare(entries(manifest), locate, needed)])

    @override
    def replace(self, manifest: WeightManifest, incoming: Incoming, *, shared: bool) -> Mapping[str, str]:
        expected = {entry.name: entry.digest for entry in manifest.tensors}
        digests = Digests()
        borrowed: dict[str, Tensor] = {}
        for name, tensor in incoming:
            self._adopt_dtype(name, tensor.dtype)
            loaded = self._loaded[name]
            if shared and tensor.dtype == loaded.dtype and tensor.device == loaded.device:
                borrowed[name] = tensor.detach()
            else:
                digests.copy(name, self._own(name), tensor, expected[name])
        incoming.refuse_missing()
        for name in self._adjacent(borrowed):
            loaded = self._loaded[name]
            loaded.data = borrowed[name]
            self._live.add(id(loaded))
        for name, tensor in borrowed.items():
            loaded = self._loaded[name]
            if loaded.data_ptr() != tensor.data_ptr():
                digests.copy(name, self._own(name), tensor, expected[name])
            else:
                digests.add(name, loaded.detach(), expected[name])
        return digests.read()

    @override
    def release(self) -> None:
        for loaded in {id(self._loaded[name]): self._loaded[name] for name in self._needed}.values():
            loaded.data = torch.empty((), dtype=loaded.dtype, device=loaded.device).expand(loaded.shape)
            self._live.add(id(loaded))
        self.released = True

    def _own(self, name: str) -> Tensor:
        """The parameter, in the engine's own memory."""
        loaded = self._loaded[name]
        if id(loaded) in self._live:
            self._allocate(name)
        return loaded.detach()

    def _adopt_dtype(self, name: str, dtype: torch.dtype) -> None:
        """Give a buffer the dtype in which trainers send it, which is theirs."""
        loaded = self._loaded[name]
        if name in self._buffers and loaded.dtype != dtype:
            loaded.data = loaded.data.to(dtype)

    def _allocate(self, name: str) -> None:
        """Allocate own memory for the parameter, together with its siblings in one buffer.

        Siblings are either all shared or all copied (`_adjacent`).
        """
        loaded = self._loaded[name]
        siblings = [self._loaded[sibling] for sibling in self._siblings(name)]
        together = all(id(tensor) in self._live and tensor.dtype == loaded.dtype for tensor in siblings)
        group = siblings if siblings and together else [loaded]
        buffer = torch.empty(sum(tensor.numel() for tensor in group), dtype=loaded.dtype, device=loaded.device)
        start = 0
        for tensor in group:
            tensor.data = buffer[start : start + tensor.numel()].view(tensor.shape)
            start += tensor.numel()
            self._live.discard(id(tensor))

    def _adjacent(self, borrowed: Mapping[str, Tensor]) -> list[str]:
        """Names in `borrowed` that have no siblings, or whose siblings are all borrowed and adjacent in memory."""

        def usable(name: str) -> bool:
            group = self._siblings(name)
            tensors = [borrowed[member] for member in group if member in borrowed]
            return len(group) <= 1 or (len(tensors) == len(group) and adjacent(tensors) is not None)

        return [name for name in borrowed if usable(name)]

    def _siblings(self, name: str) -> list[str]:
        """Names of all parameters in the sibling group of `name`, in layout order; empty if it has no siblings."""
        parts = name.split(".")
        for group in SIBLINGS:
            if len(parts) > 2 and parts[-2] in group:
                names = [".".join([*parts[:-2], sibling, parts[-1]]) for sibling in group]
                return [sibling for sibling in names if sibling in self._loaded]
        return []


class LoadedAdapter(Replaceable):
    """The single LoRA adapter of a model; the model serves its base weights until the first update."""

    def __init__(self, model: PreTrainedModel, lora: LoraSpec, *, role: str, rank: int) -> None:
        """Raises `ModelError` if the model lacks layers that `lora` names, and `UnsupportedError` for embeddings."""
        super().__init__(role, rank)
        self._lora = lora
        self._weights: dict[str, Tensor] = {}
        self._transposed: set[str] = set()
        """Paths of layers that store W as `[I, O]` (transformers' `Conv1D`)."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in target_layers(model, lora):
            layer = model.get_submodule(path)
            if isinstance(layer, torch.nn.Embedding):
                raise UnsupportedError(
                    f"{self.who}: {path} is an embedding, whose adapter this engine cannot load: set enable_lora: false"
                    " in its strategy_config, so that it receives merged weights"
                )
            weight, rank = layer.get_parameter("weight"), lora.rank_of(path)
            num_outputs, num_inputs = weight.shape
            if not isinstance(layer, torch.nn.Linear):  # transformers' Conv1D
                self._transposed.add(path)
                num_outputs, num_inputs = num_inputs, num_outputs
            self._weights[path] = weight
            self._shapes[f"{path}.{SIDES[0]}"] = (rank, num_inputs)
            self._shapes[f"{path}.{SIDES[1]}"] = (num_outputs, rank)
        self._base: dict[str, Tensor] = {}
        """Base weights W by layer path, for layers whose parameter has merged weights."""

    @override
    def compare(self, manifest: WeightManifest) -> None:
        mismatches = compare_adapter(entries(manifest), self._shapes.__getitem__)
        refuse_adapter(self.who, ENGINE, manifest, self._lora, [mismatches])

    @override
    def replace(self, manifest: WeightManifest, incoming: Incoming, *, shared: bool) -> Mapping[str, str]:
        # Copies `shared` tensors too: they are small, and the trainer's next step would change A and B but not W + B A.
        expected = {entry.name: entry.digest for entry in manifest.tensors}
        adapter: dict[str, Tensor] = {}
        digests = Digests()
        for name, tensor in incoming:
            adapter[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            digests.copy(name, adapter[name], tensor, expected[name])
        incoming.refuse_missing()
        self._merge(adapter)
        return digests.read()

    @override
    def release(self) -> None:
        """Restore the base weights, which stay loaded because no update sends them."""
        self._merge({})
        self._base = {}
        self.released = True

    @torch.no_grad()
    def _merge(self, adapter: Mapping[str, Tensor]) -> None:
        """Write W + B A into every adapted layer; computed in float32 and rounded once."""
        for path, weight in self._weights.items():
            a_RI, b_OR = (adapter.get(f"{path}.{side}") for side in SIDES)
            base = self._base.get(path)
            if a_RI is None or b_OR is None:
                if base is not None:
                    weight.copy_(base)
                continue
            if base is None:
                base = self._base[path] = weight.detach().clone()
            delta = b_OR.to(weight.device).float() @ a_RI.to(weight.device).float()
            weight.copy_((delta.T if path in self._transposed else delta).add(base.float()))
