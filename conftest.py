"""What holds for all tests, of the core and of the plugins."""

from __future__ import annotations

import gc
import inspect
import os
import re
from collections import Counter
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from roll_core import openmp
from roll_core.host import free_memory_bytes, usable_cores

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import FunctionType

    from roll_testing.kit import Kit

# Under `uv run pytest` Ray would give every worker an environment resolved anew, from a copy of the working directory.
# It reads this once, when it is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

# As `roll-core run` does, before torch is loaded: tests compute beside each other on few cores.
os.environ.update(openmp.environment(os.environ))

# How long an example takes says how busy the host is. What else is set, as by Hypothesis itself under CI, stays.
settings.register_profile("untimed", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Keep the garbage collector away from modules and test items, which last until the end.

    There are millions of such objects, and every full collection of a test would visit them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


BRIEF = {
    "test_logprobs_equal_the_reference",
    "test_gradients_are_clipped_to_their_global_norm",
    "test_steps_of_adamw_equal_the_reference",
    "test_a_resumed_run_equals_an_uninterrupted_one",
    "test_a_run_resumes_from_the_references_state",
    "test_exported_weights_are_those_that_compute",
    "test_declared_parallelism_is_tested",
}
"""Tests that `-m "not slow"` runs of a kit's class with mark `brief`: outputs, a step, a checkpoint, an export."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the other tests of such a class as slow, and those of a state that was saved before the first step."""
    if mark := item.get_closest_marker("brief"):
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if getattr(item, "originalname", "") not in BRIEF or parameters.get("done") == 0:
            item.add_marker(pytest.mark.slow(**mark.kwargs))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Workers for `-n auto`: two more than cores, since many tests wait for their processes, if memory is enough."""
    return max(1, min(usable_cores() + 2, free_memory_bytes() // WORKER_BYTES, 8))


WORKER_BYTES = 3 << 30
"""Memory that a worker and the processes of its tests may take."""
UNIT = 100
"""Tests that one worker of xdist takes at once, at most."""
ON_RAY = re.compile(r"\[(.*-)?ray(-.*)?\]$")
"""Ids of tests with a parameter `ray`."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Split what `--dist loadscope` gives to one worker: a kit's class can have more tests than all others together.

    Modules that fork processes from a server (`shared_tests.forked`) run in one worker: starting it takes 10 CPU s.
    So do tests on Ray, of which each worker would start an instance.
    """
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class UnitScheduling(LoadScopeScheduling):
        def __init__(self) -> None:
            super().__init__(config, log)
            self._scopes: dict[str, str] = {}
            self._sizes: Counter[str] = Counter()

        def _split_scope(self, nodeid: str) -> str:
            if nodeid not in self._scopes:
                path, scope = nodeid.partition("::")[0], super()._split_scope(nodeid)
                if ON_RAY.search(nodeid):
                    scope = "ray"
                elif _forks(config.rootpath / path):
                    scope = "forked"
                self._scopes[nodeid] = f"{scope}#{self._sizes[scope] // UNIT}"
                self._sizes[scope] += 1
            return self._scopes[nodeid]

    return UnitScheduling()


@cache
def _forks(module: Path) -> bool:
    return re.search(r"^from shared_tests(\.| import )forked\b", module.read_text(encoding="utf-8"), re.M) is not None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what another command runs, instead of collecting thousands of skips.

    Tests of an engine that is not installed run under `./run test-engines`, which sets `ROLL_CONFORMANCE=full`: then a
    missing engine is a failure. With `ROLL_LEFT_OUT`, which it sets for an engine of the shared environment, only what
    `./run test` leaves out remains. A kit's tests of a record run once for each record, not for each of its suites.
    """
    everything = os.environ.get("ROLL_CONFORMANCE") == "full"
    again = bool(os.environ.get("ROLL_LEFT_OUT"))
    kept: dict[object, pytest.Item] = {}
    for item in items:
        if not _not_here(item, everything) and not (again and not _not_here(item, False)):
            kept.setdefault(_of_record(item) or item, item)
    left_out = set(items) - set(kept.values())
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = kept.values()


def _of_record(item: pytest.Item) -> tuple[object, ...] | None:
    """Test, kind and name of a part, for a test that reads only the part's record."""
    part, function = getattr(item, "cls", None), getattr(item, "function", None)
    if function is None or function.__module__ != "roll_testing.packaging":
        return None
    return function.__name__, part._kind, part.name


def _not_here(item: pytest.Item, everything: bool) -> bool:
    mark, function = item.get_closest_marker("engine"), getattr(item, "function", None)
    if mark is not None and not everything and not (mark.args and _is_importable(mark.args[0])):
        return True
    runs_on = getattr(item, "callspec", None)
    if runs_on is not None and runs_on.params.get("runs") == "ray" and not os.environ.get("ROLL_EVERY_EXECUTOR"):
        return item.get_closest_marker("on_ray") is None
    part = getattr(item, "cls", None)
    if part is None or not hasattr(part, "_engine_or_skip"):
        return False
    if getattr(_provider(part), "forward_only", False) and "need_training" in _calls(part, function):
        return True
    computes = {"case", "setup"} & set(item.fixturenames) or "_engine_or_skip" in function.__code__.co_names
    return bool(computes) and not everything and not _engine_is_here(part)


@cache
def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent
        return False


@cache
def _calls(part: type[Kit], test: FunctionType) -> set[str]:
    """Names that a test of a kit uses, with those that the kit's methods it calls use."""
    found: set[str] = set()
    remaining = [test]
    while remaining:
        names = set(remaining.pop().__code__.co_names) - found
        found |= names
        remaining += [method for name in names if inspect.isfunction(method := getattr(part, name, None))]
    return found


@cache
def _provider(part: type[Kit]) -> object:
    """The record under test; None where its name is that of no part, which a test of the kit reports."""
    from roll_core.errors import PluginError

    try:
        return part().provider
    except PluginError:
        return None


@cache
def _engine_is_here(part: type[Kit]) -> bool:
    from roll_core.errors import MissingRequirementError
    from roll_core.plugins.requirements import check_requirements

    provider = _provider(part)
    try:
        if provider is not None:
            check_requirements(provider, owner=part.name)
    except MissingRequirementError:
        return False
    return True
