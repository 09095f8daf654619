"""One replica of a role that generates: an infer strategy, and the requests that it is working on."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from roll_core.config import schema_of
from roll_core.errors import RollError
from roll_core.plugins.requirements import check_requirements
from roll_core.plugins.targets import load_target
from roll_core.runtime.memory_use import MemoryUse, MemoryWatch
from roll_core.runtime.placement import HOST_BACKEND, HOST_DEVICE
from roll_core.runtime.weight_sync import DeviceFacts, WeightReceiver
from roll_core.runtime.workers.mesh import mesh_info
from roll_core.spec.config import StrategyConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roll_core.runtime.executors.base import Peers, Place
    from roll_core.runtime.weight_sync import Offer, ReceiveOutcome, SyncPlan
    from roll_core.spec.infer import InferStrategy, MetricKind
    from roll_core.spec.model import ModelSpec
    from roll_core.spec.providers import InferProvider
    from roll_core.types import Completion, GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """One replica's metrics, and how they join those of others."""

    values: Mapping[str, float]
    kinds: Mapping[str, MetricKind]


def join_readings(readings: Sequence[EngineReading]) -> dict[str, float]:
    """The metrics of a role's replicas as one; a mean is over the replicas that have it."""
    found: dict[str, list[float]] = {}
    kinds: dict[str, MetricKind] = {}
    for reading in readings:
        kinds.update(reading.kinds)
        for name, value in reading.values.items():
            found.setdefault(name, []).append(float(value))
    join: dict[MetricKind, Callable[[list[float]], float]] = {"sum": sum, "mean": fmean, "max": max}
    return {name: join[kinds.get(name, "sum")](values) for name, values in found.items()}


class InferWorker:
    """Constructed by the executor in the worker's process; methods run on its event loop and may overlap."""

    def __init__(
        self,
        *,
        place: Place,
        peers: Peers,
        role: str,
        provider: InferProvider,
        strategy_config: Mapping[str, Any],
        model: ModelSpec,
        backend: str,
        timeout_s: float,
    ) -> None:
        owner = f"infer strategy {provider.name}"
        check_requirements(provider, owner=owner)
        schema = schema_of(provider, StrategyConfig, owner=owner)
        strategy_class = load_target(provider.target, owner=owner)
        self.model = model
        self.strategy: InferStrategy = strategy_class(schema.model_validate(dict(strategy_config)))
        mesh = mesh_info(role, place, peers, backend=backend, timeout_s=timeout_s)
        self.mesh = replace(mesh, sampling_seed=secrets.randbits(63))
        on_device = self.strategy.capabilities.device_weights
        self.takes_weights_on = (place.device, backend) if on_device else (HOST_DEVICE, HOST_BACKEND)
        self.receiver = WeightReceiver(self.strategy, role=role, rank=place.rank, device=self.takes_weights_on[0])
        self.running: dict[str, asyncio.Task[Completion]] = {}
        self.turning = asyncio.Lock()
        """A call that the driver gave up on may still be on its way to sleep when the next one is to wake it."""

    async def start(self) -> None:
        """Make the engine ready."""
        self.watch = MemoryWatch(self.mesh.device)
        await self.strategy.start(self.model, self.mesh)

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Admit `requests` together, in this turn of the event loop, so that they are batched alike every time."""
        for request in requests:
            if request.id in self.running:
                raise RollError(f"request {request.id} is already running")
            self.running[request.id] = asyncio.create_task(self.strategy.generate(request))

    async def result(self, request_id: str) -> Completion:
        """Wait for one of the admitted requests and hand its answer out, once."""
        try:
            return await self.running[request_id]
        finally:
            self.running.pop(request_id, None)

    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        """End requests now; their `result` has what there is."""
        await asyncio.sleep(0)  # what was admitted in this turn of the event loop reaches the engine first
        return await self.strategy.abort(ids)

    async def progress(self) -> list[Completion] | None:
        """What running requests have drawn so far; None from an engine that does not tell."""
        return await self.strategy.progress()

    async def forget(self, ids: Sequence[str]) -> None:
        """End requests whose `result` nobody will ask for."""
        for id in ids:
            task = self.running.pop(id, None)
            if task is not None:
                task.cancel()

    async def sleep(self) -> None:
        """Give the device's memory back. Requests that nobody waits for any more, as those of an evaluation that was
        called off, are ended first."""
        async with self.turning:
            await self.strategy.abort(list(self.running))
            await asyncio.gather(*self.running.values(), return_exceptions=True)
            self.running.clear()
            await self.strategy.sleep()

    async def wake(self) -> None:
        """Take it again."""
        async with self.turning:
            await self.strategy.wake()

    async def device_facts(self) -> DeviceFacts:
        """Where it takes weights."""
        return DeviceFacts.of(*self.takes_weights_on)

    async def receive_weights(self, plan: SyncPlan, offer: Offer) -> ReceiveOutcome:
        """Take published weights and answer with what the engine holds."""
        return await self.receiver.receive(plan, offer)

    async def endpoint(self) -> str | None:
        """URL of the engine's OpenAI-compatible server, if it has one."""
        return self.strategy.endpoint()

    async def metrics(self) -> EngineReading:
        """What the engine did since the last call."""
        return EngineReading(values=dict(self.strategy.metrics()), kinds=dict(self.strategy.metric_kinds))

    async def memory_use(self) -> MemoryUse | None:
        """Of its process, since `start`; engines that compute in processes of their own have more in those."""
        return self.watch.use()

    async def close(self) -> None:
        """End the engine and whatever it was working on."""
        for task in self.running.values():
            task.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)
        self.receiver.close()
        await self.strategy.stop()
