"""Both sides of a weight sync: the sender in a train worker, the receiver in an infer worker.

    WeightSender: export_weights ─► transport ─► WeightReceiver: update_weights ─► receipt

Engines in the trainer's process use the exported tensors themselves (`shared`): no bytes move, and there are no
endpoints. `prepare` hands the tensors over, and the receiver passes them to the engine. The proof then compares memory
addresses instead of digests (`roll_core.spec.weights.memory_token`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import xxhash
from typing_extensions import override

from roll_core.config.weight_transports import load_transport
from roll_core.errors import ContractError, StaleWeightsError, WeightSyncError
from roll_core.runtime.weights.plan import ReceiveOutcome, SendHandle, SendOutcome
from roll_core.spec.multilinear import MULTILINEAR
from roll_core.spec.transport import (
    BufferSizes,
    Deadline,
    ReceiverSetup,
    ReceiversLostError,
    SenderLostError,
    SenderSetup,
    WeightTransport,
)
from roll_core.spec.weights import Digests, digest_function, make_receipt, memory_token, tensor_entry, torch_dtype
from roll_core.types import WeightManifest, WeightReceipt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from roll_core.runtime.weights.plan import SyncPlan
    from roll_core.spec.infer import InferStrategy
    from roll_core.spec.train import TrainStrategy
    from roll_core.spec.transport import ReceiverEndpoint, RoleFacts, SenderEndpoint, WeightSizes
    from roll_core.types import TensorEntry

SELF_TEST_NUMBERS = 100_000
"""Number of int32 values that a self-test sends; larger than any memory page."""
SAMPLE_BYTES = 16 << 20
"""Bytes that `sample_fingerprint` reads; smaller models are read completely."""
_PAGE = 64 << 10


class WeightSender:
    """Sends the tensors of `export_weights` or `export_adapters`. All ranks of the role are called together; only the
    leader of the first model replica sends, or the ranks in `Route.sources`.

    Called on the strategy's thread, for each publish: `prepare`, then `send` unless the transport is in-process.
    """

    def __init__(self, strategy: TrainStrategy, *, role: str, rank: int, device: str = "cpu") -> None:
        """`device`: the strategy's device."""
        self._strategy, self._role, self._rank, self._device = strategy, role, rank, device
        self._described: tuple[tuple[object, ...], tuple[TensorEntry, ...]] | None = None
        self._endpoint: SenderEndpoint | None = None
        self._endpoint_setup: tuple[object, ...] = ()

    def sends(self, plan: SyncPlan) -> bool:
        """True if this rank sends."""
        if plan.route.sources:
            return self._rank in plan.route.sources
        place = self._strategy.data_rank
        return place.index == 0 and place.leader

    def prepare(self, plan: SyncPlan) -> SendHandle | None:
        """Prepare the manifest and address of this publish; None on ranks that do not send.

        Names and shapes are taken from the first export; later exports must yield the same. Exports are collective, so
        the description is kept even if this rank's send fails: ranks that do not send keep theirs.
        """
        if plan.transport.in_process:
            dtype = torch_dtype(_dtype(plan)) if _dtype(plan) else None  # `to` returns a tensor that has it unchanged
            buffers = dict(self._buffers(plan))
            tensors = [
                (name, tensor.to(dtype) if dtype and tensor.is_floating_point() and name not in buffers else tensor)
                for name, tensor in self._exported(plan)
            ]
            # Only after the export, which is collective.
            if not self.sends(plan):
                return None
            # The entries name the memory, so that the proof needs no digests.
            entries = tuple(tensor_entry(name, tensor, memory_token(tensor)) for name, tensor in tensors)
            manifest = WeightManifest(version=plan.version, tensors=entries, unsent=plan.unsent)
            begun, frozen = time.perf_counter(), self._frozen(plan)
            sample = sample_fingerprint([(name, tensor) for name, tensor in tensors if name not in frozen])
            sample_s = time.perf_counter() - begun
            return SendHandle(manifest=manifest, tensors=tensors, frozen=frozen, sample=sample, sample_s=sample_s)
        # What determines the export of every rank, and is equal on all of them: a description is collective, too.
        what = (
            plan.dtype,
            plan.weight_format,
            plan.device_digests,
            plan.adapters,
            plan.self_test,
            plan.route.sources,
        )
        if self._described is None or self._described[0] != what:
            self._described = what, tuple(self._describe(plan))
        if not self.sends(plan):
            return None
        return SendHandle(
            manifest=self._manifest(plan, self._described[1]),
            frozen=self._frozen(plan),
            address=self._open(plan).address,
        )

    def send(self, plan: SyncPlan) -> SendOutcome | None:
        """Send the weights that `prepare` described; None on ranks that do not send."""
        exported = self._exported(plan)
        if not self.sends(plan):
            _exhaust(exported)
            return None
        if self._described is None or self._endpoint is None:
            raise WeightSyncError(f"{self._role} rank {self._rank}: send() was called before prepare()")
        manifest = self._manifest(plan, self._described[1])
        try:
            sent = self._endpoint.send(manifest, exported, Deadline(plan.deadline_s))
        # Closed before the export ends, which may take long: receivers that are left see the end at once.
        except ReceiversLostError as lost:
            self.close()
            _exhaust(exported)
            return SendOutcome(timed_out=lost.timed_out, disconnected=lost.disconnected, tensor_name=lost.tensor_name)
        except WeightSyncError as error:
            self.close()
            _exhaust(exported)
            return SendOutcome(failure=error.located(f"{self._role} rank {self._rank}"))
        except BaseException:
            self.close()
            raise
        if sent and digest_function(sent[0].digest) != digest_function(self._described[1][0].digest):
            raise ContractError(
                f"{self._role} rank {self._rank}: weight transport {plan.transport.name} returned digest"
                f" {sent[0].digest} of {sent[0].name}, but the manifest names {self._described[1][0].digest or 'XXH3'}:"
                " digest with `like=entry.digest`, as `roll_weight_transports.bucket_plan.fill` does"
            )
        return SendOutcome(manifest=replace(manifest, tensors=tuple(sent)))

    def close(self) -> None:
        """Close the endpoint. Idempotent."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._endpoint = None

    def _frozen(self, plan: SyncPlan) -> frozenset[str]:
        # A matrix in fp8 is two tensors with other names; all of them are sent.
        if plan.self_test or plan.adapters or plan.weight_format != "dtype":
            return frozenset()
        return frozenset(self._strategy.frozen_weights())

    def _manifest(self, plan: SyncPlan, described: Iterable[TensorEntry]) -> WeightManifest:
        unsent = {entry.name for entry in plan.unsent}
        tensors = tuple(entry for entry in described if entry.name not in unsent)
        return WeightManifest(version=plan.version, tensors=tensors, unsent=plan.unsent)

    def _exported(self, plan: SyncPlan) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are sent. Those that receivers keep are exported too, because exports are collective."""
        unsent = {entry.name for entry in plan.unsent}
        return ((name, tensor) for name, tensor in self._export(plan) if name not in unsent)

    def _export(self, plan: SyncPlan) -> Iterator[tuple[str, Tensor]]:
        if plan.self_test:
            return _self_test_tensors(self._device)
        exported = self._strategy.export_adapters() if plan.adapters else self._strategy.export_weights()
        # Other ranks take part in the export and convert nothing.
        if plan.weight_format != "dtype" and self.sends(plan):
            from roll_core.spec.fp8 import to_fp8

            exported = to_fp8(exported, torch_dtype(plan.dtype) if plan.dtype else None, plan.weight_format)
        return chain(exported, self._buffers(plan))

    def _buffers(self, plan: SyncPlan) -> Iterator[tuple[str, Tensor]]:
        return iter(()) if plan.self_test or plan.adapters else self._strategy.export_buffers()

    def _describe(self, plan: SyncPlan) -> Iterator[TensorEntry]:
        buffers = dict(self._buffers(plan))
        for name, tensor in self._export(plan):
            entry = tensor_entry(name, tensor, MULTILINEAR if plan.device_digests else "")
            if _dtype(plan) and tensor.is_floating_point() and name not in buffers:
                entry = replace(entry, dtype=plan.dtype)
            yield entry

    def _open(self, plan: SyncPlan) -> SenderEndpoint:
        """The endpoint of this plan: the one of the last publish if it serves the same receivers alike."""
        setup = SenderSetup(
            receivers=plan.receivers_of(self._rank),
            bucket_bytes=plan.bucket_bytes,
            host=plan.sender_hosts[self._rank],
            device=self._device,
            options=plan.route.options,
        )
        endpoint_setup = (plan.transport, plan.replaced, setup)
        if self._endpoint is None or self._endpoint_setup != endpoint_setup:
            if self._endpoint is not None:
                self._endpoint.close()
                self._endpoint = None
            self._endpoint, self._endpoint_setup = load_transport(plan.transport).sender(setup), endpoint_setup
        return self._endpoint


