"""Bringing engines to a trainer's weights during a run: when, by which transport, and what a failed proof leads to."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from roll_core.errors import (
    ReceiverSilentError,
    RollError,
    StaleWeightsError,
    WeightsUnchangedError,
    WeightSyncError,
    WorkerDiedError,
)
from roll_core.runtime.build import provider_of, served_adapters
from roll_core.runtime.placement import HOST_BACKEND
from roll_core.runtime.roles import ENGINE, WEIGHTS
from roll_core.runtime.weights import PlacementFacts, WeightPublisher, choose_transport
from roll_core.runtime.weights.probe import ProbeReading, logprob_probe, require_following
from roll_core.runtime.weights.select import collective_backend, passed_over

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.plugins.registry import Registry
    from roll_core.runtime.executors.base import Executor
    from roll_core.runtime.record import RunRecord
    from roll_core.runtime.roles import GroupInferRole
    from roll_core.runtime.run import ActiveRun
    from roll_core.runtime.weights.broadcaster import SyncReport
    from roll_core.spec.pipeline import RoleSpec
    from roll_core.spec.providers import InferCapabilities, TrainCapabilities, Transport
    from roll_core.types import TokenIds

log = logging.getLogger(__name__)

DTYPE_NAMES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
PROBE_TOKENS = 32
ATTEMPTS = 3
"""Publishes of one version, where replicas die meanwhile."""


@dataclass
class _Link:
    """One trainer and one engine."""

    publisher: WeightPublisher
    probes: bool
    """The engine returns prompt logprobs."""
    in_flight: bool
    """The engine takes weights while requests run."""
    version: int = -1
    """Last version that the engine has proved to hold."""
    readings: dict[int, ProbeReading] = field(default_factory=dict)
    """Of the last probe, by rank."""
    probed_at: int = -1
    """Version of the first probe."""
    followed: bool = False
    """The engine was probed with weights other than the first probe's."""

    def owes_probe(self, changed_at: int) -> bool:
        """True for the first publish, and for the first whose weights have changed since."""
        return self.probed_at < 0 or (not self.followed and changed_at > self.probed_at)


