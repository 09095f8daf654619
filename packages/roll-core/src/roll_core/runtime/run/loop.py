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
import shutil
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from roll_core.config import dump
from roll_core.config.secrets import Redactor
from roll_core.errors import NonFiniteError, RollError, RunFileError, WorkerDiedError, chain
from roll_core.plugins.registry import Events
from roll_core.plugins.targets import load_target
from roll_core.runtime.cluster.platform import select_platform
from roll_core.runtime.planning.plan import compared
from roll_core.runtime.records.checkpoints import CheckpointStore
from roll_core.runtime.records.console import Console
from roll_core.runtime.records.guards import Guards
from roll_core.runtime.records.ledger import Ledger
from roll_core.runtime.records.logs import run_logging
from roll_core.runtime.records.record import RunFacts, RunRecord, finished_run
from roll_core.runtime.records.run_dir import RunDir, find_checkpoint, sweep_checkpoints
from roll_core.runtime.records.run_files import explained, writing
from roll_core.runtime.records.samples import SamplesFile
from roll_core.runtime.records.tracking import MetricsFile, Trackers, read_metrics
from roll_core.runtime.rollout.recording import Recorder
from roll_core.runtime.run import summary
from roll_core.runtime.run.active_run import ActiveRun
from roll_core.runtime.run.assemble import Assembly, start_roles
from roll_core.runtime.run.data import RunData
from roll_core.runtime.run.resuming import check_fits, load_run
from roll_core.runtime.run.saving import RunSaver
from roll_core.runtime.run.stopping import StopSignals, ignoring_sigterm
from roll_core.runtime.run.tokenizer import prepare_tokenizer
from roll_core.spec.providers import TrackerProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from roll_core.config import LoadedConfig
    from roll_core.plugins.registry import Registry
    from roll_core.runtime.cluster.executors.base import Executor
    from roll_core.runtime.planning.plan import Plan
    from roll_core.runtime.records.checkpoints import Checkpoint
    from roll_core.runtime.records.record import Outcome
    from roll_core.spec.config import RunConfig
    from roll_core.spec.pipeline import Pipeline, Tracker
    from roll_core.spec.providers import PipelineProvider

log = logging.getLogger(__name__)


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


