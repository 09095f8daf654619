"""Roles as pipelines see them: worker groups that are called as one, each call in a turn on the role's slots."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from typing_extensions import override

from roll_core.data.pack import balance, totals
from roll_core.errors import RollError, UnsupportedError, WorkerDiedError, WorkerTimeoutError
from roll_core.runtime.cluster.executors.base import WorkerStub
from roll_core.runtime.cluster.leases import SlotLeases
from roll_core.runtime.cluster.placement import slots_of
from roll_core.runtime.records.portable_state import FOLDER
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.replicas import NO_TIMEOUTS, WorkerReplica
from roll_core.runtime.workers.infer import EngineReading, InferWorker, join_readings
from roll_core.runtime.workers.train import TrainWorker, combine
from roll_core.spec.pipeline import InferRole, ScoredSequences, TrainRole, UpdateResult
from roll_core.spec.providers import InferCapabilities, TrainCapabilities
from roll_core.spec.train import Want

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from roll_core.runtime.cluster.executors.base import WorkerGroup
    from roll_core.runtime.cluster.memory_use import MemoryUse
    from roll_core.runtime.rollout.replicas import HealthTimeouts, Routing
    from roll_core.runtime.rollout.requests import FindStop
    from roll_core.spec.config import WorkerConfig
    from roll_core.spec.train import LossFn, LossMetrics, Part, StepStats
    from roll_core.types import Completion, DataRank, GenerateRequest, TrainSequence

T = TypeVar("T")

log = logging.getLogger(__name__)

WEIGHTS = frozenset({"weights"})
TRAINED = frozenset({"weights", "grads", "optimizer"})
"""What a role that trains has on its slots."""
ENGINE = frozenset({"engine"})
ATTEMPTS = 3
"""How often the replicas of a role are brought back while one waits for what they draw: a prompt may kill them all."""
METRICS_S = 10.0
"""How long a replica may take to tell its metrics, for which the next step waits."""


class GroupTrainRole(TrainRole):
    """A role with a train strategy on any number of ranks."""

    def __init__(
        self,
        name: str,
        config: WorkerConfig,
        group: WorkerGroup,
        *,
        trains: bool,
        turns: SlotLeases | None = None,
        offloads: bool = False,
        capabilities: TrainCapabilities | None = None,
    ) -> None:
        """`trains` is false for a role that only scores; one that `offloads` makes room for others between its
        `turns`."""
        self.name, self.config, self.group, self.trains = name, config, group, trains
        self._workers = WorkerStub[TrainWorker](group)
        self.capabilities = capabilities or TrainCapabilities()
        self.movable = (TRAINED if trains else WEIGHTS) if offloads else frozenset[str]()
        self._turns = turns or SlotLeases()
        self._ranks: list[DataRank] = []
        self._version = self._changed_at = 0

    @property
    def slots(self) -> frozenset[int]:
        """Which it sits on."""
        return slots_of(self.group.spec.places)

    async def leave(self, parts: frozenset[str]) -> None:
        """Move parts of every rank to the host."""
        await self._workers(TrainWorker.offload).all(sorted(cast("frozenset[Part]", parts)))

    async def enter(self, parts: frozenset[str]) -> None:
        """Move them back."""
        await self._workers(TrainWorker.onload).all(sorted(cast("frozenset[Part]", parts)))

    def _turn(self, parts: frozenset[str]) -> AbstractAsyncContextManager[None]:
        return self._turns.take({self.name: parts})

    async def start(self) -> None:
        """Build the model on every rank."""
        self._ranks = await self._workers(TrainWorker.start).all()

    @property
    def data_parallel(self) -> int:
        """Model replicas that share the data."""
        return self._ranks[0].size

    @property
    @override
    def sequences_per_step(self) -> int:
        args = self.config.training_args
        return args.gradient_accumulation_steps * args.per_device_train_batch_size * self.data_parallel

    @property
    @override
    def weight_version(self) -> int:
        return self._version

    @property
    def changed_at(self) -> int:
        """Weight version of the last optimizer step whose gradient was not exactly zero; 0 if this process did none.

        Later versions may hold the same values. They need not: momentum and weight decay move weights without a
        gradient, so each step still makes a version."""
        return self._changed_at

    @override
    async def score(
        self,
        sequences: Sequence[TrainSequence],
        *,
        logprobs: bool = False,
        entropy: bool = False,
        values: bool = False,
        temperature: float = 1.0,
        base: bool = False,
        first_choices: bool = False,
    ) -> ScoredSequences:
        if base and not self.config.model_args.trains_adapters:
            raise UnsupportedError(
                f"{self.name} trains its whole model, not adapters (lora_target): no base model is left to score with"
            )
        want = Want(
            logprobs=logprobs,
            entropy=entropy,
            values=values,
            topk=int(first_choices),
            temperature=temperature,
            base=base,
        )
        shares = balance(sequences, self.data_parallel)
        async with self._turn(WEIGHTS):
            score = self._workers(TrainWorker.score)
            answers = await score.each(
                [score.args([sequences[i] for i in shares[rank.index]], want) for rank in self._ranks]
            )

        def in_order(field: str, wanted: bool) -> list[Any] | None:
            if not wanted:
                return None
            found: dict[int, Any] = {}
            for rank, answer in zip(self._ranks, answers, strict=True):
                if rank.leader:
                    found.update(zip(shares[rank.index], getattr(answer, field), strict=True))
            return [found[i] for i in range(len(sequences))]

        return ScoredSequences(
            logprobs=in_order("logprobs", logprobs),
            entropy=in_order("entropy", entropy),
            values=in_order("values", values),
            first_choices=in_order("first_choices", first_choices),
        )

    @override
    async def update(
        self,
        sequences: Sequence[TrainSequence],
        loss: LossFn,
        *,
        epochs: int = 1,
        max_length: int = 1,
        shuffle_seed: int | None = None,
    ) -> UpdateResult:
        per_step: list[LossMetrics] = []
        num_skipped = num_overflows = 0
        async with self._turn(TRAINED):
            for epoch in range(epochs):
                order = group_order(sequences, None if shuffle_seed is None else [shuffle_seed, epoch])
                for chunk in even_chunks(order, self.sequences_per_step):
                    # In the order given, so that the only step of an epoch does not depend on the seed.
                    metrics, stats = await self._step([sequences[i] for i in sorted(chunk)], loss, max_length)
                    num_skipped += stats.skipped
                    num_overflows += stats.overflow
                    per_step.append(metrics | {"grad_norm": stats.grad_norm, "lr": stats.learning_rate})
        return UpdateResult(
            metrics=average(per_step),
            num_steps=len(per_step),
            num_skipped=num_skipped,
            num_overflows=num_overflows,
            num_tokens=epochs * sum(len(sequence) for sequence in sequences),
        )

    async def _step(
        self, batch: Sequence[TrainSequence], loss: LossFn, max_length: int
    ) -> tuple[LossMetrics, StepStats]:
        shares = balance(batch, self.data_parallel)
        denominators = totals(batch, max_length=max_length)
        update = self._workers(TrainWorker.update)
        answers = await update.each(
            [update.args([batch[i] for i in shares[rank.index]], loss, denominators) for rank in self._ranks]
        )
        stats = answers[0].stats
        # The first step of a warm-up has a learning rate of 0: it is no new version.
        warming_up = stats.learning_rate == 0 < self.config.training_args.learning_rate
        if not (stats.skipped or warming_up):
            self._version += 1
            if stats.grad_norm != 0:
                self._changed_at = self._version
        return combine([a.metrics for a, rank in zip(answers, self._ranks, strict=True) if rank.leader]), stats

    async def save(self, path: Path) -> bool:
        """Write every rank's state below `path`; whether some rank has left something for `finish_save`."""
        save = self._workers(TrainWorker.save)
        async with self._turn(TRAINED):
            return any(await save.each([save.args(folder) for folder in self._rank_folders(path)]))

    async def finish_save(self) -> None:
        """Write what the last `save` has left. Takes no turn: nothing of it is on the role's slots, which may be used
        meanwhile, also by this role."""
        await self._workers(TrainWorker.finish_save).all()

    async def load(self, path: Path, version: int) -> None:
        """Continue from what `save` wrote, at weight version `version`."""
        load = self._workers(TrainWorker.load)
        async with self._turn(TRAINED):
            await load.each([load.args(folder) for folder in self._rank_folders(path)])
        self._version = version

    def _rank_folders(self, path: Path) -> list[str]:
        return [str(path / f"rank-{rank}") for rank in range(self.group.world_size)]

    async def save_portable(self, path: Path) -> None:
        """Write below `path` what every strategy continues from."""
        async with self._turn(TRAINED):
            await self._workers(TrainWorker.save_portable).all(str(path / FOLDER))

    async def load_portable(self, path: Path, version: int) -> None:
        """Continue from what `save_portable` of any strategy wrote, at weight version `version`."""
        async with self._turn(TRAINED):
            await self._workers(TrainWorker.load_portable).all(str(path / FOLDER))
        self._version = version

    async def memory_use(self) -> list[MemoryUse | None]:
        """What each rank's process and device hold; None where unknown."""
        return await self._workers(TrainWorker.memory_use).all()

    async def export(self, path: Path) -> None:
        """Write a directory that transformers loads."""
        async with self._turn(TRAINED):
            await self._workers(TrainWorker.export).all(str(path))


