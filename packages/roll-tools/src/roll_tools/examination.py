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
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from roll_core.errors import MissingRequirementError, PluginError, PythonEnvironmentError
from roll_core.plugins.requirements import alternatives, check_requirements
from roll_core.plugins.targets import load_target
from roll_core.runtime.cluster.platform import make_platform
from roll_core.runtime.workers.build import role_environments
from roll_core.spec.config import RewardConfig
from roll_core.spec.diagnostics import CheckContext, CheckResult, Level
from roll_core.spec.providers import CheckProvider, PlatformProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from roll_core.plugins.registry import Registry
    from roll_core.spec.config import RunConfig
    from roll_core.spec.platform import Platform
    from roll_core.spec.providers import Provider

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
class _Probed:
    """A platform and the result of its probe."""

    record: PlatformProvider
    package: str
    platform: Platform | None
    """None if the probe failed."""
    available: bool
    why: str


def examine(registry: Registry, config: RunConfig | None, *, deadline_s: float = DEADLINE_S) -> Iterator[DoctorFinding]:
    """Yield every finding as soon as it is available. Raises only `KeyboardInterrupt`."""
    records = [(plugin.package, record) for plugin in registry.plugins for record in plugin.providers]
    probed = [
        _probe(record, package, deadline_s) for package, record in records if isinstance(record, PlatformProvider)
    ]
    selected = _select(probed, config)
    yield from _platforms(probed, selected, config)
    for plugin in registry.plugins:
        if plugin.state == "failed":
            remedy = f"install another version of {plugin.package}, or disable it: --disable-plugin {plugin.package}"
            yield _finding("plugin", plugin.package, "warning", str(plugin.error), str(plugin), remedy=remedy)
        else:
            yield _finding("plugin", plugin.package, "ok", plugin.state, str(plugin))
    yield from _requirements(registry, records, config, selected, deadline_s)
    context = CheckContext(
        platform=selected.platform if selected else None,
        config=config,
        environments=role_environments(config, registry) if config is not None else {},
    )
    for package, record in records:
        if isinstance(record, CheckProvider) and record.platform in ("", selected.record.name if selected else ""):
            yield from _check(record, package, context, deadline_s)


# -- platforms ---------------------------------------------------------------------------------------------------------


def _probe(record: PlatformProvider, package: str, deadline_s: float) -> _Probed:
    def probe() -> tuple[Platform, bool, str]:
        platform = make_platform(record)
        result = platform.probe()
        return platform, bool(result.found), str(result.why)

    try:
        platform, available, why = guarded(probe, deadline_s)
    except CheckFailedError as error:
        return _Probed(record=record, package=package, platform=None, available=False, why=str(error))
    return _Probed(record=record, package=package, platform=platform, available=available, why=why)


def _select(probed: list[_Probed], config: RunConfig | None) -> _Probed | None:
    """Platform that a run would select: like `select_platform`, except that the first one wins a tie."""
    if config is not None and (platform_name := config.platform) is not None:
        named = [
            probe for probe in probed if platform_name in (probe.record.name, f"{probe.package}/{probe.record.name}")
        ]
        return named[0] if named else None
    return max((probe for probe in probed if probe.available), key=lambda probe: probe.record.priority, default=None)


def _platforms(probed: list[_Probed], selected: _Probed | None, config: RunConfig | None) -> Iterator[DoctorFinding]:
    named = config is not None and config.platform is not None
    for probe in probed:
        name, level, expected, remedy = probe.record.name, "note", "", ""
        if probe is selected and probe.available:
            level, expected = "ok", "selected"
        elif probe is selected:
            level, expected = "error", "set in the config"
            remedy = "fix that, run on a host that has it, or set another platform in the config"
        elif probe.platform is None:
            level, remedy = "warning", f"disable it with --disable-plugin {probe.package}, or report it to its authors"
        elif not probe.available:
            expected = "not available"
        elif selected and probe.record.priority == selected.record.priority and not named:
            level, expected = "error", "one platform"
            remedy = f"set platform: {name} or platform: {selected.record.name} in the config"
        else:
            expected = "available, not selected"
        yield _finding("platform", probe.package, level, probe.why, name, expected=expected, remedy=remedy)


# -- requirements ------------------------------------------------------------------------------------------------------


