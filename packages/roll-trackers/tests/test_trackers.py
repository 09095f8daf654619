"""The trackers with their own libraries, offline: `./run test-engines trackers`."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from roll_trackers.csv_tracker import CsvTracker

CONFIG = {"seed": 1, "role": {"lr": 0.1, "api_key": "<redacted>"}, "none": None}


def run_dir(tmp_path: Path, number: str = "001") -> Path:
    folder = tmp_path / "output" / "grpo" / number
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 1\n")
    (folder / "samples.jsonl").write_text("{}\n")
    return folder


def id_of(folder: Path, name: str) -> str:
    return json.loads((folder / "trackers" / f"{name}.json").read_text())["id"]


def continued(folder: Path, tmp_path: Path) -> Path:
    """The directory of a resumed run, as the driver prepares it."""
    new = run_dir(tmp_path, "002")
    (new / "trackers").mkdir()
    for file in (folder / "trackers").iterdir():
        (new / "trackers" / file.name).write_text(file.read_text())
    return new


def test_csv_has_one_row_per_step_and_a_column_for_each_metric(tmp_path):
    folder = run_dir(tmp_path)
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 5.0, "a": 1.0}\n')
    tracker = CsvTracker(folder, "grpo/001", {})
    tracker.log(2, {"a": 2.0})
    tracker.log(3, {"a": math.nan, "b": 3.0})
    tracker.close()
    with (folder / "metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert rows == [
        {"step": "1", "a": "1.0", "b": ""}, {"step": "2", "a": "2.0", "b": ""}, {"step": "3", "a": "nan", "b": "3.0"},
    ]  # fmt: skip


@pytest.mark.engine("mlflow")
def test_mlflow_has_config_metrics_files_and_outcome_and_continues_a_run(tmp_path):
    from mlflow import MlflowClient

    from roll_trackers.mlflow_tracker import MlflowTracker

    folder = run_dir(tmp_path)
    options = {"tags": {"team": "a"}, "notes": "first", "tracking_uri": f"sqlite:///{tmp_path}/m.db"}
    tracker = MlflowTracker(folder, "grpo/001", options)
    tracker.log_config(CONFIG)
    tracker.log(1, {"score/mean": 0.5, "nan": math.nan})
    try:
        raise RuntimeError
    except RuntimeError:
        tracker.close()
    client = MlflowClient(options["tracking_uri"])
    run = client.get_run(id_of(folder, "mlflow"))
    assert run.info.status == "FAILED"
    assert run.info.run_name == "grpo/001"
    assert run.data.params == {"seed": "1", "role.lr": "0.1", "role.api_key": "<redacted>", "none": "null"}
    assert run.data.tags["team"] == "a"
    second = MlflowTracker(continued(folder, tmp_path), "grpo/002", options)
    second.log_config(CONFIG | {"seed": 2})
    second.log(2, {"score/mean": 0.75})
    second.close()
    history = client.get_metric_history(run.info.run_id, "score/mean")
    assert [(each.step, each.value) for each in history] == [(1, 0.5), (2, 0.75)]
    assert client.get_run(run.info.run_id).info.status == "FINISHED"
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"config.yaml", "samples.jsonl"}


@pytest.mark.engine("wandb")
def test_wandb_writes_an_offline_run_and_continues_it(tmp_path):
    from roll_trackers.wandb_tracker import WandbTracker

    options = {"mode": "offline", "tags": ["a"], "notes": "first"}
    folder = run_dir(tmp_path)
    tracker = WandbTracker(folder, "grpo/001", options)
    tracker.log_config(CONFIG)
    tracker.log(1, {"score/mean": 0.5, "nan": math.nan})
    tracker.close()
    new = continued(folder, tmp_path)
    second = WandbTracker(new, "grpo/002", options)
    second.log(1, {"score/mean": 0.75})
    second.close()
    assert id_of(new, "wandb") == id_of(folder, "wandb")
    for each in (folder, new):
        (file,) = each.glob(f"wandb/offline-run-*/run-{id_of(folder, 'wandb')}.wandb")
        assert b"score/mean" in file.read_bytes()


@pytest.mark.engine("trackio")
def test_trackio_stores_metrics_and_continues_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from trackio.sqlite_storage import SQLiteStorage

    from roll_trackers.trackio_tracker import TrackioTracker

    folder = run_dir(tmp_path)
    tracker = TrackioTracker(folder, "grpo/001", {"project": "p"})
    tracker.log_config(CONFIG)
    tracker.log(1, {"score/mean": 0.5})
    tracker.close()
    second = TrackioTracker(continued(folder, tmp_path), "grpo/002", {"project": "p"})
    second.log(2, {"score/mean": 0.75})
    second.close()
    logs = SQLiteStorage.get_logs("p", "grpo-001")
    assert [(row["step"], row["score/mean"]) for row in logs] == [(1, 0.5), (2, 0.75)]
