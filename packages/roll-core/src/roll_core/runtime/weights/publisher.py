"""The driver's side of a weight sync: calls both sides of a publish and proves it: `verify` checks every receipt."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roll_core.config.weight_transports import load_transport
from roll_core.errors import (
    ContractError,
    CorruptTensorError,
    MissingTensorError,
    ReceiverTimeoutError,
    RollError,
    StaleWeightsError,
    UnexpectedTensorError,
    WeightsUnchangedError,
    WeightSyncError,
    WorkerDiedError,
    WorkerTimeoutError,
    one_line,
)
from roll_core.runtime.cluster.concurrency import cancel_all
from roll_core.runtime.cluster.executors.base import WorkerStub
from roll_core.runtime.weights.plan import SendOutcome, SyncPlan
from roll_core.runtime.weights.transfer import ReceivingWorker, SendingWorker
from roll_core.spec.weights import MEMORY, Digests, digest_function, entry_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.runtime.cluster.executors.base import WorkerGroup
    from roll_core.runtime.weights.plan import ReceiveOutcome, SendHandle
    from roll_core.types import TensorEntry, WeightManifest, WeightReceipt

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""Seconds to wait for one side after the other failed, and beyond the deadline that workers check themselves. The exit
of a process is reported later than its closed connection."""
GRACE_AFTER_DEADLINE_S = 1.0
"""Seconds to wait for receivers if the sender has already waited for them until the deadline."""
SELF_TEST_S = 30.0
"""Deadline of a self-test in seconds, unless that of a publish is shorter."""
NAMED = 5
"""Number of tensors that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Sizes and durations of one publish."""

    weight_bytes: int
    """Size of one copy of the weights in bytes, with those that engines keep."""
    copied_bytes: int
    """Bytes copied by senders; 0 if the tensors themselves were handed over."""
    seconds: float
    """Duration from the call to the end of the proof."""
    proof_s: float
    """Part of `seconds`: fingerprints if nothing is copied, and the comparison of manifest and receipts. Digests that
    are computed while copying count as copying; `benchmarks/sync.py` separates them."""


