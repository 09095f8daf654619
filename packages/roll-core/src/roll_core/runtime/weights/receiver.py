"""The receiving side of a weight sync, in an infer worker."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from roll_core.config.weight_transports import load_transport
from roll_core.errors import StaleWeightsError, WeightSyncError
from roll_core.runtime.weights.plan import ReceiveOutcome
from roll_core.spec.transport import Deadline, ReceiverSetup, SenderLostError
from roll_core.spec.weights import make_receipt
from roll_core.weights.digests import use_compiled_digests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from roll_core.runtime.weights.plan import SendHandle, SyncPlan
    from roll_core.spec.infer import InferStrategy
    from roll_core.spec.transport import ReceiverEndpoint


EXTRA_S = 2.0
"""Seconds by which receivers outlast the sender's deadline: the sender can name the silent receiver, receivers would
only see each other's closed connections."""


class WeightReceiver:
    """Feeds `update_weights` from a transport and returns the engine's receipt. Called on the engine's event loop."""

    def __init__(self, strategy: InferStrategy, *, role: str, rank: int, device: str = "cpu") -> None:
        """`device`: device on which the engine expects tensors, if the transport can deliver them there."""
        self._strategy, self._role, self._rank, self._device = strategy, role, rank, device
        self._endpoint: ReceiverEndpoint | None = None
        self._version: int | None = None

    async def receive(self, plan: SyncPlan, handle: SendHandle) -> ReceiveOutcome:
        """Load the weights of a publish. A `WeightSyncError` becomes part of the outcome; others are raised."""
        who = f"{self._role} rank {self._rank}"
        try:
            return await self._receive(plan, handle, Deadline(plan.deadline_s + EXTRA_S))
        except SenderLostError as lost:
            self.close()
            return ReceiveOutcome(failure=WeightSyncError(f"{who}: {lost}"), cut_off=True)
        except WeightSyncError as error:
            self.close()
            return ReceiveOutcome(failure=type(error)(f"{who}: {error}"))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the endpoint. Idempotent."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    async def _receive(self, plan: SyncPlan, handle: SendHandle, deadline: Deadline) -> ReceiveOutcome:
        version = plan.version
        tensors = self._incoming(plan, handle, deadline)  # connects first, so that a failure here closes the connection
        if plan.self_test:
            copies = ((name, tensor.clone()) for name, tensor in tensors)
            return ReceiveOutcome(receipt=make_receipt(handle.manifest, copies, role=self._role, rank=self._rank))
        if self._version is not None and version < self._version:
            raise StaleWeightsError(f"received weight version {version}, older than its loaded version {self._version}")
        shared = plan.transport.in_process and plan.shares_tensors
        receipt = await self._strategy.update_weights(version, handle.manifest, tensors, shared=shared)
        for _ in tensors:  # tensors that the engine left unread: the sender blocks until all are read
            pass
        self._version = version
        return ReceiveOutcome(receipt=replace(receipt, role=self._role, rank=self._rank))

    def _incoming(self, plan: SyncPlan, handle: SendHandle, deadline: Deadline) -> Iterator[tuple[str, Tensor]]:
        if plan.transport.in_process:
            return iter(handle.tensors)
        address = handle.addresses[self._rank] if handle.addresses else handle.address
        if self._endpoint is not None and self._endpoint.address != address:
            self.close()
        if self._endpoint is None:
            use_compiled_digests()
            setup = ReceiverSetup(
                address=address,
                rank=self._rank,
                num_receivers=plan.num_receivers,
                bucket_bytes=plan.bucket_bytes,
                deadline=deadline,
                device=self._device,
                options=plan.route.options,
            )
            self._endpoint = load_transport(plan.transport).receiver(setup)
        return self._endpoint.receive(handle.manifest, deadline)