class Publishing:
    """Made once the roles run. Links between roles come into being with their first publish."""

    def __init__(
        self, run: ActiveRun, roles: Sequence[RoleSpec], registry: Registry, executor: Executor, record: RunRecord
    ) -> None:
        self._run, self._registry, self._executor, self._record = run, registry, executor, record
        self._roles = {role.name: role for role in roles}
        self._links: dict[tuple[str, str], _Link] = {}

    async def publish(self, source: str, target: str) -> dict[str, float]:
        """Metrics of the publish; empty where all replicas of `target` live and hold the current weights of
        `source`."""
        version = self._run.train_role(source).weight_version
        link = self._links.get((source, target))
        engine = self._run.engine(target)
        whole = not engine.group.lost and not engine.dispatcher.nobody_left.is_set()
        if link is not None and link.version == version and engine.holds_weights and whole:
            return {}
        if engine.group.lost:
            async with self._run.turns.take({target: ENGINE}):  # an engine starts with its slots to itself
                await engine.revive()
        async with self._run.turns.take({source: WEIGHTS, target: ENGINE}):
            link = link or await self._connect(source, target)
            return await self._publish(link, source, target, version)

    async def again(self, target: str) -> dict[str, float]:
        """Publish to an engine of which no replica is left, from whom it was published to last."""
        sources = [source for source, engine in self._links if engine == target]
        return await self.publish(sources[-1] if sources else self._roles[target].model_from, target)

    async def _publish(self, link: _Link, source: str, target: str, version: int) -> dict[str, float]:
        guards = self._run.guards
        engine, changed_at = self._run.engine(target), self._run.train_role(source).changed_at
        metrics: dict[str, float] = {}
        try:
            report = await self._until_nobody_dies(engine, link, version, changed_at)
        except WeightsUnchangedError as error:
            guards.failed("weights_unchanged", error)
        except WeightSyncError as error:
            guards.failed("weight_manifest", error)
            if not error.loaded:
                raise
        else:
            metrics = {
                "weight_sync/version": version,
                "weight_sync/seconds": report.seconds,
                "weight_sync/copied_bytes": report.copied_bytes,
            }
        link.version = version
        engine.received(version)
        if link.publisher.transport == "shared" and target not in self._run.busy_roles:
            self._run.turns.lend(source, WEIGHTS, target)
        # By the step and not by counting, so that a resumed run is probed when the uninterrupted one would be.
        scheduled = self._run.step % guards.config.logprob_probe.every == 0
        if guards.active("logprob_probe") and (scheduled or link.owes_probe(changed_at)):
            try:
                found = await self._probe(link, source, target, changed_at)
                metrics |= found if scheduled else {}
            except WorkerDiedError as error:
                if not engine.dispatcher.nobody_left.is_set():
                    raise
                log.warning("%s is asked for the probe's logprobs once it is brought back: %s", target, error)
        return metrics

    async def _until_nobody_dies(
        self, engine: GroupInferRole, link: _Link, version: int, changed_at: int
    ) -> SyncReport:
        """Publish to every replica; those that have died are made anew before, and those that hang meanwhile, too.

        What is being drawn goes on under the new weights: as it is, or cut short and continued. Nothing begins between
        two attempts: whoever was cut off has a part of the weights.
        """
        async with engine.dispatcher.paused(in_flight=link.in_flight):
            for left in reversed(range(ATTEMPTS)):
                try:
                    await engine.revive()
                    return await link.publisher.publish(version, changed_at=changed_at)
                except (WorkerDiedError, WeightSyncError) as error:
                    silent = error.ranks if isinstance(error, ReceiverSilentError) else ()
                    if not left or not (
                        engine.group.lost or await engine.give_up(silent, f"{error} (model_update_timeout)")
                    ):
                        raise
                    log.info("weight version %d is published once more: %s", version, error)
        raise AssertionError("the last attempt returns or raises")

    async def _connect(self, source: str, target: str) -> _Link:
        infer = self._capabilities(target)
        publisher, why = await self._way(source, target)
        log.info("weights of %s reach %s by %s%s", source, target, publisher.transport, why and f" ({why})")
        self._record.weight_transport(source, target, publisher.transport)
        link = self._links[source, target] = _Link(
            publisher,
            probes=getattr(infer, "prompt_logprobs", False),
            in_flight=getattr(infer, "in_flight_update", False),
        )
        return link

    async def _way(self, source: str, target: str) -> tuple[WeightPublisher, str]:
        """What will carry the weights, and why nothing that would be better does. Ways whose obstacles can lie in
        drivers and containers are tried before they are relied on."""
        run = self._run
        await run.engine(target).revive()  # the dead would not answer
        trainer, engine = run.train_role(source).group, run.engine(target).group
        shares_memory = self._executor.shares_memory
        train_devices = () if shares_memory else await trainer.call("device_facts")
        infer_devices = () if shares_memory else await engine.call("device_facts")
        facts = PlacementFacts.of(
            trainer,
            engine,
            shares_memory=shares_memory,
            directory=run.config.model_update_dir or "",
            train_devices=train_devices,
            infer_devices=infer_devices,
        )
        backend, why_backend = collective_backend(trainer, engine, train_devices, infer_devices)
        ends = self._capabilities(source), self._capabilities(target)
        while True:
            transport = choose_transport(*ends, facts)  # type: ignore[arg-type]
            publisher = self._publisher(source, target, transport, facts, backend)
            failure = await _rehearsal_failure(publisher)
            if not failure:
                reasons = passed_over(*ends, facts)  # type: ignore[arg-type]
                return publisher, "; ".join(reasons + [why_backend] * (transport == "collective" and why_backend != ""))
            if transport == "cuda_ipc":
                facts = replace(facts, devices=failure)
            else:
                backend, why_backend = HOST_BACKEND, f"not {backend}: {failure}"

    def _publisher(
        self, source: str, target: str, transport: Transport, facts: PlacementFacts, backend: str
    ) -> WeightPublisher:
        run = self._run
        engine = run.engine(target)
        return WeightPublisher(
            run.train_role(source).group,
            engine.group,
            transport,
            dtype=DTYPE_NAMES[engine.config.model_args.dtype],
            weight_format=engine.config.weight_format,
            adapters=served_adapters(self._roles[target], run.config, self._registry) is not None,
            bucket_bytes=run.config.model_update_buffer_size_mb << 20,
            deadline_s=run.config.model_update_timeout,
            directory=facts.directory,
            lends=target not in run.busy_roles,
            sources=facts.sources if transport == "cuda_ipc" else (),
            backend=backend if transport == "collective" else HOST_BACKEND,
        )

    async def _probe(self, link: _Link, source: str, target: str, changed_at: int) -> dict[str, float]:
        """The same tokens, through the trainer and through every replica of the engine; the worst one counts."""
        run, engine = self._run, self._run.engine(target)
        guard, weight_format = run.config.guards.logprob_probe, engine.config.weight_format
        readings = await logprob_probe(
            run.train_role(source),
            engine,
            probe_tokens(len(run.tokenizer)),
            prompt_logprobs=link.probes,
            vocab_size=run.vocab_size(source),
        )
        before, link.readings = link.readings, readings
        if link.probed_at < 0:
            link.probed_at = link.version
        link.followed = link.followed or changed_at > link.probed_at
        for rank, reading in readings.items():
            try:
                require_following(f"{target} rank {rank}", link.version, before.get(rank), reading)
            except StaleWeightsError as error:
                run.guards.failed("logprob_probe", error, fatal=True)
        limit = guard.error_bound(weight_format)
        sampled = {rank: reading.sampled.gap for rank, reading in readings.items() if reading.sampled is not None}
        if sampled:
            worst = max(sampled, key=sampled.__getitem__)
            what = f"mean |logprob by {target} rank {worst} - logprob by {source}| of tokens that the engine sampled"
            run.guards.check_at_most("logprob_probe", sampled[worst], limit, what, error_threshold=limit)
        gaps = {rank: reading.fixed.gap for rank, reading in readings.items() if reading.fixed is not None}
        if not gaps:
            return {}
        worst = max(gaps, key=gaps.__getitem__)
        what = f"mean |logprob by {target} rank {worst} - logprob by {source}| on the probe tokens"
        bound = guard.bound(weight_format)
        run.guards.check_at_most("logprob_probe", gaps[worst], bound, what, error_threshold=limit)
        return {"weight_sync/logprob_probe": gaps[worst]}

    def _capabilities(self, name: str) -> TrainCapabilities | InferCapabilities:
        role = self._roles[name]
        return provider_of(role, self._run.config.roles()[name], self._registry).capabilities


async def _rehearsal_failure(publisher: WeightPublisher) -> str:
    """What stands in the way of device memory and of device collectives; what the host alone does is not tried."""
    if publisher.transport != "cuda_ipc" and publisher.backend == HOST_BACKEND:
        return ""
    try:
        await publisher.rehearse()
    except WorkerDiedError:
        raise
    except RollError as error:
        return f"it was tried, and failed: {error}"
    return ""


def probe_tokens(vocab_size: int) -> TokenIds:
    """Some tokens of a vocabulary, the same every time: any will do, as long as both sides get them."""
    return np.random.default_rng(0).integers(0, vocab_size, size=PROBE_TOKENS, dtype=np.int64)