class WeightPublisher:
    """Publishes the weights of one train role to one infer role. One publish at a time."""

    def __init__(self, train: WorkerGroup, infer: WorkerGroup, plan: SyncPlan) -> None:
        """`plan`: parameters that all publishes have in common."""
        self.plan = plan
        self._train, self._infer = train, infer
        self._senders = WorkerStub[SendingWorker](train)
        self._receivers = WorkerStub[ReceivingWorker](infer)
        self._previous: WeightManifest | None = None
        self._previous_replaced = 0
        self._previous_sample = ""
        self._unsent: tuple[TensorEntry, ...] = ()
        """Frozen tensors that the receivers of the previous publish have proved to have; empty after a failure."""

    async def publish(self, version: int, *, changed_at: int | None = None, keeps_weights: bool = False) -> SyncReport:
        """Send the weights as `version`, and return when every receiver has proved that it loaded them.

        `changed_at`: version made by the last optimizer step with a non-zero gradient (default: `version`). Weights
        published at that version or later may be unchanged. `keeps_weights`: the receivers still have the weights of
        this publisher's previous publish, so frozen tensors are not sent again, except after a failed publish or the
        restart of a receiver.

        Raises a `WeightSyncError` that names role, rank and tensor, or `WorkerDiedError`. After an error the receivers
        may hold weights of mixed versions until a publish succeeds; after `WeightsUnchangedError` they hold `version`.
        """
        begun = time.perf_counter()
        plan = self._next_plan(version)
        if keeps_weights and self._previous_replaced == plan.replaced:
            plan = replace(plan, unsent=self._unsent)
        self._unsent, self._previous_replaced = (), plan.replaced
        rank, handle = await self._prepare(plan)
        if plan.transport.in_process:
            outcome, receipts = SendOutcome(manifest=handle.manifest), await self._hand_over(plan, handle)
        else:
            outcome, receipts = await self._transfer(plan, handle)
        sent = outcome.manifest
        if sent is None:
            raise WeightSyncError(f"{self._train.role} rank {rank} sent no weights")
        if not sent.tensors:
            raise MissingTensorError(f"{self._train.role} rank {rank} exported no tensors for weight version {version}")
        proving = time.perf_counter()
        try:
            proven = self._verify(sent, receipts, handle)
        except WeightSyncError as error:
            error.loaded = True
            raise
        # Tensors of the trainer that a receiver uses without a copy are handed over each time.
        self._unsent = tuple(
            entry for entry in proven.loaded if entry.name in handle.frozen and not entry.digest.startswith(MEMORY)
        )
        # Before the checks below: receivers hold this version even if one of them raises.
        previous, self._previous = self._previous, proven
        previous_sample, self._previous_sample = self._previous_sample, handle.sample
        must_differ = previous is not None and previous.version < (version if changed_at is None else changed_at)
        if previous is not None and must_differ and handle.sample in ("", previous_sample):
            if handle.sample:  # equal samples: names and sampled values are unchanged
                previous = replace(previous, tensors=sent.tensors)
            require_change(sent, previous, role=self._train.role, rank=rank)
        ended = time.perf_counter()
        num_bytes = sum(entry_bytes(entry) for entry in sent.tensors)
        num_copies = 0 if plan.transport.in_process else len(set(plan.route.sources)) or 1
        return SyncReport(
            weight_bytes=num_bytes + sum(entry_bytes(entry) for entry in sent.unsent),
            copied_bytes=num_bytes * num_copies,
            seconds=ended - begun,
            proof_s=ended - proving + handle.sample_s,
        )

    async def self_test(self) -> None:
        """Publish a few numbers instead of weights. Raises the errors of a publish."""
        deadline_s = min(self.plan.deadline_s, SELF_TEST_S)
        plan = replace(self._next_plan(0), self_test=True, deadline_s=deadline_s)
        _, handle = await self._prepare(plan)
        outcome, receipts = await self._transfer(plan, handle)
        for receipt in receipts:
            verify(outcome.manifest or handle.manifest, receipt)

    def _next_plan(self, version: int) -> SyncPlan:
        members = self._train.members + self._infer.members
        one_host = len({(member.node, member.host) for member in members}) == 1
        return replace(
            self.plan,
            version=version,
            num_receivers=self._infer.world_size,
            sender_hosts=tuple("127.0.0.1" if one_host else member.address for member in self._train.members),
            replaced=self._infer.replaced,
        )

    async def _prepare(self, plan: SyncPlan) -> tuple[int, SendHandle]:
        """Prepare all senders. Returns rank and handle of the first; the handle has the addresses of all senders."""
        handles = await self._senders(SendingWorker.prepare_send, plan.deadline_s + GRACE_S).all(plan)
        ready = {rank: handle for rank, handle in enumerate(handles) if handle is not None}
        for rank, handle in ready.items():
            if plan.route.sources:
                handle = replace(handle, addresses=tuple(ready[source].address for source in plan.route.sources))
            return rank, handle
        raise WeightSyncError(f"no rank of {self._train.role} is the leader of its first model replica")

    async def _hand_over(self, plan: SyncPlan, handle: SendHandle) -> list[WeightReceipt]:
        try:
            outcomes = await self._receive(plan, handle, plan.deadline_s)
        except WorkerTimeoutError as error:
            raise self._timed_out(plan, error.ranks) from error
        return _receipts(outcomes)

    async def _transfer(self, plan: SyncPlan, handle: SendHandle) -> tuple[SendOutcome, list[WeightReceipt]]:
        """Send and receive at the same time. If several workers fail, raise the failure that caused the others."""
        within_s = plan.deadline_s + GRACE_S
        sending = asyncio.ensure_future(self._send(plan, within_s))
        receiving = asyncio.ensure_future(self._receive(plan, handle, within_s))
        both: set[asyncio.Future[object]] = {sending, receiving}  # type: ignore[arg-type]
        try:
            done, pending = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if pending:
                grace_s = _grace_s(done)
                # One side failed: the other blocks in the transfer until its deadline unless it is woken. It gets time
                # to report, because its error may be the cause.
                if grace_s is not None:
                    await self._call_off(handle)
                await asyncio.wait(pending, timeout=grace_s)
            self._raise_first_cause(plan, sending, receiving)
            return sending.result(), _receipts(receiving.result())
        except BaseException:
            await self._call_off(handle)
            raise
        finally:
            await cancel_all(both)

    async def _call_off(self, handle: SendHandle) -> None:
        transport, options = load_transport(self.plan.transport), self.plan.route.options
        for address in dict.fromkeys(handle.addresses or (handle.address,)):
            try:
                # In a thread: it may block in a connection while this loop serves the other workers' calls.
                await asyncio.to_thread(transport.cancel_transfer, address, options)
            except Exception as error:  # plugin code, which must not hide the failure that led here
                name = self.plan.transport.name
                log.warning("weight transport %s cannot cancel a transfer: %s", name, one_line(error))

    async def _receive(self, plan: SyncPlan, handle: SendHandle, within_s: float) -> list[ReceiveOutcome]:
        """Call all receivers, including lost ranks, so that the send fails instead of blocking on them."""
        receive = self._receivers(ReceivingWorker.receive_weights, within_s)
        return await receive.each([receive.args(plan, handle)] * self._infer.world_size)

    async def _send(self, plan: SyncPlan, within_s: float) -> SendOutcome:
        """Call all senders and merge their outcomes; any failure takes precedence."""
        outcomes = {
            rank: outcome
            for rank, outcome in enumerate(await self._senders(SendingWorker.send_weights, within_s).all(plan))
            if outcome is not None
        }
        (first_rank, first), *others = sorted(outcomes.items(), key=lambda item: item[1].manifest is not None)
        if first.manifest is None or not others:
            timed_out = tuple(sorted(rank for outcome in outcomes.values() for rank in outcome.timed_out))
            disconnected = tuple(sorted(rank for outcome in outcomes.values() for rank in outcome.disconnected))
            return replace(first, timed_out=timed_out, disconnected=disconnected)
        for rank, other in others:
            theirs = {entry.name: entry for entry in other.manifest.tensors} if other.manifest else {}
            if wrong := [entry.name for entry in first.manifest.tensors if theirs.get(entry.name) != entry]:
                raise CorruptTensorError(
                    f"ranks {first_rank} and {rank} of {self._train.role} have different values of {wrong[0]} in weight"
                    f" version {plan.version}: data-parallel replicas diverged"
                )
        return first

    def _raise_first_cause(
        self,
        plan: SyncPlan,
        sending: asyncio.Future[SendOutcome],
        receiving: asyncio.Future[list[ReceiveOutcome]],
    ) -> None:
        raised = [error for future in (receiving, sending) if future.done() and (error := future.exception())]
        sent = sending.result() if sending.done() and not sending.exception() else SendOutcome()
        # From cause to consequence: a worker that exited makes others time out, and a failed sender cuts off its
        # receivers. A lost sender is reported only if nothing else explains it.
        for error in sorted(raised, key=lambda error: not isinstance(error, WorkerDiedError)):
            if isinstance(error, WorkerTimeoutError) and error.role == self._infer.role:
                raise self._timed_out(plan, error.ranks, sent.tensor_name) from error
            raise error
        received = receiving.result() if receiving.done() else []
        for outcome in received:
            if outcome.failure is not None and not outcome.cut_off:
                raise outcome.failure
        if sent.failure is not None:
            raise sent.failure
        if sent.timed_out:
            raise self._timed_out(plan, sent.timed_out, sent.tensor_name)
        if sent.disconnected:
            raise WeightSyncError(
                f"{self._infer.role} rank {_ranks(sent.disconnected)} disconnected before it read {sent.tensor_name} of"
                f" weight version {plan.version}"
            )
        for outcome in received:
            if outcome.failure is not None:
                raise outcome.failure
        if not receiving.done():
            raise self._timed_out(plan, range(plan.num_receivers))

    def _timed_out(self, plan: SyncPlan, ranks: Sequence[int], tensor_name: str = "") -> ReceiverTimeoutError:
        where = f" (it did not read {tensor_name})" if tensor_name else ""
        return ReceiverTimeoutError(
            f"{self._infer.role} rank {_ranks(ranks)} did not confirm weight version {plan.version} within"
            f" {plan.deadline_s:g} s{where}: the engine hangs, or model_update_timeout is too short",
            ranks,
        )

    def _verify(self, sent: WeightManifest, receipts: Sequence[WeightReceipt], handle: SendHandle) -> WeightManifest:
        """Verify every receipt. Returns the manifest, with digests of bytes for tensors that a receiver copied."""
        handed_over = dict(handle.tensors)
        digests: dict[str, str] = {}
        """Digests of the bytes of tensors that were handed over and then copied by a receiver."""
        for receipt in receipts:
            copied = {
                entry.name
                for entry in sent.tensors
                if entry.digest.startswith(MEMORY) and receipt.digests.get(entry.name, entry.digest) != entry.digest
            }
            computed = Digests()
            for name in copied - digests.keys():
                computed.add(name, handed_over[name], receipt.digests[name])
            digests |= computed.read()
            entries = tuple(
                replace(entry, digest=digests[entry.name]) if entry.name in copied else entry for entry in sent.tensors
            )
            verify(replace(sent, tensors=entries), receipt, self._previous)
        return replace(
            sent, tensors=tuple(replace(entry, digest=digests.get(entry.name, entry.digest)) for entry in sent.tensors)
        )


