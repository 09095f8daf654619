"""The hooks of `roll.plugins`: the reference of what a plugin can provide.

A plugin is a lightweight module, named by one entry point of its distribution:

    [project.entry-points."roll.plugins"]
    roll-infer-acme = "roll_infer_acme.plugin"

    # roll_infer_acme/plugin.py
    from roll_core.spec.hooks import hookimpl
    from roll_core.spec.providers import InferProvider

    ROLL_HOOK_API = 1

    @hookimpl
    def roll_infer_strategies():
        yield InferProvider(name="acme", target="roll_infer_acme.strategy:AcmeStrategy", summary="Acme's engine")

Hooks that offer parts are called when plugins are listed. They yield records and must not import anything heavy. No
hook chooses between plugins: the config selects parts by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from roll_core.spec.pipeline import Run
    from roll_core.spec.providers import (
        AdvantageProvider,
        AgentProvider,
        CheckProvider,
        EnvironmentProvider,
        ExecutorProvider,
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
"""Marks a plugin's function as the implementation of the hook with the same name."""


# -- parts -------------------------------------------------------------------------------------------------------------


@hookspec
def roll_platforms() -> Iterable[PlatformProvider]:
    """Offer hardware platforms."""
    yield from ()


@hookspec
def roll_train_strategies() -> Iterable[TrainProvider]:
    """Offer train strategies and their forward-only variants."""
    yield from ()


@hookspec
def roll_infer_strategies() -> Iterable[InferProvider]:
    """Offer inference engines."""
    yield from ()


@hookspec
def roll_pipelines() -> Iterable[PipelineProvider]:
    """Offer pipelines, selected by the config's `pipeline:` key."""
    yield from ()


@hookspec
def roll_rewards() -> Iterable[RewardProvider]:
    """Offer rewards, selected by `rewards.<domain>.reward`."""
    yield from ()


@hookspec
def roll_environments() -> Iterable[EnvironmentProvider]:
    """Offer environments, selected by `custom_envs.<tag>.environment`."""
    yield from ()


@hookspec
def roll_agents() -> Iterable[AgentProvider]:
    """Offer agents, selected by `custom_envs.<tag>.agent`."""
    yield from ()


@hookspec
def roll_trackers() -> Iterable[TrackerProvider]:
    """Offer metrics trackers, selected by `track_with`."""
    yield from ()


@hookspec
def roll_advantage_estimators() -> Iterable[AdvantageProvider]:
    """Offer advantage estimators, selected by `adv_estimator`."""
    yield from ()


@hookspec
def roll_policy_losses() -> Iterable[PolicyLossProvider]:
    """Offer policy losses, selected by `pg_variant`."""
    yield from ()


@hookspec
def roll_weight_transports() -> Iterable[WeightTransportProvider]:
    """Offer transports from trainers to engines, selected by priority or by `weight_transport`."""
    yield from ()


@hookspec
def roll_executors() -> Iterable[ExecutorProvider]:
    """Offer executors, which start the workers of a run, selected by `executor`."""
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
    """Offer known errors of this package's engine, each with a remedy."""
    yield from ()


@hookspec
def roll_importers() -> Iterable[ImporterProvider]:
    """Offer importers of other frameworks' configs, for `roll-core import NAME FILE`."""
    yield from ()


# -- events ------------------------------------------------------------------------------------------------------------
# Called in the driver, in order of registration. An exception ends the run; the error names the plugin's package.


@hookspec
def roll_run_started(run: Run) -> None:
    """All roles have been built; the first step has not started."""


@hookspec
def roll_step_finished(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    """Step `step` (counted from 1) is done and its metrics are recorded."""


@hookspec
def roll_run_finished(run: Run, error: BaseException | None) -> None:
    """The run is over; `error` is the exception that ended it, or None."""
