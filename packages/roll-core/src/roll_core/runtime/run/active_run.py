"""The run object that a pipeline calls: roles, rollouts, weight publishing, metrics, guards.

The loop in `roll_core.runtime.run.loop` drives it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from typing_extensions import override

from roll_core.data.encode import EncodedSequences, SFTEncoder, encode_prompts, encode_sft
from roll_core.data.rows import file_names, read_rows
from roll_core.errors import DataError, PluginError, RollError
from roll_core.plugins.targets import load_target, schema_of
from roll_core.runtime.cluster.leases import SlotLeases
from roll_core.runtime.rollout.program import EVALUATION, ROLLOUT, GroupTerms, run_groups
from roll_core.runtime.rollout.recording import BatchTerms, RecordedBatch, Replay, ReplayedRole, RewardStats
from roll_core.runtime.rollout.scheduler import RolloutScheduler
from roll_core.spec.config import Config, RewardConfig
from roll_core.spec.pipeline import NamedPart, RolloutBatches, Run
from roll_core.spec.providers import InferProvider, PipelineProvider, Provider

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Literal

    from transformers import PreTrainedTokenizerBase

    from roll_core.data.rows import Rows
    from roll_core.data.streamed import StreamedRows
    from roll_core.plugins.registry import Registry
    from roll_core.runtime.records.guards import Guards
    from roll_core.runtime.records.ledger import Ledger
    from roll_core.runtime.records.media_folder import MediaFolder
    from roll_core.runtime.records.run_dir import RunDir
    from roll_core.runtime.records.run_files import ImagesFile, SamplesFile
    from roll_core.runtime.records.scores import ScoresFile
    from roll_core.runtime.rollout.program import Scorer
    from roll_core.runtime.rollout.recording import BatchFacts, Recorder
    from roll_core.runtime.rollout.scoring import RewardRouter
    from roll_core.runtime.run.roles import GroupInferRole, GroupTrainRole
    from roll_core.spec.config import DataArguments, RunConfig
    from roll_core.spec.pipeline import InferRole, RolloutPlan, Split
    from roll_core.spec.rollout import Prompt, RolloutProgram
    from roll_core.types import Group, Sample, SamplingParams, TrainSequence

P = TypeVar("P", bound=Provider)
T = TypeVar("T")

log = logging.getLogger(__name__)


class DatasetCache:
    """Rows of each `data_args`, read once for all roles."""

    def __init__(self, revisions: Mapping[str, str] | None = None) -> None:
        """`revisions` are the commits of data sets of the Hub, by name. Default: the latest ones."""
        self._rows: dict[str, Rows] = {}
        self._pinned = revisions or {}
        self.files: dict[str, str | None] = {}
        """Names of the files that were read, in order, and the commits of those that are data sets of the Hub."""

    def rows(self, data: DataArguments) -> Rows:
        """The rows of `data`, read on first use."""
        key = data.model_dump_json()
        if key not in self._rows:
            rows = self._rows[key] = read_rows(data, self._pinned)
            self._note(data, rows.revisions)
        return self._rows[key]

    def streamed(self, data: DataArguments) -> StreamedRows:
        """The rows of `data`, which stay on the disk."""
        from roll_core.data.streamed import StreamedRows

        rows = StreamedRows(data, self._pinned)
        self._note(data, rows.revisions)
        return rows

    def _note(self, data: DataArguments, revisions: Mapping[str, str]) -> None:
        self.files.update((name, revisions.get(name)) for name in file_names(data))


class ActiveRun(Run):
    """The `Run` of this process. The loop owns it; `start_roles` adds the roles."""

    def __init__(
        self,
        *,
        config: RunConfig,
        run_dir: RunDir,
        registry: Registry,
        tokenizer: PreTrainedTokenizerBase | None,
        data: DatasetCache,
        ledger: Ledger,
        guards: Guards,
        samples: SamplesFile,
        scores: ScoresFile,
        images: ImagesFile,
        media: MediaFolder,
        recorder: Recorder,
    ) -> None:
        self.config = config
        if tokenizer is not None:
            self.tokenizer = tokenizer
        self.run_dir, self.dir = run_dir, run_dir.path
        self.step = 0
        self.leases = SlotLeases(ledger.stage)
        self.vocab_sizes: dict[str, int] = {}
        """Vocabulary size of each role's model, by role."""
        self.train_roles: dict[str, GroupTrainRole] = {}
        self.infer_roles: dict[str, GroupInferRole] = {}
        self.rewards: RewardRouter | None = None
        self.busy_roles: set[str] = set()
        """Roles that generate while other roles train (concurrent rollouts)."""
        self._schedulers: list[RolloutScheduler] = []
        self._ahead = False
        """True if groups may be generated ahead of the batch that is trained on."""
        self._replayed: dict[str, ReplayedRole] = {}
        """Roles whose rollouts are replayed from another run's recording, by name."""
        self.sync_weights: Callable[[str, str], Awaitable[dict[str, float]]]
        """`WeightSyncController.publish`. Set by `start_roles`."""
        self.guards = guards
        self.registry, self._data, self._ledger, self._samples = registry, data, ledger, samples
        self._scores, self._images, self._media, self._recorder = scores, images, media, recorder
        self._metrics: dict[str, float] = {}
        self._retries = 0
        """Retried reward calls up to the last batch."""

    @property
    def data_files(self) -> dict[str, str | None]:
        """Names of the files whose rows the run has read, and the commits of those that are data sets of the Hub."""
        return self._data.files

    @override
    def train_role(self, name: str) -> GroupTrainRole:
        return _role(self.train_roles, name, "trains or scores")

    @override
    def infer_role(self, name: str) -> InferRole:
        return self._replayed.get(name) or self.engine(name)

    def engine(self, name: str) -> GroupInferRole:
        """The infer role `name`, which generates in this run (not replayed). Raises `RollError` if there is none."""
        return _role(self.infer_roles, name, "generates")

    @override
    def stage(self, name: str) -> AbstractContextManager[Any]:
        return self._ledger.stage(name)

    @override
    def log(self, metrics: Mapping[str, float]) -> None:
        self._metrics.update({name: float(value) for name, value in metrics.items()})

    def take_metrics(self) -> dict[str, float]:
        """Return and clear the metrics logged since the last call."""
        taken, self._metrics = self._metrics, {}
        return taken

    async def engine_metrics(self) -> dict[str, float]:
        """Engine metrics since the last call, as `engine/<role>/<name>`."""
        return {
            f"engine/{role}/{name}": value
            for role, engine in self.infer_roles.items()
            for name, value in (await engine.engine_metrics()).items()
        }

    @override
    def log_samples(self, samples: Sequence[Sample], *, split: Split = "train", all: bool = False) -> None:
        step = self.step + (split == "train" or all)
        self._samples.write(step, samples, split=split, limited=not all)
        if split == "val":
            self._scores.write(step, samples)

    @override
    def log_images(self, images: Sequence[bytes], captions: Sequence[str], *, split: Split = "train") -> None:
        self._images.write(self.step + (split == "train"), images, captions, split=split)

    @override
    def guard(self, guard_id: str, ok: bool, message: str, *, fatal: bool = False) -> None:
        self.guards.check(guard_id, ok, message, fatal=fatal)

    @override
    async def publish_weights(self, source: str, target: str) -> None:
        if replayed := self._replayed.get(target):
            replayed.weight_version = self.train_role(source).weight_version
            return
        with self.stage("weight_sync"):
            self.log(await self.sync_weights(source, target))

    @override
    async def rollout(
        self,
        role: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        n: int,
        split: Split = "train",
        program: Callable[[], RolloutProgram] | None = None,
    ) -> list[Group]:
        self._need_rewards()
        engine = self.engine(role)
        seeded = engine.capabilities.seeds if split == "val" else engine.capabilities.free_seeds
        with self.stage("rollout" if split == "train" else "evaluation"):
            terms = GroupTerms(
                params=params,
                n=n,
                # All evaluations of a run, and those of its export, sample with the same random numbers.
                seed_of=(self.config.seed, split, 0 if split == "val" else self.step) if seeded else None,
                priority=ROLLOUT if split == "train" else EVALUATION,
            )
            async with engine.lease(scores=True):
                groups = await engine.served(run_groups(engine.queue, prompts, terms, self._scorer, program))
        self.check_batch(role, groups, RewardStats.of(groups))
        return groups

    @override
    def rollout_batches(self, role: str, plan: RolloutPlan) -> RunRolloutBatches:
        if plan.replay:
            replayed = self._replayed[role] = ReplayedRole(role, self.config.roles()[role])
            return RunRolloutBatches(self, role, plan, Replay(Path(plan.replay), plan, replayed))
        self._need_rewards()
        if plan.concurrent:
            self.busy_roles.add(role)
        self._ahead |= plan.ahead > 0
        engine = self.engine(role)
        seeded = engine.capabilities.free_seeds if plan.seeded is None else plan.seeded
        log.info("rollouts of %s are %sseeded", role, "" if seeded else "not ")
        scheduler = RolloutScheduler(
            plan,
            engine.queue,
            self._scorer,
            seed=self.config.seed if seeded else None,
            lease=partial(engine.lease, scores=True),
            serve=engine.served,
            media=self._media,
        )
        self._schedulers.append(scheduler)
        recorder = self._recorder if plan.record else None
        return RunRolloutBatches(self, role, plan, scheduler, recorder)

    def check_batch(self, role: str, groups: Sequence[Group], stats: RewardStats, *, mixed: bool = False) -> None:
        """Trip the guards `token_round_trip` and `reward_failures` if a batch cannot be trained on.

        Every sampled token must have the engine's current weight version, or if `mixed`, this or an earlier version.
        """
        size, version = self.vocab_size(role), self.infer_role(role).weight_version
        samples = [sample for group in groups for sample in group.samples]
        problems = {
            sample.id: problem
            for sample in samples
            if (problem := token_problem(sample, vocab_size=size, version=version, mixed=mixed))
        }
        if problems:  # one guard event per batch, because each event rewrites the run's record
            sample_id, problem = next(iter(problems.items()))
            share = f"{len(problems)} of {len(samples)} samples; the first is {sample_id}"
            self.guards.check("token_round_trip", False, f"{self._source(role)}: {problem} ({share})")
        if stats.failed:
            threshold = self.config.guards.reward_failures.threshold
            self.guards.check(
                "reward_failures",
                stats.failed <= threshold * stats.scored,
                f"{stats.failed} of {stats.scored} rewards failed, more than the {threshold:.0%} allowed; the first:"
                f" {stats.first_failure}",
            )

    @property
    def _scorer(self) -> Scorer | None:
        rewards = self.rewards
        return None if rewards is None else partial(rewards.score, tokenizer=self.tokenizer)

    async def generated(self) -> None:
        """Wait until the engines of rollouts have finished their requests. Returns at once if groups are generated
        ahead."""
        for name, engine in () if self._ahead else self.infer_roles.items():
            if not isinstance(self.config.roles()[name], RewardConfig):
                await engine.queue.drained()

    def fault_metrics(self, role: str) -> dict[str, float]:
        """Replicas that `role` has lost, and reward calls that were retried since the last call of this method."""
        metrics = {}
        if role in self.infer_roles and (lost := self.infer_roles[role].queue.num_lost_replicas):
            metrics["rollout/lost_replicas"] = float(lost)
        if self.rewards is not None and (retries := self.rewards.retries - self._retries):
            self._retries += retries
            metrics["reward/retries"] = float(retries)
        return metrics

    def _need_rewards(self) -> None:
        """Raise `PluginError` if the pipeline omits a configured reward role; samples would lack correct rewards."""
        configured = {name for name, role in self.config.roles().items() if isinstance(role, RewardConfig)}
        listed = self.rewards.domains if self.rewards is not None else frozenset()
        if missing := sorted(configured - {f"rewards.{domain}" for domain in listed}):
            owner = self.registry.owner(self.registry.find(PipelineProvider, self.config.pipeline))
            raise PluginError(
                f"{owner}: roles() has no {', '.join(missing)}, which the config has, so samples would not be scored:"
                ' add RoleSpec(name=..., kind=reward.kind, task="reward") for each entry of rewards'
            )

    async def close(self) -> None:
        """Stop generation and scoring while the workers are still alive."""
        for scheduler in self._schedulers:
            await scheduler.close()
        for role in self.infer_roles.values():
            await role.close()
        if self.rewards is not None:
            await self.rewards.close()

    def vocab_size(self, role: str) -> int:
        """Vocabulary size of a role's model. Falls back to the policy role's, then to the tokenizer's length."""
        known = self.vocab_sizes
        return known.get(role) or known.get(self.config.policy_role) or len(self.tokenizer)

    def _source(self, role: str) -> str:
        """Origin of a role's samples, for messages."""
        if role in self._replayed:
            return f"{role}: a recorded rollout"
        worker = self.config.roles()[role]
        name = worker.strategy_args.strategy_name if worker.strategy_args else ""
        return f"{role}: {self.registry.owner(self.registry.find(InferProvider, name))}"

    @override
    def prompts(self, data: DataArguments) -> Sequence[Prompt]:
        rows, limit = self._data.rows(data), self.config.prompt_length
        return encode_prompts(rows, data, self.tokenizer, prompt_length=limit)[0]

    @override
    def sequences(
        self,
        data: DataArguments,
        *,
        overlong: Literal["drop", "truncate"] = "drop",
        on_prompt: bool = False,
        require_response: bool = True,
    ) -> Sequence[TrainSequence]:
        sequences, _ = encode_sft(
            self._data.rows(data),
            data,
            self.tokenizer,
            prompt_length=self.config.prompt_length,
            response_length=self.config.response_length,
            overlong=overlong,
            on_prompt=on_prompt,
            require_response=require_response,
        )
        return sequences

    @override
    def streamed_sequences(
        self, data: DataArguments, *, overlong: Literal["drop", "truncate"] = "drop", on_prompt: bool = False
    ) -> EncodedSequences:
        encoder = SFTEncoder(
            data,
            self.tokenizer,
            prompt_length=self.config.prompt_length,
            response_length=self.config.response_length,
            overlong=overlong,
            on_prompt=on_prompt,
        )
        return EncodedSequences(self._data.streamed(data), encoder)

    @override
    def rows(self, data: DataArguments) -> Rows:
        return self._data.rows(data)

    @override
    def part(self, kind: type[P], name: str, options: Mapping[str, Any]) -> NamedPart[P]:
        provider = self.registry.find(kind, name)
        owner = self.registry.owner(provider)
        if provider.config:
            options = schema_of(provider, Config, owner=owner)(**options).model_dump(mode="json")
        load = partial(load_target, provider.target, owner=owner)
        return NamedPart(provider=provider, owner=owner, options=options, load=load)


