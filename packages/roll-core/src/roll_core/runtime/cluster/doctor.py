"""Checks of `roll-core doctor`: plugins, their requirements, platforms, and every check that a plugin provides.

Each check runs in its own thread with a deadline. A check that raises, hangs or returns an invalid result becomes a
finding about that check. The other checks are not affected.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from roll_core.errors import MissingRequirementError, PluginError, PythonEnvironmentError
from roll_core.plugins.requirements import CORE, alternatives, check_requirements
from roll_core.plugins.targets import load_target
from roll_core.runtime.cluster.platform import make_platform
from roll_core.spec.config import RewardConfig
from roll_core.spec.diagnostics import CheckContext, CheckResult, Level
from roll_core.spec.providers import (
    CheckProvider,
    InferProvider,
    PlatformProvider,
    Provider,
    RewardProvider,
    TrainProvider,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from roll_core.plugins.loader import Plugin
    from roll_core.plugins.registry import Registry
    from roll_core.spec.config import EnvironmentConfig, RunConfig, WorkerConfig
    from roll_core.spec.platform import Platform, Probe

T = TypeVar("T")

DEADLINE_S = 20.0
"""Deadline of one check, in seconds. A check that hangs in a driver keeps its daemon thread until the process exits."""
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """One line of the doctor's report."""

    check: str
    package: str
    """Package that provides the check."""
    result: CheckResult

    @property
    def title(self) -> str:
        """Name of the check and the subject that it examined."""
        return f"{self.check.replace('_', ' ')} {self.result.subject}".rstrip()


class CheckFailedError(Exception):
    """A check raised, missed its deadline, or returned something other than check results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A platform and the result of its probe."""

    record: PlatformProvider
    package: str
    platform: Platform | None
    probe: Probe | None
    problem: str = ""


def examine(registry: Registry, config: RunConfig | None, *, deadline_s: float = DEADLINE_S) -> Iterator[DoctorFinding]:
    """Yield every finding as soon as it is available. Raises only `KeyboardInterrupt`."""
    seen = [_look(record, plugin, deadline_s) for plugin, record in _records(registry, PlatformProvider)]
    chosen = _choose(seen, config)
    yield from _platforms(seen, chosen, config)
    yield from _plugins(registry)
    yield from _requirements(registry, config, chosen, deadline_s)
    yield from _environments(registry, config, deadline_s)
    context = CheckContext(platform=chosen.platform if chosen is not None else None, config=config)
    name = chosen.record.name if chosen is not None else ""
    for plugin, record in _records(registry, CheckProvider):
        if record.platform in ("", name):
            yield from _check(record, plugin.package, context, deadline_s)


# -- platforms ---------------------------------------------------------------------------------------------------------


def _look(record: PlatformProvider, plugin: Plugin, deadline_s: float) -> _Seen:
    def probe() -> tuple[Platform, Probe]:
        platform = make_platform(record)
        return platform, platform.probe()

    try:
        platform, said = guarded(probe, deadline_s)
        # A malformed probe result fails here instead of where it is displayed.
        problem = "" if isinstance(said.found, bool) and isinstance(said.why, str) else f"its probe said {said!r}"
    except (CheckFailedError, AttributeError) as error:
        return _Seen(record=record, package=plugin.package, platform=None, probe=None, problem=str(error))
    if problem:
        return _Seen(record=record, package=plugin.package, platform=None, probe=None, problem=problem)
    return _Seen(record=record, package=plugin.package, platform=platform, probe=said)


def _choose(seen: list[_Seen], config: RunConfig | None) -> _Seen | None:
    """Platform that a run would select: like `select_platform`, except that the first one wins a tie."""
    wanted = config.platform if config is not None else None
    if wanted is not None:
        named = [each for each in seen if wanted in (each.record.name, f"{each.package}/{each.record.name}")]
        return named[0] if named else None
    found = [each for each in seen if each.probe is not None and each.probe.found]
    return max(found, key=lambda each: each.record.priority, default=None)


