"""`roll-core push`: the model card, and an upload to a local server with the hub's API."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from roll_core.cli.main import main
from roll_core.runtime.records.record import RunFacts, RunRecord
from roll_core.runtime.records.run_dir import RunDir
from roll_core.runtime.records.tracking import MetricsFile
from roll_testing.errors import mentions

SECRET = "hf_" + "a1B2c3D4" * 5


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "output", "grpo")
    config = {
        "pipeline": "rlvr", "pretrain": "owner/base", "adv_estimator": "grpo", "seed": 7, "note": f"key {SECRET}",
        "output_dir": str(tmp_path / "output"),
    }  # fmt: skip
    run.config.write_text(yaml.safe_dump(config), encoding="utf-8")
    record = RunRecord(run.record, RunFacts(name=run.name, pipeline="rlvr", steps_asked=2))
    record.step(2)
    record.finish()
    metrics = MetricsFile(run.metrics)
    metrics.log(1, {"val/score/mean": 0.25, "time/step": 1.0})
    metrics.log(2, {"val/score/mean": 0.5})
    metrics.close()
    run.export.mkdir()
    (run.export / "config.json").write_text("{}", encoding="utf-8")
    (run.export / "model.safetensors").write_bytes(b"weights")
    return run


def test_dry_run_writes_a_card_and_needs_no_network(run, capsys, monkeypatch):
    from huggingface_hub import ModelCard

    monkeypatch.setattr("roll_tools.hub._upload", None)
    assert main(["push", str(run.experiment), "me/model", "--dry-run"]) == 0
    assert mentions(capsys.readouterr().out, "README.md", "config.json", "model.safetensors  7")
    card = ModelCard.load(run.export / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers", "tags": ["roll", "rlvr", "grpo"], "pipeline_tag": "text-generation",
        "base_model": "owner/base",
    }  # fmt: skip
    assert "| `val/score/mean` | 0.5 |" in card.text
    assert "2 of 2 steps" in card.text
    assert 'from_pretrained("me/model")' in card.text
    assert "seed: 7" in card.text
    assert "time/step" not in card.text
    assert SECRET not in card.text
    assert str(run.experiment.parent) not in card.text


def test_an_upload_sends_all_files_and_an_edited_card(run, capsys, monkeypatch):
    (run.export / "README.md").write_text("mine", encoding="utf-8")
    requests: list[tuple[str, bytes]] = []

    class Hub(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.path, body))
            reply: dict[str, object] = {"url": "https://huggingface.co/me/model", "id": "me/model", "name": "me/model"}
            if "/preupload/" in self.path:
                names = [each["path"] for each in json.loads(body)["files"]]
                reply = {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
            elif "/commit/" in self.path:
                reply = {
                    "success": True,
                    "commitOid": "0" * 40,
                    "commitUrl": "https://huggingface.co/me/model/commit/0",
                }
            self.answer(reply)

        def do_GET(self):
            self.answer({"id": "me/model", "siblings": []})

        def answer(self, reply):
            text = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *words): ...

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", SECRET)
        assert main(["push", str(run.path), "me/model", "--private"]) == 0, capsys.readouterr().err
        server.shutdown()
    created = json.loads(next(body for path, body in requests if path == "/api/repos/create"))
    assert (created["name"], created["organization"]) == ("model", "me")
    assert created.get("private") or created["visibility"] == "private"  # by version of huggingface_hub
    lines = next(body for path, body in requests if "/commit/" in path).decode().splitlines()
    files = {
        each["value"]["path"]: base64.b64decode(each["value"]["content"])
        for each in map(json.loads, lines)
        if each["key"] == "file"
    }
    assert files == {"README.md": b"mine", "config.json": b"{}", "model.safetensors": b"weights"}


def test_a_run_without_export_is_a_mistake(run, capsys):
    (run.export / "config.json").unlink()
    assert main(["push", str(run.path), "me/model", "--dry-run"]) == 2
    assert mentions(capsys.readouterr().err, str(run.export), "config.json", "--model")
