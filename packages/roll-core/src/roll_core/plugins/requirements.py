"""Whether what a provider needs is installed where it shall run."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from roll_core.errors import MissingRequirementError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from roll_core.spec.providers import Provider


def check_requirements(provider: Provider, *, owner: str) -> None:
    """Raise `MissingRequirementError` unless every requirement in `provider.needs` is met in this environment.

    All that are missing or of a wrong version are named at once: what was found, what is wanted, and the command.
    """
    if not provider.needs:
        return
    from packaging.requirements import Requirement as Parsed

    problems, wanted = [], []
    for need in provider.needs:
        requirement = Parsed(need)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{requirement.name} is not installed, wanted {_spell(requirement)}")
        else:
            if requirement.specifier.contains(found, prereleases=True):
                continue
            problems.append(f"{requirement.name} {found} is installed, wanted {_spell(requirement)}")
        wanted.append(f"'{requirement.name}{_extras(requirement)}{requirement.specifier}'")
    if problems:
        raise MissingRequirementError(f"{owner}: {'; '.join(problems)}. Run: pip install {' '.join(wanted)}")


def _spell(requirement: Requirement) -> str:
    return str(requirement.specifier) or "any version"


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
