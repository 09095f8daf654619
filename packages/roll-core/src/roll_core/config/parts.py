"""Looks up the parts that a config names, validates their options, and collects the mistakes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from roll_core.config.explain import Finding, plugin_finding
from roll_core.config.mistakes import validate_all, value_at
from roll_core.config.schema import paths
from roll_core.config.unknown_keys import MAX_SUGGESTIONS, foreign_hint, suggest_key
from roll_core.errors import MissingRequirementError, PluginError, PluginLoadError, UnknownProviderError, closest
from roll_core.plugins.registry import is_user_function
from roll_core.plugins.requirements import check_requirements
from roll_core.plugins.signatures import signature_problem
from roll_core.plugins.targets import options_schema, schema_of
from roll_core.spec.config import AUTO, Config, RunConfig
from roll_core.spec.providers import ExecutorProvider, PipelineProvider, Provider

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.config.compose import ComposedConfig
    from roll_core.config.source import KeyPath
    from roll_core.plugins.registry import Registry

M = TypeVar("M", bound=BaseModel)
P = TypeVar("P", bound=Provider)
OF_TRAINING = {
    *("checkpoint_store", "eval_steps", "export_model", "max_ckpt_to_keep", "max_steps", "portable_checkpoints"),
    *("profile", "resume_from_checkpoint", "save_best", "save_steps"),
}
"""Keys of every run whose values in the config of a training run do not apply to an evaluation of its models."""


@dataclass(slots=True)
class Parts:
    """The parts of one config. Mistakes are collected in `found`."""

    composed: ComposedConfig
    registry: Registry
    check_needs: bool
    """True if requirements must be met in this environment."""
    data: dict[Any, Any]
    """The composed values; a validated part replaces its raw values."""
    findings: list[Finding] = field(default_factory=list)
    unchecked: dict[str, list[str]] = field(default_factory=dict)
    """Roles whose model's architecture could not be checked, by reason."""
    model_warnings: dict[tuple[KeyPath, str], list[str]] = field(default_factory=dict)
    """Strategies and roles that may not support their model, by the key that names it and the reason."""
    cause: BaseException | None = None
    """Exception of a plugin that failed to load, if a requested part is missing because of it."""
    suggestions: int = 0
    """Number of suggestions for unknown keys so far."""
    extra_paths: list[KeyPath] = field(default_factory=list)
    """Keys in the schemas of strategies and rewards, for suggestions."""

    def report(self, path: KeyPath, message: str, hint: str = "", *, code: str, at_key: bool = False) -> None:
        """Record a mistake."""
        self.findings.append(Finding(path, message, hint, at_key, code=code))

    def find(self, kind: type[P], name: str, path: KeyPath, role: Mapping[Any, Any] = MappingProxyType({})) -> P | None:
        """The record for a name; None after recording why there is none. Also records problems that would prevent the
        part from working in the processes of its role."""
        try:
            provider = self.registry.find(kind, name)
        except PluginError as error:
            self.findings.append(plugin_finding(path, error))
            if isinstance(error, UnknownProviderError) and self.cause is None:
                self.cause = error.__cause__
            return None
        owner = self.registry.owner(provider)
        if is_user_function(provider):
            return provider
        if problem := self.registry.import_problem(provider):
            self.report(path, problem, code="ROLL-P002")
        elif problem := signature_problem(provider):
            self.report(path, f"{owner}: {problem}", code="ROLL-P003")
        # Requirements of defaults are in roll-core[train], which `run` checks.
        if path[0] in self.data and self.runs_here(role):
            try:
                check_requirements(provider, owner=owner)
            except MissingRequirementError as error:
                message, _, hint = str(error).partition(". Run: ")
                self.report(path, message, hint and f"run: {hint}", code=error.code)
        return provider

    def runs_here(self, role: Mapping[Any, Any]) -> bool:
        """True if this environment is the one in which the role's workers run."""
        return self.check_needs and role.get("environment") is None and not self.on_a_cluster

    @property
    def on_a_cluster(self) -> bool:
        """True if workers run on the hosts of an existing cluster, which may have other files and packages."""
        return on_a_cluster(self.registry, self.data.get("executor"))

    def options(self, record: Provider, path: KeyPath, options: Any, named_at: KeyPath) -> None:
        """Validate the options of a part that is not a role. Without a schema, it has no options."""
        options = {} if options is None else options
        owner = self.registry.owner(record)
        if is_user_function(record):
            try:
                schema = options_schema(record)
            except PluginLoadError as error:
                hint = f"it is imported with the working directory {os.getcwd()} first on the module path"
                self.report(named_at, f"{record.target} cannot be used: {error}", hint, code="ROLL-C041")
                return
        elif options or record.config:
            schema = schema_of(record, Config, owner=owner)
        else:
            return
        if isinstance(options, dict):
            self.by_schema(schema, options, path, owner)

    def by_schema(self, schema: type[M], values: dict[Any, Any], path: KeyPath, owner: str) -> M | None:
        """Validate the values at `path` by the schema of their part; None after recording mistakes."""
        self.extra_paths += [(*path, *inner) for inner in paths(schema)]
        valid, mistakes = validate_all(schema, values, owner)
        for finding in mistakes:
            unknown = finding.kind == "extra_forbidden" and len(finding.path) == 1
            finding = replace(finding, path=path + finding.path)
            self.findings.append(self.with_key_hint(finding, sorted(schema.model_fields)) if unknown else finding)
        return valid

    def with_key_hint(
        self, finding: Finding, siblings: list[str], everywhere: tuple[KeyPath, ...] | None = None
    ) -> Finding:
        """Add a suggestion to an unknown key. `everywhere`: paths of the run's schema, if other places are possible."""
        self.suggestions += 1
        hint = ""
        if self.suggestions <= MAX_SUGGESTIONS:
            places = [*(everywhere or ()), *self.extra_paths]
            if everywhere is not None and not closest(finding.path[-1], siblings, 0.9):
                hint = foreign_hint(finding.path, value_at(self.composed.data, finding.path), places)
            hint = hint or suggest_key(finding.path, siblings, places)[0]
        return replace(finding, hint=hint, at_key=True)


def on_a_cluster(registry: Registry, executor: object) -> bool:
    """True if workers run on the hosts of an existing cluster, which may have other devices, files and packages."""
    name = executor.rpartition("/")[2] if isinstance(executor, str) else AUTO
    variables = [
        provider.address_variable for provider in registry.providers(ExecutorProvider) if name in (AUTO, provider.name)
    ]
    return any(os.environ.get(variable, "").removeprefix("local") for variable in variables)


def evaluation_values(
    values: Mapping[Any, Any], pipeline: str, registry: Registry, evaluation: str = ""
) -> dict[Any, Any]:
    """The values of a config of `pipeline` that an evaluation of its models has as well.

    `evaluation` is the pipeline of the evaluation; default: `PipelineProvider.evaluation`. Raises
    `UnknownProviderError` if there is none.
    """
    provider = registry.find(PipelineProvider, evaluation or registry.find(PipelineProvider, pipeline).evaluation)
    known = schema_of(provider, RunConfig, owner=registry.owner(provider)).model_fields.keys() - OF_TRAINING
    shared = {key: value for key, value in values.items() if key in known} | {"pipeline": provider.name}
    if isinstance(engine := shared.get("actor_infer"), dict):
        shared["actor_infer"] = {key: value for key, value in engine.items() if key != "generating_args"}
    return shared
