"""Checks and platforms made up for one test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from roll_core.builtin.cpu import CpuPlatform
from roll_core.plugins.loader import Plugin
from roll_core.plugins.registry import Registry
from roll_core.spec.diagnostics import CheckContext
from roll_core.spec.platform import Platform
from roll_core.spec.providers import CheckProvider, PlatformProvider, Provider
from roll_tools.examination import DoctorFinding, examine

MODULE = "checks_of_these_tests"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Where targets are looked up."""
    made = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, made)
    return made


@pytest.fixture
def doctor(module: ModuleType) -> Callable[..., list[DoctorFinding]]:
    """`doctor(checks={name: function}, platforms={name: (class, priority)}, records=[...], config=)`: what it finds."""

    def run(
        checks: dict[str, Any] | None = None,
        platforms: dict[str, tuple[type[Platform], int]] | None = None,
        records: tuple[Provider, ...] = (),
        check_platform: str = "",
        config: Any = None,
        more: tuple[Plugin, ...] = (),
        deadline_s: float = 20.0,
    ) -> list[DoctorFinding]:
        offered: list[Provider] = list(records)
        for name, function in (checks or {}).items():
            setattr(module, name, function)
            offered.append(CheckProvider(name=name, target=f"{MODULE}:{name}", summary="", platform=check_platform))
        for name, (cls, priority) in ({"cpu": (CpuPlatform, 0)} if platforms is None else platforms).items():
            setattr(module, name, cls)
            offered.append(PlatformProvider(name=name, target=f"{MODULE}:{name}", summary="", priority=priority))
        plugin = Plugin(
            package="acme", version="1", entry_point="acme", target="acme", state="loaded", providers=tuple(offered)
        )
        return list(examine(Registry([plugin, *more]), config, deadline_s=deadline_s))

    return run


@pytest.fixture
def context() -> CheckContext:
    """Of a laptop without a config."""
    return CheckContext(platform=CpuPlatform())
