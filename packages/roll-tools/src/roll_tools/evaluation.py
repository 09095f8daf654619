"""`roll-core eval`: one run of an evaluation per model, and the tables of scores in reports and comparisons.

MODEL ─► directory or hub id ─┐
                              ├─► config of the evaluation ─► run ─► report.html   ─┐
CONFIG ───────────────────────┘                                samples.jsonl       ─┴─► comparison.html
"""

from __future__ import annotations

import json
import os
import re
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.api import prepare
from roll_core.config.compose import compose
from roll_core.config.parts import evaluation_values
from roll_core.errors import ConfigError, UnsupportedError
from roll_core.pipelines.keys import PromptKeys
from roll_core.plugins.targets import schema_of
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.records.scores import last_responses
from roll_core.spec.config import RunConfig
from roll_core.spec.providers import PipelineProvider
from roll_tools.charts import figure
from roll_tools.open_run import is_run, open_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.config import LoadedConfig
    from roll_core.plugins.registry import Registry
    from roll_core.runtime.records.run_dir import RunDir
    from roll_core.runtime.records.scores import ScoredResponse

HARNESS_PIPELINE = "evaluate_harness"
"""Pipeline of `roll-core eval --harness`, of roll-pipeline-agentic."""
_GROUP_SIZE = "num_return_sequences_in_group"
_SCORE = re.compile(
    r"val/(?:(?P<tag>.+)/)?(?P<name>score/mean|(?:pass|best|maj)@\d+|response_length/mean|response_length/cut_share"
    r"|reward_failures)"
)


def evaluations(
    models: Sequence[str],
    config: Path,
    overrides: Sequence[str],
    registry: Registry,
    *,
    files: bool,
    training: bool = False,
    harness: str = "",
    tasks: Sequence[str] = (),
) -> list[LoadedConfig]:
    """Checked configs of the evaluations of `models`. Raises `ConfigError` for the first model with mistakes, and
    `UnsupportedError` for the config of a training run that has no evaluation.

    `config` is that of an evaluation, or of a training run with `validation`. A model is a directory or a hub id, or a
    run or a checkpoint, whose model is converted first unless the run has exported it. With `training`, the prompts of
    a training run are its training rows, with the sampling parameters and the group size of its rollouts, to which
    overrides apply as well. With `harness`, the models are scored by its `tasks` instead of prompts.
    """
    composed = compose(config, [], registry)
    if composed.problems:
        raise ConfigError(composed.problems)
    values = composed.data
    provider = registry.find(PipelineProvider, str(values.get("pipeline", "")))
    source: Path | dict[Any, Any] = config
    name = str(values.get("exp_name", RunConfig.model_fields["exp_name"].default))
    if provider.evaluation or harness:
        shared = evaluation_values(values, provider.name, registry, HARNESS_PIPELINE if harness else "")
        if harness:
            shared |= {"harness": harness, "tasks": list(tasks)}
        if training:
            role = schema_of(provider, RunConfig, owner=registry.owner(provider)).policy_role
            if shared["pipeline"] != "evaluate" or role not in values:
                raise UnsupportedError(f"{config}: pipeline {provider.name} does not train on responses to rows")
            of_rows = [word for word in overrides if re.match(rf"[+~]*({role}|{_GROUP_SIZE})\b", word)]
            overrides = [word for word in overrides if word not in of_rows]
            composed = compose(config, of_rows, registry)
            if composed.problems:
                raise ConfigError(composed.problems)
            shared["validation"] = _training_prompts(composed.data, role)
        source = values = shared
        name += "-filter" if training else f"-{harness}" if harness else "-eval"
    args = (values.get("actor_infer") or {}).get("model_args") or {}
    removed = [f"~actor_infer.model_args.{key}" for key in ("model_name_or_path", "random_init") if key in args]
    loaded = []
    for model, label in zip(models, _labels(models), strict=True):
        settings = {
            "exp_name": name if len(models) == 1 else f"{name}-{label}",
            "pretrain": model_directory(model, registry),
            "tokenizer": None,
        }
        words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        (evaluation,) = prepare([source], [*removed, *words, *overrides], registry, files=files)
        if trained := [key for key, role in evaluation.config.roles().items() if role.kind == "train"]:
            raise UnsupportedError(
                f"{config}: pipeline {provider.name} trains {trained[0]} and has no evaluation: give a config with"
                " pipeline: evaluate, or of sft, rlvr, distill or agentic"
            )
        loaded.append(replace(evaluation, sources=()))  # so that it is resumed from the config.yaml of its run
    return loaded


def _training_prompts(values: Mapping[Any, Any], role: str) -> dict[str, Any]:
    """The key `validation` for the prompts and sampling parameters of the rollouts of a training run."""
    generating = dict((values.get("actor_infer") or {}).get("generating_args") or {})
    group_size = values.get(_GROUP_SIZE, PromptKeys().num_return_sequences_in_group)
    return {
        "data_args": (values.get(role) or {}).get("data_args") or {},
        "generating_args": {**generating, "num_return_sequences": group_size},
    }


def _labels(models: Sequence[str]) -> list[str]:
    """Part of an experiment's name for each model: the last two parts of its path, or as many as tell them apart."""
    paths = [Path(os.path.abspath(model)).parts for model in models]
    for length in range(2, max(map(len, paths)) + 1):
        tails = [parts[-length:] for parts in paths]
        if len(set(tails)) == len(set(paths)):
            break
    return [re.sub(r"[^\w.-]+", "-", "-".join(tail)) for tail in tails]


