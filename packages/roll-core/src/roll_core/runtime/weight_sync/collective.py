"""The transport `collective`: broadcasts in buckets over gloo, between processes on any hosts.

The process group is made here, from a store of its own: the default process group, which belongs to the strategies, is
neither used nor needed. The ends meet in the store before the group is made, because there a missing one can be named,
and receivers write into it how far they are, so that a timeout can name who is behind:

    receivers   here/<rank> (or gone/<rank>)   wait go    broadcasts ...   taken/<n>/<rank>   all-reduce
    sender      wait here/*                    go         broadcasts ...                      all-reduce
"""

from __future__ import annotations

import contextlib
import secrets
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.errors import WeightSyncError
from roll_core.runtime.weight_sync.buckets import fill, nothing_left, plan_buckets, view
from roll_core.runtime.weight_sync.channel import ReceiversLostError, ReceivingEnd, SenderLostError, SendingEnd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed import ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

    from roll_core.runtime.weight_sync.buckets import Bucket
    from roll_core.runtime.weight_sync.plan import Deadline
    from roll_core.types import TensorEntry, WeightManifest

BUCKET_BYTES = 32 << 20
"""Buckets are no larger than this unless a tensor is: enough to saturate a network, and little memory."""
LOOPBACK = "127.0.0.1"
SENDER = 0
"""Rank of the sender in the group; receiver r has rank r + 1."""
_LOOK_S = 0.002
"""How often the sender looks who has come."""


class CollectiveSender(SendingEnd):
    """Rank 0 of the group, and host of its store."""

    def __init__(self, num_receivers: int, bucket_bytes: int, host: str) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._bucket_bytes = min(bucket_bytes, BUCKET_BYTES)
        self._num_receivers = num_receivers
        self._host = host
        token = secrets.token_hex(8)
        server = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self.address = f"{token}@{host}:{server.port}"
        self._store: Store | None = _within(server, token)
        self._group: ProcessGroupGloo | None = None
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
            if self._group is None:
                self._meet(store, at, deadline)
                self._group = _make_group(store, SENDER, self._num_receivers + 1, self._host, deadline)
            memory = _buffers(buckets)
            running: list[Work] = []
            for number, bucket in enumerate(buckets):
                if number >= 2:
                    at = buckets[number - 2].first
                    running[number - 2].wait(_timeout(deadline))
                sent += fill(memory[number % 2], bucket, exported)
                running.append(_broadcast(self._group, memory[number % 2], bucket, deadline))
            nothing_left(exported)
            at = buckets[-1].first if buckets else ""
            for work in running[-2:]:
                work.wait(_timeout(deadline))
            _all_done(self._group, deadline)
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
        self._group = self._store = None

    def _meet(self, store: Store, at: str, deadline: Deadline) -> None:
        here = [f"here/{rank}" for rank in range(self._num_receivers)]
        while not store.check(here):
            if gone := self._with("gone", store):
                raise ReceiversLostError(at, gone=gone)
            if deadline.left == 0:
                raise ReceiversLostError(at, silent=self._without("here", store))
            time.sleep(_LOOK_S)
        store.set("go", "")

    def _with(self, key: str, store: Store) -> tuple[int, ...]:
        """Receivers that have written `key`."""
        return tuple(rank for rank in range(self._num_receivers) if store.check([f"{key}/{rank}"]))

    def _without(self, key: str, store: Store) -> tuple[int, ...]:
        there = self._with(key, store)
        return tuple(rank for rank in range(self._num_receivers) if rank not in there)


class CollectiveReceiver(ReceivingEnd):
    """Rank 1 + the receiver's rank of the group."""

    def __init__(self, address: str, rank: int, num_receivers: int, bucket_bytes: int, deadline: Deadline) -> None:
        from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

        self.address = address
        self._rank, self._num_receivers = rank, num_receivers
        self._bucket_bytes = min(bucket_bytes, BUCKET_BYTES)
        token, _, where = address.partition("@")
        self._sender_host, _, port = where.rpartition(":")
        try:
            client = TCPStore(self._sender_host, int(port), is_master=False, timeout=_timeout(deadline))
        except DistError as error:
            raise SenderLostError(f"the sender's store at {where} cannot be reached: {error}") from error
        self._store: Store | None = _within(client, token)
        self._group: ProcessGroupGloo | None = None
        self._number = 0

    @override
    def receive(self, manifest: WeightManifest, deadline: Deadline) -> Iterator[tuple[str, Tensor]]:
        store = _still_open(self._store)
        self._number += 1
        try:
            if self._group is None:
                store.set(f"here/{self._rank}", "")
                store.wait(["go"], _timeout(deadline))
                size, rank = self._num_receivers + 1, self._rank + 1
                # The loopback device reaches nobody else; a sender that is met there has only receivers that are, too.
                self._group = _make_group(store, rank, size, self._sender_host, deadline)
            buckets = plan_buckets(manifest, self._bucket_bytes)
            memory = _buffers(buckets)
            running = [_broadcast(self._group, memory[0], buckets[0], deadline)] if buckets else []
            for number, bucket in enumerate(buckets):
                running[number].wait(_timeout(deadline))
                if number + 1 < len(buckets):
                    running.append(_broadcast(self._group, memory[(number + 1) % 2], buckets[number + 1], deadline))
                for piece in bucket.pieces:
                    yield piece.entry.name, view(memory[number % 2], piece)
            store.set(f"taken/{self._number}/{self._rank}", "")
            _all_done(self._group, deadline)
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
        self._group = self._store = None


def _within(store: Store, token: str) -> Store:
    """The part of a store that belongs to these two ends."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(f"roll/weights/{token}", store)


def _still_open(store: Store | None) -> Store:
    if store is None:
        raise WeightSyncError("this end of the collective is closed")
    return store


def _make_group(store: Store, rank: int, size: int, host: str, deadline: Deadline) -> ProcessGroupGloo:
    from torch.distributed import ProcessGroupGloo

    if host != LOOPBACK:
        return ProcessGroupGloo(store, rank, size, _timeout(deadline))
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = _timeout(deadline)
    return ProcessGroupGloo(store, rank, size, options)


def _broadcast(group: ProcessGroupGloo, memory: Tensor, bucket: Bucket, deadline: Deadline) -> Work:
    work: Work = group.broadcast(memory[: bucket.num_bytes], SENDER, _timeout(deadline))  # type: ignore[attr-defined]
    return work


def _all_done(group: ProcessGroupGloo, deadline: Deadline) -> None:
    """Wait for every rank. A broadcast alone may end for the sender while its bytes still lie in a socket."""
    import torch
    from torch.distributed import AllreduceOptions

    options = AllreduceOptions()
    options.timeout = _timeout(deadline)
    group.allreduce([torch.zeros(1)], options).wait(_timeout(deadline))  # type: ignore[attr-defined]


def _buffers(buckets: list[Bucket]) -> list[Tensor]:
    import torch

    num_bytes = max((bucket.num_bytes for bucket in buckets), default=0)
    return [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(2)]


def _timeout(deadline: Deadline) -> timedelta:
    return timedelta(seconds=max(deadline.left, 1e-3))
