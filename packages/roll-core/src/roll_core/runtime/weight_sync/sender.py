"""The end of a weight sync that lives beside a train strategy, in its worker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from roll_core.errors import UnsupportedError, WeightSyncError
from roll_core.modeling.digests import use_compiled_digests
from roll_core.runtime.weight_sync.channel import ReceiversLostError
from roll_core.runtime.weight_sync.plan import Deadline, Offer, SendOutcome
from roll_core.runtime.weight_sync.sample import sample_fingerprint
from roll_core.spec.weights import entry_bytes, memory_token, tensor_entry, torch_dtype
from roll_core.types import WeightManifest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from roll_core.runtime.weight_sync.channel import SendingEnd
    from roll_core.runtime.weight_sync.plan import SyncPlan
    from roll_core.spec.train import TrainStrategy
    from roll_core.types import TensorEntry


class WeightSender:
    """Offers and sends what `export_weights` yields, or `export_adapters`. All ranks of the role are called together;
    one of them sends.

    Called on the strategy's thread: `prepare`, then (unless the transport is `shared`) `send`, for each publish.
    """

    def __init__(self, strategy: TrainStrategy, *, role: str, rank: int) -> None:
        self._strategy, self._role, self._rank = strategy, role, rank
        self._offered: tuple[str, tuple[TensorEntry, ...]] | None = None
        self._end: SendingEnd | None = None
        self._end_plan: tuple[object, ...] = ()

    @property
    def sends(self) -> bool:
        """Whether this is the rank that sends: the leader of the first model replica."""
        place = self._strategy.data_rank
        return place.index == 0 and place.leader

    def prepare(self, plan: SyncPlan) -> Offer | None:
        """What will be sent; None on ranks that do not send.

        Names and shapes are asked of the export once: later exports must yield the same, and are held to it.
        """
        if plan.transport == "shared":
            tensors = [(name, _cast(tensor, plan.dtype)) for name, tensor in self._export(plan)]
            if not self.sends:
                return None
            entries = tuple(tensor_entry(name, tensor, memory_token(tensor)) for name, tensor in tensors)
            manifest = WeightManifest(version=plan.version, tensors=entries)
            begun = time.perf_counter()
            sample = sample_fingerprint(tensors)
            return Offer(manifest=manifest, tensors=tensors, sample=sample, sample_s=time.perf_counter() - begun)
        if self._offered is None or self._offered[0] != plan.dtype:
            self._offered = plan.dtype, tuple(self._describe(plan))
        if not self.sends:
            return None
        manifest = WeightManifest(version=plan.version, tensors=self._offered[1])
        return Offer(manifest=manifest, address=self._channel(plan).address)

    def send(self, plan: SyncPlan) -> SendOutcome | None:
        """Send what was offered; None on ranks that do not send."""
        if not self.sends:
            for _ in self._export(plan):
                pass
            return None
        if self._offered is None or self._end is None:
            raise WeightSyncError(f"{self._role} rank {self._rank} was asked to send weights before preparing")
        begun = time.perf_counter()
        manifest = WeightManifest(version=plan.version, tensors=self._offered[1])
        try:
            sent = self._end.send(manifest, iter(self._export(plan)), Deadline(plan.deadline_s))
        except ReceiversLostError as lost:
            self._reset()
            return SendOutcome(silent=lost.silent, gone=lost.gone, at=lost.at, seconds=time.perf_counter() - begun)
        except WeightSyncError as error:
            self._reset()
            failure = type(error)(f"{self._role} rank {self._rank}: {error}")
            return SendOutcome(failure=failure, seconds=time.perf_counter() - begun)
        except BaseException:
            self._reset()
            raise
        return SendOutcome(
            manifest=WeightManifest(version=plan.version, tensors=tuple(sent)),
            copied_bytes=sum(entry_bytes(entry) for entry in sent),
            seconds=time.perf_counter() - begun,
        )

    def close(self) -> None:
        """Hang up. May be called several times."""
        self._reset()

    def _export(self, plan: SyncPlan) -> Iterator[tuple[str, Tensor]]:
        return self._strategy.export_adapters() if plan.adapters else self._strategy.export_weights()

    def _describe(self, plan: SyncPlan) -> Iterator[TensorEntry]:
        for name, tensor in self._export(plan):
            entry = tensor_entry(name, tensor, "")
            if plan.dtype and tensor.is_floating_point():
                entry = type(entry)(name=name, dtype=plan.dtype, shape=entry.shape, digest="")
            yield entry

    def _channel(self, plan: SyncPlan) -> SendingEnd:
        host = plan.sender_hosts[self._rank]
        wanted = (plan.transport, plan.num_receivers, plan.replaced, plan.bucket_bytes, host, plan.directory)
        if self._end is None or self._end_plan != wanted:
            self._hang_up()
            self._end, self._end_plan = open_sending_end(plan, host), wanted
        return self._end

    def _hang_up(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None

    def _reset(self) -> None:
        self._hang_up()
        self._offered = None


def open_sending_end(plan: SyncPlan, host: str) -> SendingEnd:
    """The sender's end of the plan's transport."""
    use_compiled_digests()
    if plan.transport == "shm":
        from roll_core.runtime.weight_sync.shm import ShmSender

        return ShmSender(plan.num_receivers, plan.bucket_bytes)
    if plan.transport == "collective":
        from roll_core.runtime.weight_sync.collective import CollectiveSender

        return CollectiveSender(plan.num_receivers, plan.bucket_bytes, host)
    if plan.transport == "disk":
        from roll_core.runtime.weight_sync.disk import DiskSender

        return DiskSender(plan.num_receivers, plan.bucket_bytes, plan.directory)
    raise UnsupportedError(f"this version of roll-core has no weight transport {plan.transport}")


def _cast(tensor: Tensor, dtype: str) -> Tensor:
    """The very tensor unless it has to travel as another dtype."""
    return tensor.to(torch_dtype(dtype)) if dtype and tensor.is_floating_point() else tensor
