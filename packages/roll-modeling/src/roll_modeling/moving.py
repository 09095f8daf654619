"""Moves what a rank holds to the host between phases, and back; and copies it there.

The memory behind tensors is moved, not the tensors: engines keep views of one buffer in many places (ZeRO's partitions,
the padded shares of FSDP), and they all stay what they are, of memory that is gone meanwhile and has the same numbers
when it is back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from roll_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor, UntypedStorage

    from roll_core.spec.train import Part


Key = TypeVar("Key")


@dataclass(slots=True)
class Moved:
    """Memory of the device that is empty, and where its content is, if it has any."""

    storage: UntypedStorage
    num_bytes: int
    host: UntypedStorage | None


class Mover:
    """Of one rank."""

    def __init__(self, role: str, device: torch.device) -> None:
        self._role, self._device = role, device
        self._away: dict[Part, list[Moved]] = {}

    def away(self, part: Part, tensors: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> None:
        """Move the memory of `tensors`, as far as it is the device's; that of `scratch` is dropped. What is away
        already stays there."""
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

    def back(self, part: Part) -> None:
        """Undo `away`; nothing if the part is not away."""
        for each in self._away.pop(part, ()):
            each.storage.resize_(each.num_bytes)
            if each.host is not None:
                each.storage.copy_(each.host)

    def is_away(self, part: Part) -> bool:
        """Whether it was moved and is not back."""
        return part in self._away

    def need(self, *parts: Part) -> None:
        """Raises `UnsupportedError` if one of `parts` is away: there is nothing to compute with."""
        missing = [part for part in parts if part in self._away]
        if missing:
            raise UnsupportedError(f"role {self._role}: its {' and '.join(missing)} are on the host; call onload first")

    def _moves(self, storage: UntypedStorage) -> bool:
        """A file that is mapped into memory cannot be resized, and takes no memory from anybody."""
        return storage.device.type == self._device.type and storage.resizable()


def storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """The memory behind `tensors`, each piece once: they may be views of one buffer."""
    seen: set[int] = set()
    for each in tensors:
        storage = each.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def host_copies(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """On the host, of their numbers as they are now, in memory of their own."""
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
    """Of the memory behind `tensors`."""
    return sum(each.nbytes() for each in storages(tensors))
