"""Validates a composed config against the schemas of plugins, and collects every mistake.

Invalid parts are set aside and the rest is validated again, so that one mistake does not hide others: a misspelt key
and an impossible batch size are reported together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from roll_core.config.executors import check_executor
from roll_core.config.explain import Finding, code_of, show
from roll_core.config.mistakes import subject_of, take_out, validate_all
from roll_core.config.parts import Parts
from roll_core.config.positions import COMMAND_LINE, KeyLocation
from roll_core.config.schema import members, paths, schema_at, sections
from roll_core.config.strategies import StrategyCheck, named_media, unread_media
from roll_core.config.unknown_keys import meant
from roll_core.errors import ConfigError, ConfigProblem, closest
from roll_core.plugins.registry import is_user_function
from roll_core.plugins.targets import schema_of
from roll_core.spec.config import AdvantageOptions, Config, CustomEnvConfig, RewardConfig, RunConfig, WorkerConfig
from roll_core.spec.providers import (
    AdvantageProvider,
    AgentProvider,
    EnvironmentProvider,
    PipelineProvider,
    PlatformProvider,
    PolicyLossProvider,
    PromptSamplerProvider,
    Provider,
    RewardProvider,
    TrackerProvider,
    WeightTransportProvider,
)
from roll_core.spec.rollout import MEDIA_KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.config.compose import ComposedConfig
    from roll_core.config.source import KeyPath
    from roll_core.plugins.registry import Registry

M = TypeVar("M", bound=BaseModel)

NAMED_PARTS: dict[str, type[Provider]] = {
    "platform": PlatformProvider,
    "adv_estimator": AdvantageProvider,
    "pg_variant": PolicyLossProvider,
    "prompt_sampler": PromptSamplerProvider,
    "weight_transport": WeightTransportProvider,
}
"""Top-level keys whose value names a part, with the kind of part. Used if the pipeline's schema has the key."""

OPTIONS: dict[type[Provider], str] = {
    AdvantageProvider: "adv_options",
    PolicyLossProvider: "pg_options",
    PromptSamplerProvider: "prompt_sampler_options",
}
"""Top-level keys with the options of a part that another top-level key names."""

TOOLS_HINT = (
    "use a model whose own chat template describes tools (data_args.template: native), or a file of one"
    " (tokenizer.chat_template)"
)

ExtraCheck = Callable[[type[RunConfig], "Mapping[Any, Any]", RunConfig | None, "Registry"], Iterable[Finding]]
"""Finds further mistakes in the values for a pipeline's schema; rewards are already validated, keys may be invalid. The
config is None if it has mistakes."""


def validate(
    composed: ComposedConfig, registry: Registry, extra_check: ExtraCheck | None = None, *, needs: bool
) -> tuple[RunConfig, PipelineProvider, tuple[str, ...], dict[str, str]]:
    """The pipeline's validated config, its provider, what was not checked, and warnings about models by dotted key.

    Raises `ConfigError` with all problems, in the order of the files.
    """
    data = deepcopy(composed.data)
    for path in composed.broken:
        take_out(data, path)
    parts = Parts(composed, registry, needs, data)
    provider = None if ("pipeline",) in composed.broken else _pipeline(parts)
    if provider is None:
        raise _error(parts, RunConfig)
    owner = registry.owner(provider)
    schema = schema_of(provider, RunConfig, owner=owner)
    _remove_blocks(parts, schema)
    name = data["pipeline"]
    data["pipeline"] = provider.name
    raw_roles = list(sections(schema, data, WorkerConfig))
    for path, worker, role in raw_roles:
        _check_environment(parts, path, role)
        if worker.kind == "reward":
            _check_reward(parts, schema.policy_role, path, role)
        else:
            StrategyCheck(parts, schema.policy_role, path, worker, role).run()
    for path, _, environment in sections(schema, data, CustomEnvConfig):
        _check_custom_environment(parts, schema, path, environment)
    _check_named_parts(parts, schema)
    for kind in MEDIA_KINDS:
        if where := named_media(kind, schema, data):
            parts.findings += unread_media(kind, where, schema, data, registry)
    check_executor(parts, {path: role for path, _, role in raw_roles})
    config, mistakes = validate_all(schema, data, owner, composed.broken)
    parts.findings += mistakes
    if extra_check is not None:
        parts.findings += extra_check(schema, data, None if parts.findings else config, registry)
    if parts.findings or config is None or composed.problems:
        raise _error(parts, schema)
    unchecked = [f"{', '.join(roles)}: the model's architecture: {why}" for why, roles in parts.unchecked.items()]
    warnings: dict[str, str] = {}
    for (path, why), roles in parts.model_warnings.items():
        key, text = ".".join(path), f"{', '.join(roles)}: {why}"
        warnings[key] = f"{warnings[key]}; {text}" if key in warnings else text
    return _restore_name(config, "pipeline", name), provider, tuple(unchecked), warnings


