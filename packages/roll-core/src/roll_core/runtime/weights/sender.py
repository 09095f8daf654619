"""The end of a weight sync that lives beside a train strategy, in its worker."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from roll_core.errors import UnsupportedError, WeightSyncError
from roll_core.modeling.digests import use_compiled_digests
from roll_core.runtime.weights.plan import Deadline, Offer, SendOutcome
from roll_core.runtime.weights.transports.shared import sample_fingerprint
from roll_core.spec.transport import ReceiversLostError
from roll_core.spec.weights import entry_bytes, memory_token, tensor_entry, torch_dtype
from roll_core.types import WeightManifest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from roll_core.runtime.weights.plan import SyncPlan
    from roll_core.spec.train import TrainStrategy
    from roll_core.spec.transport import SendingEnd
    from roll_core.types import TensorEntry


REHEARSED = 100_000
"""Numbers; more than a page of any memory."""


class WeightSender:
    """Offers and sends what `export_weights` yields, or `export_adapters`. All ranks of the role are called together;
    one of them sends, or those that `SyncPlan.sources` names.

    Called on the strategy's thread: `prepare`, then (unless the transport is `shared`) `send`, for each publish.
    """

    def __init__(self, strategy: TrainStrategy, *, role: str, rank: int, device: str = "cpu") -> None:
        """`device` is where the strategy computes."""
        self._strategy, self._role, self._rank, self._device = strategy, role, rank, device
        self._offered: tuple[tuple[object, ...], tuple[TensorEntry, ...]] | None = None
        self._end: SendingEnd | None = None
        self._end_plan: tuple[object, ...] = ()

    def sends(self, plan: SyncPlan) -> bool:
        """Whether this rank does."""
        if plan.sources:
            return self._rank in plan.sources
        place = self._strategy.data_rank
        return place.index == 0 and place.leader

    def prepare(self, plan: SyncPlan) -> Offer | None:
        """What will be sent; None on ranks that do not send.

        Names and shapes are asked of the export once: later exports must yield the same, and are held to it.
        """
        if plan.transport == "shared":
            tensors = [(name, _cast(tensor, _dtype(plan))) for name, tensor in self._export(plan)]
            if not self.sends(plan):
                return None
            entries = tuple(tensor_entry(name, tensor, memory_token(tensor)) for name, tensor in tensors)
            manifest = WeightManifest(version=plan.version, tensors=entries)
            begun = time.perf_counter()
            sample = sample_fingerprint(tensors)
            return Offer(manifest=manifest, tensors=tensors, sample=sample, sample_s=time.perf_counter() - begun)
        what = (plan.dtype, plan.weight_format, plan.rehearsal)
        if self._offered is None or self._offered[0] != what:
            self._offered = what, tuple(self._describe(plan))
        if not self.sends(plan):
            return None
        manifest = WeightManifest(version=plan.version, tensors=self._offered[1])
        return Offer(manifest=manifest, address=self._channel(plan).address)

    def send(self, plan: SyncPlan) -> SendOutcome | None:
        """Send what was offered; None on ranks that do not send."""
        exported = iter(self._export(plan))
        if not self.sends(plan):
            _exhaust(exported)
            return None
        if self._offered is None or self._end is None:
            raise WeightSyncError(f"{self._role} rank {self._rank} was asked to send weights before preparing")
        begun = time.perf_counter()
        manifest = WeightManifest(version=plan.version, tensors=self._offered[1])
        try:
            sent = self._end.send(manifest, exported, Deadline(plan.deadline_s))
        except ReceiversLostError as lost:
            self._reset()
            _exhaust(exported)
            return SendOutcome(silent=lost.silent, gone=lost.gone, at=lost.at, seconds=time.perf_counter() - begun)
        except WeightSyncError as error:
            self._reset()
            _exhaust(exported)
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
        if plan.rehearsal:
            return _rehearsal(self._device)
        exported = self._strategy.export_adapters() if plan.adapters else self._strategy.export_weights()
        if plan.weight_format == "fp8" and self.sends(plan):
            from roll_core.modeling.eight_bits import in_eight_bits

            return in_eight_bits(exported, torch_dtype(plan.dtype) if plan.dtype else None)
        return exported

    def _describe(self, plan: SyncPlan) -> Iterator[TensorEntry]:
        for name, tensor in self._export(plan):
            entry = tensor_entry(name, tensor, "")
            if _dtype(plan) and tensor.is_floating_point():
                entry = replace(entry, dtype=plan.dtype)
            yield entry

    def _channel(self, plan: SyncPlan) -> SendingEnd:
        host = plan.sender_hosts[self._rank]
        receivers = plan.receivers_of(self._rank)
        wanted = (plan.transport, plan.backend, receivers, plan.replaced, plan.bucket_bytes, host, plan.directory)
        if self._end is None or self._end_plan != wanted:
            self._hang_up()
            self._end, self._end_plan = open_sending_end(plan, host, receivers, device=self._device), wanted
        return self._end

    def _hang_up(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None

    def _reset(self) -> None:
        self._hang_up()
        self._offered = None


def open_sending_end(plan: SyncPlan, host: str, receivers: tuple[int, ...], *, device: str = "cpu") -> SendingEnd:
    """The sender's end of the plan's transport, to `receivers`."""
    use_compiled_digests()
    if plan.transport == "shm":
        from roll_core.runtime.weights.transports.shm import ShmSender

        return ShmSender(plan.num_receivers, plan.bucket_bytes)
    if plan.transport == "cuda_ipc":
        from roll_core.runtime.weights.transports.cuda_ipc import CudaIpcSender

        return CudaIpcSender(receivers, plan.bucket_bytes, device)
    if plan.transport == "collective":
        from roll_core.runtime.weights.transports.collective import CollectiveSender

        return CollectiveSender(plan.num_receivers, plan.bucket_bytes, host, backend=plan.backend, device=device)
    if plan.transport == "disk":
        from roll_core.runtime.weights.transports.disk import DiskSender

        return DiskSender(plan.num_receivers, plan.bucket_bytes, plan.directory)
    raise UnsupportedError(f"this version of roll-core has no weight transport {plan.transport}")


def _exhaust(exported: Iterator[tuple[str, Tensor]]) -> None:
    """Ranks that do not send, or whose receivers live, are in the same export: they would wait for this one."""
    for _ in exported:
        pass


def _rehearsal(device: str) -> Iterator[tuple[str, Tensor]]:
    import torch

    yield "rehearsal", torch.arange(REHEARSED, dtype=torch.int32, device=device)


def _dtype(plan: SyncPlan) -> str:
    """As which floating-point tensors have yet to travel; what is in 8 bits, or beside it, is as it is to be."""
    return plan.dtype if plan.weight_format == "dtype" else ""


def _cast(tensor: Tensor, dtype: str) -> Tensor:
    """The very tensor unless it has to travel as another dtype."""
    return tensor.to(torch_dtype(dtype)) if dtype and tensor.is_floating_point() else tensor