def execute(
    loaded: LoadedConfig,
    registry: Registry,
    *,
    argv: Sequence[str] = (),
    console: Console | None = None,
    before_s: float = 0.0,
) -> RunResult:
    """Run a config in this process. Returns errors in the result instead of raising them and completes the record.

    `argv` is the command line, for the record and the resume command. `before_s` is the time in seconds that passed
    before this call; the time ledger counts it as `start-up`.
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
    driver = _Driver(
        config=config,
        pipeline_record=loaded.pipeline,
        registry=registry,
        run_dir=run_dir,
        record=record,
        ledger=ledger,
        console=console,
        redactor=redactor,
        stop=StopSignals(config.preemption_timeout),
    )
    error: BaseException | None = None
    with run_logging(run_dir.log, console.warn, redactor) as logs:
        driver.adopt_logs, driver.file_checks = logs.adopt, [logs.check]
        for warning in loaded.warnings:
            log.warning("%s", warning)
        try:
            with ledger.stage("load libraries"):
                owner = registry.owner(loaded.pipeline)
                driver.pipeline = load_target(loaded.pipeline.target, owner=owner)(config)
            driver.stop.run(driver.main())
        except (KeyboardInterrupt, SystemExit, Exception) as raised:
            error = explained(raised, run_dir.path)
            log.debug("the run ended early", exc_info=raised)
            for link in chain(raised):
                if isinstance(link, RollError) and link.trace:
                    log.debug("traceback in the worker:\n%s", link.trace)
        with ignoring_sigterm():
            advice = ""
            if isinstance(error, Exception) and not isinstance(error, RunFileError):
                advice = summary.advice(error, registry, run_dir)
            outcome = record.finish(error, advice=advice, time_rows=[asdict(row) for row in ledger.rows()])
            with ledger.stage("report"):
                report = summary.report(run_dir)
    console.finish(
        outcome=outcome,
        rows=ledger.rows(),
        error="" if error is None else redactor.text(summary.described(error)),
        advice=redactor.text(advice),
        lines=[
            *summary.results(run_dir, driver.last_metrics),
            ("run", summary.relative(run_dir.path)),
            *report,
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
    )


@dataclass(kw_only=True)
class _Driver:
    """State and collaborators of one run while it executes."""

    config: RunConfig
    pipeline: Pipeline[Any] = field(init=False)
    pipeline_record: PipelineProvider
    registry: Registry
    run_dir: RunDir
    record: RunRecord
    ledger: Ledger
    console: Console
    redactor: Redactor
    stop: StopSignals
    adopt_logs: Callable[[], None] = lambda: None
    file_checks: list[Callable[[], None]] = field(default_factory=list)
    """Each raises `RunFileError` if a file of the run was deleted or replaced. Called at every step and at the end."""
    plan: Plan | None = None
    """Predicted memory of the roles."""
    steps_done: int = 0
    last_metrics: dict[str, float] = field(default_factory=dict)
    evaluation_due: bool = False
    """True if SIGTERM interrupted the evaluation of the last step, in this run or in the resumed run."""

    async def main(self) -> None:
        """Run from loading libraries to the final export and memory measurement."""
        config, ledger = self.config, self.ledger
        self.console.line(f"roll · {self.run_dir.name} · {config.pipeline}", style="bold")
        self._load_libraries()
        # A user-provided Ray cluster may have its devices on other hosts than the driver.
        elsewhere = os.environ.get("RAY_ADDRESS", "local") not in ("", "local") and config.executor != "local"
        platform = select_platform(self.registry, config.platform, elsewhere=elsewhere)
        checkpoint = self._find_checkpoint()
        history = checkpoint.path.parent.parent if checkpoint is not None else None
        resumed_step = checkpoint.step if checkpoint is not None else 0
        with ledger.stage("data"):
            data = RunData(config)
            with writing(self.run_dir.tokenizer):
                tokenizer = prepare_tokenizer(config, data, self.run_dir.tokenizer)
        async with contextlib.AsyncExitStack() as stack:
            samples = SamplesFile(
                self.run_dir.samples,
                lambda ids: str(tokenizer.decode(ids.tolist())),
                history=history / self.run_dir.samples.name if history else None,
                resumed_step=resumed_step,
            )
            stack.callback(samples.close)
            guards = Guards(config.guards, on_event=self.record.guard_event)
            run = ActiveRun(
                config=config,
                run_dir=self.run_dir,
                registry=self.registry,
                tokenizer=tokenizer,
                data=data,
                ledger=ledger,
                guards=guards,
                samples=samples,
                recorder=Recorder(self.run_dir.path, history=history, resumed_step=resumed_step),
            )
            with ledger.stage("data"):
                num_steps = self.pipeline.prepare(run)
            self.record.update(
                steps_asked=num_steps,
                platform=platform.name,
                resumed_step=resumed_step,
                steps_done=resumed_step,
                resumed_from=str(checkpoint.path) if checkpoint is not None else "",
            )
            self._check_work_is_left(checkpoint, num_steps, guards)
            with ledger.stage("build roles"):
                assembly = Assembly(
                    pipeline=self.pipeline,
                    pipeline_record=self.pipeline_record,
                    registry=self.registry,
                    platform=platform,
                    record=self.record,
                    redactor=self.redactor,
                    tokenizer=self.run_dir.tokenizer,
                )
                executor, self.plan = await start_roles(run, assembly, stack)
                await self.pipeline.setup(run)
            if checkpoint is not None:
                with ledger.stage("resume"):
                    saved = await load_run(run, self.pipeline, checkpoint, self.registry)
                    self.evaluation_due = saved.evaluation_due and bool(config.eval_steps)
            metrics_file = MetricsFile(
                self.run_dir.metrics,
                history=history / self.run_dir.metrics.name if history else None,
                resumed_step=resumed_step,
            )
            stack.callback(metrics_file.close)
            self.file_checks += [samples.check, metrics_file.check]
            if resumed_step >= num_steps:  # no step will run, so no new metrics replace these
                self.last_metrics.update(*read_metrics(self.run_dir.metrics)[-1:])
            trackers = stack.enter_context(Trackers.opened(self._tracker_factories()))
            trackers.log_config(self.redactor.value(config.model_dump(mode="json")))
            events = Events(self.registry)
            failure: BaseException | None = None
            try:
                events.run_started(run)
                store = CheckpointStore(self.run_dir.checkpoints, config.max_ckpt_to_keep)
                async with RunSaver(run, self.pipeline, store) as saver:
                    await self._steps(run, num_steps, executor, guards, saver, metrics_file, trackers, events)
                await self._export(run)
                await self._measure_memory(run)
                self._check_files()
            except BaseException as error:
                failure = error
                raise
            finally:
                self.console.close()
                events.run_finished(run, failure)

    def _load_libraries(self) -> None:
        with self.ledger.stage("load libraries"):
            import torch  # noqa: F401 - imported here so that the ledger attributes its import time
            import transformers

            transformers.utils.logging.disable_progress_bar()
            self.adopt_logs()
            target, owner = self.pipeline_record.target, f"pipeline {self.config.pipeline}"
            self.pipeline = load_target(target, owner=owner)(self.config)

    def _find_checkpoint(self) -> Checkpoint | None:
        """Find and check the checkpoint to resume from; None if there is none. Removes incomplete checkpoints.

        Raises `CheckpointMismatchError` if the run cannot continue from the checkpoint.
        """
        config = self.config
        checkpoint = find_checkpoint(
            config.resume_from_checkpoint,
            output_dir=config.output_dir,
            exp_name=config.exp_name,
            current=self.run_dir,
        )
        if config.resume_from_checkpoint is not False:
            sweep_checkpoints(self.run_dir.experiment, checkpoint)
        if checkpoint is not None:
            check_fits(checkpoint, config, self.registry)
        return checkpoint

    async def _steps(
        self,
        run: ActiveRun,
        num_steps: int,
        executor: Executor,
        guards: Guards,
        saver: RunSaver,
        metrics_file: MetricsFile,
        trackers: Trackers,
        events: Events,
    ) -> None:
        config, ledger = self.config, self.ledger
        self.steps_done = guards.step = run.step
        self.stop.defer = True
        self.console.start(total_steps=num_steps, done=run.step)
        if config.eval_steps and (run.step == 0 or self.evaluation_due):
            ledger.start_step()
            metrics = await self._evaluate(run)
            if metrics and not self.evaluation_due:
                metrics |= await run.engine_metrics()
                self._record(run.step, metrics | ledger.step_times(), metrics_file, trackers)
        while run.step < num_steps:
            if self.stop.asked:
                # SIGTERM arrived before or during the save of this step.
                await saver.finish()
                raise self.stop.saved(f"step {run.step} is saved" if run.step else "no step was done yet")
            saver.check()
            ledger.start_step()
            try:
                await _watched(executor, self.pipeline.step(run))
            except NonFiniteError as error:
                guards.failed("non_finite", error)
                raise
            except WorkerDiedError as error:
                guards.failed("dead_worker", error)
                raise
            metrics = run.take_metrics()
            run.step += 1
            self.steps_done = guards.step = run.step
            self.record.step(run.step)
            last = run.step == num_steps
            self._count_tokens(metrics)
            if config.eval_steps and (run.step % config.eval_steps == 0 or last):
                metrics |= await self._evaluate(run)
            metrics |= await run.engine_metrics()
            metrics |= ledger.step_times()
            self._record(run.step, metrics, metrics_file, trackers)
            self.console.step(run.step, metrics)
            events.step_finished(run, run.step, metrics)
            self._check_files()
            if self.stop.asked or (config.save_steps and (run.step % config.save_steps == 0 or last)):
                await saver.save(evaluation_due=self.evaluation_due)
        if self.evaluation_due:
            await saver.finish()
            raise self.stop.saved(f"step {run.step} is saved; its evaluation and the export are left to do")

    def _check_files(self) -> None:
        for check in self.file_checks:
            check()
        for path in (self.run_dir.config, self.run_dir.record):
            if not path.is_file():
                raise RunFileError(f"{path} was deleted while the run was in progress")

    def _check_work_is_left(self, checkpoint: Checkpoint | None, num_steps: int, guards: Guards) -> None:
        """Trip `zero_steps` if the checkpoint leaves no work.

        At the last step, work is left unless an earlier run finished: the evaluation and the export may be missing.
        """
        step = checkpoint.step if checkpoint is not None else 0
        done = f"step {step} of {num_steps} is done"
        if checkpoint is None or step > num_steps:
            guards.check("zero_steps", step < num_steps, f"{done}: nothing is left to do")
        elif step == num_steps:
            finished = finished_run(checkpoint, self.run_dir)
            guards.check("zero_steps", finished is None, f"{done}, and {finished} finished: nothing is left to do")
            log.info("%s: what follows the last step is left to do", done)

    async def _evaluate(self, run: ActiveRun) -> dict[str, float]:
        with self.ledger.stage("evaluation"):
            found = await self.stop.unless_asked(self.pipeline.evaluate(run))
            self.evaluation_due = found is None
            if self.evaluation_due:
                log.info("SIGTERM: the evaluation of step %d is left to the run that resumes", run.step)
            metrics = dict(found or {}) | run.take_metrics()
        if metrics:
            self.console.evaluated(
                run.step, {name: value for name, value in metrics.items() if name.startswith("val/")}
            )
        return metrics

    def _record(self, step: int, metrics: Mapping[str, float], metrics_file: MetricsFile, trackers: Trackers) -> None:
        self.last_metrics.update(metrics)
        metrics_file.log(step, metrics)
        if step % self.config.logging_steps == 0:
            trackers.log(step, metrics)

    def _count_tokens(self, metrics: Mapping[str, float]) -> None:
        for stage, name in (("rollout", "tokens/generated"), ("train", "tokens/trained"), ("step", "tokens/trained")):
            if name in metrics:
                self.ledger.count_tokens(stage, int(metrics[name]))

    async def _export(self, run: ActiveRun) -> None:
        name = self.pipeline.export_role()
        if self.config.export_model and name:
            with self.ledger.stage("export"):
                try:
                    with writing(self.run_dir.export):
                        await run.train_role(name).export(self.run_dir.export)
                except RunFileError:
                    shutil.rmtree(self.run_dir.export, ignore_errors=True)  # remove the incomplete export
                    raise

    async def _measure_memory(self, run: ActiveRun) -> None:
        """Record measured memory of every role beside the prediction. Reward roles have no model and are skipped.

        Runs after the export, so a worker that fails here loses the measurements and does not fail the run.
        """
        try:
            measured = {name: await role.memory_use() for name, role in run.train_roles.items()}
            measured |= {name: await role.memory_use() for name, role in run.infer_roles.items()}
        except RollError as error:
            log.warning("what the workers took of memory is not known: %s", error)
            return
        self.record.update(memory=compared(self.plan, measured))

    def _tracker_factories(self) -> dict[str, Callable[[], Tracker]]:
        config = self.config

        def factory(name: str) -> Callable[[], Tracker]:
            provider = self.registry.find(TrackerProvider, name)
            tracker_class: type[Tracker] = load_target(provider.target, owner=self.registry.owner(provider))
            options = config.tracker_kwargs.get(name, {})
            return lambda: tracker_class(self.run_dir.path, self.run_dir.name, options)

        return {name: factory(name) for name in config.track_with}


async def _watched(executor: Executor, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`. Raises the executor's `WorkerDiedError` at once, even without a pending call to that worker."""
    working, watching = asyncio.create_task(work), asyncio.create_task(executor.watch())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        await (working if working.done() else watching)
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
