"""The loop of every run, from a validated config to a complete record.

    execute ─► _Driver.main ─► prepare ─► start_roles ─► setup ─► [resume] ─► evaluate? ─► _steps ─► export
                                                                                  │
           ┌──────────────────────────────────────────────────────────────────────┘
           └► { Pipeline.step ─► evaluate? ─► record ─► checkpoint? } * the number that `prepare` returned

    Pipeline.step ─┬─ publish_weights ─► weight_sync ─► TrainWorker.send_weights, InferWorker.receive_weights
                   ├─ rollouts.batch ──► rollout: scheduler ─► InferWorker ─► strategy.generate ─► rewards
                   └─ score, update ───► roles: GroupTrainRole ─► TrainWorker ─► strategy.forward_backward

Whether the run succeeds or fails, workers are closed, the record states the outcome, and the report is written.
`docs/architecture.md` gives an overview.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from roll_core.config.dump import dump
from roll_core.config.parts import on_a_cluster
from roll_core.config.secrets import Redactor
from roll_core.data.modelscope import with_local_models
from roll_core.data.processor import shown_text
from roll_core.data.templates import set_date
from roll_core.errors import (
    CheckpointError,
    ContractError,
    NoCheckpointError,
    NonFiniteError,
    RollError,
    RunFileError,
    TrackerError,
    WorkerDiedError,
    chain,
)
from roll_core.plugins.registry import Events
from roll_core.plugins.targets import load_target
from roll_core.runtime.cluster.concurrency import cancel_all, in_daemon_thread
from roll_core.runtime.cluster.memory_use import by_process
from roll_core.runtime.cluster.platform import select_platform
from roll_core.runtime.records.checkpoint_directory import BestMetric, CheckpointDirectory
from roll_core.runtime.records.console import Console
from roll_core.runtime.records.guards import Guards
from roll_core.runtime.records.ledger import Ledger
from roll_core.runtime.records.logs import run_logging
from roll_core.runtime.records.manifest import read_manifest
from roll_core.runtime.records.media_folder import MediaFolder
from roll_core.runtime.records.record import RunFacts, RunRecord, earlier_checkpoints, finished_run
from roll_core.runtime.records.run_dir import AUTO, RunDir, find_checkpoint, sweep_checkpoints
from roll_core.runtime.records.run_files import ImagesFile, SamplesFile, explained, writing
from roll_core.runtime.records.scores import ScoresFile
from roll_core.runtime.records.tracking import MetricsFile, Trackers, read_metrics
from roll_core.runtime.records.trends import ScoreTrends
from roll_core.runtime.rollout.recording import Recorder
from roll_core.runtime.run import summary
from roll_core.runtime.run.active_run import ActiveRun, DatasetCache
from roll_core.runtime.run.assemble import start_roles
from roll_core.runtime.run.checkpoint_store import CheckpointUploader, RemoteFolder, fetch_newest
from roll_core.runtime.run.identity import RunIdentity, changes, check_identity, log_changes
from roll_core.runtime.run.profiling import StepProfiler
from roll_core.runtime.run.run_saver import RunSaver, SavedRun, check_fits, load_run
from roll_core.runtime.run.stopping import StopSignals, ignoring_stop_signals
from roll_core.runtime.run.tokenizer import prepare_tokenizer
from roll_core.runtime.workers.build import model_spec
from roll_core.spec.providers import TrackerProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from pathlib import Path

    from roll_core.config import LoadedConfig
    from roll_core.plugins.registry import Registry
    from roll_core.runtime.cluster.executors.base import Executor
    from roll_core.runtime.records.checkpoint_directory import BestCheckpoint, Checkpoint
    from roll_core.runtime.records.logs import RunLogging
    from roll_core.runtime.records.record import Outcome
    from roll_core.spec.pipeline import Pipeline, Tracker

log = logging.getLogger(__name__)

TRACKERS = "trackers"
"""Directory of a run in which trackers store the ids of their remote runs. A resumed run begins with a copy of it."""
TOKENS_OF_STAGES = (("rollout", "tokens/generated"), ("train", "tokens/trained"), ("step", "tokens/trained"))
"""Stages of the time ledger and the metric with the number of tokens that each processes in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Outcome of a run, with its last metrics and error."""

    run_dir: RunDir
    outcome: Outcome
    steps_done: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Last value of every metric."""
    error: BaseException | None = None
    advice: str = ""
    """Cause of `error` and remedy. Empty if the error names its own remedy or no known cause matches."""
    trained: bool = False
    """True if this attempt completed a step."""

    @property
    def exit_code(self) -> int:
        """Exit code of `roll-core run`; 2, a mistake before anything was trained, only if no step was completed."""
        code = 0 if self.error is None else int(getattr(self.error, "exit_code", 1))
        return 1 if code == 2 and self.trained else code

    @property
    def history(self) -> list[dict[str, float]]:
        """Metrics of every step with `step` and `time`, as in `metrics.jsonl`: `pandas.DataFrame(result.history)`."""
        return read_metrics(self.run_dir.metrics)


