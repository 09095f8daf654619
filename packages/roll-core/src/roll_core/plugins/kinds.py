"""Kinds of parts that plugins offer: the hook, its record class, and the name of the kind in messages."""

from __future__ import annotations

from dataclasses import dataclass

from roll_core.spec.providers import (
    AdvantageProvider,
    CheckProvider,
    FragmentProvider,
    ImporterProvider,
    InferProvider,
    KnownErrorsProvider,
    PipelineProvider,
    PlatformProvider,
    PolicyLossProvider,
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
    key: str
    """Key in `known_parts.toml` and in JSON."""


KINDS = (
    Kind("roll_platforms", PlatformProvider, "platform", "platforms"),
    Kind("roll_train_strategies", TrainProvider, "train strategy", "train_strategies"),
    Kind("roll_infer_strategies", InferProvider, "infer strategy", "infer_strategies"),
    Kind("roll_pipelines", PipelineProvider, "pipeline", "pipelines"),
    Kind("roll_rewards", RewardProvider, "reward", "rewards"),
    Kind("roll_trackers", TrackerProvider, "tracker", "trackers"),
    Kind("roll_advantage_estimators", AdvantageProvider, "advantage estimator", "advantage_estimators"),
    Kind("roll_policy_losses", PolicyLossProvider, "policy loss", "policy_losses"),
    Kind("roll_weight_transports", WeightTransportProvider, "weight transport", "weight_transports"),
    Kind("roll_config_fragments", FragmentProvider, "config fragment", "config_fragments"),
    Kind("roll_checks", CheckProvider, "check", "checks"),
    Kind("roll_known_errors", KnownErrorsProvider, "list of known errors", "known_errors"),
    Kind("roll_importers", ImporterProvider, "importer", "importers"),
)

_BY_RECORD = {kind.record: kind for kind in KINDS}


def kind_of(record: type[Provider]) -> Kind:
    """Kind whose records are instances of this class."""
    return _BY_RECORD[record]
