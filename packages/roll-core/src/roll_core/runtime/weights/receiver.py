"""The end of a weight sync that lives beside an infer strategy, in its worker."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from roll_core.errors import StaleWeightsError, UnsupportedError, WeightSyncError
from roll_core.modeling.digests import use_compiled_digests
from roll_core.runtime.weights.plan import Deadline, ReceiveOutcome
from roll_core.spec.transport import SenderLostError
from roll_core.spec.weights import make_receipt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from roll_core.runtime.weights.plan import Offer, SyncPlan
    from roll_core.spec.infer import InferStrategy
    from roll_core.spec.transport import ReceivingEnd


PATIENCE_S = 2.0
"""Receivers wait so much longer than the sender: it knows who is silent, they would only see each other hang up."""


class WeightReceiver:
    """Feeds `update_weights` from a transport and answers with the engine's receipt. Called on the engine's loop."""

    def __init__(self, strategy: InferStrategy, *, role: str, rank: int, device: str = "cpu") -> None:
        """`device` is where the engine wants tensors that a transport can deliver there."""
        self._strategy, self._role, self._rank, self._device = strategy, role, rank, device
        self._end: ReceivingEnd | None = None
        self._version: int | None = None

    async def receive(self, plan: SyncPlan, offer: Offer) -> ReceiveOutcome:
        """Take in what the sender offers. Failures of the sync are part of the outcome; others are raised."""
        begun = time.perf_counter()
        try:
            outcome = await self._receive(plan, offer, Deadline(plan.deadline_s + PATIENCE_S))
        except SenderLostError as lost:
            self.close()
            outcome = ReceiveOutcome(failure=WeightSyncError(f"{self._who}: {lost}"), cut_off=True)
        except WeightSyncError as error:
            self.close()
            outcome = ReceiveOutcome(failure=type(error)(f"{self._who}: {error}"))
        except BaseException:
            self.close()
            raise
        return replace(outcome, seconds=time.perf_counter() - begun)

    def close(self) -> None:
        """Hang up. May be called several times."""
        if self._end is not None:
            self._end.close()
            self._end = None

    @property
    def _who(self) -> str:
        return f"{self._role} rank {self._rank}"

    async def _receive(self, plan: SyncPlan, offer: Offer, deadline: Deadline) -> ReceiveOutcome:
        version = plan.version
        tensors = self._incoming(plan, offer, deadline)  # connects, so that hanging up tells the sender of a failure
        if plan.rehearsal:
            copies = ((name, tensor.clone()) for name, tensor in tensors)
            return ReceiveOutcome(receipt=make_receipt(offer.manifest, copies, role=self._role, rank=self._rank))
        if self._version is not None and version < self._version:
            raise StaleWeightsError(f"was sent weight version {version} but already holds version {self._version}")
        receipt = await self._strategy.update_weights(
            version, offer.manifest, tensors, shared=plan.transport == "shared" and plan.lends
        )
        for _ in tensors:  # what the engine left unread: the sender waits until all is taken
            pass
        self._version = version
        return ReceiveOutcome(receipt=replace(receipt, role=self._role, rank=self._rank))

    def _incoming(self, plan: SyncPlan, offer: Offer, deadline: Deadline) -> Iterator[tuple[str, Tensor]]:
        if plan.transport == "shared":
            return iter(offer.tensors)
        address = offer.addresses[self._rank] if offer.addresses else offer.address
        if self._end is not None and self._end.address != address:
            self.close()
        if self._end is None:
            self._end = open_receiving_end(plan, address, self._rank, deadline, device=self._device)
        return self._end.receive(offer.manifest, deadline)


def open_receiving_end(
    plan: SyncPlan, address: str, rank: int, deadline: Deadline, *, device: str = "cpu"
) -> ReceivingEnd:
    """A receiver's end of the plan's transport."""
    use_compiled_digests()
    if plan.transport == "shm":
        from roll_core.runtime.weights.transports.shm import ShmReceiver

        return ShmReceiver(address, rank, plan.bucket_bytes, deadline)
    if plan.transport == "cuda_ipc":
        from roll_core.runtime.weights.transports.cuda_ipc import CudaIpcReceiver

        return CudaIpcReceiver(address, rank, plan.bucket_bytes, deadline, device)
    if plan.transport == "collective":
        from roll_core.runtime.weights.transports.collective import CollectiveReceiver

        return CollectiveReceiver(
            address, rank, plan.num_receivers, plan.bucket_bytes, deadline, backend=plan.backend, device=device
        )
    if plan.transport == "disk":
        from roll_core.runtime.weights.transports.disk import DiskReceiver

        return DiskReceiver(address, rank, plan.bucket_bytes)
    raise UnsupportedError(f"this version of roll-core has no weight transport {plan.transport}")
