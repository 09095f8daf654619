"""Conformance kit for weight transports.

    class TestMine(WeightTransportConformance):
        name = "mine"

Both endpoints run in this process, receivers on threads of their own.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch

from roll_core.config.weight_transports import load_transport
from roll_core.errors import CorruptTensorError, MissingTensorError, UnexpectedTensorError, WeightSyncError
from roll_core.runtime.weights.publisher import verify
from roll_core.spec.multilinear import MULTILINEAR
from roll_core.spec.providers import WeightTransportProvider
from roll_core.spec.transport import (
    Deadline,
    ReceiverSetup,
    ReceiversLostError,
    RoleFacts,
    SenderLostError,
    SenderSetup,
    WorkerFacts,
)
from roll_core.spec.weights import copy_digested, make_manifest, make_receipt
from roll_testing.packaging import PackagingTests

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from roll_core.spec.transport import ReceiverEndpoint, SenderEndpoint
    from roll_core.types import WeightManifest, WeightReceipt

BUCKET_BYTES = 16 << 10
IN_TIME, SHORT = 20.0, 3.0
"""Deadlines in seconds: one that is not reached, and one that is."""

Weights = dict[str, torch.Tensor]


def weights(seed: int = 0) -> Weights:
    """Return tensors of several dtypes and shapes.

    One is larger than a bucket; others are scalar, empty or transposed.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {f"layer.{index}": torch.randn(700 + 97 * index, generator=generator) for index in range(12)}
    weights["large"] = torch.randn(90, 60, generator=generator)
    weights["half"] = torch.randn(40, 33, generator=generator).bfloat16()
    weights["scalar"], weights["empty"] = torch.tensor(seed + 2.5), torch.zeros(0, 8)
    weights["bytes"], weights["transposed"] = (
        torch.arange(17, dtype=torch.int8),
        torch.randn(30, 20, generator=generator).t(),
    )
    return weights