def _pipeline(parts: Parts) -> PipelineProvider | None:
    """The requested pipeline. If its name is misspelt, the most similar one, so that the rest is also checked."""
    path = ("pipeline",)
    names = parts.registry.names(PipelineProvider)
    hint = f"available: {', '.join(names) or 'none'}"
    if "pipeline" not in parts.data:
        if any(meant((str(key),), value) for key, value in parts.data.items()):
            hint += "\n    with pipeline: rlvr, check names the keys that replace those of TRL, verl and OpenRLHF"
        folder = next((key for key, value in parts.data.items() if isinstance(value, dict) and "pipeline" in value), "")
        if folder:
            hint = (
                f"{folder} has one: defaults put a file of the directory {folder} below this key; write"
                f" {folder}/NAME@_here_, or put this file into that directory"
            )
        parts.report(path, "is missing", hint, code="ROLL-C011", at_key=True)
        return None
    name = parts.data["pipeline"]
    if not isinstance(name, str):
        parts.report(path, f"found {show(name)}, expected the name of a pipeline", hint, code="ROLL-C013")
        return None
    provider = parts.find(PipelineProvider, name, path)
    if provider is None:
        close = closest(name, names)
        candidates = [provider for provider in parts.registry.providers(PipelineProvider) if provider.name == close]
        return candidates[0] if len(candidates) == 1 else None
    return provider


def _remove_blocks(parts: Parts, schema: type[RunConfig]) -> None:
    """Remove blocks of fragments that are not keys of the config. A block that no interpolation refers to is a
    mistake."""
    for name in sorted(parts.composed.blocks - schema.model_fields.keys()):
        parts.data.pop(name, None)
        if name not in parts.composed.referred:
            message = f"is not used: it is no key of the config, and nothing refers to it as ${{{name}}}"
            hint = f"refer to it, for example strategy_config: ${{{name}}}"
            parts.report((name,), message, hint, code="ROLL-C015", at_key=True)


def _check_environment(parts: Parts, path: KeyPath, role: dict[Any, Any]) -> None:
    """Check that an interpreter given by its path exists, unless workers run on the hosts of a cluster."""
    environment = role.get("environment")
    python = environment.get("python") if isinstance(environment, dict) else environment
    exists = not isinstance(python, str) or os.sep not in python or os.path.exists(os.path.expanduser(python))
    if not exists and not parts.on_a_cluster:
        key_path = (*path, "environment") if isinstance(environment, str) else (*path, "environment", "python")
        hint = "name an interpreter, or the folder of a virtual environment"
        parts.report(key_path, f"there is no {python}", hint, code="ROLL-C003")


def _check_reward(parts: Parts, policy_role: str, path: KeyPath, role: dict[Any, Any]) -> None:
    """Validate a reward by the schema of its provider, and replace its raw values by the result."""
    name = role.get("reward")
    schema: type[RewardConfig] = RewardConfig
    owner = "roll-core"
    at_name = (*path, "reward")
    if isinstance(name, str):
        role["reward"] = name.rpartition("/")[2]
        provider = parts.find(RewardProvider, name, at_name, role)
        if provider is not None:
            owner = parts.registry.owner(provider)
            schema = schema_of(provider, RewardConfig, owner=owner)
    if schema.kind != "reward":
        StrategyCheck(parts, policy_role, path, schema, role).run()
    elif role.get("strategy_args") is not None:
        parts.report((*path, "strategy_args"), "a reward takes no strategy", code="ROLL-C017", at_key=True)
    if isinstance(name, str) and schema is RewardConfig and any(finding.path == at_name for finding in parts.findings):
        # The schema of an unknown reward is unknown, so only the common keys can be checked.
        known = {key: setting for key, setting in role.items() if key in RewardConfig.model_fields}
        reward = parts.by_schema(schema, known, path, owner)
    else:
        reward = parts.by_schema(schema, role, path, owner)
    replaced = schema.model_construct(reward="") if reward is None else _restore_name(reward, "reward", str(name))
    rewards = parts.data[path[0]]
    rewards[next(key for key in rewards if str(key) == path[1])] = replaced


