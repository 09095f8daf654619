"""Loaded weights of the engine by Hugging Face name, and their replacement in a weight update.

The weights are the parameters of the engine's own model. An update copies the received tensors into them and computes
each digest from the engine's memory afterwards. If the tensors are live parameters of a trainer in this process, the
engine uses them directly, without a copy. Sibling projections are shared only if all of them are live and adjacent in
memory (`layout`). Otherwise the fused matrix would be a copy, and digests would not describe the multiplied memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from roll_core.errors import MissingTensorError, UnexpectedTensorError
from roll_core.spec.weights import check_tensor, check_version, copy_digested, digest, loaded_digest
from roll_core.types import WeightReceipt
from roll_modeling.layout import SIBLINGS, adjacent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from roll_core.types import WeightManifest


class HeldWeights:
    """Loaded parameters of one model."""

    def __init__(self, model: nn.Module, *, role: str, rank: int) -> None:
        self._role, self._rank = role, rank
        self._held: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        """Parameters and buffers by name; tied parameters occur under each of their names."""
        self._held.update(model.state_dict(keep_vars=True))
        self._needed = {name for name, _ in model.named_parameters()}
        self._live: set[int] = set()
        """Ids of parameters whose memory the engine does not own: shared with a trainer, or released for sleep."""
        self.released = False
        """True if the weights were released and no update has loaded new ones yet."""
        self.torn = False
        """True if an update has started and has not completed: the weights may be of two versions."""

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

        Sets `torn`; the caller clears it after it has refreshed the runner.

        With `shared`, uses tensors of the right dtype and device without a copy where possible.
        """
        check_version(self._who, version, current, manifest)
        self.torn = True
        entries = {entry.name: entry for entry in manifest.tensors}
        digests: dict[str, str] = {}
        borrowed: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in tensors:
            held = self._held.get(name)
            if held is None or name not in entries:
                whose = "the model" if held is None else "the manifest"
                raise UnexpectedTensorError(f"{self._who}: was sent {name}, which {whose} does not have")
            check_tensor(self._who, entries[name], tensor, held.shape)
            seen.add(id(held))
            if shared and tensor.dtype == held.dtype and tensor.device == held.device:
                borrowed[name] = tensor.detach()
                digests[name] = ""
            else:
                digests[name] = self._copy(name, tensor)
        self._refuse_missing(entries.keys() - digests.keys(), "was not sent", manifest.version)
        absent = {name for name in self._needed if id(self._held[name]) not in seen}
        self._refuse_missing(absent, "is not in the manifest", manifest.version)
        for name, tensor in self._adjacent(borrowed).items():
            held = self._held[name]
            held.data = tensor
            self._live.add(id(held))
        for name, tensor in borrowed.items():
            held = self._held[name]
            if held.data_ptr() != tensor.data_ptr():
                digests[name] = self._copy(name, tensor)
            else:
                digests[name] = loaded_digest(held.detach(), entries[name].digest)
        self.released = False
        return WeightReceipt(version=version, digests=digests, role=self._role, rank=self._rank)

    def release(self) -> None:
        """Free the memory of all parameters, and drop references to a trainer's tensors. Shapes remain known."""
        for held in {id(self._held[name]): self._held[name] for name in self._needed}.values():
            held.data = torch.empty((), dtype=held.dtype, device=held.device).expand(held.shape)
            self._live.add(id(held))
        self.released = True

    @property
    def _who(self) -> str:
        return f"{self._role or 'engine'} rank {self._rank}"

    def _refuse_missing(self, names: Iterable[str], problem: str, version: int) -> None:
        missing = sorted(names)
        if missing:
            raise MissingTensorError(
                f"{self._who}: {missing[0]} {problem} of version {version} ({len(missing)} such tensors)"
            )

    def _copy(self, name: str, tensor: Tensor) -> str:
        """Copy the tensor into the engine's own memory. Returns the digest of the copy."""
        held = self._held[name]
        if id(held) in self._live:
            self._allocate(name)
        if tensor.dtype == held.dtype:
            return copy_digested(held.detach(), tensor)
        held.detach().copy_(tensor)
        return digest(held.detach())

    def _allocate(self, name: str) -> None:
        """Allocate own memory for the parameter, together with its siblings in one buffer.

        Siblings are either all shared or all copied (`_adjacent`).
        """
        held = self._held[name]
        siblings = [self._held[each] for each in _siblings(name, self._held)]
        together = all(id(each) in self._live and each.dtype == held.dtype for each in siblings)
        group = siblings if siblings and together else [held]
        buffer = torch.empty(sum(each.numel() for each in group), dtype=held.dtype, device=held.device)
        start = 0
        for each in group:
            each.data = buffer[start : start + each.numel()].view(each.shape)
            start += each.numel()
            self._live.discard(id(each))

    def _adjacent(self, borrowed: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of `borrowed` that have no siblings, or whose siblings are all borrowed and adjacent in memory."""
        lonely: set[str] = set()
        for name in borrowed:
            group = _siblings(name, self._held)
            if len(group) > 1 and not (
                all(each in borrowed for each in group) and adjacent([borrowed[each] for each in group]) is not None
            ):
                lonely.add(name)
        return {name: tensor for name, tensor in borrowed.items() if name not in lonely}


def _siblings(name: str, held: dict[str, Any]) -> list[str]:
    """Names of all parameters in the sibling group of `name`, in layout order; empty if it has no siblings."""
    parts = name.split(".")
    for group in SIBLINGS:
        if len(parts) > 2 and parts[-2] in group:
            return [
                ".".join([*parts[:-2], sibling, parts[-1]])
                for sibling in group
                if (".".join([*parts[:-2], sibling, parts[-1]]) in held)
            ]
    return []
