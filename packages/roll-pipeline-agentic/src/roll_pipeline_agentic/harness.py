"""Scores of a model by an evaluation harness, which calls the engine at the recording endpoint.

    EvaluateHarnessPipeline ── command ──► process of the harness ── HTTP ──► RecordingServer ──► engine
             ▲                                      │
             └────────── TaskScores ◄── JSON files ─┘

A step is a task. The harness writes its own logs to `harness/<task>/` of the run directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from roll_core.data.rollouts import sample_of_rollout
from roll_core.errors import EnvironmentsFailedError
from roll_core.pipelines.evaluate import check_terms
from roll_core.pipelines.plans import evaluate
from roll_core.pipelines.score_metrics import CI_HIGH, CI_LOW
from roll_core.spec.agent import Session
from roll_core.spec.config import DataArguments
from roll_core.spec.pipeline import Pipeline
from roll_core.spec.rollout import Prompt, RolloutProgram
from roll_core.types import Group, Rollout, SamplingParams
from roll_pipeline_agentic.agents import ended, killed, variables
from roll_pipeline_agentic.calls import seed_of
from roll_pipeline_agentic.chat_encoder import ChatEncoder
from roll_pipeline_agentic.completions import Completions
from roll_pipeline_agentic.config import EvaluateHarnessConfig
from roll_pipeline_agentic.recording import Limits, Recorder
from roll_pipeline_agentic.recording_server import RecordingServer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from roll_core.spec.pipeline import RoleSpec, Run
    from roll_core.spec.rollout import RolloutContext

log = logging.getLogger(__name__)

MAX_OUTPUT = 2000
"""Characters of a harness's output in an error."""
NORMAL_95 = 1.959964
"""Half of a 95% confidence interval in standard errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScores:
    """Results of a task."""

    task: str
    num_samples: int
    values: Mapping[str, float]
    """Metrics by name, the main one first."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Standard errors of metrics."""

    def metrics(self) -> dict[str, float]:
        """Metrics of a run: `val/<task>/<metric>`, and the main metric as `val/<task>/score/mean` with its interval."""
        prefix = f"val/{self.task}"
        metrics = {f"{prefix}/{name}": value for name, value in self.values.items()}
        if self.values:
            name, value = next(iter(self.values.items()))
            metrics[f"{prefix}/score/mean"] = value
            if name in self.errors:
                half = NORMAL_95 * self.errors[name]
                metrics |= {f"{prefix}/score/{CI_LOW}": value - half, f"{prefix}/score/{CI_HIGH}": value + half}
        return metrics


def harness_command(
    config: EvaluateHarnessConfig, task: str, session: Session, logs: Path, tokenizer: Mapping[str, Any] | None = None
) -> list[str]:
    """The command that runs a task of a harness against the endpoint of `session`: by chat completions, or by
    completions with these arguments of lm-evaluation-harness about the `tokenizer`."""
    connections = str(config.max_connections)
    if config.harness == "lm_eval":
        model = {
            "model": session.model,
            "base_url": f"{session.base_url}/{'chat/completions' if tokenizer is None else 'completions'}",
            "num_concurrent": config.max_connections,
            "max_retries": 1,
            "timeout": 86400,
            "seed": config.seed,
            **(tokenizer or {}),
        }
        name = "local-chat-completions" if tokenizer is None else "local-completions"
        words = ["-m", "lm_eval", "run", "--model", name, "--model_args", json.dumps(model)]
        words += ["--tasks", task, "--output_path", str(logs), "--log_samples"]
        words += ["--apply_chat_template"] if tokenizer is None else []
    else:
        words = ["-m", "inspect_ai", "eval", task, "--model", f"openai-api/roll/{session.model}"]
        words += ["--log-dir", str(logs), "--log-format", "json", "--display", "none"]
        words += ["--max-connections", connections, "--max-retries", "1", "--seed", str(config.seed)]
    return [config.python, *words, *config.harness_args]


