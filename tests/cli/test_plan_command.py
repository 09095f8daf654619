"""`roll-core plan`: what is shown, and exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from roll_core.cli import main as cli
from roll_testing.errors import mentions
from shared_tests.hf_plugins import HF_PACKAGES

SFT = """\
pipeline: sft
num_gpus_per_node: 4
tokenizer: {kind: byte}
sft_train:
  model_args: {dtype: fp32, random_init: {model_type: llama, hidden_size: 256, num_hidden_layers: 2,
    intermediate_size: 512, num_attention_heads: 4}}
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
  device_mapping: [0, 1, 2]
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLL_PLUGINS", HF_PACKAGES)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "run.yaml").write_text(SFT)


def test_a_run_that_fits_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "run.yaml", "--host-memory", "8"]) == 0
    shown = capsys.readouterr().out
    assert "sft on platform cpu, executor ray: 1 node of 4 slots" in shown
    assert "0 · 0–2        ranks 0–2" in shown
    assert "✓ fits: at most" in shown


def test_formulas_are_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "run.yaml", "-v", "--host-memory", "8"]) == 0
    assert mentions(capsys.readouterr().out, "11.0", "8", "1.4")


def test_run_that_does_not_fit_exits_with_1_and_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "run.yaml", "--host-memory", "2.5", "response_length=4096"]) == 1
    shown = capsys.readouterr().out
    assert "✗ does not fit by" in shown
    assert "it fits with: sft_train.training_args.per_device_train_batch_size=" in shown


def test_a_run_that_would_not_start_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "run.yaml", "sft_train.device_mapping=[4]"]) == 1
    assert mentions(capsys.readouterr().out, "1", "sft_train")


def test_a_mistake_is_2_and_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "run.yaml", "sede=1"]) == 2
    assert "sede" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "run.yaml", "other.yaml"])
    assert ended.value.code == 2
    assert os.listdir() == ["run.yaml"]


def test_everything_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "run.yaml", "--json", "--host-memory", "1.5"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["starts"], found["fits"], found["known"]) == (True, False, True)
    (role,) = found["memory"]
    assert role["parameters"] == 2 * 258 * 256 + 256 + 2 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256)
    at_work = [use for use in role["uses"] if not use["during"] or "backward" in use["during"]]
    for place in ("device", "host"):
        assert role["acts"]["backward"][place] == sum(use["num_bytes"] for use in at_work if use["on"] == place) > 0
    assert found["proposal"] is None or found["proposal"]["over_bytes"] < found["over_bytes"]


@pytest.mark.parametrize(
    "machine",
    [
        ("--slot-memory", "80", "--host-memory", "1000"),
        ("--slot-memory", "80"),
        ("--host-memory", "1000"),
        ("--nodes", "1"),
    ],
)
def test_a_run_for_another_machine_is_planned(
    machine: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLL_PLUGINS", f"{HF_PACKAGES},roll-platform-cuda")
    elsewhere = ["plan", "run.yaml", "platform=cuda", "--json"]
    assert cli.main([*elsewhere, *machine]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["starts"], found["problems"], found["platform"]) == (True, [], "cuda")
    assert cli.main(elsewhere) == 1


def test_no_files_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "run.yaml", "--host-memory", "8", "--no-files"]) == 0


def test_slot_memory_of_slots_without_memory_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "run.yaml", "--slot-memory", "80"]) == 2
    assert mentions(capsys.readouterr().err, "platform=cuda")


def test_a_hub_id_without_files_is_unknown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLL_PLUGINS", f"{HF_PACKAGES},roll-platform-cuda")
    hub = ["~sft_train.model_args.random_init", "pretrain=some-org/no-such-model", "platform=cuda"]
    assert cli.main(["plan", "run.yaml", *hub, "--json", "--slot-memory", "80", "--host-memory", "1000"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["starts"], found["known"], found["fits"]) == (True, False, False)
    assert mentions(found["memory"][0]["unknown"], "some-org/no-such-model", "config.json")


@pytest.mark.parametrize("keys", ["[1]", '"llama"', '{"model_type": "llama", "hidden_size": "256"}'])
def test_a_model_config_that_is_none_is_unknown(keys: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(keys)
    model = ["~sft_train.model_args.random_init", "pretrain=model", "--host-memory", "8", "--json"]
    assert cli.main(["plan", "run.yaml", *model]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["known"]
    assert mentions(found["memory"][0]["unknown"], "model/config.json")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--nodes", "0", "a whole number > 0"),
        ("--nodes", "1.5", "a whole number > 0"),
        ("--host-memory", "nan", "a number ≥ 0"),
        ("--slot-memory", "-1", "a number ≥ 0"),
        ("--host-memory", "80GiB", "a number ≥ 0"),
    ],
)
def test_a_machine_that_cannot_be_is_2(
    capsys: pytest.CaptureFixture[str], option: str, value: str, expected: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "run.yaml", option, value])
    assert ended.value.code == 2
    assert f"argument {option}: found {value}, expected {expected}" in capsys.readouterr().err


def test_unknown_memory_is_not_reported_as_fitting(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = ["~sft_train.model_args.random_init", "pretrain=output/before/latest/export"]
    assert cli.main(["plan", "run.yaml", "--host-memory", "8", *unknown]) == 0
    shown = capsys.readouterr().out
    assert "output/before/latest/export" in shown
    assert "· the other roles need at most" in shown
    assert "✓" not in shown
