"""Specification of a role's Python environment, sent to the hosts of its workers."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from roll_core.plugins.requirements import CORE, alternatives, core_requirements

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.diagnostics import RoleEnvironment


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """Python environment of a role, as plain values that mean the same on every host."""

    python: str = ""
    """An interpreter or a folder with one. With `packages`: the Python that uv builds the environment from."""
    packages: tuple[str, ...] = ()
    """Arguments of pip; empty if the environment exists already."""
    exclude: tuple[str, ...] = ()
    """Distributions that are not installed even if others require them."""
    distributions: Mapping[str, str] = field(default_factory=dict)
    """Required distributions and versions: roll-core, plugins of its extra `train`, the plugin of the role's
    provider, and that plugin's toolkits."""
    sources: tuple[str, ...] = ()
    """Arguments of pip that install `distributions` as the driver has them."""
    reported: tuple[str, ...] = ()
    """Further distributions whose versions are reported in the fingerprint."""

    @property
    def name(self) -> str:
        """Name of the environment in messages."""
        return f"of {', '.join(self.packages)}" if self.packages else self.python


def environment_spec(environment: RoleEnvironment) -> EnvironmentSpec:
    """Specification of a role's environment, with the versions that are installed here."""
    from packaging.requirements import Requirement

    config, package = environment.config, environment.package
    brought = (requirement.name for requirement in core_requirements("train") if CORE in _required_by(requirement.name))
    needed = dict.fromkeys((CORE, *brought, *_toolkits(package), package or CORE))
    needs = [Requirement(alternative).name for need in environment.needs for alternative in alternatives(need)]
    return EnvironmentSpec(
        python=_absolute(config.python or ""),
        packages=tuple(_absolute(word) for line in config.packages for word in shlex.split(line)),
        exclude=tuple(config.exclude),
        distributions={name: importlib.metadata.version(name) for name in needed},
        sources=tuple(word for name in needed for word in source_of(name)),
        reported=tuple(needs),
    )


def _toolkits(package: str) -> list[str]:
    """Distributions that a plugin requires and that require roll-core themselves."""
    required = _required_by(package) if package and package != CORE else ()
    return [name for name in required if CORE in _required_by(name)]


def _required_by(name: str) -> list[str]:
    """Distributions that an installed distribution requires, without extras; empty if it is not installed."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    try:
        requirements = map(Requirement, importlib.metadata.requires(name) or ())
    except importlib.metadata.PackageNotFoundError:
        return []
    return [
        canonicalize_name(requirement.name)
        for requirement in requirements
        if not requirement.marker or requirement.marker.evaluate({"extra": ""})
    ]


def _absolute(word: str) -> str:
    """Absolute path for a path that is relative to the driver's folder or to a home; other words are unchanged."""
    path = word.startswith((".", "~")) or (os.sep in word and os.path.exists(word))
    return os.path.abspath(os.path.expanduser(word)) if path else word


def source_of(name: str) -> list[str]:
    """Arguments of pip that install a distribution from the same source as here."""
    distribution = importlib.metadata.distribution(name)
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    url = urlparse(origin.get("url", ""))
    if url.scheme == "file" and "dir_info" in origin:
        folder = str(Path(unquote(url.path)))
        return ["-e", folder] if origin["dir_info"].get("editable") else [folder]
    return [f"{name}=={distribution.version}"]
