"""What the doctor says of CANN's variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_core.spec.diagnostics import CheckContext
from roll_platform_npu import checks

HERE = CheckContext(platform=None)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in checks.HOMES:
        monkeypatch.delenv(name, raising=False)


def test_an_environment_that_was_not_set_names_the_script() -> None:
    (found,) = checks.cann(HERE)
    assert found.level == "error"
    assert "set_env.sh" in found.remedy


def test_a_home_is_there_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checks.HOMES[0], str(tmp_path))
    assert [each.level for each in checks.cann(HERE)] == ["ok"]
    monkeypatch.setenv(checks.HOMES[1], str(tmp_path / "none"))
    assert [each.level for each in checks.cann(HERE)] == ["ok", "error"]
