"""The driver's side of a weight sync: tells both ends what to do, and believes nothing that is not proved."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roll_core.errors import (
    CorruptTensorError,
    ReceiverSilentError,
    WeightSyncError,
    WorkerDiedError,
    WorkerTimeoutError,
)
from roll_core.runtime.placement import HOST_BACKEND
from roll_core.runtime.weights.plan import SendOutcome, SyncPlan
from roll_core.runtime.weights.proof import require_change, verify
from roll_core.spec.weights import MEMORY, digest, entry_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.runtime.executors.base import WorkerGroup
    from roll_core.runtime.weights.plan import Offer, ReceiveOutcome
    from roll_core.spec.config import WeightFormat
    from roll_core.spec.providers import Transport
    from roll_core.types import TensorEntry, WeightManifest, WeightReceipt

GRACE_S = 5.0
"""How long one side may still answer after the other has failed, and after the deadline that workers watch themselves:
the news of a dead process comes later than that of its closed connection."""
REHEARSAL_S = 30.0
"""Deadline of a rehearsal, unless that of a publish is shorter."""
AFTERTHOUGHT_S = 1.0
"""The same where the sender has already waited for receivers until the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What a publish did."""

    version: int
    transport: Transport
    num_tensors: int
    num_receivers: int
    weight_bytes: int
    """Of one copy of the weights."""
    copied_bytes: int
    """Copied by the sender; 0 where the very tensors were handed over."""
    seconds: float
    """From the call to the proof."""
    proof_s: float
    """Of these, fingerprints where nothing is copied, and the comparison of manifest and receipts. Digests that ride on
    a copy are part of the copy's time; `benchmarks/sync.py` tells them apart."""


