"""Checks that a provider's requirements are installed in this Python environment."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from roll_core.errors import MissingRequirementError, install_command

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from roll_core.spec.providers import Provider

CORE = "roll-core"


def alternatives(need: str | tuple[str, ...]) -> tuple[str, ...]:
    """Alternative requirements of one entry of `Provider.needs`; at least one must be met."""
    return (need,) if isinstance(need, str) else need


def check_requirements(provider: Provider, *, owner: str) -> None:
    """Raise `MissingRequirementError` unless every requirement in `provider.needs` is met in this environment.

    The message lists all missing or mismatched packages: the version found, the version expected, the install command.
    """
    if unmet := _unmet(provider):
        problems = [", and ".join(_problem(requirement) for requirement in need) for need in unmet]
        to_install = [next((requirement for requirement in need if _installed(requirement)), need[0]) for need in unmet]
        for requirement in to_install:
            requirement.marker = None
        raise _missing(owner, problems, *map(str, to_install))


def is_absent(provider: Provider) -> bool:
    """True if requirements are unmet only because their packages are not installed, in whichever version."""
    unmet = _unmet(provider)
    return bool(unmet) and not any(_installed(requirement) for need in unmet for requirement in need)


def _unmet(provider: Provider) -> list[list[Requirement]]:
    """The alternatives of each entry of `provider.needs` that apply here, if none of them is met."""
    if not provider.needs:
        return []
    from packaging.requirements import Requirement as Parsed

    needs = [[Parsed(text) for text in alternatives(need)] for need in provider.needs]
    needs = [
        [requirement for requirement in need if requirement.marker is None or requirement.marker.evaluate()]
        for need in needs
    ]
    return [need for need in needs if need and all(_problem(requirement) for requirement in need)]


def check_extra(extra: str, *, what: str) -> None:
    """Raise `MissingRequirementError` unless all requirements of this extra of roll-core are met.

    `what` names the feature that needs the extra.
    """
    if problems := [problem for requirement in core_requirements(extra) if (problem := _problem(requirement))]:
        raise _missing(what, problems, f"{CORE}[{extra}]")


def core_requirements(extra: str = "") -> list[Requirement]:
    """Requirements of roll-core in this environment: the unconditional ones, or those that only `extra` adds."""
    from packaging.requirements import Requirement as Parsed

    requirements = [Parsed(text) for text in importlib.metadata.requires(CORE) or ()]
    always = [
        requirement
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]
    if not extra:
        return always
    return [
        requirement
        for requirement in requirements
        if requirement not in always and requirement.marker and requirement.marker.evaluate({"extra": extra})
    ]


def _missing(who: str, problems: list[str], *requirements: str) -> MissingRequirementError:
    return MissingRequirementError(f"{who}: {'; '.join(problems)}. Run: {install_command(*requirements)}")


def _installed(requirement: Requirement) -> str:
    """Installed version of a package, whichever version is wanted; empty if it is not installed."""
    try:
        return importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _problem(requirement: Requirement) -> str:
    """Why a requirement is not met; empty if it is met."""
    version, expected = _installed(requirement), str(requirement.specifier) or "any version"
    if version and requirement.specifier.contains(version, prereleases=True):
        return ""
    return f"{requirement.name} {f'{version} is' if version else 'is not'} installed, expected {expected}"
