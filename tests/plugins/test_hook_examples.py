"""The example in the docstring of every hook, as the plugin's module."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from roll_core.plugins.loader import HOOK_NAMES, load_plugins
from roll_core.plugins.records import KINDS
from roll_core.plugins.registry import Registry
from roll_core.spec import hooks
from roll_testing.new import TEMPLATES
from roll_testing.part_checks import check_part

IMPORTS = """
from pathlib import Path

from roll_core.runtime.cluster.executors.local import LocalExecutor
from roll_core.spec.agent import Agent
from roll_core.spec.algorithms import AdvantageOutput
from roll_core.spec.diagnostics import CheckResult, KnownError
from roll_core.spec.environment import Environment, Opening, Turn
from roll_core.spec.hooks import hookimpl
from roll_core.spec.pipeline import Tracker
from roll_core.spec.platform import Platform, Probe
from roll_core.spec.providers import *
from roll_core.spec.rollout import PromptSampler, RewardFunction
from roll_core.types import Reward
from roll_migrate.conversion import ImportedConfig, ImportedKey

ROLL_HOOK_API = 1
"""
EVENTS = {
    "roll_run_started": ({"run": SimpleNamespace(config=SimpleNamespace(exp_name="grpo"))}, "started grpo"),
    "roll_step_finished": ({"run": None, "step": 3, "metrics": {"score/mean": 1.0}}, "solved at step 3"),
    "roll_run_finished": ({"run": None, "error": ValueError()}, "ended by ValueError"),
    "roll_run_recorded": ({"directory": Path("output/grpo/001")}, "recorded 001"),
}


def example_of(hook: str) -> str:
    """The fenced block of the docstring, as a module."""
    (block,) = re.findall(r"```python\n(.*?)```", inspect.getdoc(getattr(hooks, hook)), re.DOTALL)
    return block


@pytest.fixture
def plugin_of(tmp_path, monkeypatch):
    for template in TEMPLATES.iterdir():
        monkeypatch.syspath_prepend(str(template))
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "acme_fragments" / "config"
    folder.mkdir(parents=True)
    (folder / "acme_small.yaml").write_text("acme_small: {heads: 4}\n")
    info = tmp_path / "roll_acme-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: roll-acme\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[roll.plugins]\nroll-acme = acme\n")

    def load(source):
        (tmp_path / "acme.py").write_text(IMPORTS + source)
        importlib.invalidate_caches()
        return next(each for each in load_plugins(path=[str(tmp_path)], environ={}) if each.package == "roll-acme")

    yield load
    sys.modules.pop("acme", None)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.hook)
def test_hook_example_provides_a_part_that_matches_its_contract(plugin_of, kind):
    plugin = plugin_of(example_of(kind.hook))
    assert (plugin.state, plugin.hooks) == ("loaded", (kind.hook,)), plugin.error
    (record,) = plugin.providers
    assert type(record) is kind.record
    check_part(record, owner=Registry((plugin,)).owner(record))


@pytest.mark.parametrize("hook", EVENTS)
def test_the_example_of_an_event_runs(plugin_of, hook, capsys):
    arguments, printed = EVENTS[hook]
    plugin = plugin_of(example_of(hook))
    getattr(plugin.manager.hook, hook)(**arguments)
    assert capsys.readouterr().out.strip() == printed


def test_every_hook_has_an_example():
    assert {*EVENTS, *(kind.hook for kind in KINDS)} == HOOK_NAMES