def _check_custom_environment(
    parts: Parts, schema: type[RunConfig], path: KeyPath, environment: dict[Any, Any]
) -> None:
    """Check that an environment and an agent exist, and validate their options."""
    key = "environment" if "environment" in environment else "env_type"
    named: tuple[tuple[str, type[Provider], str], ...] = (
        (key, EnvironmentProvider, "env_config"),
        ("agent", AgentProvider, "agent_config"),
    )
    for key, kind, options in named:
        if isinstance(name := environment.get(key), str) and name:
            elsewhere = kind is EnvironmentProvider and environment.get("python")
            provider = parts.find(kind, name, (*path, key), {"environment": elsewhere or None})
            if provider is not None and not (elsewhere and is_user_function(provider)):  # it is not importable here
                parts.options(provider, (*path, options), environment.get(options), (*path, key))
            if isinstance(provider, EnvironmentProvider) and provider.tools and not environment.get("agent"):
                for tool_key, reason in schema.tool_problems(parts.data).items():
                    message = f"{'.'.join(path)} has tools: {reason}"
                    parts.report(tuple(tool_key.split(".")), message, TOOLS_HINT, code="ROLL-C018")


def _check_named_parts(parts: Parts, schema: type[RunConfig]) -> None:
    """Check platform, estimator, policy loss, prompt sampler, weight transport and trackers, and their options."""
    data = parts.data
    for key, kind in NAMED_PARTS.items():
        if key not in schema.model_fields:
            continue
        name = data.get(key, schema.model_fields[key].default)
        provider = parts.find(kind, name, (key,)) if isinstance(name, str) else None
        if provider is not None and (options_key := OPTIONS.get(kind)):
            parts.options(provider, (options_key,), data.get(options_key), (key,))
        if isinstance(provider, AdvantageProvider):
            _check_estimator(parts, provider, key, schema)
    trackers = data.get("track_with", schema.model_fields["track_with"].default)
    single = isinstance(trackers, str)
    names = [trackers] if single else trackers if isinstance(trackers, list) else []
    options = data.get("tracker_kwargs") or {}
    for position, name in enumerate(names):
        if isinstance(name, str):
            path = ("track_with",) if single else ("track_with", str(position))
            tracker = parts.find(TrackerProvider, name, path)
            if tracker is not None and isinstance(options, dict):
                parts.options(tracker, ("tracker_kwargs", name), options.get(name), path)
    for key in options if isinstance(options, dict) else ():
        if isinstance(key, str) and key not in names:
            message = f"is not used: track_with names {', '.join(map(str, names)) or 'no tracker'}"
            parts.report(("tracker_kwargs", key), message, code="ROLL-C015", at_key=True)


def _check_estimator(parts: Parts, provider: AdvantageProvider, key: str, schema: type[RunConfig]) -> None:
    """Check the rest of the config against the requirements of an advantage estimator."""
    name, data = provider.name, parts.data
    critic = data.get("critic") is not None
    if provider.needs_critic and not critic:
        message = f"{name} reads a critic's values, but there is no role critic"
        parts.report((key,), message, "add the role critic, or use an estimator without one", code="ROLL-C014")
    if critic and not provider.needs_critic and not is_user_function(provider):
        message = f"is not used: {name} reads no values of a critic"
        parts.report(("critic",), message, "remove it, or use an estimator with one", code="ROLL-C015", at_key=True)
    samples_key = tuple(schema.group_size_key.split(".")) if schema.group_size_key else ()
    samples = _value(schema, data, samples_key) if samples_key else 0
    needed = 2 if provider.needs_groups else 1
    with suppress(ValidationError, TypeError):  # reported as invalid options
        options = schema_of(provider, Config, owner=parts.registry.owner(provider))(**data.get("adv_options") or {})
        needed = max(needed, options.min_samples if isinstance(options, AdvantageOptions) else 1)
    if isinstance(samples, int) and 0 < samples < needed:
        message = f"found {samples}, but {name} compares the samples of one prompt, so each needs at least {needed}"
        parts.report(samples_key, message, code="ROLL-C014")
    if provider.needs_turns and not schema.multi_turn:
        message = f"{name} credits turns, but pipeline {data.get('pipeline')} has rollouts of one turn"
        parts.report((key,), message, "use an estimator of whole responses, such as grpo", code="ROLL-C014")
    if provider.needs_baseline and schema.multi_turn:
        message = f"{name} compares with a greedy response, which pipeline {data.get('pipeline')} does not generate"
        parts.report((key,), message, "use another estimator, such as grpo", code="ROLL-C014")
    for norm in ("norm_mean_type", "norm_std_type") if provider.normalise != "config" else ():
        if data.get(norm) not in (None, provider.normalise):
            normalises = "does not normalise rewards"
            if provider.normalise != "none":
                normalises = f"itself normalises rewards by {provider.normalise}"
            message = f"found {data[norm]}, but {name} {normalises}"
            hint = f"remove {norm}, or choose an estimator that does not normalise (adv_estimator: reinforce)"
            parts.report((norm,), message, hint, code="ROLL-C014")


