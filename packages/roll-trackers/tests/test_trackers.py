"""The trackers with their own libraries, offline: `./run test-engines trackers`."""

from __future__ import annotations

import asyncio
import csv
import gzip
import json
import math
import pickle
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from roll_core.errors import TrackerError
from roll_trackers.csv_tracker import CsvTracker
from roll_trackers.remote_run import RemoteTracker

FILES = ("config.yaml", "report.html", "samples.jsonl")
SECRET = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"seed": 1, "role": {"lr": 0.1, "api_key": "<redacted>"}, "none": None}


def run_dir(tmp_path: Path, number: str = "001") -> Path:
    folder = tmp_path / "output" / "grpo" / number
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 1\n")
    (folder / "samples.jsonl").write_text("{}\n")
    (folder / "report.html").write_text("<p>report</p>\n")
    return folder


def end(tracker, folder: Path, *, failed: bool) -> None:
    """The end of a run, as the driver tells it."""
    tracker.run_finished(failed=failed, files=[folder / name for name in FILES])
    tracker.close()


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


def test_csv_merges_a_step_that_is_logged_again(tmp_path):
    folder = run_dir(tmp_path)
    tracker = CsvTracker(folder, "grpo/001", {})
    for step in range(200):
        tracker.log(step, {"a": float(step)})
    few = len(pickle.dumps(vars(tracker)))
    for step in range(200, 400):
        tracker.log(step, {"a": float(step)})
    assert len(pickle.dumps(vars(tracker))) <= few + 8
    tracker.log(399, {"val/score": 0.5})
    tracker.close()
    with (folder / "metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["step"] for row in rows] == [str(step) for step in range(400)]
    assert rows[-1] == {"step": "399", "a": "399.0", "val/score": "0.5"}
    assert rows[0] == {"step": "0", "a": "0.0", "val/score": ""}
    assert not list(folder.glob(".metrics.csv*"))


class EndRecorder(RemoteTracker):
    """A remote run in a list."""

    name = "recorder"

    def open(self, run_name, options, run_id):
        self.ends = []
        return run_id or run_name

    def log(self, step, metrics): ...

    def end(self, *, failed, files):
        self.ends.append((failed, [path.name for path in files]))


@pytest.mark.parametrize("failed", [False, True])
def test_a_remote_run_ends_as_the_run_did_with_its_files(tmp_path, failed):
    folder = run_dir(tmp_path)
    tracker = EndRecorder(folder, "grpo/001", {})
    end(tracker, folder, failed=failed)
    assert tracker.ends == [(failed, list(FILES))]
    again = EndRecorder(continued(folder, tmp_path), "grpo/002", {})
    assert id_of(tmp_path / "output" / "grpo" / "002", "recorder") == "grpo/001"
    again.close()  # another tracker could not be opened
    assert again.ends == [(True, [])]


@pytest.mark.engine("mlflow")
def test_mlflow_has_config_metrics_files_and_continues_a_run(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    from roll_trackers.mlflow_tracker import MlflowTracker

    folder = run_dir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    options = {"tags": {"team": "a"}, "notes": "first"}
    tracker = MlflowTracker(folder, "grpo/001", options)
    tracker.log_config(CONFIG)
    tracker.log(1, {"score/mean": 0.5, "nan": math.nan})
    tracker.log(2, {"score/mean": 0.6})
    end(tracker, folder, failed=True)
    client = MlflowClient(f"sqlite:///{tmp_path}/output/mlflow.db")
    run = client.get_run(id_of(folder, "mlflow"))
    assert run.info.status == "FAILED"
    assert run.info.run_name == "grpo/001"
    assert run.data.params == {"seed": "1", "role.lr": "0.1", "role.api_key": "<redacted>", "none": "null"}
    assert run.data.tags["team"] == "a"
    new = continued(folder, tmp_path)
    second = MlflowTracker(new, "grpo/002", options)
    second.log_config(CONFIG | {"seed": 2})
    second.log(2, {"score/mean": 0.75})
    end(second, new, failed=False)
    history = client.get_metric_history(run.info.run_id, "score/mean")
    assert [(each.step, each.value) for each in history] == [(1, 0.5), (2, 0.6), (2, 0.75)]
    run = client.get_run(run.info.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["score/mean"] == 0.75
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == set(FILES)
    assert run.info.artifact_uri.startswith((tmp_path / "output" / "mlartifacts").as_uri())


@pytest.mark.engine("mlflow")
def test_mlflow_takes_names_with_the_tags_of_a_data_set(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    from roll_trackers.mlflow_tracker import MlflowTracker

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = run_dir(tmp_path)
    store = (tmp_path / "store").as_uri()
    tracker = MlflowTracker(folder, "grpo/001", {"tracking_uri": store})
    given = {"rewards": {"C++": {"weight": 1}, "größe (m)": 2}, "long": {"x" * 300: 3}}
    tracker.log_config(given)
    tracker.log(1, {"val/C++/score/mean": 0.5, "val/größe (m)/score/mean": 0.25, "val//score/mean": 1.0})
    end(tracker, folder, failed=False)
    second = MlflowTracker(continued(folder, tmp_path), "grpo/002", {"tracking_uri": store})
    second.log_config(given)  # of which the run has all parameters
    second.close()
    run = MlflowClient(store).get_run(id_of(folder, "mlflow"))
    assert run.data.params == {
        "rewards.C__.weight": "1", "rewards.größe _m_": "2", f"long.{'x' * 245}": "3",
    }  # fmt: skip
    assert run.data.metrics == {
        "val/C__/score/mean": 0.5, "val/größe _m_/score/mean": 0.25, "val/score/mean": 1.0,
    }  # fmt: skip


@pytest.mark.engine("wandb")
def test_wandb_writes_an_offline_run_and_continues_it(tmp_path, monkeypatch):
    from roll_trackers.wandb_tracker import WandbTracker

    monkeypatch.delenv("WANDB_CONSOLE", raising=False)
    arguments = ["roll-core", "run", f"tracker_kwargs.wandb.api_key={SECRET}"]
    monkeypatch.setattr(sys, "argv", arguments)
    options = {"mode": "offline", "tags": ["a"], "notes": "first", "api_key": SECRET}
    folder = run_dir(tmp_path)
    tracker = WandbTracker(folder, "grpo/001", options)
    assert sys.argv is arguments
    sys.stdout.write("not recorded\n")
    tracker.log_config(CONFIG)
    tracker.log(1, {"score/mean": 0.5, "nan": math.nan})
    end(tracker, folder, failed=True)
    new = continued(folder, tmp_path)
    second = WandbTracker(new, "grpo/002", options)
    second.log(1, {"score/mean": 0.75})
    end(second, new, failed=False)
    assert id_of(new, "wandb") == id_of(folder, "wandb")
    for each in (folder, new):
        (file,) = each.glob(f"wandb/offline-run-*/run-{id_of(folder, 'wandb')}.wandb")
        deadline = time.monotonic() + 60
        while b"score/mean" not in file.read_bytes():  # wandb's service may write it after `finish`
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for stored in (path for path in each.rglob("*") if path.is_file()):
            assert SECRET.encode() not in stored.read_bytes(), stored
            assert b"not recorded" not in stored.read_bytes(), stored
        assert {path.name for path in each.glob("wandb/offline-run-*/files/*")} >= set(FILES)


def swanlab_records(folder: Path):
    """Records of the only offline run in a run directory, in order."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (file,) = folder.glob("swanlab/run-*/run-*.swanlab")
    reader = DataStoreReader()
    reader.open(file)
    records = []
    while (data := reader.scan()) is not None:
        records.append(Record.FromString(data))
    reader.close()
    return records


def swanlab_scores(folder: Path):
    """Step and value of each `score/mean`."""
    scalars = [each.scalar for each in swanlab_records(folder) if each.HasField("scalar")]
    return [(each.step, each.value.number) for each in scalars if each.key == "score/mean"]


def swanlab_state(folder: Path) -> str:
    from swanlab.proto.swanlab.run.v1.run_pb2 import RunState

    (found,) = [each.finish.state for each in swanlab_records(folder) if each.HasField("finish")]
    return RunState.Name(found)


@pytest.mark.engine("swanlab")
def test_swanlab_writes_an_offline_run_and_continues_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    from roll_trackers.swanlab_tracker import SwanlabTracker

    def handler(number, frame): ...

    before = signal.signal(signal.SIGINT, handler)
    try:
        options = {"project": "p", "mode": "offline", "tags": ["a"], "notes": "first", "api_key": SECRET}
        folder = run_dir(tmp_path)
        tracker = SwanlabTracker(folder, "grpo/001", options)
        assert signal.getsignal(signal.SIGINT) is handler
        tracker.log_config(CONFIG)
        tracker.log(1, {"score/mean": 0.5, "nan": math.nan})
        tracker.log(2, {"score/mean": 0.625})
        sys.stdout.write("not recorded\n")
        end(tracker, folder, failed=True)
        new = continued(folder, tmp_path)
        second = SwanlabTracker(new, "grpo/002", options)
        second.log(2, {"score/mean": 0.75})
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the run is over
        end(second, new, failed=False)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert id_of(new, "swanlab") == id_of(folder, "swanlab")
    assert swanlab_scores(folder) == [(1, 0.5), (2, 0.625)]
    assert swanlab_scores(new) == [(2, 0.75)]
    assert [swanlab_state(each) for each in (folder, new)] == ["RUN_STATE_CRASHED", "RUN_STATE_FINISHED"]
    saved = {record.save.name for record in swanlab_records(folder) if record.HasField("save")}
    assert saved >= set(FILES)
    (metadata,) = folder.glob("swanlab/run-*/files/swanlab-metadata.json")
    assert "command" not in metadata.read_text()
    (config,) = folder.glob("swanlab/run-*/files/config.yaml")
    assert yaml.safe_load(config.read_text())["role"]["value"] == CONFIG["role"]
    for stored in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert SECRET.encode() not in stored.read_bytes(), stored
        assert b"not recorded" not in stored.read_bytes(), stored


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
    tracker.log(2, {"score/mean": 0.6})
    end(tracker, folder, failed=True)
    second = TrackioTracker(continued(folder, tmp_path), "grpo/002", {"project": "p"})
    second.log(2, {"score/mean": 0.75})
    second.close()
    logs = SQLiteStorage.get_logs("p", "grpo-001")
    assert [(row["step"], row["score/mean"]) for row in logs] == [(1, 0.5), (2, 0.6), (2, 0.75)]
    blobs = {path.read_bytes() for path in tmp_path.rglob("blobs/sha256/*/*")}
    assert blobs == {(folder / name).read_bytes() for name in FILES}


def spans_of(folder: Path) -> dict[str, dict]:
    spans = [json.loads(line) for line in (folder / "spans.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({span["context"]["trace_id"] for span in spans}) == 1
    return {span["name"]: span for span in spans}


@pytest.mark.engine("opentelemetry.sdk")
def test_opentelemetry_nests_stages_and_links_a_resumed_run(tmp_path):
    from roll_trackers.opentelemetry_tracker import OpenTelemetryTracker

    folder = run_dir(tmp_path)
    tracker = OpenTelemetryTracker(folder, "grpo/001", {"exporter": "file", "service_name": "ours"})

    async def work(name: str) -> None:
        with tracker.stage(name):
            await asyncio.sleep(0.01)

    async def main() -> None:
        with tracker.stage("step"):
            with tracker.stage("rollout"):
                late = asyncio.create_task(outlives())
                await asyncio.gather(work("reward"), work("generate"))
            with pytest.raises(ValueError, match="a-secret"), tracker.stage("train"):
                raise ValueError("a-secret")
            tracker.log(7, {"score/mean": 0.5})
        go.set()
        await late

    async def outlives() -> None:
        await go.wait()
        await work("late")

    go = asyncio.Event()
    asyncio.run(main())
    end(tracker, folder, failed=True)
    spans = spans_of(folder)
    ids = {span["context"]["span_id"]: name for name, span in spans.items()}
    parents = {name: ids.get(span["parent_id"]) for name, span in spans.items()}
    assert parents == {
        "run": None, "step": "run", "rollout": "step", "reward": "rollout", "generate": "rollout", "train": "step",
        "late": "run",
    }  # fmt: skip
    assert spans["run"]["attributes"] == {"roll.run": "grpo/001"}
    assert spans["step"]["attributes"] == {"roll.step": 7}
    assert spans["run"]["resource"]["attributes"]["service.name"] == "ours"
    assert {name: span["status"]["status_code"] for name, span in spans.items() if name in ("run", "train")} == {
        "run": "ERROR", "train": "ERROR",
    }  # fmt: skip
    assert "a-secret" not in (folder / "spans.jsonl").read_text(encoding="utf-8")

    new = continued(folder, tmp_path)
    end(OpenTelemetryTracker(new, "grpo/002", {"exporter": "file"}), new, failed=False)
    second = spans_of(new)["run"]
    assert second["status"]["status_code"] == "OK"
    assert second["links"][0]["context"] == spans["run"]["context"] | {"trace_state": "[]"}
    assert second["context"]["trace_id"] != spans["run"]["context"]["trace_id"]


class Policy:
    """A worker whose methods fail on demand; `evaluate` is async."""

    def __init__(self, place, peers): ...

    def update(self, value):
        if value < 0:
            raise ValueError("a-secret")
        return value

    async def evaluate(self, value):
        await asyncio.sleep(0.01)
        return value


@pytest.mark.engine("opentelemetry.sdk")
def test_opentelemetry_records_worker_calls_in_their_stages(tmp_path, monkeypatch):
    """With the SDK's exporter in memory; the tree is written by hand. Another process is a worker without the driver's
    provider."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from roll_core.builtin.cpu import CpuPlatform
    from roll_core.errors import WorkerError
    from roll_core.runtime.cluster.executors.base import GroupSpec
    from roll_core.runtime.cluster.executors.local import LocalExecutor
    from roll_core.runtime.cluster.placement import Place
    from roll_core.runtime.records.tracking import Trackers
    from roll_trackers import opentelemetry_tracker

    exporters = []

    def in_memory(valid, file):
        exporters.append(InMemorySpanExporter())
        return exporters[-1]

    monkeypatch.setattr(opentelemetry_tracker, "exporter", in_memory)
    folder = run_dir(tmp_path)
    trackers = Trackers.opened({"o": lambda: opentelemetry_tracker.OpenTelemetryTracker(folder, "grpo/001", {})})
    specs = [
        GroupSpec(role=role, kind="train", target=f"{__name__}:Policy", places=(Place(rank=0, world_size=1),))
        for role in ("actor_train", "critic")
    ]

    async def main():
        async with LocalExecutor(CpuPlatform(), 1) as executor:
            groups = await executor.start(specs)
            actor, critic = groups["actor_train"], groups["critic"]
            await actor.call("update", {0: (0,)})  # outside all stages
            with trackers.stage("step"), trackers.stage("train"):
                assert await asyncio.gather(actor.call("update", {0: (1,)}), critic.call("evaluate", {0: (2,)})) == [
                    [1],
                    [2],
                ]
                with pytest.raises(WorkerError), trackers.stage("again"):
                    await actor.call("update", {0: (-1,)})
            monkeypatch.setattr(opentelemetry_tracker.CallSpans, "of_driver", {})
            elsewhere = await LocalExecutor.start(executor, [specs[1]])
            with trackers.stage("evaluation"):
                await elsewhere["critic"].call("evaluate", {0: (3,)})
            monkeypatch.undo()

    asyncio.run(main())
    trackers.finish(failed=False, files=[])
    here, there = (each.get_finished_spans() for each in exporters)
    assert [span.name for span in there] == ["critic.evaluate"]
    spans = [*here, *there]
    assert len({span.context.trace_id for span in spans}) == 1
    name_of = {span.context.span_id: span.name for span in spans}
    tree = sorted((span.name, name_of[span.parent.span_id] if span.parent else "") for span in spans)
    assert tree == [
        ("actor_train.update", "again"),
        ("actor_train.update", "train"),
        ("again", "train"),
        ("critic.evaluate", "evaluation"),
        ("critic.evaluate", "train"),
        ("evaluation", "run"),
        ("run", ""),
        ("step", "run"),
        ("train", "step"),
    ]
    failed = {(span.name, span.status.description) for span in spans if span.status.status_code.name == "ERROR"}
    assert failed == {("actor_train.update", "ValueError"), ("again", "WorkerError")}
    (other,) = there
    assert other.attributes == {"roll.role": "critic", "roll.rank": 0}


@pytest.mark.engine("opentelemetry.sdk")
def test_opentelemetry_sends_spans_and_ends_without_a_collector(tmp_path, caplog):
    from http.server import BaseHTTPRequestHandler, HTTPServer

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    from roll_trackers.opentelemetry_tracker import OpenTelemetryTracker

    bodies = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words): ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        folder = run_dir(tmp_path)
        url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        tracker = OpenTelemetryTracker(folder, "grpo/001", {"endpoint": url})
        with tracker.stage("step"):
            pass
        end(tracker, folder, failed=False)
        server.shutdown()
    found = [
        span.name
        for body in bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert found == ["step", "run"]
    begin = time.monotonic()
    new = run_dir(tmp_path, "003")
    end(OpenTelemetryTracker(new, "grpo/003", {"endpoint": url}), new, failed=False)
    assert time.monotonic() - begin < 40
    assert caplog.messages
    assert all("tracker opentelemetry" in message for message in caplog.messages)


@pytest.mark.engine("prometheus_client")
def test_prometheus_serves_the_last_values_until_it_is_closed(tmp_path):
    import urllib.error
    import urllib.request

    from prometheus_client.parser import text_string_to_metric_families

    from roll_trackers.prometheus_tracker import PrometheusTracker

    folder = run_dir(tmp_path)
    tracker = PrometheusTracker(folder, "grpo/001", {"port": 0})
    url = (folder / "trackers" / "prometheus.txt").read_text().strip()
    assert url.startswith("http://127.0.0.1:")
    tracker.log(1, {"score/mean": 0.5, 'a "quoted" name': 1.0})
    tracker.log(2, {"score/mean": 0.75, "bad": math.nan})
    with urllib.request.urlopen(url) as response:
        families = {each.name: each.samples for each in text_string_to_metric_families(response.read().decode())}
    assert [(each.labels, each.value) for each in families["roll_step"]] == [({"run": "grpo/001"}, 2.0)]
    values = {each.labels["name"]: each.value for each in families["roll_metric"]}
    assert math.isnan(values.pop("bad"))
    assert values == {"score/mean": 0.75, 'a "quoted" name': 1.0}
    with pytest.raises(TrackerError):
        PrometheusTracker(folder, "grpo/002", {"port": tracker.port})
    tracker.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url)