def _grace_s(done: set[asyncio.Future[object]]) -> float | None:
    """Seconds to wait for the other side after one has finished; None if it succeeded: wait until the deadline."""
    for future in done:
        if future.exception() is not None:
            return GRACE_S
        result = future.result()
        if isinstance(result, list) and any(outcome.failure is not None for outcome in result):
            return GRACE_S
        if isinstance(result, SendOutcome) and result.manifest is None:
            return GRACE_AFTER_DEADLINE_S if result.timed_out else GRACE_S
    return None


def _receipts(outcomes: Sequence[ReceiveOutcome]) -> list[WeightReceipt]:
    for outcome in outcomes:
        if outcome.failure is not None:
            raise outcome.failure
    return [outcome.receipt for outcome in outcomes if outcome.receipt is not None]


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


# -- the proof: the manifest of the sender compared with each receipt --------------------------------------------------


def verify(manifest: WeightManifest, receipt: WeightReceipt, previous: WeightManifest | None = None) -> None:
    """Raise the most specific `WeightSyncError` if `receipt` differs from `manifest`, or `ContractError` if its digests
    are of another function.

    `previous`: manifest of the publish before. Tensors that still have its digests were not updated.
    """
    who = f"{receipt.role} rank {receipt.rank}"
    if receipt.version != manifest.version:
        raise StaleWeightsError(
            f"{who} has weight version {receipt.version}, expected {manifest.version}: it ignored the update"
        )
    sent = {entry.name: entry.digest for entry in manifest.loaded}
    loaded = receipt.digests
    wrong = [entry for entry in manifest.loaded if loaded.get(entry.name, entry.digest) != entry.digest]
    # A tensor in the place of another explains other differences, so it is checked first.
    if wrong:
        raise _wrong_digests(who, manifest.version, sent, loaded, wrong, previous)
    if missing := [name for name in sent if name not in loaded]:
        raise MissingTensorError(
            f"{who} did not load {_names(missing)} of weight version {manifest.version}"
            f" (it loaded {len(loaded)} of {len(sent)} tensors)"
        )
    if extra := [name for name in loaded if name not in sent]:
        raise UnexpectedTensorError(
            f"{who} loaded {_names(extra)}, which weight version {manifest.version} does not contain: both sides must"
            " run the same model"
        )


