"""The hooks of `roll.plugins`: this module is the reference of what a plugin can provide.

A plugin is a light module named by one entry point of its distribution:

    [project.entry-points."roll.plugins"]
    roll-infer-acme = "roll_infer_acme.plugin"

    # roll_infer_acme/plugin.py
    from roll_core.spec.hooks import hookimpl
    from roll_core.spec.providers import InferProvider

    ROLL_HOOK_API = 1

    @hookimpl
    def roll_infer_strategies():
        yield InferProvider(name="acme", target="roll_infer_acme.strategy:AcmeStrategy", summary="Acme's engine")

Hooks that offer parts are called when plugins are listed, so they import nothing heavy and yield records. No hook
chooses between plugins: a part is chosen by its name in the config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from roll_core.spec.pipeline import Run
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
        RewardProvider,
        TrackerProvider,
        TrainProvider,
        WeightTransportProvider,
    )

PROJECT = "roll"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function as the implementation of the hook whose name it bears."""


# -- parts -------------------------------------------------------------------------------------------------------------


@hookspec
def roll_platforms() -> Iterable[PlatformProvider]:
    """Offer hardware platforms."""
    yield from ()


@hookspec
def roll_train_strategies() -> Iterable[TrainProvider]:
    """Offer train strategies and their forward-only twins."""
    yield from ()


@hookspec
def roll_infer_strategies() -> Iterable[InferProvider]:
    """Offer inference engines."""
    yield from ()


@hookspec
def roll_pipelines() -> Iterable[PipelineProvider]:
    """Offer pipelines, chosen by the config's `pipeline:` key."""
    yield from ()


@hookspec
def roll_rewards() -> Iterable[RewardProvider]:
    """Offer rewards, chosen by `rewards.<domain>.reward`."""
    yield from ()


@hookspec
def roll_trackers() -> Iterable[TrackerProvider]:
    """Offer metrics trackers, chosen by `track_with`."""
    yield from ()


@hookspec
def roll_advantage_estimators() -> Iterable[AdvantageProvider]:
    """Offer advantage estimators, chosen by `adv_estimator`."""
    yield from ()


@hookspec
def roll_policy_losses() -> Iterable[PolicyLossProvider]:
    """Offer policy losses, chosen by `pg_variant`."""
    yield from ()


@hookspec
def roll_weight_transports() -> Iterable[WeightTransportProvider]:
    """Offer transports that bring a trainer's weights to engines; chosen by priority, or by `weight_transport`."""
    yield from ()


@hookspec
def roll_config_fragments() -> Iterable[FragmentProvider]:
    """Offer YAML files for the `defaults:` of configs."""
    yield from ()


@hookspec
def roll_checks() -> Iterable[CheckProvider]:
    """Offer checks of the machine, the software and the config, for `roll-core doctor`."""
    yield from ()


@hookspec
def roll_known_errors() -> Iterable[KnownErrorsProvider]:
    """Offer lists of errors that people meet with this package's engine, each with what to do."""
    yield from ()


@hookspec
def roll_importers() -> Iterable[ImporterProvider]:
    """Offer importers of other frameworks' configs, for `roll-core import NAME FILE`."""
    yield from ()


# -- events ------------------------------------------------------------------------------------------------------------
# Called in the driver, in order of registration. One that raises ends the run, and the error names its package.


@hookspec
def roll_run_started(run: Run) -> None:
    """All roles have been built; the first step has not begun."""


@hookspec
def roll_step_finished(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    """Step `step` (counted from 1) is done and its metrics are recorded."""


@hookspec
def roll_run_finished(run: Run, error: BaseException | None) -> None:
    """The run is over; `error` is what ended it, or None."""