class WeightPublisher:
    """Brings an infer role to the weights of a train role. One publish at a time.

    `prepare_send(plan)` and `send_weights(plan)` are called on all train workers, `receive_weights(plan, offer)` on all
    infer workers: see `WeightSender` and `WeightReceiver`.
    """

    def __init__(
        self,
        train: WorkerGroup,
        infer: WorkerGroup,
        transport: Transport,
        *,
        dtype: str = "",
        weight_format: WeightFormat = "dtype",
        adapters: bool = False,
        bucket_bytes: int = 1 << 30,
        deadline_s: float = 60.0,
        directory: str = "",
        lends: bool = True,
        sources: tuple[int, ...] = (),
        backend: str = HOST_BACKEND,
    ) -> None:
        """`adapters` sends these alone, to an infer role that has the model beneath them; `weight_format`, `lends`,
        `sources`, `backend`: see `SyncPlan`."""
        self.backend = backend
        self._lends, self._sources = lends, sources
        self._train, self._infer = train, infer
        self.transport: Transport = transport
        self._dtype, self._weight_format, self._adapters = dtype, weight_format, adapters
        self._bucket_bytes, self._deadline_s = bucket_bytes, deadline_s
        self._directory = directory
        self._previous: WeightManifest | None = None
        self._previous_sample = ""

    async def publish(self, version: int, *, changed_at: int | None = None) -> SyncReport:
        """Send the weights as `version`, and return when every receiver has proved that it holds them.

        `changed_at` is the version that the last optimizer step with a gradient other than zero has made (default:
        `version`). Weights that were published at that version or later may be unchanged.

        Raises a `WeightSyncError` that names role, rank and tensor, or `WorkerDiedError`. After an error the receivers'
        weights are not to be trusted until a publish succeeds; after `WeightsUnchangedError` they are as published.
        """
        begun = time.perf_counter()
        plan = self._plan(version)
        rank, offer = await self._prepare(plan)
        if self.transport == "shared":
            outcome, receipts = SendOutcome(manifest=offer.manifest), await self._hand_over(plan, offer)
        else:
            outcome, receipts = await self._transfer(plan, offer)
        sent = outcome.manifest
        if sent is None:
            raise WeightSyncError(f"{self._train.role} rank {rank} sent nothing")
        proving = time.perf_counter()
        try:
            held = self._prove(sent, receipts, offer)
        except WeightSyncError as error:
            error.loaded = True
            raise
        previous, self._previous = self._previous, held
        previous_sample, self._previous_sample = self._previous_sample, offer.sample
        must_differ = previous is not None and previous.version < (version if changed_at is None else changed_at)
        if must_differ and (not offer.sample or offer.sample == previous_sample):
            self._require_change(sent, previous, rank, sampled=bool(offer.sample))
        ended = time.perf_counter()
        return SyncReport(
            version=version,
            transport=self.transport,
            num_tensors=len(sent.tensors),
            num_receivers=plan.num_receivers,
            weight_bytes=sum(entry_bytes(entry) for entry in sent.tensors),
            copied_bytes=outcome.copied_bytes,
            seconds=ended - begun,
            proof_s=ended - proving + offer.sample_s,
        )

    async def rehearse(self) -> None:
        """Do as in a publish with a few numbers in place of weights. Raises what then goes wrong."""
        plan = replace(self._plan(0), rehearsal=True, deadline_s=min(self._deadline_s, REHEARSAL_S))
        _, offer = await self._prepare(plan)
        outcome, receipts = await self._transfer(plan, offer)
        for receipt in receipts:
            verify(outcome.manifest or offer.manifest, receipt)

    def _plan(self, version: int) -> SyncPlan:
        members = self._train.members + self._infer.members
        one_host = len({(member.node, member.host) for member in members}) == 1
        return SyncPlan(
            version=version,
            transport=self.transport,
            num_receivers=self._infer.world_size,
            sender_hosts=tuple("127.0.0.1" if one_host else member.address for member in self._train.members),
            dtype=self._dtype,
            weight_format=self._weight_format,
            adapters=self._adapters,
            bucket_bytes=self._bucket_bytes,
            backend=self.backend,
            directory=self._directory,
            deadline_s=self._deadline_s,
            lends=self._lends,
            sources=self._sources,
            replaced=self._infer.replaced,
        )

    async def _prepare(self, plan: SyncPlan) -> tuple[int, Offer]:
        offers: list[Offer | None] = await self._train.call("prepare_send", plan, deadline_s=plan.deadline_s + GRACE_S)
        ready = {rank: offer for rank, offer in enumerate(offers) if offer is not None}
        for rank, offer in ready.items():
            if plan.sources:
                offer = replace(offer, addresses=tuple(ready[source].address for source in plan.sources))
            return rank, offer
        raise WeightSyncError(f"no rank of {self._train.role} is the leader of its first model replica")

    async def _hand_over(self, plan: SyncPlan, offer: Offer) -> list[WeightReceipt]:
        try:
            outcomes = await self._receive(plan, offer, plan.deadline_s)
        except WorkerTimeoutError as error:
            raise self._silent(plan, error.silent) from error
        return _receipts(outcomes)

    async def _transfer(self, plan: SyncPlan, offer: Offer) -> tuple[SendOutcome, list[WeightReceipt]]:
        """Both sides at once. Of all that fails, what does not follow from another failure is raised."""
        within_s = plan.deadline_s + GRACE_S
        sending = asyncio.ensure_future(self._send(plan, within_s))
        receiving = asyncio.ensure_future(self._receive(plan, offer, within_s))
        both: set[asyncio.Future[object]] = {sending, receiving}  # type: ignore[arg-type]
        try:
            done, pending = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if pending:
                patience_s = _patience_s(done)
                if patience_s is not None:
                    await _call_off(plan, offer)
                await asyncio.wait(pending, timeout=patience_s)
            self._raise_first_cause(plan, sending, receiving)
            return sending.result(), _receipts(receiving.result())
        except BaseException:
            await _call_off(plan, offer)
            raise
        finally:
            for future in both:
                future.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _receive(self, plan: SyncPlan, offer: Offer, within_s: float) -> list[ReceiveOutcome]:
        """All of them: whoever died while the weights were prepared would be waited for by those who send."""
        told = [(plan, offer)] * self._infer.world_size
        return await self._infer.call_each("receive_weights", told, deadline_s=within_s)

    async def _send(self, plan: SyncPlan, within_s: float) -> SendOutcome:
        outcomes: list[SendOutcome | None] = await self._train.call("send_weights", plan, deadline_s=within_s)
        return self._joined({rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None})

    def _joined(self, outcomes: dict[int, SendOutcome]) -> SendOutcome:
        """What the sending ranks did, as one; whoever failed stands for all."""
        (first_rank, first), *others = sorted(outcomes.items(), key=lambda each: each[1].manifest is not None)
        if first.manifest is None or not others:
            silent = tuple(sorted(rank for each in outcomes.values() for rank in each.silent))
            gone = tuple(sorted(rank for each in outcomes.values() for rank in each.gone))
            return replace(first, silent=silent, gone=gone)
        for rank, other in others:
            if other.manifest != first.manifest:
                raise CorruptTensorError(self._diverged(first_rank, first.manifest, rank, other.manifest))
        return replace(
            first,
            copied_bytes=sum(each.copied_bytes for each in outcomes.values()),
            seconds=max(each.seconds for each in outcomes.values()),
        )

    def _diverged(self, rank: int, manifest: WeightManifest, other_rank: int, other: WeightManifest | None) -> str:
        theirs = {entry.name: entry for entry in other.tensors} if other else {}
        name = next((each.name for each in manifest.tensors if theirs.get(each.name) != each), "")
        return (
            f"ranks {rank} and {other_rank} of {self._train.role} hold different values of {name or 'their tensors'} in"
            f" weight version {manifest.version}: replicas that are to be equal have diverged"
        )

    def _raise_first_cause(
        self,
        plan: SyncPlan,
        sending: asyncio.Future[SendOutcome],
        receiving: asyncio.Future[list[ReceiveOutcome]],
    ) -> None:
        raised = [error for future in (receiving, sending) if future.done() and (error := future.exception())]
        sent = sending.result() if sending.done() and not sending.exception() else SendOutcome()
        for error in sorted(raised, key=lambda error: not isinstance(error, WorkerDiedError)):
            if isinstance(error, WorkerTimeoutError) and error.role == self._infer.role:
                raise self._silent(plan, error.silent, sent.at) from error
            raise error
        received = receiving.result() if receiving.done() else []
        for outcome in received:
            if outcome.failure is not None and not outcome.cut_off:
                raise outcome.failure
        if sent.failure is not None:
            raise sent.failure
        if sent.silent:
            raise self._silent(plan, sent.silent, sent.at)
        if sent.gone:
            raise WeightSyncError(
                f"{self._infer.role} rank {_ranks(sent.gone)} hung up before {sent.at} of weight version"
                f" {plan.version} was taken"
            )
        for outcome in received:
            if outcome.failure is not None:
                raise outcome.failure
        if not receiving.done():
            raise self._silent(plan, range(plan.num_receivers))

    def _silent(self, plan: SyncPlan, ranks: Sequence[int], at: str = "") -> ReceiverSilentError:
        where = f" (it did not take {at})" if at else ""
        return ReceiverSilentError(
            f"{self._infer.role} rank {_ranks(ranks)} did not confirm weight version {plan.version} within"
            f" {plan.deadline_s:g} s{where}: the engine hangs, or is too slow for the deadline",
            ranks,
        )

    def _prove(self, sent: WeightManifest, receipts: Sequence[WeightReceipt], offer: Offer) -> WeightManifest:
        """Verify every receipt; returns the manifest with digests of bytes wherever a receiver gave them."""
        live = dict(offer.tensors)
        digests: dict[str, str] = {}

        def in_terms_of(receipt: WeightReceipt, entry: TensorEntry) -> TensorEntry:
            """A receiver that holds a copy of what was handed over answers with the digest of its bytes."""
            if not entry.digest.startswith(MEMORY) or receipt.digests.get(entry.name, entry.digest) == entry.digest:
                return entry
            if entry.name not in digests:
                digests[entry.name] = digest(live[entry.name])
            return replace(entry, digest=digests[entry.name])

        for receipt in receipts:
            entries = tuple(in_terms_of(receipt, entry) for entry in sent.tensors)
            verify(replace(sent, tensors=entries), receipt, self._previous)
        known = tuple(replace(entry, digest=digests.get(entry.name, entry.digest)) for entry in sent.tensors)
        return replace(sent, tensors=known)

    def _require_change(
        self, sent: WeightManifest, previous: WeightManifest | None, rank: int, *, sampled: bool
    ) -> None:
        if previous is None or not sent.tensors:
            return
        if sampled:  # equal samples: names and values are what they were, as far as they were read
            previous = replace(previous, tensors=sent.tensors)
        require_change(sent, previous, role=self._train.role, rank=rank)


async def _call_off(plan: SyncPlan, offer: Offer) -> None:
    """Tell ends that have no connection, by whose end they would learn it, that the publish has failed."""
    if plan.transport == "disk":
        from roll_core.runtime.weights.transports.disk import call_off

        await asyncio.to_thread(call_off, offer.address)
    elif plan.transport == "collective" and plan.backend != HOST_BACKEND:
        from roll_core.runtime.weights.transports.collective_groups import call_off

        await asyncio.to_thread(call_off, offer.address)


def _patience_s(done: set[asyncio.Future[object]]) -> float | None:
    """How long to wait for the other side when one has answered; None, until its deadline, if that answer is good."""
    for future in done:
        if future.exception() is not None:
            return GRACE_S
        result = future.result()
        if isinstance(result, list) and any(outcome.failure is not None for outcome in result):
            return GRACE_S
        if isinstance(result, SendOutcome) and result.manifest is None:
            return AFTERTHOUGHT_S if result.silent else GRACE_S
    return None


def _receipts(outcomes: Sequence[ReceiveOutcome]) -> list[WeightReceipt]:
    for outcome in outcomes:
        if outcome.failure is not None:
            raise outcome.failure
    return [outcome.receipt for outcome in outcomes if outcome.receipt is not None]


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
