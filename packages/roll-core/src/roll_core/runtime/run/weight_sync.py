"""Weight sync of a run: when trainers publish to engines, by which transport, and how failed checks are handled."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from roll_core.config.weight_transports import choose_transport, load_transport
from roll_core.data.processor import processor_of
from roll_core.errors import (
    ReceiverTimeoutError,
    RollError,
    StaleWeightsError,
    WeightsUnchangedError,
    WeightSyncError,
    WorkerDiedError,
)
from roll_core.runtime.cluster.executors.base import WorkerStub
from roll_core.runtime.records.mismatch import LogprobBatch, LogprobRow
from roll_core.runtime.run.probe import Compared, ProbeReading, check_follows, image_prompt, logprob_probe, mean_gap
from roll_core.runtime.run.roles import ENGINE, WEIGHTS
from roll_core.runtime.weights.plan import SyncPlan, role_facts
from roll_core.runtime.weights.publisher import WeightPublisher
from roll_core.runtime.workers.build import served_adapters
from roll_core.runtime.workers.infer import InferWorker
from roll_core.runtime.workers.train import TrainWorker
from roll_core.spec.platform import HOST_DEVICE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from roll_core.plugins.registry import Registry
    from roll_core.runtime.records.record import RunRecord
    from roll_core.runtime.run.active_run import ActiveRun
    from roll_core.runtime.run.roles import GroupInferRole
    from roll_core.runtime.weights.publisher import SyncReport
    from roll_core.spec.pipeline import RoleSpec
    from roll_core.spec.transport import DeviceFacts
    from roll_core.types import TokenIds

log = logging.getLogger(__name__)

DTYPE_NAMES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
PROBE_TOKENS = 32
PUBLISH_ATTEMPTS = 3
"""Maximum number of publishes of one version, if replicas exit or hang during a publish."""


@dataclass
class _Link:
    """State of weight sync between one trainer and one engine."""

    publisher: WeightPublisher
    version: int = -1
    """Last version that was published to the engine; -1 before the first."""
    readings: dict[int, ProbeReading] = field(default_factory=dict)
    """Readings of the last probe, by rank."""
    probed_at: int = -1
    """Version of the first probe."""
    followed: bool = False
    """True if the engine was probed with weights that differ from the first probe's."""