def execute(
    loaded: LoadedConfig,
    registry: Registry,
    *,
    callbacks: Sequence[object] = (),
    argv: Sequence[str] = (),
    console: Console | None = None,
    before_s: float = 0.0,
) -> RunResult:
    """Run a config in this process. Returns errors in the result instead of raising them and completes the record.

    `callbacks` have event hooks, see `Events`. `argv` is the command line, for the record and the resume command.
    `before_s` is the time in seconds that passed before this call; the time ledger counts it as `start-up`.
    """
    console = console or Console()
    started = time.time()
    ledger = Ledger(before_s=before_s, on_change=console.stage)
    config = loaded.config
    redactor = Redactor.of(os.environ, config.model_dump(mode="json"))
    run_dir = RunDir.create(config.output_dir, config.exp_name)
    with writing(run_dir.config):
        run_dir.config.write_text(redactor.text(dump(config)), encoding="utf-8")
    facts = RunFacts(
        name=run_dir.name,
        pipeline=config.pipeline,
        seed=config.seed,
        argv=tuple(argv),
        plugins=registry.describe(),
        steps_asked=config.max_steps,
        started=started,
    )
    record = RunRecord(run_dir.record, facts, redactor)
    error: BaseException | None = None
    with run_logging(run_dir.log, console.warn, redactor) as logs:
        for warning in loaded.warnings:
            log.warning("%s", warning)
        events = Events(registry, callbacks)
        driver = _Driver(loaded, registry, events, run_dir, record, ledger, console, redactor, logs)
        try:
            driver.stop.run(driver.main())
        except (KeyboardInterrupt, SystemExit, Exception) as raised:
            error = explained(raised, run_dir.path)
            log.debug("the run ended early", exc_info=raised)
            for link in chain(raised):
                if isinstance(link, RollError) and link.trace:
                    log.debug("traceback in the worker:\n%s", link.trace)

        def completed() -> tuple[str, Outcome, list[Path]]:
            advice = ""
            if isinstance(error, Exception) and not isinstance(error, RunFileError):
                advice = summary.advice(error, registry, run_dir)
            outcome = record.finish(error, advice=advice, time_rows=[asdict(row) for row in ledger.rows()])
            with ledger.stage("report"):
                return advice, outcome, events.run_recorded(run_dir.path)

        ledger.observe = contextlib.nullcontext  # a tracker that fails must not prevent the report
        with ignoring_stop_signals(), contextlib.closing(driver.trackers):
            advice, outcome, written = completed()
            try:
                driver.trackers.finish(failed=error is not None, files=run_dir.uploads())
            except TrackerError as failure:
                if error is None:
                    error = failure
                    advice, outcome, written = completed()
                else:
                    log.warning("%s", failure)
    console.finish(
        outcome=outcome,
        rows=ledger.rows(),
        error="" if error is None else redactor.text(summary.described(error)),
        advice=redactor.text(advice),
        lines=[
            *summary.results(run_dir, driver.last_metrics),
            ("run", summary.relative(run_dir.path)),
            *((path.stem, summary.relative(path)) for path in written),
            *summary.how_to_resume(loaded, argv, run_dir, redactor),
        ],
    )
    return RunResult(
        run_dir=run_dir,
        outcome=outcome,
        steps_done=driver.steps_done,
        metrics=driver.last_metrics,
        error=error,
        advice=advice,
        trained=driver.trained,
    )


