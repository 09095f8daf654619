"""The loop that every run goes through, from a checked config to a complete record.

    build -> setup -> [resume] -> evaluate? -> { step -> evaluate? -> record -> checkpoint? } * num_steps -> export

Whatever happens, workers are closed, the record says how it ended, and the report is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from roll_core.config import dump
from roll_core.config.secrets import Redactor
from roll_core.errors import NonFiniteError, RollError, RunFileError, UnsupportedError, WorkerDiedError, chain
from roll_core.plugins.attribution import raised_by
from roll_core.plugins.events import Events
from roll_core.plugins.targets import load_target
from roll_core.runtime.cluster.executors import choose_executor, make_executor
from roll_core.runtime.cluster.memory_use import forget_peak
from roll_core.runtime.cluster.placement import place_roles, slots_per_node
from roll_core.runtime.cluster.platform import select_platform
from roll_core.runtime.planning.comparing import compared, plan_of_run
from roll_core.runtime.planning.models import vocab_size_of
from roll_core.runtime.records.checkpoints import CheckpointStore
from roll_core.runtime.records.console import Console
from roll_core.runtime.records.guards import Guards
from roll_core.runtime.records.known_errors import advise
from roll_core.runtime.records.ledger import Ledger
from roll_core.runtime.records.logs import run_logging
from roll_core.runtime.records.record import RunFacts, RunRecord, finished_run, read_record
from roll_core.runtime.records.report import write_report
from roll_core.runtime.records.run_dir import RunDir, find_checkpoint, sweep_checkpoints
from roll_core.runtime.records.run_files import explained, writing
from roll_core.runtime.records.samples import SamplesFile
from roll_core.runtime.records.tracking import MetricsFile, Trackers, read_metrics
from roll_core.runtime.rollout.recording import Recorder
from roll_core.runtime.rollout.replicas import HealthTimeouts
from roll_core.runtime.rollout.requests import stop_finder
from roll_core.runtime.rollout.scoring import RewardRole, RewardRouter
from roll_core.runtime.run.active_run import ActiveRun
from roll_core.runtime.run.data import RunData
from roll_core.runtime.run.resuming import check_fits, load_run
from roll_core.runtime.run.roles import GroupInferRole, GroupTrainRole
from roll_core.runtime.run.saving import RunSaver
from roll_core.runtime.run.stopping import StopSignals, ignoring_sigterm
from roll_core.runtime.run.tokenizer import prepare_tokenizer
from roll_core.runtime.weights.controller import WeightSyncController
from roll_core.runtime.workers.build import (
    group_specs,
    kept_apart,
    makes_room,
    model_spec,
    provider_of,
    role_config,
    slots_per_worker,
)
from roll_core.spec.config import RewardConfig
from roll_core.spec.providers import InferProvider, TrackerProvider, TrainProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from roll_core.config import LoadedConfig
    from roll_core.plugins.registry import Registry
    from roll_core.runtime.cluster.executors.base import Executor
    from roll_core.runtime.planning.plan import Plan
    from roll_core.runtime.records.checkpoints import Checkpoint
    from roll_core.runtime.records.record import Outcome
    from roll_core.spec.config import RunConfig
    from roll_core.spec.pipeline import Pipeline
    from roll_core.spec.platform import Platform
    from roll_core.spec.providers import PipelineProvider
    from roll_core.spec.tracker import Tracker

log = logging.getLogger(__name__)

PROGRESS_S = 2.0
"""How often replicas tell what they have drawn. What a replica drew since then is drawn again if it dies."""
POLLS_OF_LIFE = 10
"""How often in `replica_timeout` one is asked whose death ends the run: it is to show that it lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended."""

    run_dir: RunDir
    outcome: Outcome
    steps_done: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last value of every metric."""
    error: BaseException | None = None
    advice: str = ""
    """What is known about `error`, and what to do; empty where it says so itself, or nobody knows."""


