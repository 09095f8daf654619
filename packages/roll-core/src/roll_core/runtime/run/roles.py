"""Train and infer roles for pipelines: each drives a worker group and takes a lease on its slots for every call."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from typing_extensions import override

from roll_core.data.module_rows import balance_rows, check_rows
from roll_core.data.pack import balance, count_totals, rollouts
from roll_core.errors import CheckpointError, RollError, UnsupportedError, WorkerDiedError, WorkerTimeoutError
from roll_core.runtime.cluster.concurrency import gather
from roll_core.runtime.cluster.executors.base import WorkerStub
from roll_core.runtime.cluster.leases import SlotLeases
from roll_core.runtime.cluster.placement import slots_of
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.replicas import WorkerReplica
from roll_core.runtime.workers.infer import InferWorker, join_readings
from roll_core.runtime.workers.train import TrainWorker, combine
from roll_core.spec.pipeline import InferRole, ScoredSequences, TrainRole, UpdateResult
from roll_core.spec.providers import InferCapabilities, TrainCapabilities
from roll_core.spec.train import WantedOutputs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from roll_core.runtime.cluster.executors.base import WorkerGroup
    from roll_core.runtime.cluster.memory_use import MemoryUse
    from roll_core.runtime.run.followers import Followers
    from roll_core.spec.config import WorkerConfig
    from roll_core.spec.module_program import ModuleLoss, ModuleProgram, ModuleRow
    from roll_core.spec.train import LossFn, LossMetrics, StateKind, StepStats
    from roll_core.types import Completion, DataRank, GenerateRequest, TrainSequence

T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger(__name__)

WEIGHTS = frozenset({"weights"})
TRAINED = frozenset({"weights", "grads", "optimizer"})
"""Parts of a training role on its slots."""
ENGINE = frozenset({"engine"})
RESTART_ATTEMPTS = 3
"""Restarts of all replicas of a role per call. The limit matters for a prompt that crashes every replica."""
PORTABLE = "portable"
"""Folder of the portable state in a checkpoint, beside the folders `rank-<n>`."""
METRICS_S = 10.0
"""Timeout in seconds for a replica's metrics; the next step waits for them."""
HEALTH_CHECK_S = 10.0
"""Timeout in seconds for a replica's reply after it missed the deadline of a publish."""


