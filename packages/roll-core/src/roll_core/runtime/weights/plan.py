"""Messages between the driver and both sides of a weight sync: plain values that cross processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roll_core.spec.platform import HOST_DEVICE
from roll_core.spec.transport import DeviceFacts, RoleFacts, Route, WorkerFacts
from roll_core.types import DataRank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roll_core.errors import WeightSyncError
    from roll_core.runtime.cluster.executors.base import WorkerGroup
    from roll_core.spec.config import WeightFormat
    from roll_core.spec.providers import WeightTransportProvider
    from roll_core.types import TensorEntry, WeightManifest, WeightReceipt


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan:
    """Parameters of one publish, sent to both sides. `WeightPublisher` sets those that each publish determines."""

    transport: WeightTransportProvider
    version: int = 0
    num_receivers: int = 1
    route: Route = field(default_factory=Route)
    sender_hosts: tuple[str, ...] = ("127.0.0.1",)
    """IP address at which receivers reach each train rank, by rank."""
    dtype: str = ""
    """Dtype in which floating-point tensors are sent (safetensors' name, such as `BF16`); empty for their own dtype."""
    weight_format: WeightFormat = "dtype"
    """Other than `dtype`: matrices of layers are sent in fp8, see `roll_core.spec.fp8`."""
    adapters: bool = False
    """True if only adapters are sent, to receivers that have loaded the base model."""
    bucket_bytes: int = 1 << 30
    """Upper bound of a bucket; a larger tensor has a bucket of its own."""
    deadline_s: float = 60.0
    """Seconds from the start of sending until all receivers must have read everything."""
    replaced: int = 0
    """Number of receivers that were restarted so far; connections to the processes before them are stale."""
    self_test: bool = False
    """True if a few numbers are sent instead of weights."""
    device_digests: bool = False
    """True if devices compute the digests of weights that are sent (`roll_core.spec.multilinear`)."""
    shares_tensors: bool = True
    """For a transport within one process: true if receivers use the sender's tensors. If false, they copy the tensors,
    because the trainer updates them during generation."""

    unsent: tuple[TensorEntry, ...] = ()
    """Frozen tensors that all receivers have loaded in earlier publishes; they are not sent."""

    def receivers_of(self, rank: int) -> tuple[int, ...]:
        """Ranks of the receivers that a train rank sends to."""
        sources = self.route.sources
        return tuple(receiver for receiver in range(self.num_receivers) if not sources or sources[receiver] == rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendHandle:
    """Manifest and addresses (or tensors) that a sending rank prepares for a publish."""

    manifest: WeightManifest
    """Manifest of the weights, without digests if they are computed while sending."""
    address: str = ""
    """Address to which receivers connect."""
    addresses: tuple[str, ...] = ()
    """Address by receiver rank, if there are several senders."""
    tensors: Sequence[tuple[str, Tensor]] = ()
    """The exported tensors themselves, for a transport within one process."""
    frozen: frozenset[str] = frozenset()
    """Names of tensors that never change, so that later publishes need not send them."""
    sample: str = ""
    """Fingerprint of a sample of these tensors, see `sample_fingerprint`."""
    sample_s: float = 0.0
    """Seconds that the fingerprint took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOutcome:
    """Result of sending on one rank. Failures are values: the driver compares all of them to find the first cause."""

    manifest: WeightManifest | None = None
    """Manifest with digests of the bytes sent; None if sending failed."""
    timed_out: tuple[int, ...] = ()
    """Receivers that had not read everything by the deadline."""
    disconnected: tuple[int, ...] = ()
    """Receivers that disconnected before the end."""
    tensor_name: str = ""
    """First tensor that these receivers had not confirmed."""
    failure: WeightSyncError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveOutcome:
    """Result of receiving on one rank."""

    receipt: WeightReceipt | None = None
    failure: WeightSyncError | None = None
    cut_off: bool = False
    """True if the failure is a lost sender, whose cause is another worker's failure."""


def device_facts(device: str, backend: str, data_rank: DataRank | None = None) -> DeviceFacts:
    """Facts of this process's device; `data_rank` of a train worker."""
    place = data_rank or DataRank()
    return DeviceFacts(device=device, backend=backend, uuid=_uuid(device), is_leader=place.leader, replica=place.index)


def _uuid(device: str) -> str:
    """UUID of a device; empty on the host, or if torch does not report it."""
    kind = device.partition(":")[0]
    if kind == HOST_DEVICE:
        return ""
    import torch

    properties = getattr(torch.get_device_module(kind), "get_device_properties", None)
    return str(getattr(properties(device), "uuid", "")) if properties else ""


def role_facts(
    group: WorkerGroup,
    weight_transports: tuple[str, ...],
    devices: Sequence[DeviceFacts] = (),
    *,
    directory: str = "",
) -> RoleFacts:
    """Facts of a running role. `devices` has the workers' device facts by rank, or is empty if they are not needed."""
    workers = tuple(
        WorkerFacts(
            host=member.host,
            pid=member.pid,
            node=member.node,
            slots=member.slots,
            device=devices[rank] if devices else DeviceFacts(),
        )
        for rank, member in enumerate(group.members)
    )
    return RoleFacts(role=group.role, workers=workers, weight_transports=weight_transports, directory=directory)