class RunRolloutBatches(RolloutBatches):
    """Batches that a scheduler produces or a replay reads, with the checks and metrics of a run."""

    def __init__(
        self,
        run: ActiveRun,
        role: str,
        plan: RolloutPlan,
        source: RolloutScheduler | Replay,
        recorder: Recorder | None = None,
    ) -> None:
        """`recorder` writes the batches. Raises `RunDirectoryError` if it cannot."""
        self._run, self._role, self._plan, self._source, self._recorder = run, role, plan, source, recorder
        if recorder is not None:
            recorder.begin()

    @override
    async def batch(self) -> list[Group]:
        run, plan = self._run, self._plan
        with run.stage("rollout"):
            groups, facts = await self._source.batch(run.step)
            if self._recorder is not None:
                version = run.infer_role(self._role).weight_version
                batch = RecordedBatch(groups=groups, facts=facts, weight_version=version)
                await asyncio.to_thread(self._recorder.write, run.step + 1, BatchTerms.of(plan), batch)
        run.check_batch(self._role, groups, facts.rewards, mixed=plan.ahead > 0)
        if plan.routed_experts:
            check_experts(groups, f"step {run.step + 1}: {self._role}")
        bound, oldest = math.ceil(plan.ahead), max(facts.ages, default=0)
        run.guard(
            "staleness",
            oldest <= bound or plan.stale == "reuse",
            f"step {run.step + 1}: a group was started {oldest} steps ago, but at most {bound} are allowed",
        )
        run.log(batch_metrics(plan, groups, facts) | run.fault_metrics(self._role))
        return list(groups)

    @override
    def state(self) -> Mapping[str, Any]:
        return self._source.state()

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        self._source.load_state(state)