def _wrong_digests(
    who: str,
    version: int,
    sent: Mapping[str, str],
    loaded: Mapping[str, str],
    wrong: Sequence[TensorEntry],
    previous: WeightManifest | None,
) -> RollError:
    """The cause of digests that differ: another function, an ignored update, swapped tensors, or other bytes."""
    first, names = wrong[0], [entry.name for entry in wrong]
    if digest_function(loaded[first.name]) != digest_function(first.digest):
        return ContractError(
            f"{who}: the receipt has digest {loaded[first.name]} of {first.name}, but the manifest names"
            f" {digest_function(first.digest) or 'XXH3'}: digest with `like=entry.digest`, or use `make_receipt`"
        )
    before = {entry.name: entry.digest for entry in previous.loaded} if previous else {}
    if previous is not None and all(loaded[name] == before.get(name) for name in names):
        return StaleWeightsError(
            f"{who} confirmed weight version {version}, but has the values of version {previous.version} in"
            f" {_names(names)}"
        )
    owner = {sent[name]: name for name in names}
    partners = ((name, owner.get(loaded[name], name)) for name in names)
    swapped = [(a, b) for a, b in partners if a < b and loaded[b] == sent[a]]
    if swapped:
        pairs = ", ".join(f"{a} and {b}" for a, b in swapped[:NAMED])
        return CorruptTensorError(f"{who} has the values of {pairs} swapped, in weight version {version}")
    others = f", and {len(wrong) - 1} others: {_names(names[1:])}" if len(wrong) > 1 else ""
    return CorruptTensorError(
        f"{who} loaded other bytes than were sent for {first.name} ({first.dtype} {list(first.shape)}) in weight"
        f" version {version}: digest {loaded[first.name]}, sent was {first.digest}{others}"
    )


def require_change(manifest: WeightManifest, previous: WeightManifest, *, role: str, rank: int) -> None:
    """Raise `WeightsUnchangedError` if a new version has the same values as the one before."""
    before = {entry.name: entry.digest for entry in previous.loaded}
    steps = manifest.version - previous.version
    if steps <= 0 or any(before.get(entry.name) != entry.digest for entry in manifest.tensors):
        return
    raise WeightsUnchangedError(
        f"{role} rank {rank} did {steps} optimizer step{'s' if steps > 1 else ''} with a non-zero gradient since weight"
        f" version {previous.version}, but version {manifest.version} has the same values in all"
        f" {len(manifest.tensors)} tensors ({manifest.tensors[0].name}, ...): the learning rate is 0 or too small for"
        " the dtype, or the strategy exported a stale copy"
    )


def _names(names: Sequence[str]) -> str:
    rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + rest
