"""No module imports itself through others, in functions and for annotations neither."""

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("measure", Path(__file__).resolve().parents[2] / "tools" / "measure.py")
measure = importlib.util.module_from_spec(spec)
spec.loader.exec_module(measure)

REBUILT = ("roll_core.runtime.rollout.",)
"""Circles through these are known; they go with the modules."""


def test_no_modules_import_each_other():
    found = [circle for circle in measure.circles(measure.imports()) if not any(m.startswith(REBUILT) for m in circle)]
    assert found == []


def test_a_circle_is_found_wherever_it_is_entered():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e2"}, "e2": {"e"}}
    assert measure.circles(graph) == [["b", "c"], ["e", "e2"]]