class WeightTransportConformance(PackagingTests):
    """Tests that every weight transport must pass that copies tensors between processes."""

    _kind = WeightTransportProvider
    options: ClassVar[Mapping[str, str]] = {}
    """`Route.options` of the endpoints. `{directory}` in a value is replaced by an empty folder."""

    @pytest.fixture(autouse=True)
    def _endpoints(self, tmp_path: Path) -> Iterator[None]:
        """Close the endpoints that a test opened, in the order of opening.

        Closing the sender first unblocks its receivers.
        """
        self._options = {key: value.replace("{directory}", str(tmp_path)) for key, value in self.options.items()}
        self._opened: list[SenderEndpoint | ReceiverEndpoint] = []
        yield
        for endpoint in self._opened:
            endpoint.close()

    def open_sender(self, num_receivers: int) -> SenderEndpoint:
        """Open the sender for receivers 0 to `num_receivers - 1`."""
        setup = SenderSetup(receivers=tuple(range(num_receivers)), bucket_bytes=BUCKET_BYTES, options=self._options)
        endpoint = load_transport(self.provider).sender(setup)
        self._opened.append(endpoint)
        return endpoint

    def open_receiver(self, address: str, rank: int, num_receivers: int) -> ReceiverEndpoint:
        """Open the receiver of this rank."""
        setup = ReceiverSetup(
            address=address,
            rank=rank,
            num_receivers=num_receivers,
            bucket_bytes=BUCKET_BYTES,
            deadline=Deadline(IN_TIME),
            options=self._options,
        )
        endpoint = load_transport(self.provider).receiver(setup)
        self._opened.append(endpoint)
        return endpoint

    def receive(
        self, address: str, num_receivers: int, act: Callable[[int, ReceiverEndpoint], object], *ranks: int
    ) -> list[threading.Thread]:
        """Run `act(rank, endpoint)` on a thread for each of these ranks. Its `WeightSyncError`s are ignored."""

        def work(rank: int) -> None:
            with contextlib.suppress(WeightSyncError):
                act(rank, self.open_receiver(address, rank, num_receivers))

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        return threads

    def test_available_returns_a_reason_or_none(self) -> None:
        """`available` must return None, or a reason why the transport is not available."""
        facts = [RoleFacts(role=name, workers=(WorkerFacts(host="here", pid=pid),)) for pid, name in enumerate("ab")]
        reason = load_transport(self.provider).available(*facts)
        assert reason is None or (isinstance(reason, str) and reason), (
            f"available() returned {reason!r}, expected a reason or None"
        )

    @pytest.mark.parametrize(("num_receivers", "like"), [(1, ""), (3, ""), (1, MULTILINEAR)])
    def test_receivers_get_what_was_sent(self, num_receivers: int, like: str) -> None:
        """Receivers must get all tensors bit for bit, in three publishes over the same endpoints.

        `send` must return the entries of the tensors that it sent, with digests by the function that the manifest
        names: XXH3, or `multilinear`, as between devices.
        """
        published = [make_manifest(version, weights(version).items(), like) for version in range(3)]
        receipts: dict[tuple[int, int], WeightReceipt] = {}

        def act(rank: int, endpoint: ReceiverEndpoint) -> None:
            for manifest in published:
                copies = {name: tensor.clone() for name, tensor in endpoint.receive(manifest, Deadline(IN_TIME))}
                receipt = make_receipt(manifest, copies.items())
                receipts[manifest.version, rank] = replace(receipt, role="engine", rank=rank)

        sender = self.open_sender(num_receivers)
        threads = self.receive(sender.address, num_receivers, act, *range(num_receivers))
        for manifest in published:
            sent = sender.send(manifest, iter(weights(manifest.version).items()), Deadline(IN_TIME))
            assert tuple(sent) == manifest.tensors, "send() returned other entries than those of the tensors it sent"
        for thread in threads:
            thread.join(IN_TIME)
        for manifest in published:
            for rank in range(num_receivers):
                assert (manifest.version, rank) in receipts, (
                    f"receiver {rank} did not get all tensors of version {manifest.version}"
                )
                verify(manifest, receipts[manifest.version, rank])

    def test_a_torn_bucket_fails_the_proof(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A byte that changes after it was digested must be detected by the receiver's digest.

        Requires a sender that fills buckets by `roll_weight_transports.bucket_plan.fill`.
        """

        def torn(target: Tensor, source: Tensor) -> str:
            digest = copy_digested(target, source)
            target.view(-1).view(torch.uint8)[:1] ^= 16
            return digest

        monkeypatch.setattr("roll_core.spec.weights.copy_digested", torn)
        sender, sent, held = self.open_sender(1), weights(), {}
        manifest = make_manifest(1, sent.items())

        def act(rank: int, endpoint: ReceiverEndpoint) -> None:
            held.update({name: tensor.clone() for name, tensor in endpoint.receive(manifest, Deadline(IN_TIME))})

        (thread,) = self.receive(sender.address, 1, act, 0)
        sender.send(manifest, iter(sent.items()), Deadline(IN_TIME))
        thread.join(IN_TIME)
        with pytest.raises(CorruptTensorError):
            verify(manifest, make_receipt(manifest, held.items()))

    def test_receivers_that_never_connect_are_named(self) -> None:
        """`ReceiversLostError.timed_out` must have the ranks of receivers that have not connected by the deadline."""
        sender = self.open_sender(3)
        self.receive(sender.address, 3, _read_all, 1)
        self._expect_lost(sender, SHORT, timed_out={0, 2})

    def test_a_cancelled_sender_does_not_wait_for_receivers_that_never_connect(self) -> None:
        """After `cancel_transfer`, `send` must raise `ReceiversLostError` before its deadline.

        Otherwise a receiver that exits before it connects blocks the trainer until the deadline.
        """
        sender = self.open_sender(1)
        cancel = load_transport(self.provider).cancel_transfer
        timer = threading.Timer(0.2, cancel, [sender.address, self._options])
        timer.start()
        try:
            self._expect_lost(sender, IN_TIME, disconnected={0})
        finally:
            timer.join()
        cancel(sender.address, self._options)

    def test_a_receiver_that_stops_reading_is_named(self) -> None:
        """`ReceiversLostError.timed_out` must have the rank of a receiver that has stopped reading by the deadline."""
        done = threading.Event()

        def act(rank: int, endpoint: ReceiverEndpoint) -> None:
            tensors = endpoint.receive(_manifest(), Deadline(IN_TIME))
            next(tensors)
            done.wait(IN_TIME)

        sender = self.open_sender(2)
        self.receive(sender.address, 2, _read_all, 0)
        self.receive(sender.address, 2, act, 1)
        try:
            self._expect_lost(sender, SHORT, timed_out={1})
        finally:
            done.set()

    def test_a_receiver_that_hangs_up_is_named(self) -> None:
        """`ReceiversLostError.disconnected` must have the rank of a receiver that closed its endpoint.

        The sender must raise before the deadline.
        """

        def act(rank: int, endpoint: ReceiverEndpoint) -> None:
            next(endpoint.receive(_manifest(), Deadline(IN_TIME)))
            endpoint.close()

        sender = self.open_sender(1)
        self.receive(sender.address, 1, act, 0)
        self._expect_lost(sender, IN_TIME, disconnected={0})

    def test_a_sender_that_hangs_up_frees_its_receivers(self) -> None:
        """If the sender closes, receivers must raise `SenderLostError` before their deadline instead of blocking."""
        sender, left_s = self.open_sender(1), []

        def act(rank: int, endpoint: ReceiverEndpoint) -> None:
            deadline = Deadline(IN_TIME)
            threading.Timer(0.2, sender.close).start()
            try:
                _read_all(rank, endpoint, deadline)
            except SenderLostError:
                left_s.append(deadline.left)

        (thread,) = self.receive(sender.address, 1, act, 0)
        thread.join(IN_TIME)
        if not left_s or not left_s[0]:
            raise AssertionError("the receiver raised no SenderLostError before its deadline")

    @pytest.mark.parametrize(
        ("harm", "error"),
        [("lost", MissingTensorError), ("extra", UnexpectedTensorError), ("reshaped", WeightSyncError)],
    )
    def test_an_export_that_differs_from_the_manifest_is_refused(self, harm: str, error: type[Exception]) -> None:
        """The sender must refuse an export with a missing, extra or reshaped tensor. The error must name the tensor."""
        sent = weights()
        name = "extra" if harm == "extra" else list(sent)[-1]
        manifest = make_manifest(1, sent.items())
        if harm == "lost":
            del sent[name]
        else:
            sent[name] = torch.zeros(3)
        sender = self.open_sender(1)
        self.receive(sender.address, 1, lambda rank, endpoint: _read_all(rank, endpoint, manifest=manifest), 0)
        with pytest.raises(error, match=name) as caught:
            sender.send(manifest, iter(sent.items()), Deadline(IN_TIME))
        assert not isinstance(caught.value, ReceiversLostError), f"the sender blames its receivers: {caught.value}"

    def test_closing_twice_is_allowed(self) -> None:
        """`close` of both endpoints must be idempotent, also before they were used."""
        sender = self.open_sender(1)
        receiver = self.open_receiver(sender.address, 0, 1)
        for endpoint in (receiver, receiver, sender, sender):
            endpoint.close()

    def _expect_lost(
        self,
        sender: SenderEndpoint,
        within_s: float,
        *,
        timed_out: Collection[int] = (),
        disconnected: Collection[int] = (),
    ) -> None:
        sent, deadline = weights(), Deadline(within_s)
        with pytest.raises(ReceiversLostError) as caught:
            sender.send(_manifest(), iter(sent.items()), deadline)
        if not {*timed_out} <= {*caught.value.timed_out} or not {*disconnected} <= {*caught.value.disconnected}:
            raise AssertionError(
                f"expected timed_out {sorted(timed_out)} and disconnected {sorted(disconnected)}, found timed_out"
                f" {caught.value.timed_out} and disconnected {caught.value.disconnected}"
            )
        assert not disconnected or deadline.left, "the sender noticed the closed connection only at its deadline"


def _manifest() -> WeightManifest:
    return make_manifest(1, weights().items())


def _read_all(
    rank: int, endpoint: ReceiverEndpoint, deadline: Deadline | None = None, manifest: WeightManifest | None = None
) -> Sequence[str]:
    return [name for name, _ in endpoint.receive(manifest or _manifest(), deadline or Deadline(IN_TIME))]
