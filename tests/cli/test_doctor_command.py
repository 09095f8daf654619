"""`roll-core doctor`: output and exit codes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from roll_core.cli import main as cli
from shared_tests.hf_plugins import HF_PACKAGES

SFT = """\
pipeline: sft
pretrain: model
sft_train:
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a config whose model and rows are there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLL_PLUGINS", HF_PACKAGES)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "run.yaml").write_text(SFT)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


def test_a_good_config_on_a_good_machine_is_0(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "run.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "✓  platform cpu" in shown
    assert "models sft_train" in shown
    assert "no errors" in shown


def test_error_exits_with_1_and_names_a_remedy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.jsonl").unlink()
    assert cli.main(["doctor", "run.yaml"]) == 1
    shown = capsys.readouterr().out
    assert "✗  data sft_train.data_args" in shown
    assert "→ paths are relative to" in shown
    assert "1 error" in shown


def test_json_has_every_finding(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "run.yaml", "pretrain=nowhere", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False
    assert {frozenset(each) for each in said["findings"]} == {
        frozenset({"check", "package", "subject", "level", "found", "wanted", "remedy"})
    }
    (wrong,) = [each for each in said["findings"] if each["level"] == "error"]
    assert (wrong["check"], wrong["subject"], wrong["package"]) == ("models", "sft_train", "roll-tools")


def test_a_config_with_a_mistake_is_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "run.yaml", "sede=1"]) == 2
    assert "sede" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["run.yaml", "run.yaml"], ["seed=3"], ["--jsno"]])
def test_a_wrong_command_is_2(folder: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *words])
    assert ended.value.code == 2


def test_doctor_skips_characters_that_the_terminal_cannot_show(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(["doctor"]) == 0
    sys.stdout.flush()
    assert b"platform cpu" in written.getvalue()