def _platforms(seen: list[_Seen], chosen: _Seen | None, config: RunConfig | None) -> Iterator[DoctorFinding]:
    asked_for = config is not None and config.platform is not None
    for each in seen:
        name, why = each.record.name, each.probe.why if each.probe is not None else each.problem
        here = each.probe is not None and each.probe.found
        if each is chosen and not here:
            remedy = "mend that, run where it is, or choose another platform in the config"
            yield _finding(
                "platform", each.package, "error", why, name, wanted="asked for by the config", remedy=remedy
            )
        elif each is chosen:
            yield _finding("platform", each.package, "ok", why, name, wanted="chosen")
        elif each.probe is None:
            remedy = f"leave it out with --disable-plugin {each.package}, or ask its authors"
            yield _finding("platform", each.package, "warning", why, name, remedy=remedy)
        elif not here:
            yield _finding("platform", each.package, "note", why, name, wanted="not here")
        else:
            tie = chosen is not None and each.record.priority == chosen.record.priority
            if tie and not asked_for:
                remedy = f"say platform: {name}, or platform: {chosen.record.name if chosen else ''}, in the config"
                yield _finding("platform", each.package, "error", why, name, wanted="one to choose", remedy=remedy)
            else:
                yield _finding("platform", each.package, "note", why, name, wanted="here, but not chosen")


# -- plugins -----------------------------------------------------------------------------------------------------------


def _plugins(registry: Registry) -> Iterator[DoctorFinding]:
    for plugin in registry.plugins:
        if plugin.state == "failed":
            remedy = f"install another version of {plugin.package}, or leave it out: --disable-plugin {plugin.package}"
            yield _finding("plugin", plugin.package, "warning", str(plugin.error), str(plugin), remedy=remedy)
        else:
            yield _finding("plugin", plugin.package, "ok", plugin.state, str(plugin))


def _requirements(
    registry: Registry, config: RunConfig | None, chosen: _Seen | None, deadline_s: float
) -> Iterator[DoctorFinding]:
    """Check the requirements of every provider.

    An unmet requirement is an error if the config uses the provider. It is a note if the config does not use it, or for
    a platform that is not selected. Otherwise, without a config, it is a warning.
    """
    used = set() if config is None else _names_used(config)
    told: set[tuple[str, object]] = set()
    # Providers that the config uses come first, because equal requirements of one package are reported once.
    records = sorted(_every_record(registry), key=lambda pair: pair[1].name not in used)
    for plugin, record in records:
        if not record.needs or (plugin.package, record.needs) in told:
            continue
        told.add((plugin.package, record.needs))
        wanted = ", ".join(" or ".join(alternatives(need)) for need in record.needs)
        try:
            guarded(partial(check_requirements, record, owner=registry.owner(record)), deadline_s)
        except CheckFailedError as failed:
            if not isinstance(failed.__cause__, MissingRequirementError):
                remedy = "install the packages anew: what is known of them is damaged"
                yield _finding("requirements", plugin.package, "warning", str(failed), record.name, remedy=remedy)
                continue
            problem, _, command = str(failed).partition(". Run: ")
            absent = isinstance(record, PlatformProvider) and (chosen is None or record is not chosen.record)
            unused = config is not None or absent
            level: Level = "error" if record.name in used else "note" if unused else "warning"
            yield _finding(
                "requirements", plugin.package, level, problem, record.name, wanted=wanted, remedy=command or problem
            )
        else:
            yield _finding("requirements", plugin.package, "ok", "met", record.name, wanted=wanted)


def _names_used(config: RunConfig) -> set[str]:
    names = {config.platform, *config.track_with}
    # A role with its own Python environment needs its requirements there, not here.
    here = [role for role in config.roles().values() if role.environment is None]
    names |= {role.strategy_args.strategy_name for role in here if role.strategy_args is not None}
    return {name.rpartition("/")[2] for name in names if name}


def _environments(registry: Registry, config: RunConfig | None, deadline_s: float) -> Iterator[DoctorFinding]:
    """Check roles' existing Python environments. Environments that uv will install are reported as a note."""
    for name, role in config.roles().items() if config is not None else ():
        if role.environment is None:
            continue
        if role.environment.packages:
            packages = ", ".join(role.environment.packages)
            yield _finding("environment", CORE, "note", f"uv installs {packages} when the role first starts", name)
            continue
        try:
            python = guarded(partial(_prepared, registry, name, role, role.environment), deadline_s)
        except CheckFailedError as failed:
            problem, _, command = str(failed).partition(". Run: ")
            remedy = command or "name another one in the role's environment"
            yield _finding("environment", CORE, "error", problem, name, remedy=remedy)
        else:
            yield _finding("environment", CORE, "ok", str(python), name)