class HarnessProgram(RolloutProgram):
    """Runs a task of a harness. Its calls are the turns of a rollout."""

    def __init__(
        self, config: EvaluateHarnessConfig, encoder: ChatEncoder, server: RecordingServer, logs: Path, run: Run
    ) -> None:
        self._config, self._encoder, self._server, self._logs, self._run = config, encoder, server, logs, run

    @override
    async def run(self, context: RolloutContext, prompt: Prompt) -> Group:
        config = self._config
        limits = Limits(
            calls=1 << 40,
            reply_tokens=config.response_length,
            tokens=config.prompt_length + config.response_length,
        )
        recorder = Recorder(context, self._encoder, limits, key="call", unrecorded_replies="allow", clients_sample=True)
        completions = Completions(
            self._run.infer_role("actor_infer"),
            self._run.tokenizer,
            key=f"{prompt.id}/completion",
            max_tokens=limits.tokens,
            fail=recorder.fail,
        )
        await self._server.start()
        try:
            with self._server.session(recorder, completions) as secret:
                seed = seed_of(config.seed, prompt.id)
                session = Session(base_url=self._server.base_url, api_key=secret, seed=seed)
                await self._call(session, recorder, prompt.tag)
        finally:
            rollout = await recorder.finish()
        if not rollout.turns and completions.first is not None:
            rollout = Rollout(turns=(completions.first,))
        if not rollout.turns:
            raise EnvironmentsFailedError(f"{config.harness}: task {prompt.tag} sent no request to the engine")
        sample = sample_of_rollout(
            rollout, id=f"{prompt.id}/0", group_id=prompt.id, finish_reason="stop", tag=prompt.tag
        )
        return Group(id=prompt.id, samples=(sample,))

    async def _call(self, session: Session, recorder: Recorder, task: str) -> None:
        """Run the harness to its end, by one API or the other. Raises `EnvironmentsFailedError`, or the error of the
        engine."""
        config = self._config
        self._logs.mkdir(parents=True, exist_ok=True)
        by_chat = config.harness_api != "completions"
        command = harness_command(config, task, session, self._logs, None if by_chat else self._tokenizer())
        code, text = await self._process(command, session, recorder)
        compares = code and config.harness == "lm_eval" and "loglikelihood" in text.lower()
        if compares and config.harness_api == "auto":
            log.info("task %s compares log-likelihoods: the harness starts again, by completions", task)
            command = harness_command(config, task, session, self._logs, self._tokenizer())
            code, text = await self._process(command, session, recorder)
        elif compares and by_chat:
            text += "\n    the task compares log-likelihoods of given answers: set harness_api: completions"
        if code:
            raise EnvironmentsFailedError(
                f"{config.harness}: task {task} ended with exit code {code}; its output is in"
                f" {self._logs / 'output.txt'} and ends with\n{text[-MAX_OUTPUT:]}"
            )

    def _tokenizer(self) -> dict[str, Any]:
        """Arguments of lm-evaluation-harness about the tokenizer: prompts are those of its own model `hf`."""
        config, tokenizer = self._config, self._run.tokenizer
        begin = tokenizer.bos_token_id
        return {
            "tokenizer": str(self._run.dir / "tokenizer"),
            "max_length": config.prompt_length + config.response_length,
            "max_gen_toks": config.response_length,
            "add_bos_token": begin is not None and tokenizer("a").input_ids[:1] == [begin],
            "trust_remote_code": config.actor_infer.model_args.trust_remote_code,
        }

    async def _process(self, command: Sequence[str], session: Session, recorder: Recorder) -> tuple[int, str]:
        """Run a command. Returns its exit code and output. Raises the error of the engine."""
        environ = {
            **os.environ,
            **variables(session),
            "ROLL_BASE_URL": session.base_url,
            "ROLL_API_KEY": session.api_key,
            "PYTHONUNBUFFERED": "1",
        }
        with (self._logs / "output.txt").open("wb") as output:
            starting = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environ,
                    start_new_session=True,
                )
            )
            failed = asyncio.ensure_future(recorder.failed.wait())
            try:
                process = await asyncio.shield(starting)
                running = asyncio.ensure_future(process.wait())
                await asyncio.wait({running, failed}, return_when=asyncio.FIRST_COMPLETED)
                if recorder.error is not None:
                    raise recorder.error
                code = await running
            finally:
                failed.cancel()
                await ended(asyncio.ensure_future(killed(starting)))
        return code, (self._logs / "output.txt").read_text(encoding="utf-8", errors="replace").strip()


