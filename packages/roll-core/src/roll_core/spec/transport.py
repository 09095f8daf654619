"""What a transport is: a sending end beside the train strategy, and a receiving end beside each engine.

    sending rank                                   receiving ranks
    offer: names, shapes, address  --- driver --->
    send: bucket, bucket, ...      === channel ==> receive: (name, tensor), ... -> InferStrategy.update_weights

Ends live from publish to publish, so that memory stays warm and connections stand; an end that failed is closed and
the next publish makes a new one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from roll_core.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from roll_core.runtime.weights.plan import Deadline
    from roll_core.types import TensorEntry, WeightManifest


class ReceiversLostError(WeightSyncError):
    """Receivers fell silent or hung up while the tensor `at` was sent. Stays inside the sending worker."""

    def __init__(self, at: str, silent: tuple[int, ...] = (), gone: tuple[int, ...] = ()) -> None:
        super().__init__(at, silent, gone)
        self.at, self.silent, self.gone = at, silent, gone


class SenderLostError(WeightSyncError):
    """The sender fell silent or hung up while weights were received. Stays inside the receiving worker."""


class SendingEnd(ABC):
    """Made by the sending rank for a number of receivers."""

    address: str
    """Where receiving ends connect."""

    @abstractmethod
    def send(
        self, manifest: WeightManifest, exported: Iterator[tuple[str, Tensor]], deadline: Deadline
    ) -> list[TensorEntry]:
        """Send `exported`, which `manifest` describes, to all receivers; returns when all have taken everything.

        Entries of the result have digests. Raises `ReceiversLostError`.
        """

    @abstractmethod
    def close(self) -> None:
        """Hang up and give all memory back. Called once or several times."""


class ReceivingEnd(ABC):
    """Made by each receiver, from the sender's address."""

    address: str

    @abstractmethod
    def receive(self, manifest: WeightManifest, deadline: Deadline) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `manifest` in order. Each is the sender's memory and valid until the next is asked for.

        The sender waits until the iterator is exhausted. Raises `SenderLostError`.
        """

    @abstractmethod
    def close(self) -> None:
        """Hang up and give all memory back. Called once or several times."""
