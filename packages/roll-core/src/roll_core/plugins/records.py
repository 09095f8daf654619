"""Kinds of provider records, and a type check of their fields, since plugin authors may not run a type checker."""

from __future__ import annotations

import re
import typing
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal

from roll_core.plugins.requirements import alternatives
from roll_core.spec.providers import (
    AdvantageProvider,
    AgentProvider,
    CheckProvider,
    CommandProvider,
    EnvironmentProvider,
    ExecutorProvider,
    FragmentProvider,
    ImporterProvider,
    InferProvider,
    KnownErrorsProvider,
    OptimizerProvider,
    PipelineProvider,
    PlatformProvider,
    PolicyLossProvider,
    PromptSamplerProvider,
    Provider,
    RewardProvider,
    TrackerProvider,
    TrainProvider,
    WeightTransportProvider,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of part: its hook, its record class and its names."""

    hook: str
    record: type[Provider]
    noun: str
    """Name in messages: "no *infer strategy* is called 'x'"."""
    contract: str = ""
    """`"module:attribute"` of the class or protocol that the target implements; empty if there is none."""

    @property
    def key(self) -> str:
        """Key in `known_parts.toml` and in JSON."""
        return self.hook.removeprefix("roll_")


KINDS = (
    Kind("roll_platforms", PlatformProvider, "platform", "roll_core.spec.platform:Platform"),
    Kind("roll_train_strategies", TrainProvider, "train strategy", "roll_core.spec.train:TrainStrategy"),
    Kind("roll_infer_strategies", InferProvider, "infer strategy", "roll_core.spec.infer:InferStrategy"),
    Kind("roll_pipelines", PipelineProvider, "pipeline", "roll_core.spec.pipeline:Pipeline"),
    Kind("roll_rewards", RewardProvider, "reward", "roll_core.spec.rollout:RewardFunction"),
    Kind("roll_environments", EnvironmentProvider, "environment", "roll_core.spec.environment:Environment"),
    Kind("roll_agents", AgentProvider, "agent", "roll_core.spec.agent:Agent"),
    Kind("roll_trackers", TrackerProvider, "tracker", "roll_core.spec.pipeline:Tracker"),
    Kind(
        "roll_advantage_estimators",
        AdvantageProvider,
        "advantage estimator",
        "roll_core.spec.algorithms:AdvantageEstimator",
    ),
    Kind("roll_optimizers", OptimizerProvider, "optimizer", "roll_core.spec.train:OptimizerFactory"),
    Kind("roll_policy_losses", PolicyLossProvider, "policy loss", "roll_core.spec.algorithms:PolicyLoss"),
    Kind("roll_prompt_samplers", PromptSamplerProvider, "prompt sampler", "roll_core.spec.rollout:PromptSampler"),
    Kind(
        "roll_weight_transports",
        WeightTransportProvider,
        "weight transport",
        "roll_core.spec.transport:WeightTransport",
    ),
    Kind("roll_executors", ExecutorProvider, "executor", "roll_core.runtime.cluster.executors.base:Executor"),
    Kind("roll_config_fragments", FragmentProvider, "config fragment"),
    Kind("roll_checks", CheckProvider, "check"),
    Kind("roll_known_errors", KnownErrorsProvider, "list of known errors"),
    Kind("roll_importers", ImporterProvider, "importer", "roll_core.spec.providers:Importer"),
    Kind("roll_commands", CommandProvider, "command", "roll_core.spec.providers:Command"),
)

_BY_RECORD = {kind.record: kind for kind in KINDS}


def kind_of(record: type[Provider]) -> Kind:
    """Kind whose records are instances of this class."""
    return _BY_RECORD[record]


def described(record: Provider) -> str:
    """Kind and name for messages: `infer strategy 'acme'`. A forward-only strategy trains nothing."""
    noun = "forward-only strategy" if getattr(record, "forward_only", False) else kind_of(type(record)).noun
    return f"{noun} {record.name!r}"


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_BOUND = r"(>=|==|<)\d+(\.\d+)*"
_COMMON_NEED = re.compile(rf"[a-z0-9]+(-[a-z0-9]+)*(\[\w+\])?({_BOUND}(,{_BOUND})*)?", re.ASCII)
"""The usual form of a requirement, which is valid. Others are parsed, which imports `packaging`."""


def check_record(record: Provider) -> str:
    """Describe what is wrong with a record: the field, its value, the expected value. Empty if the record is valid."""
    problem = _check_fields(record)
    if problem:
        return problem
    if not _NAME.fullmatch(record.name):
        return f"name is {record.name!r}, expected letters, digits, '_', '+', '-' and '.'"
    if not _TARGET.fullmatch(record.target):
        return f"target is {record.target!r}, expected 'module:attribute'"
    if isinstance(record, FragmentProvider) and record.target.rpartition(":")[2] != f"{record.name}.yaml":
        return f"target is {record.target!r}, expected 'package:{record.name}.yaml'"
    if record.config and not _TARGET.fullmatch(record.config):
        return f"config is {record.config!r}, expected 'module:attribute' or ''"
    if record.needs:
        return _check_needs(record.needs)
    return ""


def _check_needs(needs: tuple[str | tuple[str, ...], ...]) -> str:
    for need in needs:
        if not need:
            return f"needs has {need!r}, expected a requirement (PEP 508)"
        for requirement in alternatives(need):
            if _COMMON_NEED.fullmatch(requirement):
                continue
            from packaging.requirements import InvalidRequirement, Requirement

            try:
                Requirement(requirement)
            except InvalidRequirement as error:
                return f"needs has {requirement!r}, expected a requirement (PEP 508): {str(error).splitlines()[0]}"
    return ""


def _check_fields(record: Any, prefix: str = "") -> str:
    cls: Any = type(record)
    hints = _hints(cls)
    for field in fields(record):
        value = getattr(record, field.name)
        name = prefix + field.name
        if not _matches(value, hints[field.name]):
            return f"{name} is {show(value)}, expected {_spell(hints[field.name])}"
        if is_dataclass(value):
            problem = _check_fields(value, f"{name}.")
            if problem:
                return problem
    return ""


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _matches(value: object, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in arguments and type(value) in {type(argument) for argument in arguments}
    if origin is tuple:
        return type(value) is tuple and all(_matches(element, arguments[0]) for element in value)
    if origin in (typing.Union, UnionType):
        return any(_matches(value, alternative) for alternative in arguments)
    if hint in (int, bool, str, float, NoneType):
        return type(value) is hint
    return isinstance(value, hint)


def _spell(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if origin is tuple:
        return f"a tuple, each item {_spell(arguments[0])}"
    if origin in (typing.Union, UnionType):
        return " or ".join(_spell(alternative) for alternative in arguments)
    return hint.__name__ if isinstance(hint, type) else str(hint)


def show(value: object) -> str:
    """A wrong value and its type for messages, shortened."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
