"""Whole runs: an environment of this package and a class of the user, from the config to metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_environment_runs import metrics, run

from roll_core.errors import EnvironmentsFailedError
from roll_testing.errors import check_error


def test_the_text_game_is_trained_on(tmp_path: Path) -> None:
    line = metrics(run(tmp_path, {"environment": "text_game", "env_config": {"rooms": 3}}))
    assert line["env/env/turns/mean"] == 2
    assert line["env/env/truncated_share"] == 1
    assert 0 <= line["env/env/valid"] <= 1


@pytest.mark.engine("gymnasium")
def test_a_gymnasium_environment_is_trained_on(tmp_path: Path) -> None:
    line = metrics(run(tmp_path, {"environment": "gymnasium", "env_config": {"id": "FrozenLake-v1"}}))
    assert line["env/env/turns/mean"] == 2


LINES = """
class Lines:
    def __init__(self, fails=False):
        self.fails = fails

    def reset(self, seed=None):
        return f"write {seed % 10}", {}

    def step(self, action):
        if self.fails:
            raise ValueError("no such level")
        return "", float(len(action)), True, False, {}
"""


@pytest.mark.parametrize("fails", [False, True])
def test_user_class_runs_in_a_process_and_its_failure_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    (tmp_path / "my_lines.py").write_text(LINES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    options = {"make": "my_lines:Lines", "options": {"fails": fails}}
    entry = {"environment": "gymnasium", "env_config": options, "concurrency": 1, "max_retries": 0}
    result = run(tmp_path, entry, max_consecutive_failures=1)
    if not fails:
        assert metrics(result)["env/env/turns/mean"] == 1
        return
    assert isinstance(result.error, EnvironmentsFailedError)
    check_error(result.error, EnvironmentsFailedError, "roll-environments", "my_lines:Lines", "step", "ValueError")