def batch_metrics(plan: RolloutPlan, groups: Sequence[Group], facts: BatchFacts) -> dict[str, float]:
    """Metrics `rollout/...` of the features that the plan uses."""
    metrics: dict[str, float] = {}
    if plan.keep is not None:
        metrics["rollout/left_out_groups"] = float(facts.left_out)
    if plan.first_ready:
        metrics |= {
            "rollout/passed_over_groups": float(facts.passed_over),
            "rollout/late_length_ratio": late_length_ratio(groups, facts.ages),
        }
    if plan.ahead:
        samples = [sample for group in groups for sample in group.samples if len(sample.versions)]
        mixed = [bool(sample.versions.min() != sample.versions.max()) for sample in samples]
        metrics |= {
            "rollout/surplus_groups": float(facts.surplus),
            "rollout/stale_groups": float(facts.stale),
            "rollout/staleness/mean": statistics.fmean(facts.ages) if facts.ages else 0.0,
            "rollout/staleness/max": float(max(facts.ages, default=0)),
            "rollout/mixed_version_share": statistics.fmean(mixed) if mixed else 0.0,
        }
    if facts.restarted:
        metrics["rollout/restarted_groups"] = float(facts.restarted)
    return metrics


def late_length_ratio(groups: Sequence[Group], ages: Sequence[int]) -> float:
    """Mean length of responses that were started for an earlier batch ÷ mean length of the others.

    Measures the length bias of batches that take groups in completion order. 1 unless both kinds exist.
    """
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for group, age in zip(groups, ages, strict=True):
        lengths[age > 0] += [len(sample.response_ids) for sample in group.samples]
    return (
        statistics.fmean(lengths[True]) / statistics.fmean(lengths[False]) if all(map(sum, lengths.values())) else 1.0
    )


