"""The interface of weight transports, which send published tensors from train workers to infer workers.

    driver        WeightTransport.available(sender, receiver) -> reason | None       once, when two roles are connected
    train rank    SenderEndpoint.send(manifest, exported, deadline)    == bytes ==>
    infer rank    ReceiverEndpoint.receive(manifest, deadline) -> (name, tensor), ... -> InferStrategy.update_weights

A transport moves bytes and reports lost endpoints. The runtime computes digests and compares receipts, so every
transport is verified in the same way. `roll_weight_transports.bucket_plan` lays tensors out in buckets and digests
them while copying.

Endpoints are reused by later publishes, so that memory stays allocated and connections stay open. If an endpoint fails,
it is closed, and the next publish opens a new one.
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
    """Device of one worker, as reported by its own process."""

    device: str = "cpu"
    """Torch device string on which the worker exports or receives weights."""
    backend: str = "gloo"
    """Collective backend between such devices."""
    uuid: str = ""
    """UUID of the device; empty on the host, or if torch does not report it."""
    is_leader: bool = True
    """Train workers: True if `export_weights` yields whole tensors on this rank."""
    replica: int = 0
    """Train workers: index of the model replica that this rank belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Location and device of one running worker."""

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
    """Ordered by rank."""
    weight_transports: tuple[str, ...] = ()
    """Weight transports that its strategy supports (a capability)."""
    directory: str = ""
    """`model_update_dir` of the run: folder or URL that both sides can reach; empty if not configured."""


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
    """Name in messages if a transport has several routes, for example the collective backend."""
    sources: tuple[int, ...] = ()
    """Sending train rank of each receiver, by receiver rank. Empty: the leader of the first replica sends to all
    receivers."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options for both endpoints; their meaning is defined by the transport."""
    self_test: bool = False
    """Send a small test tensor before the first publish. If that fails, the next route or transport is used."""
    note: str = ""
    """Why no better route is possible, for the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizes:
    """Sizes of the published weights, for memory estimates."""

    total_bytes: int
    largest_bytes: int
    """Bytes of the largest tensor."""
    bucket_bytes: int
    """`model_update_buffer_size_mb` of the run, in bytes."""


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
    """A deadline on this process's monotonic clock."""

    seconds: float
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Remaining seconds, never negative."""
        return max(0.0, self.begun + self.seconds - time.monotonic())


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSetup:
    """Arguments of `WeightTransport.sender`."""

    receivers: tuple[int, ...]
    """Ranks of the receivers that this worker sends to."""
    bucket_bytes: int
    """Maximum size of a bucket; a larger tensor gets a bucket of its own."""
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
    """Number of receivers of all senders together."""
    bucket_bytes: int
    deadline: Deadline
    """Deadline for connecting."""
    device: str = "cpu"
    """Device on which the engine expects tensors: the host unless it declares `device_weights`."""
    options: Mapping[str, str] = field(default_factory=dict)
    """`Route.options`."""


class ReceiversLostError(WeightSyncError):
    """Receivers timed out or disconnected while `tensor_name` was being sent. Raised by `SenderEndpoint.send`."""

    def __init__(self, tensor_name: str, timed_out: tuple[int, ...] = (), disconnected: tuple[int, ...] = ()) -> None:
        """`timed_out`: ranks that missed the deadline. `disconnected`: ranks that closed their connection."""
        super().__init__(tensor_name, timed_out, disconnected)
        self.tensor_name, self.timed_out, self.disconnected = tensor_name, timed_out, disconnected


class SenderLostError(WeightSyncError):
    """The sender timed out or disconnected. Raised by `WeightTransport.receiver` and `ReceiverEndpoint.receive`."""


class SenderEndpoint(ABC):
    """The sending side, in a train worker. Called on the strategy's thread."""

    address: str
    """Address to which receivers connect. The driver sends it to them."""

    @abstractmethod
    def send(
        self, manifest: WeightManifest, exported: Iterator[tuple[str, Tensor]], deadline: Deadline
    ) -> list[TensorEntry]:
        """Send `exported`, as described by `manifest`; return once every receiver has read all of it.

        Returns the entries with digests of the bytes that were sent, by the function that `manifest` names. Raises
        `ReceiversLostError` if receivers are lost, and another `WeightSyncError` if the export differs from the
        manifest.
        """

    @abstractmethod
    def close(self) -> None:
        """Close connections and free memory. Idempotent."""


class ReceiverEndpoint(ABC):
    """The receiving side, in an infer worker."""

    address: str
    """Address of the connected sender."""

    @abstractmethod
    def receive(self, manifest: WeightManifest, deadline: Deadline) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `manifest` in order. A tensor is valid until the next one is requested.

        The sender blocks until the iterator is exhausted. Raises `SenderLostError`.
        """

    @abstractmethod
    def close(self) -> None:
        """Close connections and free memory, so that a blocked sender fails. Idempotent."""


class WeightTransport(ABC):
    """A method to transfer weights. Constructed without arguments, in the driver and in every worker that uses it.

    The module must import torch lazily: `roll-core plan` also calls `available` and `buffers`.
    """

    @abstractmethod
    def available(self, sender: RoleFacts, receiver: RoleFacts) -> str | None:
        """Reason why the transport cannot connect these roles; None if it can.

        The caller has already checked the provider record: `in_process` against the workers' processes, and the
        strategies' `weight_transports`.
        """

    def routes(self, sender: RoleFacts, receiver: RoleFacts) -> Sequence[Route]:
        """Routes between these roles, best first. Called only if the transport is available."""
        return (Route(),)

    def sender(self, setup: SenderSetup) -> SenderEndpoint:
        """Create an endpoint in a train worker. Required unless the provider record sets `in_process`."""
        raise NotImplementedError(f"{type(self).__qualname__} has no sender")

    def receiver(self, setup: ReceiverSetup) -> ReceiverEndpoint:
        """Create an endpoint in an infer worker and connect it to its sender. Required unless the provider record sets
        `in_process`."""
        raise NotImplementedError(f"{type(self).__qualname__} has no receiver")

    def cancel_transfer(self, address: str, options: Mapping[str, str]) -> None:
        """Release endpoints that would otherwise block until their deadline, after a worker failed.

        Called by the driver, on a thread, once per sender and perhaps repeatedly. A sender that waits for receivers to
        connect must raise `ReceiversLostError`: a receiver that exited has no connection whose end it could detect. The
        default does nothing.
        """
        return

    def buffers(self, sizes: WeightSizes) -> BufferSizes:
        """Memory of one publish, for `roll-core plan`."""
        num_bytes = min(sizes.total_bytes, sizes.bucket_bytes)
        return BufferSizes(sender_bytes=num_bytes, receiver_bytes=num_bytes)


document_fields(__name__)
