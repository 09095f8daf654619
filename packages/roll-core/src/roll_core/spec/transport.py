"""The contract of weight transports: how the tensors of a publish travel from train workers to infer workers.

    driver        WeightTransport.available(sender, receiver) -> reason | None       once, when two roles are connected
    train rank    SenderEndpoint.send(manifest, exported, deadline)    == bytes ==>
    infer rank    ReceiverEndpoint.receive(manifest, deadline) -> (name, tensor), ... -> InferStrategy.update_weights

A transport moves bytes and reports lost endpoints. Digests, receipts and the comparison of both are the runtime's, so
every transport is proven alike. `roll_core.spec.buckets` lays tensors out in buckets and digests them while copying.

Endpoints live from publish to publish, so that memory stays allocated and connections stay open. An endpoint that
failed is closed; the next publish opens a new one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from roll_core.errors import WeightSyncError
from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from roll_core.types import TensorEntry, WeightManifest

# -- facts about the two sides -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The device of one worker, as its own process reports it."""

    device: str = "cpu"
    """Torch device string on which it exports, or takes, weights."""
    backend: str = "gloo"
    """Collective backend between such devices."""
    uuid: str = ""
    """UUID of the device; empty if its memory cannot be opened by another process."""
    leads: bool = True
    """Train workers: `export_weights` yields whole tensors on this rank."""
    replica: int = 0
    """Train workers: index of the model replica that this rank belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """One running worker of a role."""

    host: str
    pid: int
    node: int = 0
    slots: tuple[int, ...] = ()
    device: DeviceFacts = field(default_factory=DeviceFacts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFacts:
    """One side of a weight sync: the train role that sends, or the infer role that receives."""

    role: str
    workers: tuple[WorkerFacts, ...]
    """By rank."""
    weight_transports: tuple[str, ...] = ()
    """Capability of its strategy."""
    directory: str = ""
    """`model_update_dir` of the run: folder or URL that both sides reach; empty if not configured."""


def one_host(*sides: RoleFacts) -> bool:
    """True if all workers of these roles are on one host."""
    return len({(worker.node, worker.host) for side in sides for worker in side.workers}) == 1


def one_process(*sides: RoleFacts) -> bool:
    """True if all workers of these roles are in one process."""
    return len({(worker.node, worker.host, worker.pid) for side in sides for worker in side.workers}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One way in which a transport can connect two roles."""

    label: str = ""
    """Name in messages where a transport has several routes, such as the collective backend."""
    sources: tuple[int, ...] = ()
    """Train rank that sends to each receiver, by receiver rank; empty: the leader of the first replica sends to all."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Passed to both endpoints; their meaning belongs to the transport."""
    self_test: bool = False
    """Send a few numbers before the first publish; if that fails, the next route or transport is used."""
    note: str = ""
    """Why no better route is possible, for the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizes:
    """Sizes of the published weights, for estimates of memory."""

    total_bytes: int
    largest_bytes: int
    """Bytes of the largest tensor."""
    bucket_bytes: int
    """`model_update_buffer_size_mb` of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSizes:
    """Memory that one sending and one receiving worker allocate during a publish."""

    sender_bytes: int
    receiver_bytes: int
    formula: str = "a bucket of weights"
    on: Literal["device", "host"] = "device"


# -- endpoints ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time of this process."""

    seconds: float
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds until it passes, never negative."""
        return max(0.0, self.begun + self.seconds - time.monotonic())


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSetup:
    """Arguments of `WeightTransport.sender`."""

    receivers: tuple[int, ...]
    """Ranks of the receivers that this worker sends to."""
    bucket_bytes: int
    """Upper bound of a bucket; a larger tensor has a bucket of its own."""
    host: str = "127.0.0.1"
    """IP address at which receivers reach this worker; the loopback address if all workers are on one host."""
    device: str = "cpu"
    """Device on which the train strategy computes."""
    options: Mapping[str, str] = field(default_factory=dict)
    """`Route.options`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverSetup:
    """Arguments of `WeightTransport.receiver`."""

    address: str
    """`SenderEndpoint.address` of its sender."""
    rank: int
    num_receivers: int
    """Receivers of all senders together."""
    bucket_bytes: int
    deadline: Deadline
    """For connecting."""
    device: str = "cpu"
    """Device on which the engine wants tensors; the host unless it declares `device_weights`."""
    options: Mapping[str, str] = field(default_factory=dict)
    """`Route.options`."""


