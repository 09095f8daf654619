"""Publishes a strategy's weights as a run does, to a receiver that stores them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from roll_core.config.weight_transports import load_transport
from roll_core.plugins.registry import load_registry
from roll_core.runtime.weights.plan import SyncPlan
from roll_core.runtime.weights.transfer import WeightSender
from roll_core.spec.providers import WeightTransportProvider
from roll_core.spec.transport import Deadline, ReceiverSetup, Route
from roll_core.spec.weights import digest
from roll_testing.bench import ROLE, take_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from roll_core.runtime.weights.plan import SendHandle
    from roll_core.spec.train import TrainStrategy
    from roll_core.spec.transport import ReceiverEndpoint
    from roll_testing.bench import Step

IN_ONE_PROCESS = ("shared", "shm", "collective", "disk")
"""Transports whose endpoints both work within one process, where the kit runs them. `cuda_ipc` does not."""
DEADLINE_S = 60.0
BUCKET_BYTES = 4096
"""Small, so that a tiny model needs several buckets."""


@cache
def transport_record(name: str) -> WeightTransportProvider:
    """Return the record of the installed weight transport with this name."""
    return load_registry().find(WeightTransportProvider, name)


def published(
    strategy: TrainStrategy, rank: int, steps: Sequence[Step], transport: str
) -> Iterator[tuple[Mapping[str, str], Mapping[str, str]]]:
    """Publish after each step.

    Yield digests of the received weights and of the weights exported at that moment. Yields nothing on ranks that do
    not send.
    """
    sender = WeightSender(strategy, role=ROLE, rank=rank)
    receiver = Receiver()
    directory = TemporaryDirectory()
    try:
        for version, step in enumerate(steps, 1):
            take_step(strategy, step)
            plan = SyncPlan(
                version=version,
                transport=transport_record(transport),
                route=Route(options={"directory": directory.name}),
                num_receivers=1,
                sender_hosts=("127.0.0.1",) * (rank + 1),
                bucket_bytes=BUCKET_BYTES,
                deadline_s=DEADLINE_S,
            )
            handle = sender.prepare(plan)
            if handle is not None:
                receiver.take(plan, handle)
            outcome = None if plan.transport.in_process else sender.send(plan)
            if outcome is not None and outcome.failure is not None:
                raise outcome.failure
            held = receiver.wait()
            exported = {
                name: digest(tensor) for name, tensor in chain(strategy.export_weights(), strategy.export_buffers())
            }
            if handle is not None:
                yield held, exported
    finally:
        sender.close()
        receiver.close()
        directory.cleanup()


class Receiver:
    """Copies received tensors on its own thread. `wait` returns digests of the copies."""

    def __init__(self) -> None:
        self._endpoint: ReceiverEndpoint | None = None
        self._threads = ThreadPoolExecutor(1)
        self._receiving: Future[dict[str, Tensor]] | None = None

    def take(self, plan: SyncPlan, handle: SendHandle) -> None:
        """Start receiving on the thread."""
        self._receiving = self._threads.submit(self._receive, plan, handle)

    def wait(self) -> Mapping[str, str]:
        """Return digests of the received tensors by name; empty if this rank did not send.

        Raises the receiver's error.
        """
        if self._receiving is None:
            return {}
        return {name: digest(tensor) for name, tensor in self._receiving.result(DEADLINE_S).items()}

    def close(self) -> None:
        """Close the endpoint."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._threads.shutdown(wait=False)

    def _receive(self, plan: SyncPlan, handle: SendHandle) -> dict[str, Tensor]:
        if plan.transport.in_process:
            return {name: tensor.clone() for name, tensor in handle.tensors}
        deadline = Deadline(DEADLINE_S)
        if self._endpoint is None:
            setup = ReceiverSetup(
                address=handle.address, rank=0, num_receivers=1, bucket_bytes=plan.bucket_bytes, deadline=deadline
            )
            self._endpoint = load_transport(plan.transport).receiver(setup)
        return {name: tensor.clone() for name, tensor in self._endpoint.receive(handle.manifest, deadline)}