class WeightSyncController:
    """Publishes weights between the roles of a run. Constructed once roles run; connects two at their first publish."""

    def __init__(
        self, run: ActiveRun, roles: Sequence[RoleSpec], registry: Registry, record: RunRecord, *, in_process: bool
    ) -> None:
        self._run, self._registry, self._record, self._in_process = run, registry, record, in_process
        self._roles = {role.name: role for role in roles}
        self._links: dict[tuple[str, str], _Link] = {}
        self._sources: dict[str, str] = {}
        """Role whose weights an engine has, by engine."""

    async def publish(self, source: str, target: str) -> dict[str, float]:
        """Publish the weights of `source` to `target` and return the metrics.

        An empty `source` is the role whose weights `target` had, for an engine that has lost all replicas. Does
        nothing, and returns no metrics, if all replicas of `target` are alive and have the current weights.
        """
        source = source or self._sources.get(target, self._roles[target].model_from)
        version = self._run.train_role(source).weight_version
        link = self._links.get((source, target))
        engine = self._run.engine(target)
        complete = not engine.group.lost and not engine.queue.no_replicas.is_set()
        current = link is not None and link.version == version and self._sources.get(target) == source
        if current and engine.has_weights and complete:
            return {}
        if engine.group.lost:
            async with self._run.leases.take({target: ENGINE}):  # an engine needs exclusive slots while it starts
                await engine.revive()
        async with self._run.leases.take({source: WEIGHTS, target: ENGINE}):
            link = link or await self._connect(source, target)
            return await self._publish(link, source, target, version)

    async def _publish(self, link: _Link, source: str, target: str, version: int) -> dict[str, float]:
        guards = self._run.guards
        engine, changed_at = self._run.engine(target), self._run.train_role(source).changed_at
        metrics: dict[str, float] = {}
        # Another role's weights, or a sleep, replace the frozen tensors too.
        keeps_weights = engine.capabilities.keeps_weights and engine.has_weights and self._sources.get(target) == source
        try:
            report = await self._publish_to_all(engine, link, version, changed_at, keeps_weights=keeps_weights)
        except WeightsUnchangedError as error:
            guards.failed("weights_unchanged", error)
        except WeightSyncError as error:
            guards.failed("weight_manifest", error)
            # The guard may only warn, but weights of mixed versions must not generate.
            if not error.loaded:
                raise
        else:
            metrics = {
                "weight_sync/version": version,
                "weight_sync/seconds": report.seconds,
                "weight_sync/copied_bytes": report.copied_bytes,
            }
        # Only now: after an exception the next publish must not be skipped as current.
        link.version, self._sources[target] = version, source
        engine.received(version)
        if link.publisher.plan.transport.in_process and target not in self._run.busy_roles:
            self._run.leases.share(source, WEIGHTS, target)
        # Scheduled by step number, so that a resumed run is probed at the same steps as an uninterrupted one. A probe
        # is also due at the first publish, and at the first publish with changed weights.
        scheduled = self._run.step % guards.config.logprob_probe.every == 0
        due = link.probed_at < 0 or (not link.followed and changed_at > link.probed_at)
        if guards.active("logprob_probe") and (scheduled or due):
            try:
                probe_metrics = await self._probe(link, source, target, changed_at)
                metrics |= probe_metrics if scheduled else {}
            except WorkerDiedError as error:
                if not engine.queue.no_replicas.is_set():
                    raise
                log.warning("%s: the logprob probe is postponed until the engine has restarted: %s", target, error)
        return metrics

    async def _publish_to_all(
        self, engine: GroupInferRole, link: _Link, version: int, changed_at: int, *, keeps_weights: bool
    ) -> SyncReport:
        """Publish to every replica. Replicas that exited, or hang during the publish, are restarted before the next
        attempt.

        Running requests continue with the new weights, in flight or after an abort. No request starts between two
        attempts, because an interrupted replica holds weights of mixed versions.
        """
        async with engine.queue.paused(in_flight=engine.capabilities.in_flight_update):
            for left in reversed(range(PUBLISH_ATTEMPTS)):
                try:
                    await engine.revive()
                    return await link.publisher.publish(version, changed_at=changed_at, keeps_weights=keeps_weights)
                except (WorkerDiedError, WeightSyncError) as error:
                    ranks = error.ranks if isinstance(error, ReceiverTimeoutError) else ()
                    if not left or not (
                        engine.group.lost or await engine.give_up(ranks, f"{error} (model_update_timeout)")
                    ):
                        raise
                    log.info("weight version %d: publish failed, retrying: %s", version, error)
        raise AssertionError("the last attempt returns or raises")

    async def _connect(self, source: str, target: str) -> _Link:
        """Connect two roles by the most preferred transport and route that pass their self-test."""
        run, trainer, engine = self._run, self._run.train_role(source), self._run.engine(target)
        await engine.revive()  # exited workers cannot report their devices
        train_devices: Sequence[DeviceFacts] = ()
        infer_devices: Sequence[DeviceFacts] = ()
        if not self._in_process:
            train_devices = await WorkerStub[TrainWorker](trainer.group)(TrainWorker.device_facts).all()
            infer_devices = await WorkerStub[InferWorker](engine.group)(InferWorker.device_facts).all()
        directory = run.config.model_update_dir or ""
        sender = role_facts(trainer.group, trainer.capabilities.weight_transports, train_devices, directory=directory)
        receiver = role_facts(engine.group, engine.capabilities.weight_transports, infer_devices, directory=directory)
        workers = (*sender.workers, *receiver.workers)
        on_devices = not self._in_process and all(worker.device.device != HOST_DEVICE for worker in workers)
        rejected: dict[str, str] = {}
        while True:
            transport = run.config.weight_transport
            choice = choose_transport(self._registry, sender, receiver, transport, rejected=rejected)
            failures: list[str] = []
            for route in load_transport(choice.provider).routes(sender, receiver):
                plan = SyncPlan(
                    transport=choice.provider,
                    route=route,
                    dtype=DTYPE_NAMES[engine.config.model_args.dtype],
                    weight_format=engine.config.weight_format,
                    adapters=served_adapters(self._roles[target], run.config, self._registry) is not None,
                    bucket_bytes=run.config.model_update_buffer_size_mb << 20,
                    deadline_s=run.config.model_update_timeout,
                    device_digests=on_devices,
                    shares_tensors=target not in run.busy_roles,
                )
                publisher = WeightPublisher(trainer.group, engine.group, plan)
                failure = await _self_test_failure(publisher) if route.self_test else ""
                if failure:
                    failures.append(f"{route.label}: {failure}" if route.label else failure)
                    continue
                name, why = choice.provider.name, "; ".join(filter(None, [*choice.passed_over, *failures, route.note]))
                log.info("weights of %s reach %s by %s%s", source, target, name, why and f" ({why})")
                self._record.weight_transport(source, target, name)
                link = self._links[source, target] = _Link(publisher)
                return link
            rejected[choice.provider.name] = "; ".join(failures)

    async def _probe(self, link: _Link, source: str, target: str, changed_at: int) -> dict[str, float]:
        """Compare logprobs of the same tokens between the trainer and every replica; the worst replica counts."""
        run, engine = self._run, self._run.engine(target)
        guard, weight_format = run.config.guards.logprob_probe, engine.config.weight_format
        max_length = run.config.prompt_length + run.config.response_length
        tokens, image = probe_tokens(run.tokenizer, max_length), None
        if engine.queue.has_images and run.train_role(source).capabilities.images:
            image = image_prompt(tokens, run.tokenizer, max_length)
        readings = await logprob_probe(
            run.train_role(source),
            engine,
            tokens,
            max_length=max_length,
            image=image,
            can=engine.capabilities,
            vocab_size=run.vocab_size(source),
            replays_experts=run.config.replays_experts
            and source == self._roles[target].model_from == run.config.policy_role,
        )
        before, link.readings = link.readings, readings
        if link.probed_at < 0:
            link.probed_at = link.version
        link.followed = link.followed or changed_at > link.probed_at
        for rank, reading in readings.items():
            try:
                check_follows(f"{target} rank {rank}", link.version, before.get(rank), reading)
            except StaleWeightsError as error:
                run.guards.failed("logprob_probe", error, fatal=True)
        limit = guard.error_bound(weight_format)

        def check(part: str, on: str, bound: float) -> float | None:
            """Check the worst replica's gap in this part of the readings; None if no replica has the part."""
            gap_by_rank = {rank: mean_gap(getattr(reading, part)) for rank, reading in readings.items()}
            gaps = {rank: gap for rank, gap in gap_by_rank.items() if gap is not None}
            if not gaps:
                return None
            worst = max(gaps, key=gaps.__getitem__)
            what = f"mean |logprob by {target} rank {worst} - logprob by {source}| {on}"
            if not gaps[worst] <= bound:
                log.warning("%s: %s", what, self._causes(target, getattr(readings[worst], part)))
            run.guards.check_at_most("logprob_probe", gaps[worst], bound, what, error_threshold=limit)
            return gaps[worst]

        check("sampled", "of tokens that the engine sampled", limit)
        check("image", "of tokens after an image", guard.bound(weight_format))
        gap = check("fixed", "on the probe tokens", guard.bound(weight_format))
        return {} if gap is None else {"weight_sync/logprob_probe": gap}

    def _causes(self, target: str, compared: Sequence[Compared | None]) -> str:
        """What the compared logprobs show, and the command that examines the rest."""
        rows = tuple(
            LogprobRow(
                tokens=one.tokens,
                sampled=np.ones(len(one.tokens), dtype=np.bool_),
                versions=np.zeros(len(one.tokens), dtype=np.int32),
                engine=one.engine,
                trainer=one.trainer,
            )
            for one in compared
            if one is not None
        )
        diagnosis = LogprobBatch(rows=rows, dtype=self._run.engine(target).config.model_args.dtype).diagnose()
        return f"{diagnosis.summary()}; examine it with: roll-core doctor mismatch {self._run.dir / 'config.yaml'}"


async def _self_test_failure(publisher: WeightPublisher) -> str:
    """Why the self-test failed; empty if it passed."""
    try:
        await publisher.self_test()
    except WorkerDiedError:
        raise
    except RollError as error:
        return f"the self-test failed: {error}"
    return ""


def probe_tokens(tokenizer: PreTrainedTokenizerBase, max_length: int) -> TokenIds:
    """Fixed pseudo-random tokens of text, at least 2, with room for a sampled one in `max_length`."""
    size = max(2, min(PROBE_TOKENS, max_length - 1))
    tokens = np.random.default_rng(0).integers(0, len(tokenizer), size=size, dtype=np.int64)
    processor = processor_of(tokenizer)
    reserved = () if processor is None else processor.media_token_ids
    text_id = next(id for id in range(len(tokenizer)) if id not in reserved)
    return np.where(np.isin(tokens, reserved), text_id, tokens)