class ReceiversLostError(WeightSyncError):
    """Receivers timed out or hung up while the tensor `at` was sent. Raised by `SenderEndpoint.send`."""

    def __init__(self, at: str, silent: tuple[int, ...] = (), gone: tuple[int, ...] = ()) -> None:
        """`silent`: ranks that missed the deadline. `gone`: ranks that closed their connection."""
        super().__init__(at, silent, gone)
        self.at, self.silent, self.gone = at, silent, gone


class SenderLostError(WeightSyncError):
    """The sender timed out or hung up. Raised by `WeightTransport.receiver` and `ReceiverEndpoint.receive`."""


class SenderEndpoint(ABC):
    """The sending side, in a train worker. Called on the strategy's thread."""

    address: str
    """Where receivers connect; sent to them by the driver."""

    @abstractmethod
    def send(
        self, manifest: WeightManifest, exported: Iterator[tuple[str, Tensor]], deadline: Deadline
    ) -> list[TensorEntry]:
        """Send `exported`, which `manifest` describes, and return once every receiver has read everything.

        Returns the entries with digests of the bytes that were sent. Raises `ReceiversLostError`; raises another
        `WeightSyncError` if the export differs from the manifest.
        """

    @abstractmethod
    def close(self) -> None:
        """Close connections and free memory. Idempotent."""


class ReceiverEndpoint(ABC):
    """The receiving side, in an infer worker."""

    address: str
    """Of the sender that it is connected to."""

    @abstractmethod
    def receive(self, manifest: WeightManifest, deadline: Deadline) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `manifest` in order. A tensor is valid until the next one is requested.

        The sender blocks until the iterator is exhausted. Raises `SenderLostError`.
        """

    @abstractmethod
    def close(self) -> None:
        """Close connections and free memory, so that a blocked sender fails. Idempotent."""


class WeightTransport(ABC):
    """One way for weights to travel. Constructed without arguments, in the driver and in every worker that uses it.

    The module must import torch lazily: `roll-core plan` calls `available` and `buffers` too.
    """

    @abstractmethod
    def available(self, sender: RoleFacts, receiver: RoleFacts) -> str | None:
        """Reason why it cannot connect these roles; None if it can.

        The caller has already compared the record: `in_process` against the workers' processes, and the strategies'
        `weight_transports`.
        """

    def routes(self, sender: RoleFacts, receiver: RoleFacts) -> Sequence[Route]:
        """Ways to connect these roles, the best first. Called only if it is available."""
        return (Route(),)

    def sender(self, setup: SenderSetup) -> SenderEndpoint:
        """A new endpoint in a train worker. Required unless its record says `in_process`."""
        raise NotImplementedError(f"{type(self).__qualname__} has no sender")

    def receiver(self, setup: ReceiverSetup) -> ReceiverEndpoint:
        """A new endpoint in an infer worker, connected to its sender. Required unless its record says `in_process`."""
        raise NotImplementedError(f"{type(self).__qualname__} has no receiver")

    def call_off(self, address: str, options: Mapping[str, str]) -> None:
        """Release endpoints that would otherwise block until their deadline, after a worker failed.

        Called by the driver, on a thread. Nothing to do where a closed connection already unblocks the other side.
        """
        return

    def buffers(self, sizes: WeightSizes) -> BufferSizes:
        """Memory of one publish, for `roll-core plan`."""
        num_bytes = min(sizes.total_bytes, sizes.bucket_bytes)
        return BufferSizes(sender_bytes=num_bytes, receiver_bytes=num_bytes)


document_fields(__name__)