class GroupTrainRole(TrainRole):
    """A role with a train strategy on any number of ranks."""

    def __init__(
        self,
        name: str,
        config: WorkerConfig,
        group: WorkerGroup,
        *,
        trains: bool,
        leases: SlotLeases | None = None,
        offloads: bool = False,
        beside_engine: bool = False,
        averages: bool = False,
        averages_per_batch: bool = False,
        capabilities: TrainCapabilities | None = None,
    ) -> None:
        """Wrap a worker group. `trains` is false for a role that only scores.

        `leases` grants leases on slots and is shared by all roles. If `offloads`, the role moves its parts to the host
        while other roles use its slots. A role `beside_engine` also works while an engine holds a lease for both.
        `averages`: it keeps a moving average of its parameters, which programs may use. `averages_per_batch`: the
        average moves after the last optimizer step of an update.
        """
        self.name, self.config, self.group, self.trains = name, config, group, trains
        self._workers = WorkerStub[TrainWorker](group)
        self.capabilities = capabilities or TrainCapabilities()
        self.movable = (TRAINED if trains else WEIGHTS) if offloads else frozenset[str]()
        self._leases, self._beside_engine = leases or SlotLeases(), beside_engine
        # The moving average is part of the optimizer's state.
        self._program_parts = TRAINED if averages else WEIGHTS
        self._averages_per_batch = averages_per_batch
        self._ranks: list[DataRank] = []
        self.data_parallel = 0
        """Data-parallel size: number of model replicas over which a batch is split. Known once the role has started."""
        self.weight_version = 0
        self.changed_at = 0
        """Weight version of the last optimizer step whose gradient was not exactly zero; 0 if this process did none.

        Later versions may have the same or different values: momentum and weight decay change weights without a
        gradient. An optimizer step therefore increments the version even if its gradient is zero.
        """

    @cached_property
    def slots(self) -> frozenset[int]:
        """Slots of the role's workers."""
        return slots_of(self.group.spec.places)

    async def offload(self, parts: frozenset[str]) -> None:
        """Offload parts of every rank to the host."""
        await self._workers(TrainWorker.offload).all(sorted(cast("frozenset[StateKind]", parts)))

    async def onload(self, parts: frozenset[str]) -> None:
        """Onload parts of every rank to the device."""
        await self._workers(TrainWorker.onload).all(sorted(cast("frozenset[StateKind]", parts)))

    def _lease(self, parts: frozenset[str]) -> AbstractAsyncContextManager[None]:
        return self._leases.take({self.name: parts}, join=self._beside_engine)

    async def start(self) -> None:
        """Build the model on every rank."""
        self._ranks = await self._workers(TrainWorker.start).all()
        self.data_parallel = self._ranks[0].size

    @property
    @override
    def sequences_per_step(self) -> int:
        args = self.config.training_args
        return args.gradient_accumulation_steps * args.per_device_train_batch_size * self.data_parallel

    @override
    async def score(self, sequences: Sequence[TrainSequence], want: WantedOutputs) -> ScoredSequences:
        if want.base and not self.config.model_args.trains_adapters:
            raise UnsupportedError(
                f"{self.name} trains its whole model, not adapters (lora_target): it has no base model to score with"
            )
        self._check_wanted(want)
        self._check_images(sequences)
        shares = balance(sequences, self.data_parallel)
        # The moving average is part of the optimizer's state.
        async with self._lease(TRAINED if want.ema else WEIGHTS):
            score = self._workers(TrainWorker.score)
            outputs_of_ranks = await score.each(
                [score.args([sequences[i] for i in shares[rank.index]], want) for rank in self._ranks]
            )
        joined: dict[str, list[Any]] = {}
        for field in fields(ScoredSequences):
            parts = [getattr(outputs, field.name) for outputs in outputs_of_ranks]
            if parts[0] is not None:
                joined[field.name] = self._in_order(shares, parts)
        return ScoredSequences(**joined)

    def _in_order(self, shares: Sequence[Sequence[int]], results: Sequence[Sequence[T]]) -> list[T]:
        """Results of all leaders in the order of the whole batch; `shares` are the indices of each data rank."""
        leaders = [
            (shares[rank.index], rows_of_rank)
            for rank, rows_of_rank in zip(self._ranks, results, strict=True)
            if rank.leader
        ]
        rows = [row for _, rows_of_rank in leaders for row in rows_of_rank]
        return [rows[index] for index in np.argsort([index for share, _ in leaders for index in share])]

    @override
    async def update(
        self,
        sequences: Sequence[TrainSequence],
        loss: LossFn,
        *,
        epochs: int = 1,
        max_length: int = 1,
        max_steps: int | None = None,
        shuffle_seed: int | None = None,
    ) -> UpdateResult:
        self._check_wanted(loss.want)
        self._check_images(sequences)
        call = self._workers(TrainWorker.update)

        async def step(indices: list[int], epoch: int) -> list[tuple[LossMetrics, StepStats]]:
            batch = [sequences[i] for i in indices]
            shares, denominators = balance(batch, self.data_parallel), count_totals(batch, max_length=max_length)
            return await call.each(
                [call.args([batch[i] for i in shares[rank.index]], loss, denominators) for rank in self._ranks]
            )

        orders = [group_order(sequences, shuffle_seed, epoch) for epoch in range(epochs)]
        num_tokens = epochs * sum(len(sequence) for sequence in sequences)
        return await self._steps(orders, step, num_tokens=num_tokens, max_steps=max_steps)

    @override
    async def run_program(
        self, rows: Sequence[ModuleRow], program: ModuleProgram
    ) -> list[Mapping[str, NDArray[np.generic]]]:
        self._check_rows(rows)
        call, shares = self._workers(TrainWorker.run_program), balance_rows(rows, self.data_parallel)
        async with self._lease(self._program_parts):
            results = await call.each(
                [call.args([rows[i] for i in shares[rank.index]], program) for rank in self._ranks]
            )
        return self._in_order(shares, results)

    @override
    async def update_program(
        self, rows: Sequence[ModuleRow], loss: ModuleLoss, *, epochs: int = 1, shuffle_seed: int | None = None
    ) -> UpdateResult:
        self._check_rows(rows)
        call = self._workers(TrainWorker.update_program)

        async def step(indices: list[int], epoch: int) -> list[tuple[LossMetrics, StepStats]]:
            batch = [rows[i] for i in indices]
            shares = balance_rows(batch, self.data_parallel)
            return await call.each(
                [call.args([batch[i] for i in shares[rank.index]], loss, len(batch), epoch) for rank in self._ranks]
            )

        orders = [row_order(len(rows), shuffle_seed, epoch) for epoch in range(epochs)]
        return await self._steps(orders, step, num_tokens=0)

    async def _steps(
        self,
        orders: Sequence[Sequence[Sequence[int]]],
        step: Callable[[list[int], int], Awaitable[list[tuple[LossMetrics, StepStats]]]],
        *,
        num_tokens: int,
        max_steps: int | None = None,
    ) -> UpdateResult:
        """Take optimizer steps over the units of each epoch, `max_steps` at most.

        `step` takes one step with the rows of these indices in this epoch, and returns the results of all ranks.
        """
        per_step: list[LossMetrics] = []
        num_skipped = num_overflows = 0
        async with self._lease(TRAINED):
            for epoch, order in enumerate(orders):
                for chunk in even_chunks(order, self.sequences_per_step, max_steps):
                    # Keep the given order within a step: if an epoch has one step, it must not depend on the seed.
                    metrics, stats = self._stepped(await step(sorted(itertools.chain.from_iterable(chunk)), epoch))
                    num_skipped += stats.skipped
                    num_overflows += stats.overflow
                    per_step.append(metrics | {"grad_norm": stats.grad_norm, "lr": stats.learning_rate})
            if self._averages_per_batch:
                await self._workers(TrainWorker.move_averages).all()
        return UpdateResult(
            metrics=average(per_step),
            num_steps=len(per_step),
            num_skipped=num_skipped,
            num_overflows=num_overflows,
            num_tokens=num_tokens,
        )

    def _check_wanted(self, want: WantedOutputs) -> None:
        """Raise `UnsupportedError` for outputs that the strategy does not declare."""
        whole_vocabulary = want.hidden or want.comparison is not None
        for name, is_wanted in (
            ("topk", want.topk > 0),
            ("gathered", want.gathered),
            ("whole_vocabulary", whole_vocabulary),
            ("ema", want.ema),
        ):
            if is_wanted and not getattr(self.capabilities, name):
                raise self._undeclared(name)

    def _check_images(self, sequences: Sequence[TrainSequence]) -> None:
        """Raise `UnsupportedError` for images and videos that no check before the run knows, as of environments."""
        kinds = {item.kind for sequence in sequences for item in sequence.media}
        for kind in sorted(kinds.difference(self.capabilities.media)):
            raise self._undeclared(f"{kind}s")

    def _check_rows(self, rows: Sequence[ModuleRow]) -> None:
        """Raise `UnsupportedError` if the strategy runs no programs, and `DataError` for rows that it cannot run."""
        if not self.capabilities.module_programs:
            raise self._undeclared("module_programs")
        check_rows(rows)

    def _undeclared(self, name: str) -> UnsupportedError:
        return UnsupportedError(f"{self.name}: its strategy does not declare the capability {name}")

    def _stepped(self, results: Sequence[tuple[LossMetrics, StepStats]]) -> tuple[LossMetrics, StepStats]:
        """Count the weight version of an optimizer step, and combine the metrics of all ranks."""
        _, stats = results[0]
        # The first step of a warm-up has a learning rate of 0, so it creates no new version.
        warming_up = stats.learning_rate == 0 < self.config.training_args.learning_rate
        if not (stats.skipped or warming_up):
            self.weight_version += 1
            if stats.grad_norm != 0:
                self.changed_at = self.weight_version
        return combine([metrics for (metrics, _), rank in zip(results, self._ranks, strict=True) if rank.leader]), stats

    async def save(self, path: Path, *, portable: bool = False) -> bool:
        """Write every rank's state below `path`. Returns True if some rank left files for `finish_save`.

        `portable`: also write the portable state, which every strategy can load. Raises `CheckpointError` if a rank's
        host writes to another disk than this process reads.
        """
        save = self._workers(TrainWorker.save)
        async with self._lease(TRAINED):
            unfinished = await save.each([save.args(folder) for folder in self._rank_folders(path)])
            if portable:
                await self._workers(TrainWorker.save_portable).all(str(path / PORTABLE))
        written = {file.name for file in path.iterdir()} if path.is_dir() else set()
        if lost := [str(member) for member in self.group.members if f"rank-{member.rank}" not in written]:
            raise CheckpointError(
                f"{self.name}: {path} lacks the files of {', '.join(lost)}, which wrote them to its own disk: set"
                " output_dir to a file system that all hosts share"
            )
        return any(unfinished)

    async def finish_save(self) -> None:
        """Write the files that the last `save` left. Needs no lease, because the pending state is not on the slots.

        Other roles, or this role, may use the slots meanwhile.
        """
        await self._workers(TrainWorker.finish_save).all()

    async def load(self, path: Path, version: int, *, portable: bool = False) -> None:
        """Load the state that `save` wrote below `path` and set the weight version to `version`.

        `portable`: load the portable state, written by any strategy.
        """
        load = self._workers(TrainWorker.load)
        async with self._lease(TRAINED):
            if portable:
                await self._workers(TrainWorker.load_portable).all(str(path / PORTABLE))
            else:
                await load.each([load.args(folder) for folder in self._rank_folders(path)])
        self.weight_version = version

    def _rank_folders(self, path: Path) -> list[str]:
        return [str(path / f"rank-{rank}") for rank in range(self.group.world_size)]

    async def start_profile(self, *, memory: bool) -> None:
        """Start the profiler of each rank, with allocations if `memory`."""
        await self._workers(TrainWorker.start_profile).all(memory)

    async def stop_profile(self, name: Path) -> None:
        """Write the timeline of each rank to files whose names begin with the path `name`."""
        await self._workers(TrainWorker.stop_profile).all(str(name))

    async def memory_use(self) -> list[MemoryUse | None]:
        """Memory of each rank's process and device in bytes; None if unknown."""
        return await self._workers(TrainWorker.memory_use).all()

    async def export(self, path: Path) -> None:
        """Export the model to the directory `path` in the format of transformers."""
        async with self._lease(TRAINED):
            await self._workers(TrainWorker.export).all(str(path))

    @override
    async def export_head(self, path: Path) -> None:
        self._check_wanted(WantedOutputs(hidden=True))
        async with self._lease(WEIGHTS):
            await self._workers(TrainWorker.export_head).all(str(path))