class GroupInferRole(InferRole):
    """A role with an infer strategy on any number of replicas."""

    def __init__(
        self,
        name: str,
        config: WorkerConfig,
        group: WorkerGroup,
        *,
        turns: SlotLeases | None = None,
        sleeps: bool = False,
        fed: bool = False,
        capabilities: InferCapabilities | None = None,
        routing: Routing = "least_loaded",
        max_running: int | None = None,
        expand: bool = False,
        find_stop: FindStop | None = None,
        progress_s: float = 0.0,
        timeouts: HealthTimeouts = NO_TIMEOUTS,
        bring_back: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """One that `sleeps` makes room for others between its `turns` and loses its weights by that; so it does once
        it is `fed`, which is to say that weights are published to it. Where all replicas have died `bring_back`
        publishes to new ones. The rest is for its `RequestQueue`."""
        self.name, self.config, self.group = name, config, group
        self._workers = WorkerStub[InferWorker](group)
        self.capabilities = capabilities or InferCapabilities()
        self._replicas = {rank: WorkerReplica(group, rank) for rank in range(group.world_size)}
        self._waiting: set[int] = set()
        """Ranks that were made anew and have no weights yet."""
        self.queue = RequestQueue(
            self._replicas.values(),
            routing=routing,
            max_running=max_running,
            expand=expand,
            find_stop=find_stop,
            progress_s=progress_s,
            timeouts=timeouts,
            survives_all=lambda: bring_back is not None and group.outlives_all,
        )
        self._bring_back, self._bringing_back = bring_back, asyncio.Lock()
        self._turns, self._sleeps, self._fed = turns or SlotLeases(), sleeps, fed
        self._version = 0
        self.holds_weights = True
        """False from when it sleeps until weights are published to it."""

    @property
    def slots(self) -> frozenset[int]:
        """Which it sits on."""
        return slots_of(self.group.spec.places)

    @property
    def movable(self) -> frozenset[str]:
        """An engine that nobody publishes to keeps the weights that it has."""
        return ENGINE if self._sleeps and self._fed else frozenset()

    async def leave(self, parts: frozenset[str]) -> None:
        """Put every replica to sleep."""
        self.holds_weights = False
        await self._call_survivors(InferWorker.sleep)

    async def enter(self, parts: frozenset[str]) -> None:
        """Wake them."""
        await self._call_survivors(InferWorker.wake)

    async def _call_survivors(self, method: Callable[[InferWorker], Coroutine[Any, Any, None]]) -> None:
        """Call every replica that lives; one that exits during the call is restarted as others are."""
        ranks = [rank for rank in range(self.group.world_size) if rank not in self.group.lost]
        told = await asyncio.gather(*[self._workers(method).at(rank) for rank in ranks], return_exceptions=True)
        for rank, outcome in zip(ranks, told, strict=True):
            died = isinstance(outcome, WorkerDiedError) and rank in self.group.lost
            if isinstance(outcome, BaseException) and not died:
                raise outcome

    async def start(self) -> None:
        """Make every engine ready."""
        await self._workers(InferWorker.start).all()
        if self.capabilities.endpoint:
            for rank, url in enumerate(await self._workers(InferWorker.endpoint).all()):
                log.info("%s rank %d serves OpenAI's API at %s", self.name, rank, url)

    async def revive(self) -> None:
        """Make replicas anew that have died. They are given requests once weights have been published."""
        while self.group.lost:  # others may die meanwhile
            rank = min(self.group.lost)
            self.queue.remove(self._replicas[rank])
            await self.group.replace(rank)
            await self._workers(InferWorker.start).at(rank)
            self._waiting.add(rank)

    async def give_up(self, ranks: Sequence[int], why: str) -> bool:
        """End replicas that hang, as if they had died; false, and nothing is done, where no other would be left."""
        living = set(range(self.group.world_size)) - self.group.lost
        if not (ranks and self.group.spec.survives != "never" and living > set(ranks)):
            return False
        for rank in ranks:
            await self.group.give_up(rank, why)
        return bool(self.group.lost)

    def received(self, version: int) -> None:
        """Weights of this version were published to it."""
        self._version, self._fed, self.holds_weights = version, True, True
        for rank in sorted(self._waiting):
            self._replicas[rank] = WorkerReplica(self.group, rank)
            self.queue.add(self._replicas[rank])
        self._waiting.clear()

    @property
    @override
    def weight_version(self) -> int:
        return self._version

    @override
    async def generate(
        self,
        requests: Sequence[GenerateRequest],
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        async with self.turn():
            return await self.served(self.queue.generate(requests, on_completion))

    async def served(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Wait, within a turn, for what replicas draw. Where none is left they are brought back, and what they were
        drawing goes on; raises the last one's death where that was in vain `ATTEMPTS` times."""
        task = asyncio.create_task(waiting)
        try:
            for _ in range(ATTEMPTS):
                if await self._is_done(task):
                    return await task
                async with self._bringing_back:
                    if self._bring_back is not None and self.queue.no_replicas.is_set():
                        await self._bring_back()
            if not await self._is_done(task) and (death := self.queue.error) is not None:
                raise death
            return await task
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _is_done(self, task: asyncio.Task[T]) -> bool:
        """True once it is; false where no replica is left before that."""
        alone = asyncio.create_task(self.queue.no_replicas.wait())
        try:
            await asyncio.wait({task, alone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            alone.cancel()
        return task.done()

    async def generate_on_each(self, request: GenerateRequest) -> dict[int, Completion]:
        """What each replica answers to one request, by rank; those that die over it, or have died, are left out.

        Raises what else goes wrong, and `WorkerDiedError` where no replica is left.
        """
        async with self.turn():
            asked = [
                self.queue.generate([replace(request, id=f"{request.id}/{rank}")], replica=replica)
                for rank, replica in self._replicas.items()
            ]
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        faults = [failure for failure in failures if not isinstance(failure, WorkerDiedError)]
        if faults or len(failures) == len(outcomes):
            raise (faults or failures)[0]
        found = zip(self._replicas, outcomes, strict=True)
        return {rank: outcome[0] for rank, outcome in found if not isinstance(outcome, BaseException)}

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A turn in which it generates."""
        async with self._turns.take({self.name: ENGINE}):
            if not self.holds_weights:
                raise RollError(
                    f"{self.name} has slept since weights were last published to it, while others used its slots:"
                    " publish_weights before it generates"
                )
            yield

    async def memory_use(self) -> list[MemoryUse | None]:
        """What each replica's process and device hold; None where unknown."""
        return await self._workers(InferWorker.memory_use).all()

    async def engine_metrics(self) -> dict[str, float]:
        """What the engines did since the last call, over all replicas. One that is late is left out: where it hangs it
        is the request queue that finds out."""
        ranks = [rank for rank in range(self.group.world_size) if rank not in self.group.lost]
        asked = [self._workers(InferWorker.metrics, METRICS_S).at(rank) for rank in ranks]
        readings: list[EngineReading] = []
        for rank, told in zip(ranks, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if not isinstance(told, BaseException):
                readings.append(told)
            elif not isinstance(told, WorkerTimeoutError) and rank not in self.group.lost:
                raise told
        return join_readings(readings)


def group_order(sequences: Sequence[TrainSequence], seed: Sequence[int] | None) -> Sequence[int]:
    """Indices of `sequences`, their groups shuffled as wholes by `seed`; in order if it is None."""
    if seed is None:
        return range(len(sequences))
    groups = sorted({each.group for each in sequences})
    places = dict(zip(groups, np.random.default_rng(seed).permutation(len(groups)).tolist(), strict=True))
    return sorted(range(len(sequences)), key=lambda i: places[sequences[i].group])


def even_chunks(sequences: Sequence[T], size: int) -> list[Sequence[T]]:
    """As few chunks of at most `size` as will do, of sizes that differ by one at most, in order.

    Where failed rewards thin a batch out, no optimizer step is left with a handful of sequences.
    """
    count = math.ceil(len(sequences) / size)
    bounds = [round(i * len(sequences) / count) for i in range(count + 1)] if count else []
    return [sequences[a:b] for a, b in itertools.pairwise(bounds)]


def average(per_step: Sequence[LossMetrics]) -> LossMetrics:
    """Metrics of several optimizer steps as one: means, except `/max` and `/min`."""
    if not per_step:
        return {}
    total = combine(per_step)
    return {k: v if k.endswith(("/max", "/min")) else v / len(per_step) for k, v in total.items()}