class SendingWorker:
    """The part of a train worker that the driver calls for a weight sync."""

    sender: WeightSender

    def prepare_send(self, plan: SyncPlan) -> SendHandle | None:
        """First half of a weight sync: this rank's manifest and address. None if this rank does not send."""
        return self.sender.prepare(plan)

    def send_weights(self, plan: SyncPlan) -> SendOutcome | None:
        """Second half of a weight sync: send the weights while the receivers load them.

        None if this rank does not send.
        """
        return self.sender.send(plan)


def sample_fingerprint(tensors: Sequence[tuple[str, Tensor]], sample_bytes: int = SAMPLE_BYTES) -> str:
    """Hash of the names and a sample of the bytes: the first page of each tensor and every k-th page.

    k is the smallest number for which about `sample_bytes` are read. Different fingerprints prove that a value differs.
    Equal fingerprints prove equality only if all pages are read. An optimizer step that changes no sampled page of any
    tensor has almost surely changed no value. A device digests its pages itself; only digests are copied from it.
    """
    total = sum(tensor.nbytes for _, tensor in tensors)
    every = max(1, -(-total // sample_bytes))
    running, digests = xxhash.xxh3_128(), Digests()
    for name, tensor in tensors:
        running.update(f"\0{name}\0".encode())
        for number, page in enumerate(_pages(tensor, every)):
            if page.is_cpu:
                running.update(page.numpy().data)
            else:
                digests.add(f"{name}\0{number}", page, MULTILINEAR)
    for name, digest_text in digests.read().items():
        running.update(f"\0{name}\0{digest_text}".encode())
    return running.hexdigest()


def _pages(tensor: Tensor, every: int) -> Iterator[Tensor]:
    """Every `every`-th page of the tensor's bytes; those of a device together, since each costs it several launches."""
    import torch

    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if every == 1:
        yield flat
        return
    period = _PAGE * every
    num_periods = 0 if flat.is_cpu else flat.numel() // period
    if num_periods:
        yield flat[: num_periods * period].view(num_periods, period)[:, :_PAGE]
    for start in range(num_periods * period, flat.numel(), period):
        yield flat[start : start + _PAGE]


def _exhaust(exported: Iterator[tuple[str, Tensor]]) -> None:
    """Finish an export in which other ranks take part; otherwise they would block in its collectives."""
    for _ in exported:
        pass


def _self_test_tensors(device: str) -> Iterator[tuple[str, Tensor]]:
    import torch

    yield "self_test", torch.arange(SELF_TEST_NUMBERS, dtype=torch.int32, device=device)


def _dtype(plan: SyncPlan) -> str:
    """Dtype to which floating-point tensors are cast; empty for fp8, whose tensors have their final dtypes."""
    return plan.dtype if plan.weight_format == "dtype" else ""


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
            receipt = await self._receive(plan, handle, Deadline(plan.deadline_s + EXTRA_S))
            return ReceiveOutcome(receipt=replace(receipt, role=self._role, rank=self._rank))
        except SenderLostError as lost:
            self.close()
            return ReceiveOutcome(failure=WeightSyncError(f"{who}: {lost}"), cut_off=True)
        except WeightSyncError as error:
            self.close()
            return ReceiveOutcome(failure=error.located(who))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the endpoint. Idempotent."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    async def _receive(self, plan: SyncPlan, handle: SendHandle, deadline: Deadline) -> WeightReceipt:
        version = plan.version
        tensors = self._incoming(plan, handle, deadline)  # connects first, so that a failure here closes the connection
        if plan.self_test:
            return make_receipt(handle.manifest, ((name, tensor.clone()) for name, tensor in tensors))
        if self._version is not None and version < self._version:
            raise StaleWeightsError(f"received weight version {version}, older than its loaded version {self._version}")
        shared = plan.transport.in_process and plan.shares_tensors
        receipt: object = await self._strategy.update_weights(version, handle.manifest, tensors, shared=shared)
        if not isinstance(receipt, WeightReceipt):
            strategy = type(self._strategy)
            raise ContractError(
                f"{self._role} rank {self._rank}: update_weights of {strategy.__module__}:{strategy.__qualname__}"
                f" returned {type(receipt).__name__}, expected WeightReceipt"
            )
        for _ in tensors:  # tensors that the engine left unread: the sender blocks until all are read
            pass
        self._version = version
        return receipt

    def _incoming(self, plan: SyncPlan, handle: SendHandle, deadline: Deadline) -> Iterator[tuple[str, Tensor]]:
        if plan.transport.in_process:
            return iter(handle.tensors)
        address = handle.addresses[self._rank] if handle.addresses else handle.address
        # The sender has a new endpoint: after a failure, or because a worker was replaced.
        if self._endpoint is not None and self._endpoint.address != address:
            self.close()
        if self._endpoint is None:
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


class ReceivingWorker:
    """The part of an infer worker that the driver calls for a weight sync."""

    receiver: WeightReceiver

    async def receive_weights(self, plan: SyncPlan, handle: SendHandle) -> ReceiveOutcome:
        """Load published weights. Returns what the engine holds afterwards."""
        return await self.receiver.receive(plan, handle)


class SharedTransport(WeightTransport):
    """Shares tensors within one process (`in_process` in its provider record)."""

    @override
    def available(self, sender: RoleFacts, receiver: RoleFacts) -> str | None:
        return None

    @override
    def buffers(self, sizes: WeightSizes) -> BufferSizes:
        return BufferSizes(sender_bytes=0, receiver_bytes=0)