class EvaluateHarnessPipeline(Pipeline[EvaluateHarnessConfig]):
    """Scores a model by the tasks of a harness. A step is a task."""

    @override
    def prepare(self, run: Run) -> int:
        config = self.config
        endpoint = config.agent_endpoint
        self.server = RecordingServer(endpoint.host, endpoint.port, endpoint.url)
        self.server.check()
        self.encoder = ChatEncoder(run.tokenizer, DataArguments(), where=config.harness)
        self.scores: list[TaskScores] = []
        return min(len(config.tasks), config.max_steps or len(config.tasks))

    @override
    def roles(self) -> Sequence[RoleSpec]:
        return evaluate(self.config).roles

    @override
    async def step(self, run: Run) -> None:
        config, task = self.config, self.config.tasks[run.step]
        logs = run.dir / "harness" / re.sub(r"[^\w.-]+", "-", f"{run.step + 1}-{task}")
        with contextlib.suppress(FileNotFoundError):  # of an interrupted run
            shutil.rmtree(logs)
        program = partial(HarnessProgram, config, self.encoder, self.server, logs, run)
        prompt = Prompt(id=f"val/{run.step}", tokens=np.zeros(0, dtype=np.int64), text="", tag=task)
        params = SamplingParams(max_new_tokens=config.response_length)
        (group,) = await run.rollout("actor_infer", [prompt], params, n=1, split="val", program=program)
        (sample,) = group.samples
        run.log({"tokens/generated": float((sample.versions >= 0).sum())})
        scores = READERS[config.harness](logs)
        if not scores:
            raise EnvironmentsFailedError(f"{config.harness}: task {task} wrote no results to {logs}")
        self.scores += scores

    @override
    async def evaluate(self, run: Run) -> Mapping[str, float]:
        metrics = {name: value for scores in self.scores for name, value in scores.metrics().items()}
        return metrics | ({"val/num_samples": float(sum(s.num_samples for s in self.scores))} if metrics else {})

    @override
    def state(self) -> Mapping[str, Any]:
        return {"terms": self.config.terms, "scores": [asdict(scores) for scores in self.scores]}

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Raises `CheckpointMismatchError` if the scores so far are those of another model or other tasks."""
        check_terms(state["terms"], self.config.terms)
        self.scores = [TaskScores(**scores) for scores in state["scores"]]

    @override
    async def close(self) -> None:
        if hasattr(self, "server"):
            await self.server.close()


# -- results -----------------------------------------------------------------------------------------------------------


def lm_eval_scores(logs: Path) -> list[TaskScores]:
    """Scores of the files `results_*.json` of lm-evaluation-harness, of each task and group."""
    scores = []
    for path in sorted(logs.rglob("results_*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        for task, row in results["results"].items():
            values: dict[str, float] = {}
            errors: dict[str, float] = {}
            for name, value in row.items():
                metric, _, kind = name.partition(",")
                if isinstance(value, bool) or not isinstance(value, int | float) or "," not in name:
                    continue
                target = errors if metric.endswith("_stderr") else values
                short = metric.removesuffix("_stderr")
                target[short if kind == "none" else f"{short}/{kind}"] = float(value)
            number = results.get("n-samples", {}).get(task, {}).get("effective", 0)
            scores.append(TaskScores(task=task, num_samples=int(number), values=values, errors=errors))
    return scores


def inspect_scores(logs: Path) -> list[TaskScores]:
    """Scores of the JSON logs of Inspect. With several scorers, their metrics have the scorer's name first.

    Raises `EnvironmentsFailedError` if a task did not succeed, because Inspect exits with 0.
    """
    scores = []
    for path in sorted(logs.glob("*.json")):
        log = json.loads(path.read_text(encoding="utf-8"))
        if log.get("status") != "success":
            message = (log.get("error") or {}).get("message", "")
            raise EnvironmentsFailedError(
                f"inspect_ai: task {log['eval']['task']} ended as {log.get('status')}: {message}"
                f" ({path}); its output is in {logs / 'output.txt'}"
            )
        values: dict[str, float] = {}
        errors: dict[str, float] = {}
        scorers = log["results"]["scores"]
        for scorer in scorers:
            prefix = f"{scorer['name']}/" if len(scorers) > 1 else ""
            metrics = {name: metric["value"] for name, metric in scorer["metrics"].items()}
            error = metrics.pop("stderr", None)
            values |= {f"{prefix}{name}": float(value) for name, value in metrics.items()}
            if error is not None and metrics:
                errors[f"{prefix}{next(iter(metrics))}"] = float(error)
        num_samples = log["results"].get("completed_samples", 0)
        scores.append(TaskScores(task=log["eval"]["task"], num_samples=num_samples, values=values, errors=errors))
    return scores


READERS = {"lm_eval": lm_eval_scores, "inspect_ai": inspect_scores}
