"""The transport `collective`: broadcasts in buckets, between processes on any hosts.

The ends meet in a store before the group is made, because there a missing one can be named, and receivers write into it
how far they are, so that a timeout can name who is behind:

    receivers   here/<rank> (or gone/<rank>)   wait go    broadcasts ...   taken/<n>/<rank>   all-reduce
    sender      wait here/*                    go         broadcasts ...                      all-reduce
    driver                                                off, where an end has failed
"""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import override

from roll_core.errors import WeightSyncError
from roll_core.runtime.placement import HOST_BACKEND, HOST_DEVICE
from roll_core.runtime.weights.transports.collective_groups import LOOK_S, SENDER, connect, make_group, timeout
from roll_core.spec.buckets import fill, nothing_left, plan_buckets, view
from roll_core.spec.transport import ReceiversLostError, ReceivingEnd, SenderLostError, SendingEnd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed import Store, Work  # type: ignore[attr-defined]

    from roll_core.runtime.weights.plan import Deadline
    from roll_core.runtime.weights.transports.collective_groups import Group
    from roll_core.runtime.weights.transports.store import HostedStore, RemoteStore
    from roll_core.spec.buckets import Bucket
    from roll_core.types import TensorEntry, WeightManifest

S = TypeVar("S", bound="Store")

BUCKET_BYTES = 32 << 20
"""Buckets are no larger than this unless a tensor is: enough to saturate a network, and little memory."""


class CollectiveSender(SendingEnd):
    """First rank of the group, and host of its store."""

    def __init__(
        self,
        num_receivers: int,
        bucket_bytes: int,
        host: str,
        *,
        backend: str = HOST_BACKEND,
        device: str = HOST_DEVICE,
    ) -> None:
        from roll_core.runtime.weights.transports.store import HostedStore

        self._bucket_bytes = min(bucket_bytes, BUCKET_BYTES)
        self._num_receivers = num_receivers
        self._host, self._backend, self._device = host, backend, device
        secret = secrets.token_hex(16)
        self._store: HostedStore | None = HostedStore(host, secret)
        self.address = f"{secret}@{host}:{self._store.port}"
        self._group: Group | None = None
        self._number = 0

    @override
    def send(
        self, manifest: WeightManifest, exported: Iterator[tuple[str, Tensor]], deadline: Deadline
    ) -> list[TensorEntry]:
        store = _still_open(self._store)
        self._number += 1
        buckets = plan_buckets(manifest, self._bucket_bytes)
        sent: list[TensorEntry] = []
        at = buckets[0].first if buckets else ""
        try:
            group = self._group or self._meet(store, at, deadline)
            memory = _buffers(group, buckets)
            running: list[Work] = []
            for number, bucket in enumerate(buckets):
                if number >= 2:
                    at = buckets[number - 2].first
                    group.wait(running[number - 2], deadline)
                sent += fill(memory[number % 2], bucket, exported)
                running.append(group.broadcast(memory[number % 2][: bucket.num_bytes], deadline))
            nothing_left(exported)
            at = buckets[-1].first if buckets else ""
            for work in running[-2:]:
                group.wait(work, deadline)
            group.all_done(deadline)
        except RuntimeError as error:
            if isinstance(error, WeightSyncError):
                raise
            behind = self._without(f"taken/{self._number}", store)
            if deadline.left == 0:
                raise ReceiversLostError(at, silent=behind) from error
            raise ReceiversLostError(at, gone=self._with("gone", store) or behind) from error
        return sent

    @override
    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
        if self._store is not None:
            self._store.close()
        self._group = self._store = None

    def _meet(self, store: Store, at: str, deadline: Deadline) -> Group:
        here = [f"here/{rank}" for rank in range(self._num_receivers)]
        while not store.check(here):
            if gone := self._with("gone", store):
                raise ReceiversLostError(at, gone=gone)
            if deadline.left == 0:
                raise ReceiversLostError(at, silent=self._without("here", store))
            time.sleep(LOOK_S)
        store.set("go", "")
        size = self._num_receivers + 1
        self._group = make_group(self._backend, self._device, store, SENDER, size, self._host, deadline)
        return self._group

    def _with(self, key: str, store: Store) -> tuple[int, ...]:
        """Receivers that have written `key`."""
        return tuple(rank for rank in range(self._num_receivers) if store.check([f"{key}/{rank}"]))

    def _without(self, key: str, store: Store) -> tuple[int, ...]:
        there = self._with(key, store)
        return tuple(rank for rank in range(self._num_receivers) if rank not in there)


class CollectiveReceiver(ReceivingEnd):
    """The receiver's rank, and one, of the group."""

    def __init__(
        self,
        address: str,
        rank: int,
        num_receivers: int,
        bucket_bytes: int,
        deadline: Deadline,
        *,
        backend: str = HOST_BACKEND,
        device: str = HOST_DEVICE,
    ) -> None:
        from torch.distributed import DistError

        self.address = address
        self._rank, self._num_receivers = rank, num_receivers
        self._bucket_bytes = min(bucket_bytes, BUCKET_BYTES)
        self._backend, self._device = backend, device
        try:
            self._store: RemoteStore | None = connect(address, timeout(deadline))
        except DistError as error:
            where = address.partition("@")[2]
            raise SenderLostError(f"the sender's store at {where} cannot be reached: {error}") from error
        self._group: Group | None = None
        self._number = 0

    @override
    def receive(self, manifest: WeightManifest, deadline: Deadline) -> Iterator[tuple[str, Tensor]]:
        store = _still_open(self._store)
        self._number += 1
        try:
            group = self._group or self._meet(store, deadline)
            buckets = plan_buckets(manifest, self._bucket_bytes)
            memory = _buffers(group, buckets)
            running = [group.broadcast(memory[0][: buckets[0].num_bytes], deadline)] if buckets else []
            for number, bucket in enumerate(buckets):
                group.wait(running[number], deadline)
                if number + 1 < len(buckets):
                    following = memory[(number + 1) % 2][: buckets[number + 1].num_bytes]
                    running.append(group.broadcast(following, deadline))
                for piece in bucket.pieces:
                    yield piece.entry.name, view(memory[number % 2], piece)
            store.set(f"taken/{self._number}/{self._rank}", "")
            group.all_done(deadline)
        except RuntimeError as error:
            if isinstance(error, WeightSyncError):
                raise
            how = "the sender fell silent" if deadline.left == 0 else "the sender or another receiver hung up"
            raise SenderLostError(f"{how}: {error}") from error

    @override
    def close(self) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone where the sender is, and knows already
                self._store.set(f"gone/{self._rank}", "")
        if self._group is not None:
            self._group.abort()
        if self._store is not None:
            self._store.close()
        self._group = self._store = None

    def _meet(self, store: Store, deadline: Deadline) -> Group:
        store.set(f"here/{self._rank}", "")
        store.wait(["go"], timeout(deadline))
        size, rank = self._num_receivers + 1, self._rank + 1
        host = self.address.partition("@")[2].rpartition(":")[0]
        self._group = make_group(self._backend, self._device, store, rank, size, host, deadline)
        return self._group


def _still_open(store: S | None) -> S:
    if store is None:
        raise WeightSyncError("this end of the collective is closed")
    return store


def _buffers(group: Group, buckets: list[Bucket]) -> list[Tensor]:
    num_bytes = max((bucket.num_bytes for bucket in buckets), default=0)
    return [group.memory(num_bytes) for _ in range(2)]
