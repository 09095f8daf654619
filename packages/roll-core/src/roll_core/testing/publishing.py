"""Publishes a strategy's weights as a run does, to a receiver that keeps what it gets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from roll_core.runtime.weights.plan import Deadline, SyncPlan
from roll_core.runtime.weights.receiver import open_receiving_end
from roll_core.runtime.weights.sender import WeightSender
from roll_core.spec.weights import digest
from roll_core.testing.bench import ROLE, take_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from roll_core.runtime.weights.plan import Offer
    from roll_core.spec.providers import Transport
    from roll_core.spec.train import TrainStrategy
    from roll_core.spec.transport import ReceivingEnd
    from roll_core.testing.bench import Step

IN_ONE_PROCESS: tuple[Transport, ...] = ("shared", "shm", "collective", "disk")
"""Transports whose two ends can be in one process, as the kit has them; those of `cuda_ipc` cannot."""
DEADLINE_S = 60.0
BUCKET_BYTES = 4096
"""Small, so that a tiny model takes several buckets."""


def published(
    strategy: TrainStrategy, rank: int, steps: Sequence[Step], transport: Transport
) -> Iterator[tuple[Mapping[str, str], Mapping[str, str]]]:
    """After each step: digests of what the receiver holds, and of what the strategy exports right then."""
    sender = WeightSender(strategy, role=ROLE, rank=rank)
    receiver = Receiver()
    directory = TemporaryDirectory()
    try:
        for version, step in enumerate(steps, 1):
            take_step(strategy, step)
            plan = SyncPlan(
                version=version,
                transport=transport,
                num_receivers=1,
                sender_hosts=("127.0.0.1",) * (rank + 1),
                bucket_bytes=BUCKET_BYTES,
                directory=directory.name,
                deadline_s=DEADLINE_S,
            )
            offer = sender.prepare(plan)
            if offer is not None:
                receiver.take(plan, offer)
            outcome = sender.send(plan) if transport != "shared" else None
            if outcome is not None and outcome.failure is not None:
                raise outcome.failure
            held = receiver.wait()
            exported = {name: digest(tensor) for name, tensor in strategy.export_weights()}
            if offer is not None:
                yield held, exported
    finally:
        sender.close()
        receiver.close()
        directory.cleanup()


class Receiver:
    """Copies what it is sent, on a thread of its own, and digests the copies once all are there."""

    def __init__(self) -> None:
        self._end: ReceivingEnd | None = None
        self._threads = ThreadPoolExecutor(1)
        self._receiving: Future[dict[str, Tensor]] | None = None

    def take(self, plan: SyncPlan, offer: Offer) -> None:
        """Begin to receive."""
        self._receiving = self._threads.submit(self._receive, plan, offer)

    def wait(self) -> Mapping[str, str]:
        """Digests of what arrived, by name; nothing if nothing was offered. Raises what went wrong."""
        if self._receiving is None:
            return {}
        return {name: digest(tensor) for name, tensor in self._receiving.result(DEADLINE_S).items()}

    def close(self) -> None:
        """Hang up."""
        if self._end is not None:
            self._end.close()
        self._threads.shutdown(wait=False)

    def _receive(self, plan: SyncPlan, offer: Offer) -> dict[str, Tensor]:
        if plan.transport == "shared":
            return {name: tensor.clone() for name, tensor in offer.tensors}
        deadline = Deadline(DEADLINE_S)
        if self._end is None:
            self._end = open_receiving_end(plan, offer.address, 0, deadline)
        return {name: tensor.clone() for name, tensor in self._end.receive(offer.manifest, deadline)}