def _value(schema: type[BaseModel], data: Any, path: KeyPath) -> Any:
    """The value at a path as written, or else its default; None if there is neither."""
    for name in path:
        field = schema.model_fields.get(name)
        if not isinstance(data, dict) or field is None:
            return None
        data = data.get(name, field.get_default(call_default_factory=True))
        if isinstance(data, BaseModel):
            data = dict(data)
        schema = next((member for member, _ in members(field.annotation)), BaseModel)
    return data


# -- problems ----------------------------------------------------------------------------------------------------------


def _error(parts: Parts, schema: type[RunConfig]) -> ConfigError:
    """All problems, in the order of the files."""
    problems = {problem: _location(parts, problem) for problem in parts.composed.problems}
    for finding in parts.findings:
        if not any(finding.path[: len(path)] == path for path in parts.composed.broken):
            problem, location = _problem(parts, finding, schema)
            problems.setdefault(problem, location)
    error = ConfigError(sorted(problems, key=lambda problem: (problems[problem], problem.key)))
    error.__cause__ = parts.cause
    return error


def _location(parts: Parts, problem: ConfigProblem) -> KeyLocation:
    """Position of a problem of composition, for sorting. The command line comes last."""
    if problem.where == COMMAND_LINE:
        return KeyLocation(1_000_000, 0, 0, COMMAND_LINE)
    return parts.composed.positions.value(tuple(problem.key.split(".")))


def _problem(parts: Parts, finding: Finding, schema: type[RunConfig]) -> tuple[ConfigProblem, KeyLocation]:
    positions = parts.composed.positions
    if finding.kind == "extra_forbidden" and not finding.hint:
        names = {finding.path[-1], *meant(finding.path, None)} & set(schema.unread)
        finding = replace(finding, hint=schema.unread[min(names)]) if names else finding
    if finding.kind == "extra_forbidden" and not finding.hint:
        container = schema_at(schema, finding.path[:-1])
        finding = parts.with_key_hint(finding, sorted(container.model_fields) if container else [], paths(schema))
    if finding.kind == "missing" or (finding.path == ("pipeline",) and "pipeline" not in parts.composed.data):
        location = positions.key(finding.path[:-1])
    else:
        path = subject_of(finding, parts.composed.data)
        location = positions.key(path) if finding.at_key else positions.value(path)
    message = finding.message
    through = None if finding.at_key else positions.through(finding.path)
    if through is not None:
        interpolation, target = through
        if interpolation.from_environment and finding.shown:
            # Do not show the value of an environment variable: it may be intended for another key.
            message = message.replace(finding.shown, "text" if finding.shown[0] in "'\"" else "a value", 1)
            finding = replace(finding, hint="${oc.decode:${oc.env:NAME}} reads a variable as a number, a list, …")
        message += f" (from {interpolation.text}{'' if target is None else f', written at {target}'})"
    *above, last = finding.path or ("",)
    if finding.kind == "invalid_key" and last in ("True", "False"):
        last = last.lower()  # as YAML spells it
    return ConfigProblem(str(location), ".".join((*above, last)), message, finding.hint, code_of(finding)), location


def _restore_name(config: M, key: str, name: str) -> M:
    """Restore the name as written: schemas use a part's bare name, a config may contain `package/name`."""
    return config if getattr(config, key) == name else config.model_copy(update={key: name})