def execute(
    loaded: LoadedConfig,
    registry: Registry,
    *,
    argv: Sequence[str] = (),
    console: Console | None = None,
    before_s: float = 0.0,
) -> RunResult:
    """Run a config to its end in this process. Errors are in the result, not raised: the record is complete either way.

    `before_s` are seconds that went by before, which the table of where the time went calls start-up.
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
                advice = _advice(error, registry, run_dir)
            outcome = record.finish(error, advice=advice, time_rows=[_row(row) for row in ledger.rows()])
            with ledger.stage("report"):
                report = _report(run_dir)
    console.finish(
        outcome=outcome,
        rows=ledger.rows(),
        error="" if error is None else redactor.text(_described(error)),
        advice=redactor.text(advice),
        lines=[
            *driver.results(),
            ("run", _relative(run_dir.path)),
            *report,
            *_how_to_resume(loaded, argv, run_dir, redactor),
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


def _advice(error: Exception, registry: Registry, run_dir: RunDir) -> str:
    """Whose code raised it, and what to do about it, as far as either is known."""
    source = raised_by(error, registry.plugins)
    lines = [f"raised by {source}; the traceback is in {_relative(run_dir.log)}"] if source else []
    if (known := advise(error, registry)) is not None:
        lines.append(known.told(beside=str(error)))
    return "\n".join(lines)


def _described(error: BaseException) -> str:
    """The message after its code; after the exception's type if it is none of ROLL's."""
    if isinstance(error, RollError):
        return error.described().rstrip()
    name, message = type(error).__name__, str(error)
    return f"{name}: {message}" if message else name


def _report(run_dir: RunDir) -> list[tuple[str, str]]:
    """Write the report, and the line that says where; a full disk must not cost the closing lines."""
    try:
        return [("report", _relative(write_report(run_dir.path)))]
    except OSError as error:
        log.error("the report could not be written: %s", error)
        return []


def _how_to_resume(
    loaded: LoadedConfig, argv: Sequence[str], run_dir: RunDir, redactor: Redactor
) -> list[tuple[str, str]]:
    """The command that resumes a run that did not finish, or why there is none."""
    record = read_record(run_dir.record)
    if record.get("outcome") == "finished":
        return []
    saved = CheckpointStore(run_dir.checkpoints).list()
    step = saved[-1].step if saved else record.get("resumed_step", 0)
    if not step:
        return [("resume", f"no checkpoint was saved (save_steps: {loaded.config.save_steps})")]
    overrides = [each for each in argv[1:] if "=" in each and not each.startswith(("-", "resume_from_checkpoint="))]
    command = ["roll-core", "run", str(loaded.sources[0]), *overrides, "resume_from_checkpoint=true"]
    return [("resume", f"{redactor.text(shlex.join(command))}   (step {step} is saved)")]


@dataclass(kw_only=True)
class _Driver:
    """The parts of a run while it goes on."""

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
    """Raise `RunFileError` if a file that the run writes to is lost. Called at every step and at the end."""
    plan: Plan | None = None
    """What it was expected to take."""
    steps_done: int = 0
    last_metrics: dict[str, float] = field(default_factory=dict)
    evaluation_due: bool = False
    """SIGTERM cut the evaluation of the last step short, in this run or in the run that is resumed."""

    async def main(self) -> None:
        """Everything between the first line and the last."""
        config, ledger = self.config, self.ledger
        self._announce()
        with ledger.stage("load libraries"):
            import torch  # noqa: F401 - loaded here so that the ledger knows where the time went
            import transformers

            transformers.utils.logging.disable_progress_bar()
            self.adopt_logs()
            self.pipeline = load_target(self.pipeline_record.target, owner=f"pipeline {config.pipeline}")(config)
        # A Ray that the user names may have its devices on other hosts than the driver's.
        elsewhere = os.environ.get("RAY_ADDRESS", "local") not in ("", "local") and config.executor != "local"
        platform = select_platform(self.registry, config.platform, elsewhere=elsewhere)
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
                executor = await self._build(run, platform, stack)
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
            if resumed_step >= num_steps:  # no step follows that would have these
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
                # Whoever asked did so before this step was saved, or while it was.
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
        """A run that was killed behind its last step still owes what follows it: the evaluation, the export."""
        step = checkpoint.step if checkpoint is not None else 0
        done = f"step {step} of {num_steps} is done"
        if checkpoint is None or step > num_steps:
            guards.check("zero_steps", step < num_steps, f"{done}: nothing is left to do")
        elif step == num_steps:
            finished = finished_run(checkpoint, self.run_dir)
            guards.check("zero_steps", finished is None, f"{done}, and {finished} finished: nothing is left to do")
            log.info("%s: what follows the last step is left to do", done)

    async def _build(self, run: ActiveRun, platform: Platform, stack: contextlib.AsyncExitStack) -> Executor:
        """Start every role, models before what depends on them."""
        config = self.config
        roles = self.pipeline.roles()
        configs = {role.name: role_config(config, role.name) for role in roles}
        places = place_roles(
            configs,
            platform,
            num_gpus_per_node=config.num_gpus_per_node,
            slots_per_worker=slots_per_worker(roles, config, self.registry),
        )
        apart = kept_apart(roles, config, self.registry)
        executor_name = choose_executor(config, places, apart=bool(apart))
        if apart and executor_name == "local":
            raise UnsupportedError(f"{apart}: executor local has only one; leave it out, or write ray")
        per_node = slots_per_node(platform, config.num_gpus_per_node)
        executor = await stack.enter_async_context(make_executor(executor_name, platform, slots_per_node=per_node))
        self.record.update(executor=executor_name)
        self.plan = plan_of_run(config, self.registry, self.pipeline_record, roles, platform, executor_name, places)
        forget_peak()
        log.info("executor %s on platform %s", executor_name, platform.name)
        tokenizer = self.run_dir.tokenizer
        groups = await executor.start(group_specs(roles, config, self.registry, platform, places, tokenizer))
        self.record.update(environments={role: dict(found) for role, found in executor.fingerprints.items()})
        rewards: dict[str, RewardRole] = {}
        for role in roles:
            name, group, worker = role.name, groups[role.name], configs[role.name]
            if isinstance(worker, RewardConfig):
                rewards[name.partition(".")[2]] = reward = RewardRole(name, worker, group, self.redactor)
                await reward.start()
                continue
            moves = makes_room(role, config, self.registry, platform)
            provider = provider_of(role, worker, self.registry)
            spec = model_spec(role, config, tokenizer)
            run.vocab_sizes[name] = vocab_size_of(spec, config, tokens=len(run.tokenizer))
            if role.kind == "generate":
                fed = bool(role.model_from)
                alive_s = config.replica_timeout / POLLS_OF_LIFE
                engine = GroupInferRole(
                    name,
                    worker,
                    group,
                    turns=run.turns,
                    sleeps=moves,
                    fed=fed,
                    capabilities=provider.capabilities if isinstance(provider, InferProvider) else None,
                    routing=config.router_args.router_name,
                    max_running=config.max_running_requests,
                    expand=config.is_num_return_sequences_expand,
                    progress_s=alive_s if executor.shares_memory else min(PROGRESS_S, alive_s),
                    timeouts=HealthTimeouts(token_s=config.replica_timeout, result_s=config.rpc_timeout),
                    find_stop=stop_finder(lambda ids: str(run.tokenizer.decode(ids, skip_special_tokens=True))),
                    bring_back=partial(run.bring_back, name) if fed else None,
                )
                run.infer_roles[name] = engine
                await run.turns.admit(engine)
            else:
                model = GroupTrainRole(
                    name,
                    worker,
                    group,
                    trains=role.kind == "train",
                    turns=run.turns,
                    offloads=moves,
                    capabilities=provider.capabilities if isinstance(provider, TrainProvider) else None,
                )
                run.train_roles[name] = model
                await run.turns.admit(model)
        if rewards:
            tags = {domain: reward.config.tag_included for domain, reward in rewards.items()}
            run.rewards = RewardRouter(rewards, tags)
        stack.push_async_callback(run.close)
        run.weight_sync = WeightSyncController(run, roles, self.registry, executor, self.record)
        return executor

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
                    shutil.rmtree(self.run_dir.export, ignore_errors=True)  # a part of a model is of no use
                    raise

    async def _measure_memory(self, run: ActiveRun) -> None:
        """Into the record, beside what was predicted. Rewards have no model and are not asked. All is done and exported
        by then: a worker that does not answer costs the figures and not the run."""
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

    def _announce(self) -> None:
        self.console.line(f"roll · {self.run_dir.name} · {self.config.pipeline}", style="bold")

    def results(self) -> list[tuple[str, str]]:
        """What a person wants to know first: how good the model is now, and where it lies."""
        lines = []
        if "val/score/mean" in self.last_metrics:
            lines.append(("held-out score", f"{self.last_metrics['val/score/mean']:.3f}  (val/score/mean)"))
        if "val/loss" in self.last_metrics:
            lines.append(("held-out loss", f"{self.last_metrics['val/loss']:.4f}  (val/loss)"))
        if "val/token_accuracy" in self.last_metrics:
            lines.append(("first choices", f"{self.last_metrics['val/token_accuracy']:.1%}  (val/token_accuracy)"))
        if self.run_dir.export.is_dir():
            lines.append(("model", _relative(self.run_dir.export)))
        return lines


async def _watched(executor: Executor, work: Coroutine[Any, Any, None]) -> None:
    """Do the work; a worker that dies ends it, also while nothing is asked of that worker."""
    working, watching = asyncio.create_task(work), asyncio.create_task(executor.watch())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        await (working if working.done() else watching)
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _row(row: Any) -> dict[str, Any]:
    return {
        "stage": row.stage,
        "seconds": row.seconds,
        "share": row.share,
        "entries": row.entries,
        "tokens": row.tokens,
    }


def _relative(path: Any) -> str:
    """Paths as a person would type them."""
    try:
        relative = os.path.relpath(path)
    except OSError:  # the working directory is gone
        return str(path)
    return str(path) if relative.startswith(os.pardir) else relative