def model_directory(model: str, registry: Registry) -> str:
    """Directory of a model that engines load, or its hub id.

    A run stands for its export, or its newest checkpoint; a checkpoint, or an adapter, is converted beside it, once.
    """
    path = Path(os.path.expanduser(model)).absolute()
    if not path.is_dir():
        return model
    if not (path / "config.json").is_file() and not CheckpointDirectory.is_checkpoint(path):
        if is_run(path):
            run = open_run(path)
            newest = next(reversed(CheckpointDirectory(run.checkpoints).list()), None)
            path = run.export if run.export.is_dir() or newest is None else newest.path
        elif not (path / "adapter_config.json").is_file():
            return model
    if (path / "config.json").is_file():
        return str(path)
    from roll_core.runtime.run.run_saver import SavedRun
    from roll_tools.convert import convert_checkpoint

    out, role = path.with_name(f"{path.name}-merged"), None
    if CheckpointDirectory.is_checkpoint(path):
        out = path.parent.parent / f"export-{path.name}"
        trained = registry.find(PipelineProvider, SavedRun.of(CheckpointDirectory.open(path)).pipeline)
        role = schema_of(trained, RunConfig, owner=registry.owner(trained)).policy_role or None
    if not out.is_dir():
        convert_checkpoint(path, out, registry, role=role, merged=True)
    return str(out)


# -- tables ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTable:
    """Scores with their 95% confidence intervals; one column per tag or run."""

    columns: list[str]
    rows: list[tuple[str, list[str]]]
    """Metric, and its cell in each column; empty if it is missing."""


def tag_scores(metrics: Sequence[Mapping[str, float]]) -> ScoreTable | None:
    """Scores of the last evaluation, of all responses and by tag; None without one."""
    last = _last_evaluation(metrics)
    matches = [match for name in last if (match := _SCORE.fullmatch(name))]
    tags = sorted({match["tag"] or "" for match in matches})
    names = dict.fromkeys(match["name"] for match in matches)
    rows = [(name, [_cell(last, f"val/{tag}/{name}" if tag else f"val/{name}") for tag in tags]) for name in names]
    return ScoreTable(columns=[tag or "all" for tag in tags], rows=rows) if rows else None


def run_scores(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> ScoreTable | None:
    """Scores of the last evaluation of each run, by its label; None if no run has any."""
    last = [_last_evaluation(metrics) for metrics in runs.values()]
    names = dict.fromkeys(name for scores in last for name in scores if _SCORE.fullmatch(name))
    rows = [(name, [_cell(scores, name) for scores in last]) for name in names]
    return ScoreTable(columns=list(runs), rows=rows) if rows else None


def score_differences(runs: Mapping[str, RunDir]) -> ScoreTable | None:
    """Paired differences of each run's scores to those of the first run; None without two evaluations.

    Only of runs whose `scores.jsonl` has the evaluation.
    """
    from roll_core.pipelines.score_metrics import paired_differences

    responses = {label: recorded for label, run in runs.items() if (recorded := responses_of(run))}
    if len(responses) < 2:
        return None
    first, *others = responses
    cells: dict[str, dict[str, str]] = {}
    for label in others:
        for d in paired_differences(responses[first], responses[label]):
            text = f"{d.difference:+.4g} [{d.low:+.4g}, {d.high:+.4g}] of {d.num_prompts} prompts"
            cells.setdefault(d.metric, {})[label] = text
    rows = [(metric, [by_run.get(label, "") for label in others]) for metric, by_run in cells.items()]
    return ScoreTable(columns=[f"{label} − {first}" for label in others], rows=rows) if rows else None


def task_scores(run: RunDir, prices: Mapping[str, Mapping[str, float]]) -> ScoreTable | None:
    """Score, turns, tokens and cost of each task in the last evaluation; None if no reward names a task.

    `prices` of a million tokens read and sampled, by tag.
    """
    by_task: dict[tuple[str, str], list[ScoredResponse]] = {}
    for response in responses_of(run):
        if response.task:
            by_task.setdefault((response.tag, response.task), []).append(response)
    rows = []
    for (tag, task), episodes in sorted(by_task.items()):
        scores = [response.score for response in episodes if response.score is not None]
        read, sampled = (
            statistics.fmean(getattr(response, name) for response in episodes) for name in ("read_tokens", "num_tokens")
        )
        price = prices.get(tag)
        cost = None if price is None else (price["read"] * read + price["sampled"] * sampled) / 1e6
        cells = [
            str(len(episodes)),
            figure(statistics.fmean(scores)) if scores else "",
            figure(statistics.fmean(response.turns for response in episodes)),
            figure(read),
            figure(sampled),
            "" if cost is None else figure(cost),
        ]
        rows.append((f"{tag}: {task}" if tag else task, cells))
    columns = ["episodes", "score", "turns", "tokens read", "tokens sampled", "cost"]
    return ScoreTable(columns=columns, rows=rows) if rows else None


def responses_of(run: RunDir) -> list[ScoredResponse]:
    """All responses of a run's last evaluation; empty if `scores.jsonl` lacks some."""
    from roll_core.runtime.records.tracking import read_metrics

    return last_responses(run.scores, int(_last_evaluation(read_metrics(run.metrics)).get("val/num_samples", 0)))


def _last_evaluation(metrics: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    return next((row for row in reversed(metrics) if "val/num_samples" in row), {})


def _cell(metrics: Mapping[str, float], name: str) -> str:
    if name not in metrics:
        return ""
    low, high = (metrics.get(f"{name.removesuffix('/mean')}/{bound}") for bound in ("ci_low", "ci_high"))
    interval = "" if low is None or high is None else f" [{figure(low)}, {figure(high)}]"
    return f"{figure(metrics[name])}{interval}"