class GroupInferRole(InferRole):
    """A role with an infer strategy on any number of replicas."""

    def __init__(
        self,
        name: str,
        config: WorkerConfig,
        group: WorkerGroup,
        *,
        followers: Followers | None = None,
        leases: SlotLeases | None = None,
        sleeps: bool = False,
        receives_weights: bool = False,
        capabilities: InferCapabilities | None = None,
        queue: Callable[..., RequestQueue] = RequestQueue,
        restart: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Wrap a worker group. `queue` constructs its `RequestQueue` of the replicas and `survives_all`.

        `followers` are the workers on further nodes, if replicas are on several.
        `leases` grants leases on slots and is shared by all roles. If `sleeps`, the engines free their slots for other
        roles and lose their weights. They sleep only if `receives_weights`: if a role publishes weights to them.
        `restart` restarts all replicas and publishes weights to them. It is called once no replica is alive. Without
        it, replicas of a role without a publish are restarted with the weights of their model.
        """
        self.name, self.config, self.group, self._followers = name, config, group, followers
        self._workers = WorkerStub[InferWorker](group)
        self.capabilities = capabilities or InferCapabilities()
        self._replicas = {rank: WorkerReplica(group, rank) for rank in range(group.world_size)}
        self._waiting: set[int] = set()
        """Ranks of restarted workers that have no weights yet."""
        self._leases, self._sleeps, self._receives_weights = leases or SlotLeases(), sleeps, receives_weights
        self.queue = queue(
            self._replicas.values(),
            survives_all=lambda: (restart is not None or not self._receives_weights) and group.survives_all,
        )
        self._restart, self._restarting = restart, asyncio.Lock()
        self.weight_version = 0
        self.scorers: list[str] = []
        """Reward models that share its slots. They are on the slots during rollouts."""
        self.has_weights = True
        """False after the engines slept, until the next publish."""

    @cached_property
    def slots(self) -> frozenset[int]:
        """Slots of the role's workers."""
        return slots_of(self.group.spec.places)

    @property
    def movable(self) -> frozenset[str]:
        """Parts that can be offloaded. Empty if no role publishes to this engine: it could not reload its weights."""
        return ENGINE if self._sleeps and self._receives_weights else frozenset()

    async def offload(self, parts: frozenset[str]) -> None:
        """Put every replica to sleep, which frees the slots' memory and discards the weights."""
        self.has_weights = False
        await self._call_survivors(partial(self._call_in_time, InferWorker.sleep))

    async def onload(self, parts: frozenset[str]) -> None:
        """Wake every replica. It has no weights until the next publish."""
        await self._call_survivors(partial(self._call_in_time, InferWorker.wake))

    async def _call_in_time(self, method: Callable[[InferWorker], Coroutine[Any, Any, None]], rank: int) -> None:
        """Call a replica, and kill it if it does not return within `replica_timeout`."""
        try:
            await self._workers(method, self.queue.timeouts.token_s).at(rank)
        except WorkerTimeoutError as error:
            raise await self.group.kill(rank, f"{error} (replica_timeout)") from error

    async def _call_survivors(self, call: Callable[[int], Awaitable[R]], *ignored: type[RollError]) -> list[R]:
        """Call every live rank. Omits a replica that exits during the call; `revive` restarts it later."""
        ranks = [rank for rank in range(self.group.world_size) if rank not in self.group.lost]
        outcomes = await asyncio.gather(*[call(rank) for rank in ranks], return_exceptions=True)
        results: list[R] = []
        for rank, outcome in zip(ranks, outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                results.append(outcome)
            elif not isinstance(outcome, ignored) and not (
                isinstance(outcome, WorkerDiedError) and rank in self.group.lost
            ):
                raise outcome
        return results

    async def start(self) -> None:
        """Start every engine and log the URLs of its OpenAI-compatible endpoints, if it has any."""
        if self._followers is None:
            await self._workers(InferWorker.start).all()
        else:
            await gather([self._followers.start(rank) for rank in range(self.group.world_size)])
        if self.capabilities.endpoint:
            for rank, url in enumerate(await self._workers(InferWorker.endpoint).all()):
                log.info("%s rank %d serves OpenAI's API at %s", self.name, rank, url)
        self.queue.watch()

    async def revive(self) -> None:
        """Restart replicas whose workers exited. They receive requests after the next publish (`received`)."""
        while self.group.lost:  # more workers may exit meanwhile
            rank = min(self.group.lost)
            # First: an idle replica's exit may be unnoticed, and the queue would submit to the old worker.
            self.queue.remove(self._replicas[rank])
            if self._followers is None:
                await self.group.replace(rank)
                await self._workers(InferWorker.start).at(rank)
            else:
                await self._followers.replace(rank)  # first: its checks would end the new worker
                await self.group.replace(rank)
                await self._followers.start(rank)
            self._waiting.add(rank)

    async def reload(self) -> None:
        """Restart replicas whose workers exited, with the weights of their model."""
        await self.revive()
        self._readmit()

    async def give_up(self, ranks: Sequence[int], why: str) -> bool:
        """Kill hanging replicas, as if their workers had exited. Returns True if any worker of the group is lost.

        If no other replica is alive, the sender may be at fault, or the timeout too short. Only replicas whose workers
        do not reply to a health check are killed then. Kills none if the role cannot survive their loss.
        """
        living = set(range(self.group.world_size)) - self.group.lost
        if not living > set(ranks):
            ranks = await self._unresponsive(ranks) if self.group.survives_all else ()
        if self.group.spec.survives != "never":
            for rank in ranks:
                await self.group.kill(rank, why)
        return bool(self.group.lost)

    async def _unresponsive(self, ranks: Sequence[int]) -> list[int]:
        """Ranks whose workers do not reply within `HEALTH_CHECK_S`."""
        checks = [self._workers(InferWorker.progress, HEALTH_CHECK_S).at(rank) for rank in ranks]
        outcomes = zip(ranks, await asyncio.gather(*checks, return_exceptions=True), strict=True)
        return [rank for rank, outcome in outcomes if isinstance(outcome, WorkerTimeoutError)]

    def received(self, version: int) -> None:
        """Record that weights of this version were published, and add restarted replicas to the request queue."""
        self.weight_version, self._receives_weights, self.has_weights = version, True, True
        self._readmit()

    def _readmit(self) -> None:
        for rank in sorted(self._waiting):
            self._replicas[rank] = WorkerReplica(self.group, rank)
            self.queue.add(self._replicas[rank])
        self._waiting.clear()

    @override
    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        if not self.capabilities.prompt_topk and any(request.prompt_topk for request in requests):
            raise UnsupportedError(f"{self.name}: its strategy does not declare the capability prompt_topk")
        async with self.lease():
            return await self.served(self.queue.generate(requests))

    async def generate_beside(self, request: GenerateRequest) -> Completion:
        """Run a request without a lease, for an engine whose weights stay on its slots. Restarts lost replicas."""
        if self.group.lost:
            async with self._restarting:
                await self.reload()
        (completion,) = await self.served(self.queue.generate([request]))
        return completion

    async def served(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Await generation results while holding a lease. Restarts the replicas whenever none is alive.

        Unfinished requests then continue on the new replicas. Raises `WorkerDiedError` of the last replica if all
        replicas exit again after `RESTART_ATTEMPTS` restarts.
        """
        task = asyncio.create_task(waiting)
        try:
            for _ in range(RESTART_ATTEMPTS):
                if await self._is_done(task):
                    return await task
                async with self._restarting:
                    # Another caller may have restarted them while this one waited for the lock.
                    if self.queue.no_replicas.is_set():
                        await (self._restart or self.reload)()
            if not await self._is_done(task) and (death := self.queue.error) is not None:
                raise death
            return await task
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _is_done(self, task: asyncio.Task[T]) -> bool:
        """Wait for the task or for the loss of all replicas. Returns True if the task is done."""
        # The task alone is not enough: with no replica alive its requests wait without end.
        alone = asyncio.create_task(self.queue.no_replicas.wait())
        try:
            await asyncio.wait({task, alone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            alone.cancel()
        return task.done()

    async def generate_on_each(self, requests: Sequence[GenerateRequest]) -> dict[int, list[Completion]]:
        """Send the requests to every replica and return the completions by rank, without replicas that exited.

        Raises any other error of a replica. Raises `WorkerDiedError` if every replica exited.
        """
        async with self.lease():
            calls = [
                self.queue.generate(
                    [replace(request, id=f"{request.id}/{rank}") for request in requests], replica=replica
                )
                for rank, replica in self._replicas.items()
            ]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        faults = [failure for failure in failures if not isinstance(failure, WorkerDiedError)]
        if faults or len(failures) == len(outcomes):
            raise (faults or failures)[0]
        by_replica = zip(self._replicas, outcomes, strict=True)
        return {rank: outcome for rank, outcome in by_replica if not isinstance(outcome, BaseException)}

    @asynccontextmanager
    async def lease(self, *, scores: bool = False) -> AsyncIterator[None]:
        """A lease on the role's slots for generation, and if `scores` for the reward models on these slots.

        Raises `RollError` if the engines slept and have no weights.
        """
        async with self._leases.take({self.name: ENGINE} | dict.fromkeys(self.scorers if scores else (), WEIGHTS)):
            if not self.has_weights:
                raise RollError(
                    f"{self.name} slept after its last weight sync, because other roles used its slots, and has no"
                    " weights: call publish_weights before it generates"
                )
            yield

    async def close(self) -> None:
        """Stop all requests and the checks of followers."""
        await self.queue.close()
        if self._followers is not None:
            await self._followers.close()

    async def memory_use(self) -> list[MemoryUse | None]:
        """Memory of each replica's process and device in bytes; None if unknown."""
        return await self._workers(InferWorker.memory_use).all()

    async def engine_metrics(self) -> dict[str, float]:
        """Engine metrics since the last call, combined over all replicas.

        Omits replicas that exit or do not respond within `METRICS_S`. The request queue's health checks detect hangs.
        """
        metrics = self._workers(InferWorker.metrics, METRICS_S)
        return join_readings(await self._call_survivors(metrics.at, WorkerTimeoutError))


def group_order(sequences: Sequence[TrainSequence], seed: int | None, epoch: int) -> list[list[int]]:
    """Indices of the rows of each rollout or unit, with whole groups shuffled by `seed`; not shuffled if it is None."""
    groups_of_rows = rollouts(sequences)
    if seed is None:
        return groups_of_rows
    groups = sorted({sequence.group for sequence in sequences})
    places = dict(zip(groups, np.random.default_rng([seed, epoch]).permutation(len(groups)).tolist(), strict=True))
    return sorted(groups_of_rows, key=lambda rows: places[sequences[rows[0]].group])


def row_order(num_rows: int, seed: int | None, epoch: int) -> list[list[int]]:
    """Indices of the rows of a program, each a unit of its own, shuffled by `seed`; not shuffled if it is None."""
    order = range(num_rows) if seed is None else np.random.default_rng([seed, epoch]).permutation(num_rows).tolist()
    return [[index] for index in order]


def even_chunks(sequences: Sequence[T], size: int, max_chunks: int | None = None) -> list[Sequence[T]]:
    """Split into the fewest chunks of at most `size` elements, in order. Chunk sizes differ by at most one.

    Chunks are larger if they would be more than `max_chunks`. If failed rewards shrink a batch, no optimizer step is
    left with only a few sequences.
    """
    count = math.ceil(len(sequences) / size)
    count = count if max_chunks is None else min(count, max_chunks)
    bounds = [round(i * len(sequences) / count) for i in range(count + 1)] if count else []
    return [sequences[a:b] for a, b in itertools.pairwise(bounds)]


def average(per_step: Sequence[LossMetrics]) -> LossMetrics:
    """Combine the metrics of several optimizer steps: means, and extrema for `/max` and `/min`."""
    if not per_step:
        return {}
    total = combine(per_step)
    return {k: v if k.endswith(("/max", "/min")) else v / len(per_step) for k, v in total.items()}
