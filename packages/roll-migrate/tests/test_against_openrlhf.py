"""Every flag of the installed OpenRLHF's trainers has a rule, with its kind of value and its default."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from roll_migrate import openrlhf_flags as launch
from roll_migrate.openrlhf_keys import TABLES

if (OPENRLHF := find_spec("openrlhf")) is None:
    pytest.skip("needs openrlhf: ./run test-engines openrlhf openrlhf-preference", allow_module_level=True)

LAUNCHER = {"local_rank"}
"""A flag that the launcher adds."""


def parsed(trainer):
    """Keyword arguments of `add_argument` by flag, as the source of a trainer writes them: it cannot be imported."""
    source = Path(OPENRLHF.submodule_search_locations[0], "cli", f"{trainer}.py").read_text(encoding="utf-8")
    return {
        name: {node.arg: node.value for node in call.keywords}
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"
        for name in names(call.args[0])
    }


def names(flag):
    """The flag, or those of both trained roles if its text has a variable: `f"--{role}.adam.lr"`."""
    if isinstance(flag, ast.Constant):
        return [flag.value.removeprefix("--")]
    parts = [node.value if isinstance(node, ast.Constant) else None for node in flag.values]
    return ["".join(part or role for part in parts).removeprefix("--") for role in ("actor", "critic")]


@pytest.mark.parametrize("trainer", launch.TRAINERS)
def test_every_flag_has_a_rule_and_its_kind_of_value(trainer):
    flags = parsed(trainer)
    assert len(flags) > 50
    assert not flags.keys() - TABLES[trainer].keys() - LAUNCHER
    for name, options in flags.items():
        meaning = launch.ALIASES[trainer].get(name, (name,))[0]
        action = ast.literal_eval(options["action"]) if "action" in options else ""
        assert (meaning in launch.SWITCHES) is action.startswith("store_"), name
        # A list of any length may be one value in other versions.
        assert meaning in launch.LISTS if "nargs" in options else not launch.LISTS.get(meaning), name
        kind = getattr(options.get("type"), "id", "str")
        if not action and name not in LAUNCHER:
            assert (meaning in launch.TEXTS) is (kind == "str"), name


@pytest.mark.parametrize("trainer", launch.TRAINERS)
def test_importer_uses_the_parsers_defaults(trainer):
    result, source = {}, {launch.TRAINER: trainer, launch.FLAT: "pretrain" in parsed(trainer)}
    for flag, options in parsed(trainer).items():
        name = launch.ALIASES[trainer].get(flag, (flag,))[0]
        if "default" not in options or name not in {**launch.DEFAULTS, **launch.OF_TRAINER[trainer]}:
            continue
        if (default := ast.literal_eval(options["default"])) is not None:
            result[name] = list(default) if isinstance(default, tuple) else default
    if result.get("algo.advantage.is_correction_threshold") == 2:  # until 0.8; the report says so
        del result["algo.advantage.is_correction_threshold"]
    assert len(result) > 5
    assert {name: launch.fact(source, name) for name in result} == result
