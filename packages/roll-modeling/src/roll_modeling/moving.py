"""Offloads a rank's tensors to the host between phases, loads them back, and copies them to the host.

The memory behind tensors is moved, not the tensors. Engines keep views of one buffer in many places (ZeRO's partitions,
the padded shards of FSDP). All views remain valid. Their memory is freed while offloaded and has the same content when
it is back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from roll_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor, UntypedStorage

    from roll_core.spec.train import StateKind


Key = TypeVar("Key")


@dataclass(slots=True)
class Moved:
    """Freed device memory, and its copy on the host (None for scratch memory)."""

    storage: UntypedStorage
    num_bytes: int
    host: UntypedStorage | None


class Mover:
    """Offloads and loads the state of one rank, by part."""

    def __init__(self, role: str, device: torch.device) -> None:
        self._role, self._device = role, device
        self._away: dict[StateKind, list[Moved]] = {}

    def away(self, part: StateKind, tensors: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> None:
        """Offload the device memory of `tensors`, and drop that of `scratch`.

        Memory that is not on the device is skipped. Does nothing if the part is already offloaded.
        """
        if part in self._away:
            return
        pin = self._device.type != "cpu"
        moved = self._away.setdefault(part, [])
        for storage in filter(self._moves, storages(tensors)):
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin).untyped_storage()
            host.copy_(storage)
            moved.append(Moved(storage, storage.nbytes(), host))
            storage.resize_(0)
        for storage in filter(self._moves, storages(scratch)):
            moved.append(Moved(storage, storage.nbytes(), None))
            storage.resize_(0)
        if pin:
            torch.accelerator.empty_cache()

    def back(self, part: StateKind) -> None:
        """Load an offloaded part back to the device. Idempotent."""
        for each in self._away.pop(part, ()):
            each.storage.resize_(each.num_bytes)
            if each.host is not None:
                each.storage.copy_(each.host)

    def is_away(self, part: StateKind) -> bool:
        """True if the part is offloaded."""
        return part in self._away

    def need(self, *parts: StateKind) -> None:
        """Raise `UnsupportedError` if one of `parts` is offloaded and thus not available for computation."""
        missing = [part for part in parts if part in self._away]
        if missing:
            raise UnsupportedError(f"role {self._role}: its {' and '.join(missing)} are on the host; call onload first")

    def _moves(self, storage: UntypedStorage) -> bool:
        """True if the storage can be offloaded. Memory-mapped files cannot be resized, and use no private memory."""
        return storage.device.type == self._device.type and storage.resizable()


def storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """Distinct storages of `tensors`, which may be views of one buffer."""
    seen: set[int] = set()
    for each in tensors:
        storage = each.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def host_copies(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Copy tensors to the host (pinned, if they are on a device), and wait until the copies are complete."""
    copies: dict[Key, Tensor] = {}
    waits = False
    for key, tensor in tensors.items():
        away = tensor.device.type != "cpu"
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=away)
        copies[key] = copy.copy_(tensor.detach(), non_blocking=away)
        waits = waits or away
    if waits:
        torch.accelerator.synchronize()
    return copies


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Total size of the storages of `tensors`, in bytes."""
    return sum(each.nbytes() for each in storages(tensors))
