"""`profile`: timelines of selected steps in the run directory."""

import gzip
import json

import pytest
import yaml

from roll_core.config import load
from roll_core.errors import ConfigError
from roll_testing.errors import mentions


def events(path):
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def profiled(result):
    folder = result.run_dir.profile
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_profiled_steps_are_in_the_timeline_and_report(local_runs):
    config = local_runs.sft(max_steps=4, profile={"roles": ["sft_train"], "steps": [2, 3]})
    result = local_runs.ok(config)
    assert profiled(result) == ["sft_train-steps-2-3-rank-0.json.gz"]
    (path,) = result.run_dir.profile.iterdir()
    names = {each.get("name", "") for each in events(path)}
    assert any(name.startswith("aten::") for name in names)
    assert "[memory]" not in names
    assert path.name in result.run_dir.report.read_text(encoding="utf-8")
    without = local_runs.ok(config | {"profile": None, "exp_name": "without"})
    assert profiled(without) == []
    names = [{name for name in line if "time/profile" in name} for line in local_runs.metrics(result)]
    assert names == [set(), set(), {"time/profile"}, set()]
    assert local_runs.timeless(result) == local_runs.timeless(without)


@pytest.mark.parametrize(("steps", "name"), [([3, 9], "3-4"), ([9, 10], None)])
def test_window_beyond_the_run_has_steps_up_to_the_last(local_runs, steps, name):
    profile = {"roles": ["sft_train"], "steps": steps, "memory": True}
    result = local_runs.ok(local_runs.sft(max_steps=4, profile=profile))
    assert profiled(result) == ([f"sft_train-steps-{name}-rank-0.json.gz"] if name else [])
    assert mentions(local_runs.screen.getvalue(), "profile", "9", "10") is (name is None)
    for path in result.run_dir.profile.glob("*"):
        changes = [each["args"]["Bytes"] for each in events(path) if each.get("name") == "[memory]"]
        assert max(changes) > 0 > min(changes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"roles": ["nobody"], "steps": [1, 2]},
        {"roles": [], "steps": [1, 2]},
        {"roles": ["sft_train"], "steps": [2, 1]},
        {"roles": ["sft_train"], "steps": [0, 1]},
        {"roles": ["sft_train"], "steps": [1]},
        {"roles": ["sft_train"]},
    ],
    ids=str,
)
def test_a_profile_of_nothing_is_a_located_error(local_runs, wrong):
    path = local_runs.folder / "wrong.yaml"
    given = local_runs.sft()
    path.write_text(yaml.safe_dump(given | {"profile": wrong}, sort_keys=False), encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load(path, [], local_runs.registry)
    first = len(yaml.safe_dump(given, sort_keys=False).splitlines()) + 1
    assert {int(problem.where.split(":")[-2]) >= first for problem in raised.value.problems} == {True}