@dataclass(eq=False)
class _Driver:
    """State of one run while it executes. `main` and the methods below it are in the order of events."""

    loaded: LoadedConfig
    registry: Registry
    events: Events
    run_dir: RunDir
    record: RunRecord
    ledger: Ledger
    console: Console
    redactor: Redactor
    logs: RunLogging
    pipeline: Pipeline[Any] = field(init=False)
    guards: Guards = field(init=False)
    trends: ScoreTrends = field(init=False)
    metrics_file: MetricsFile = field(init=False)
    uploader: CheckpointUploader | None = None
    profiler: StepProfiler | None = None
    trackers: Trackers = field(default_factory=Trackers)
    """Closed after the report is written, so that they can upload it."""
    steps_done: int = 0
    trained: bool = False
    """True if this attempt completed a step."""
    last_metrics: dict[str, float] = field(default_factory=dict)
    evaluation_due: bool = False
    """True if SIGTERM or SIGHUP interrupted the evaluation of the last step, in this run or in the resumed run."""
    continued: RunIdentity | None = None
    """Identity of the run from whose checkpoint this one resumes."""
    date: datetime = field(default_factory=lambda: datetime.now().replace(microsecond=0))
    """Local date and time that chat templates see, also in later continuations of the run."""
    exporting: bool = False
    """True if the export has begun and is not complete."""

    def __post_init__(self) -> None:
        self.config, self.provider = self.loaded.config, self.loaded.pipeline
        source = self.loaded.sources[0] if self.loaded.sources else self.run_dir.config
        self.best_metric = BestMetric(self.config.save_best, str(source))
        self.stop = StopSignals(self.config.preemption_timeout)
        self.checkpoints = CheckpointDirectory(self.run_dir.checkpoints, self.config.max_ckpt_to_keep)
        self.id = f"{self.run_dir.path.name}-{secrets.token_hex(4)}"
        """Unique on all hosts."""
        self.file_checks = [self.logs.check]
        """Each raises `RunFileError` if a file of the run was deleted or replaced. Called at every step and at the
        end."""

    async def main(self) -> None:
        """Run from loading libraries to the final export and memory measurement."""
        ledger = self.ledger
        self.console.line(f"roll · {self.run_dir.name} · {self.config.pipeline}", style="bold")
        with ledger.stage("load libraries"):
            import torch  # noqa: F401 - imported here so that the ledger attributes its import time
            import transformers

            transformers.utils.logging.disable_progress_bar()
            self.logs.adopt()
            self.config = config = with_local_models(self.config)
            owner = self.registry.owner(self.provider)
            self.pipeline = load_target(self.provider.target, owner=owner)(config)
        # An existing cluster may have its devices on other hosts than the driver.
        elsewhere = on_a_cluster(self.registry, config.executor)
        platform = select_platform(self.registry, config.platform, elsewhere=elsewhere)
        if config.profile is not None:
            self.profiler = StepProfiler(config.profile, self.run_dir.profile)
        checkpoint = await self._find_checkpoint()
        async with contextlib.AsyncExitStack() as stack:
            run = self._prepare_run(checkpoint, stack)
            with ledger.stage("data"):
                num_steps = self.pipeline.prepare(run)
                if not hasattr(num_steps, "__index__"):  # an integer, also numpy's
                    kind, owner = type(num_steps).__name__, self.registry.owner(self.provider)
                    raise ContractError(f"{owner}: prepare() returned {kind}, expected the number of steps")
            resumed_step = checkpoint.step if checkpoint is not None else 0
            self.record.update(
                steps_asked=num_steps,
                platform=platform.name,
                resumed_step=resumed_step,
                steps_done=resumed_step,
                resumed_from=str(checkpoint) if checkpoint is not None else "",
            )
            self._check_work_is_left(checkpoint, num_steps)
            self._open_metrics(checkpoint, stack)
            identity = self._identity(run, checkpoint)
            stack.push_async_callback(self.pipeline.close)  # after the roles are closed, so that no program runs
            stack.callback(self._remove_incomplete_export)  # after the roles are closed, so that no worker writes it
            with ledger.stage("build roles"):
                executor = await start_roles(run, self.pipeline, platform, self.record, self.redactor, stack)
                await self.pipeline.setup(run)
                if self.profiler is not None:
                    self.profiler.check(run, range(resumed_step + 1, num_steps + 1))
            best: BestCheckpoint | None = None
            if checkpoint is not None:
                with ledger.stage("resume"):
                    saved = await load_run(run, self.pipeline, checkpoint)
                    self.evaluation_due = saved.evaluation_due and bool(config.eval_steps)
                    best = self.best_metric.resumed(checkpoint, saved.best)
                    self._record_best(best)
                    if checkpoint.origin:
                        shutil.rmtree(checkpoint.path, ignore_errors=True)
            if resumed_step >= num_steps:  # no step will run, so no new metrics replace these
                self.last_metrics.update(*read_metrics(self.run_dir.metrics)[-1:])
            failure: BaseException | None = None
            try:
                self.events.run_started(run)
                async with contextlib.AsyncExitStack() as saving:
                    if self.uploader is not None:
                        await self.uploader.probe()
                        await saving.enter_async_context(self.uploader)
                    saver = RunSaver(run, self.pipeline, self.checkpoints, self._completed, best, identity)
                    await saving.enter_async_context(saver)
                    await self._steps(run, num_steps, executor, saver, checkpoint)
                await self._export(run)
                await self._measure_memory(run)
                self._check_files()
            except BaseException as error:
                failure = error
                raise
            finally:
                self.console.close()
                self.events.run_finished(run, failure)

    async def _find_checkpoint(self) -> Checkpoint | None:
        """Find and check the checkpoint to resume from; None if there is none. Removes incomplete checkpoints.

        Raises `CheckpointMismatchError` if the run cannot continue from the checkpoint.
        """
        config = self.config
        spec, store = config.resume_from_checkpoint, config.checkpoint_store
        if isinstance(spec, str) and "://" in spec:
            checkpoint = await self._fetch(spec)
            if checkpoint is None:
                raise NoCheckpointError(f"resume_from_checkpoint: there is no complete checkpoint below {spec}")
        else:
            missing: CheckpointError | None = None
            try:
                checkpoint = find_checkpoint(
                    spec, output_dir=config.output_dir, exp_name=config.exp_name, current=self.run_dir
                )
            except CheckpointError as error:
                if store is None or spec not in (True, AUTO):
                    raise
                checkpoint, missing = None, error
            if store is not None and spec in (True, AUTO):
                try:
                    newer = await self._fetch(f"{store.url.rstrip('/')}/{config.exp_name}", checkpoint)
                except CheckpointError as error:
                    if checkpoint is None:
                        raise
                    log.warning("the run resumes from %s: %s", checkpoint, error)
                else:
                    checkpoint = newer or checkpoint
            if checkpoint is None and missing is not None:
                raise missing
        if config.resume_from_checkpoint is not False:
            sweep_checkpoints(self.run_dir.experiment, checkpoint)
        if checkpoint is not None:
            check_fits(checkpoint, config, self.registry)
            self.continued = RunIdentity.read(SavedRun.of(checkpoint).identity)
            self.checkpoints.after = max(
                _created(checkpoint.path), *map(_created, checkpoint.path.parent.glob("step-*"))
            )
            self.checkpoints.earlier = earlier_checkpoints(self.run_dir.experiment, self._attempts)
        self.record.update(id=self.id)
        if store is not None:
            url, options = f"{store.url.rstrip('/')}/{config.exp_name}", store.storage_options
            folder = RemoteFolder(f"{url}/{self.id}", options)
            earlier = [(RemoteFolder(f"{url}/{id}", options), step) for id, step in self._attempts.items()]
            self.uploader = CheckpointUploader(
                folder, self.checkpoints, self.run_dir.path, required=store.required, earlier=earlier
            )
            self.record.update(checkpoint_store=folder.url)
        return checkpoint

    @property
    def _attempts(self) -> Mapping[str, int]:
        """Last step of each run that this one continues, by id."""
        return {} if self.continued is None else self.continued.attempts

    async def _fetch(self, url: str, older: Checkpoint | None = None) -> Checkpoint | None:
        """Copy the newest checkpoint below `url` into the run directory; None if none is newer than `older`."""
        after = read_manifest(older.path).created if older is not None else 0.0
        store = self.config.checkpoint_store
        same = store is not None and store.url.partition("://")[0] == url.partition("://")[0]
        folder = RemoteFolder(url, store.storage_options if store is not None and same else {})
        with self.ledger.stage("resume"):
            into = self.run_dir.path / "resumed"
            return await in_daemon_thread(partial(fetch_newest, folder, into, after=after), name="roll-download")

    def _prepare_run(self, checkpoint: Checkpoint | None, stack: contextlib.AsyncExitStack) -> ActiveRun:
        """Load the tokenizer, if the pipeline needs one, and create the run, without roles.

        A resumed run continues the files of its history.
        """
        config, run_dir = self.config, self.run_dir
        history, resumed_step = _history(checkpoint)
        if self.continued is not None:
            with contextlib.suppress(TypeError, ValueError):  # an edited or older checkpoint
                self.date = datetime.fromisoformat(self.continued.date)
        self.record.update(date=self.date.isoformat())
        with self.ledger.stage("data"):
            data = DatasetCache(self.continued.commits if self.continued is not None else None)
            tokenizer = None
            if self.provider.tokenizer:
                with writing(run_dir.tokenizer):
                    tokenizer = prepare_tokenizer(config, data, run_dir.tokenizer)
                set_date(tokenizer, self.date)
        media = MediaFolder(run_dir.path, history=history)
        samples = SamplesFile(
            run_dir.samples,
            lambda ids: "" if tokenizer is None else shown_text(tokenizer, ids.tolist()),
            media=media,
            history=history,
            resumed_step=resumed_step,
        )
        scores = ScoresFile(run_dir.scores, history=history, resumed_step=resumed_step)
        images = ImagesFile(run_dir.images, history=history, resumed_step=resumed_step)
        for file in (samples, scores, images):
            stack.callback(file.close)
            self.file_checks.append(file.check)
        self.guards = Guards(config.guards, on_event=self.record.guard_event)
        return ActiveRun(
            config=config,
            run_dir=run_dir,
            registry=self.registry,
            tokenizer=tokenizer,
            data=data,
            ledger=self.ledger,
            guards=self.guards,
            samples=samples,
            scores=scores,
            images=images,
            media=media,
            recorder=Recorder(run_dir.path, history=history, resumed_step=resumed_step),
        )

    def _identity(self, run: ActiveRun, checkpoint: Checkpoint | None) -> RunIdentity:
        """Facts that a run shares with its continuation. Compares them with those of `checkpoint`, and logs once what
        else changed. Raises `CheckpointMismatchError`."""
        trained = [role for role in self.pipeline.roles() if role.kind == "train"]
        models = {role.name: model_spec(role, self.config, self.run_dir.tokenizer) for role in trained}
        tokenizer = run.tokenizer if self.provider.tokenizer else None
        here = RunIdentity.of(models, tokenizer, run.data_files, self.date, self.id, self._attempts)
        if here.commits:
            self.record.update(datasets=here.commits)
        if checkpoint is not None:
            if self.continued is not None:
                check_identity(checkpoint, self.continued, here)
            log_changes(changes(checkpoint, self.continued, here, self.run_dir.config), checkpoint)
        return here

    def _check_work_is_left(self, checkpoint: Checkpoint | None, num_steps: int) -> None:
        """Trip `zero_steps` if the checkpoint leaves no work.

        At the last step, work is left unless an earlier run finished: the evaluation and the export may be missing.
        """
        step = checkpoint.step if checkpoint is not None else 0
        done = f"step {step} of {num_steps} is done"
        if checkpoint is None or step > num_steps:
            self.guards.check("zero_steps", step < num_steps, f"{done}: no work is left")
        elif step == num_steps:
            finished = finished_run(checkpoint, self.run_dir)
            self.guards.check("zero_steps", finished is None, f"{done}, and {finished} finished: no work is left")
            log.info("%s: only the evaluation and the export of the last step are left", done)

    def _open_metrics(self, checkpoint: Checkpoint | None, stack: contextlib.AsyncExitStack) -> None:
        """Open `metrics.jsonl` and the trackers."""
        config, run_dir = self.config, self.run_dir
        history, resumed_step = _history(checkpoint)
        self.metrics_file = MetricsFile(run_dir.metrics, history=history, resumed_step=resumed_step)
        stack.callback(self.metrics_file.close)
        self.file_checks.append(self.metrics_file.check)
        self.trends = ScoreTrends(config.guards.falling_reward)
        for row in read_metrics(run_dir.metrics) if history is not None else ():
            self.trends.add(int(row["step"]), row)
        if history is not None and (ids := history / TRACKERS).is_dir():
            with writing(run_dir.path / TRACKERS):
                shutil.copytree(ids, run_dir.path / TRACKERS, dirs_exist_ok=True)
        factories: dict[str, Callable[[], Tracker]] = {}
        for name in config.track_with:
            provider = self.registry.find(TrackerProvider, name)
            owner = self.registry.owner(provider)
            tracker: type[Tracker] = load_target(provider.target, owner=owner)
            factories[owner] = partial(tracker, run_dir.path, run_dir.name, config.tracker_kwargs.get(name, {}))
        self.trackers = Trackers.opened(factories)
        self.ledger.observe = self.trackers.stage
        self.trackers.log_config(self.redactor.value(config.model_dump(mode="json")))

    async def _steps(
        self, run: ActiveRun, num_steps: int, executor: Executor, saver: RunSaver, resumed: Checkpoint | None
    ) -> None:
        config, ledger = self.config, self.ledger
        self.steps_done = self.guards.step = run.step
        self.stop.defer = True
        self.console.start(total_steps=num_steps, done=run.step)
        if config.eval_steps and (run.step == 0 or self.evaluation_due):
            ledger.start_step()
            metrics = await self._evaluate(run)
            if metrics and not self.evaluation_due:
                metrics |= await run.engine_metrics() | ledger.step_times()
                self._record(run.step, num_steps, metrics)
                best = self.best_metric.improved(run.step, metrics, saver.best, str(resumed))
                if best is not None:  # the resumed checkpoint itself
                    saver.best, self.checkpoints.best = best, best.step
                    self._record_best(best)
                self.best_metric.check()
        while run.step < num_steps:
            if self.stop.requested:
                # SIGTERM or SIGHUP arrived before or during the save of this step.
                await self._finish_saving(run, saver)
                raise self.stop.saved(f"step {run.step} is saved" if run.step else "no step was done yet")
            saver.check()
            if self.uploader is not None:
                self.uploader.check()
                run.log(self.uploader.take_metrics())
            ledger.start_step()
            with self.trackers.stage("step"):
                metrics = await self._step(run, num_steps, executor)
            last = run.step == num_steps
            self.console.step(run.step, metrics, line=self._is_logged(run.step, num_steps, metrics))
            self.events.step_finished(run, run.step, metrics)
            self._check_files()
            best = self.best_metric.improved(run.step, metrics, saver.best, str(self.checkpoints.path(run.step)))
            due = config.save_steps and (run.step % config.save_steps == 0 or last)
            if best is not None or due or self.stop.requested:
                await saver.save(evaluation_due=self.evaluation_due, best=best)
            self.best_metric.check()
            if self.guards.active("falling_reward") and (falling := self.trends.falling(run.step)):
                self.guards.check("falling_reward", False, falling)
        await self._finish_saving(run, saver)
        if self.evaluation_due:
            raise self.stop.saved(f"step {run.step} is saved; its evaluation and the export are left")

    async def _step(self, run: ActiveRun, num_steps: int, executor: Executor) -> dict[str, float]:
        """Run the next step and its evaluation, and record its metrics. Returns them."""
        config = self.config
        self.guards.step = run.step
        if self.profiler is not None:
            await self.profiler.before_step(run)
        try:
            await _watched(executor, self.pipeline.step(run))
        except NonFiniteError as error:
            self.guards.failed("non_finite", error)
            raise
        except WorkerDiedError as error:
            self.guards.failed("dead_worker", error)
            raise
        metrics = run.take_metrics()
        for stage, name in TOKENS_OF_STAGES:
            if name in metrics:
                self.ledger.count_tokens(stage, int(metrics[name]))
        run.step += 1
        self.trained = True
        self.steps_done = run.step
        self.record.step(run.step)
        last = run.step == num_steps
        if self.profiler is not None:
            await self.profiler.after_step(run, last=last or self.stop.requested)
        if config.eval_steps and (run.step % config.eval_steps == 0 or last):
            metrics |= await self._evaluate(run)
        metrics |= await run.engine_metrics() | self.ledger.step_times()
        self._record(run.step, num_steps, metrics)
        return metrics

    async def _evaluate(self, run: ActiveRun) -> dict[str, float]:
        with self.ledger.stage("evaluation"):
            evaluated = await self.stop.unless_requested(self.pipeline.evaluate(run))
            self.evaluation_due = evaluated is None and self.stop.requested  # a plugin's `evaluate` may return None
            if self.evaluation_due:
                log.info("the resumed run will repeat the evaluation of step %d", run.step)
            metrics = dict(evaluated or {}) | run.take_metrics()
        if metrics:
            self.console.evaluated(
                run.step, {n: value for n, value in metrics.items() if n.startswith("val/") and "/ci_" not in n}
            )
        return metrics

    async def _finish_saving(self, run: ActiveRun, saver: RunSaver) -> None:
        await saver.finish()
        if self.uploader is not None:
            with run.stage("upload"):
                await self.uploader.finish()

    def _completed(self, checkpoint: Checkpoint, best: BestCheckpoint | None) -> None:
        """Called with each complete checkpoint and the best one so far."""
        self._record_best(best)
        if self.uploader is not None:
            self.uploader.submit(checkpoint, best)

    def _record_best(self, best: BestCheckpoint | None) -> None:
        if best is not None:
            self.record.update(best_checkpoint=asdict(best))

    def _record(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self.last_metrics.update(metrics)
        self.trends.add(step, metrics)
        self.metrics_file.log(step, metrics)
        if self._is_logged(step, num_steps, metrics):
            self.trackers.log(step, metrics)

    def _is_logged(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> bool:
        """True if trackers and the console get this step."""
        evaluated = any(name.startswith("val/") for name in metrics)
        return evaluated or step % self.config.logging_steps == 0 or step == num_steps

    def _check_files(self) -> None:
        for check in self.file_checks:
            check()
        for path in (self.run_dir.config, self.run_dir.record):
            if not path.is_file():
                raise RunFileError(f"{path} was deleted while the run was in progress")

    async def _export(self, run: ActiveRun) -> None:
        name = self.pipeline.export_role()
        if self.config.export_model and name:
            with self.ledger.stage("export"):
                if self.provider.tokenizer:  # its files may have been deleted while the run trained
                    with writing(self.run_dir.tokenizer):
                        run.tokenizer.save_pretrained(self.run_dir.tokenizer)
                self.exporting = True
                with writing(self.run_dir.export):
                    await run.train_role(name).export(self.run_dir.export)
                self.exporting = False

    def _remove_incomplete_export(self) -> None:
        if self.exporting:
            shutil.rmtree(self.run_dir.export, ignore_errors=True)

    async def _measure_memory(self, run: ActiveRun) -> None:
        """Record the measured memory of train and infer roles.

        Runs after the export, so a worker that fails here loses the measurements and does not fail the run.
        """
        try:
            measured = {name: await role.memory_use() for name, role in (run.train_roles | run.infer_roles).items()}
        except RollError as error:
            log.warning("the memory of the workers was not measured: %s", error)
            return
        self.record.update(memory=by_process(measured))


def _history(checkpoint: Checkpoint | None) -> tuple[Path | None, int]:
    """Run directory and step of the checkpoint from which the run resumes; None and 0 for a new run."""
    return (checkpoint.run, checkpoint.step) if checkpoint is not None else (None, 0)


def _created(checkpoint: Path) -> float:
    """Time of a checkpoint in Unix seconds; 0 if it is damaged."""
    try:
        return read_manifest(checkpoint).created
    except CheckpointError:
        return 0.0


async def _watched(executor: Executor, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`. Raises the executor's `WorkerDiedError` at once, even without a pending call to that worker."""
    working, watching = asyncio.create_task(work), asyncio.create_task(executor.watch())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        await (working if working.done() else watching)
    finally:
        await cancel_all([working, watching])