def check_experts(groups: Sequence[Group], who: str) -> None:
    """Raise `DataError` if no sample has routed experts. Some samples may lack them after a replica was lost."""
    samples = [sample for group in groups for sample in group.samples if len(sample.response_ids)]
    if samples and all(sample.routed_experts is None for sample in samples):
        raise DataError(
            f"{who} returned no routed experts, which router_replay.mode R3 needs. Recorded rollouts have them only if"
            " the recorded run had mode R3, too"
        )


def token_problem(sample: Sample, *, vocab_size: int, version: int, mixed: bool = False) -> str:
    """Describe what is wrong with a sample's response tokens; empty if they are valid.

    Checks that logprobs, loss mask and versions have one value per token, that ids are below `vocab_size`, and that
    logprobs are finite and not positive. Sampled tokens must be of weight version `version`. If `mixed`, versions may
    also increase along the response up to `version`.
    """
    ids = sample.response_ids
    for name in ("logprobs", "loss_mask", "versions"):
        if len(getattr(sample, name)) != len(ids):
            return f"{len(ids)} response tokens but {len(getattr(sample, name))} {name}"
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        return f"token ids from {ids.min()} to {ids.max()}, but the vocabulary size is {vocab_size}"
    if not np.isfinite(sample.logprobs).all() or (sample.logprobs > 1e-3).any():
        return "logprobs that are not finite or are positive"
    versions = sample.versions[sample.loss_mask]
    if mixed and len(versions) and versions.max() <= version and (np.diff(versions) >= 0).all():
        return ""
    if (versions != version).any():
        return f"tokens sampled at weight versions {sorted(set(versions.tolist()))}, expected {version}"
    return ""


def _role(roles: Mapping[str, T], name: str, does: str) -> T:
    if name not in roles:
        raise RollError(f"this run has no role {name!r} that {does}; it has {', '.join(roles) or 'none'}")
    return roles[name]