def _requirements(
    registry: Registry,
    records: list[tuple[str, Provider]],
    config: RunConfig | None,
    selected: _Probed | None,
    deadline_s: float,
) -> Iterator[DoctorFinding]:
    """Check the requirements of every provider.

    An unmet requirement is an error if the config uses the provider. It is a note if the config does not use it, or for
    a platform that is not selected. Otherwise, without a config, it is a warning.
    """
    used = set() if config is None else _names_used(config)
    reported: set[tuple[str, object]] = set()
    # Providers that the config uses come first, because equal requirements of one package are reported once.
    for package, record in sorted(records, key=lambda pair: pair[1].name not in used):
        if not record.needs or (package, record.needs) in reported:
            continue
        reported.add((package, record.needs))
        expected = ", ".join(" or ".join(alternatives(need)) for need in record.needs)
        try:
            guarded(partial(check_requirements, record, owner=registry.owner(record)), deadline_s)
        except CheckFailedError as failed:
            problem, _, remedy = str(failed).partition(". Run: ")
            unselected = isinstance(record, PlatformProvider) and (selected is None or record is not selected.record)
            level = "error" if record.name in used else "note" if config is not None or unselected else "warning"
            if not isinstance(failed.__cause__, MissingRequirementError):
                level, remedy = "warning", "reinstall the packages: their metadata is damaged"
            yield _finding(
                "requirements", package, level, problem, record.name, expected=expected, remedy=remedy or problem
            )
        else:
            yield _finding("requirements", package, "ok", "met", record.name, expected=expected)


def _names_used(config: RunConfig) -> set[str]:
    from roll_core.config.validate import NAMED_PARTS

    names = {config.executor, *config.track_with, *(getattr(config, key, None) for key in NAMED_PARTS)}
    # A role with its own Python environment needs its requirements there, not here.
    here = [role for role in config.roles().values() if role.environment is None]
    names |= {role.strategy_args.strategy_name for role in here if role.strategy_args is not None}
    names |= {role.reward for role in here if isinstance(role, RewardConfig)}
    return {name.rpartition("/")[2] for name in names if name}


# -- checks ------------------------------------------------------------------------------------------------------------


def _check(record: CheckProvider, package: str, context: CheckContext, deadline_s: float) -> Iterator[DoctorFinding]:
    def run() -> list[CheckResult]:
        results = list(load_target(record.target, owner=f"check {record.name}")(context))
        for result in results:
            if problem := _problem(result):
                raise CheckFailedError(problem)
        return results

    try:
        results = guarded(run, deadline_s)
    except CheckFailedError as error:
        remedy = f"this is a bug of the check, not of your machine: report it to the authors of {package}"
        yield _finding(record.name, package, "warning", f"the check itself failed: {error}", remedy=remedy)
        return
    for result in results:
        yield DoctorFinding(check=record.name, package=package, result=result)


def _problem(result: Any) -> str:
    """Reason why a result cannot be displayed; empty if it can."""
    if type(result) is not CheckResult:
        return f"it yielded {type(result).__name__}, expected CheckResult"
    wrong = [field.name for field in fields(result) if not isinstance(getattr(result, field.name), str)]
    if wrong:
        return f"its result's {', '.join(wrong)} is not str"
    return "" if result.level in LEVELS else f"its result's level is {result.level!r}, expected {', '.join(LEVELS)}"


def guarded(function: Callable[[], T], deadline_s: float) -> T:
    """Run `function` in a daemon thread and return its result.

    Raises `CheckFailedError` if the function raises, or if it does not return within `deadline_s` seconds.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:  # plugin code: SystemExit is a finding too
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True, name="doctor")
    # Prints of a check must not end up in the output of `--json`.
    with contextlib.redirect_stdout(sys.stderr):
        thread.start()
        thread.join(deadline_s)
    if errors:
        raise CheckFailedError(_one_line(errors[0])) from errors[0]
    if not results:
        raise CheckFailedError(f"no result within {deadline_s:g} s")
    return results[0]


def _one_line(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:  # a third-party exception whose __str__ raises
        text = ""
    if isinstance(error, (CheckFailedError, PluginError, PythonEnvironmentError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _finding(
    check: str, package: str, level: str, status: str, subject: str = "", *, expected: str = "", remedy: str = ""
) -> DoctorFinding:
    result = CheckResult(level=cast("Level", level), found=status, subject=subject, wanted=expected, remedy=remedy)
    return DoctorFinding(check=check, package=package, result=result)
