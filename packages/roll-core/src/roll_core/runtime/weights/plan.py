"""What both ends of a weight sync are told and what they answer: plain values that cross processes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roll_core.runtime.placement import HOST_BACKEND
from roll_core.types import DataRank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roll_core.errors import WeightSyncError
    from roll_core.spec.config import WeightFormat
    from roll_core.spec.providers import Transport
    from roll_core.types import WeightManifest, WeightReceipt


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan:
    """One publish, as both ends see it."""

    version: int
    transport: Transport
    num_receivers: int
    sender_hosts: tuple[str, ...] = ("127.0.0.1",)
    """By rank of the train role: name or address under which receivers reach it."""
    dtype: str = ""
    """Floating-point tensors travel as this (safetensors' name, `BF16`); empty leaves them as they are."""
    weight_format: WeightFormat = "dtype"
    """`fp8`: matrices of layers travel in 8 bits, see `roll_core.modeling.eight_bits`."""
    adapters: bool = False
    """What travels is adapters alone, for receivers that have the model beneath them."""
    bucket_bytes: int = 1 << 30
    """Largest bucket; a larger tensor travels alone."""
    backend: str = HOST_BACKEND
    """Of the transport `collective`."""
    directory: str = ""
    """Folder or URL that both ends reach, for the transport `disk`."""
    deadline_s: float = 60.0
    """From when the sender begins until all receivers must have taken everything."""
    replaced: int = 0
    """Receivers that were made anew so far: what is connected to those before is of no use."""
    sources: tuple[int, ...] = ()
    """By receiver, the train rank that sends to it; empty where the leader of the first model replica sends to all."""
    rehearsal: bool = False
    """A few numbers travel instead of weights, which shows that the transport works here."""
    lends: bool = True
    """With the transport `shared`: receivers use the very tensors. False where they copy, because the trainer goes on
    while they generate."""

    def receivers_of(self, rank: int) -> tuple[int, ...]:
        """The ranks to which a sending rank sends."""
        return tuple(each for each in range(self.num_receivers) if not self.sources or self.sources[each] == rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What a worker computes on, as its own process sees it."""

    device: str
    """Torch device string."""
    backend: str = HOST_BACKEND
    """Collective backend between such devices."""
    uuid: str = ""
    """Of the device; empty where its memory cannot be lent."""
    leads: bool = True
    """Of a train worker: an export gives it whole tensors."""
    replica: int = 0
    """Of a train worker: the model replica of which it holds a part or the whole."""

    @classmethod
    def of(cls, device: str, backend: str, data_rank: DataRank | None = None) -> DeviceFacts:
        """Asked in the worker's process; `data_rank` is a train worker's."""
        from roll_core.modeling.device_memory import device_memory

        kind, place = device_memory(device), data_rank or DataRank()
        uuid = kind.uuid(device) if kind else ""
        return cls(device=device, backend=backend, uuid=uuid, leads=place.leader, replica=place.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the sending rank has ready."""

    manifest: WeightManifest
    """Digests are empty where they are taken while the bytes travel."""
    address: str = ""
    """Where the transport's receiving ends connect."""
    addresses: tuple[str, ...] = ()
    """The same by receiver, where not all have one sender."""
    tensors: Sequence[tuple[str, Tensor]] = ()
    """The very tensors, for the transport `shared`; they never leave the process."""
    sample: str = ""
    """Fingerprint of some of the bytes, for the transport `shared`; see `sample_fingerprint`."""
    sample_s: float = 0.0
    """Seconds that the fingerprint took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOutcome:
    """How sending went. Failures are values: which of several ends failed first is judged where all are known."""

    manifest: WeightManifest | None = None
    """With digests of what was sent; None if sending did not get that far."""
    copied_bytes: int = 0
    seconds: float = 0.0
    silent: tuple[int, ...] = ()
    """Receivers that had not taken everything when the deadline passed."""
    gone: tuple[int, ...] = ()
    """Receivers that hung up before the end."""
    at: str = ""
    """The first tensor that was then not known to be taken."""
    failure: WeightSyncError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveOutcome:
    """How receiving went on one rank."""

    receipt: WeightReceipt | None = None
    seconds: float = 0.0
    failure: WeightSyncError | None = None
    cut_off: bool = False
    """The failure is that the sender hung up or fell silent: its cause lies elsewhere."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in this process's time."""

    seconds: float
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds until it passes, never negative."""
        return max(0.0, self.begun + self.seconds - time.monotonic())