def _prepared(registry: Registry, name: str, role: WorkerConfig, environment: EnvironmentConfig) -> Path:
    from roll_core.runtime.cluster.python_environments.prepare import prepare
    from roll_core.runtime.cluster.python_environments.spec import environment_spec

    provider = _provider(registry, role)
    return prepare(environment_spec(environment, provider, registry.package(provider)), name)


def _provider(registry: Registry, role: WorkerConfig) -> Provider:
    """Provider that a role's config names."""
    if isinstance(role, RewardConfig):
        return registry.find(RewardProvider, role.reward)
    kind = InferProvider if role.kind == "generate" else TrainProvider
    return registry.find(kind, role.strategy_args.strategy_name if role.strategy_args is not None else "")


# -- checks ------------------------------------------------------------------------------------------------------------


def _check(record: CheckProvider, package: str, context: CheckContext, deadline_s: float) -> Iterator[DoctorFinding]:
    def run() -> list[CheckResult]:
        results = list(load_target(record.target, owner=f"check {record.name}")(context))
        for result in results:
            if problem := _nonsense(result):
                raise CheckFailedError(problem)
        return results

    try:
        results = guarded(run, deadline_s)
    except CheckFailedError as error:
        remedy = f"it says nothing about your machine: tell the authors of {package}"
        yield _finding(record.name, package, "warning", f"the check itself failed: {error}", remedy=remedy)
        return
    for result in results:
        yield DoctorFinding(check=record.name, package=package, result=result)


def guarded(function: Callable[[], T], deadline_s: float) -> T:
    """Run `function` in a daemon thread and return its result.

    Raises `CheckFailedError` if the function raises, or if it does not return within `deadline_s` seconds.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(function())
        except BaseException as error:  # plugin code: SystemExit is a finding too
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True, name="doctor")
    # Prints of a check must not end up in the output of `--json`.
    with contextlib.redirect_stdout(sys.stderr):
        thread.start()
        thread.join(deadline_s)
    if errors:
        text = _one_line(errors[0])
        raise CheckFailedError(text) from errors[0]
    if not answers:
        raise CheckFailedError(f"no answer within {deadline_s:g} s")
    return answers[0]


def _nonsense(result: Any) -> str:
    """Reason why a result cannot be displayed; empty if it can."""
    if type(result) is not CheckResult:
        return f"it yielded {type(result).__name__}, expected CheckResult"
    odd = [each.name for each in fields(result) if not isinstance(getattr(result, each.name), str)]
    if odd:
        return f"{', '.join(odd)} of its result should be text"
    return "" if result.level in LEVELS else f"it found {result.level!r}, expected one of {', '.join(LEVELS)}"


def _one_line(error: BaseException) -> str:
    if isinstance(error, (CheckFailedError, PluginError, PythonEnvironmentError)):
        return " ".join(str(error).split())
    try:
        text = " ".join(str(error).split())
    except Exception:  # a third-party exception whose __str__ raises
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _finding(
    check: str, package: str, level: Level, found: str, subject: str = "", *, wanted: str = "", remedy: str = ""
) -> DoctorFinding:
    result = CheckResult(level=level, found=found, subject=subject, wanted=wanted, remedy=remedy)
    return DoctorFinding(check=check, package=package, result=result)


R = TypeVar("R", PlatformProvider, CheckProvider)


def _records(registry: Registry, kind: type[R]) -> Iterator[tuple[Plugin, R]]:
    for plugin in registry.plugins:
        yield from ((plugin, record) for record in plugin.providers if isinstance(record, kind))


def _every_record(registry: Registry) -> Iterator[tuple[Plugin, Any]]:
    for plugin in registry.plugins:
        yield from ((plugin, record) for record in plugin.providers)
