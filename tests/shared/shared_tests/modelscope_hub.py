"""A local server with the API of ModelScope, for repositories in memory."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from shared_tests.dataset_hub import serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import pytest


class ModelScopeHub:
    """Files of repositories: `repos["datasets/owner/name"]["master"]["train.jsonl"]`."""

    def __init__(self) -> None:
        self.url = ""
        self.repos: dict[str, dict[str, Mapping[str, bytes]]] = {}
        self.requests: list[str] = []
        """Paths of the requests so far."""

    def push(self, repo: str, files: Mapping[str, bytes], revision: str = "master") -> None:
        """Replace the files of a revision."""
        self.repos.setdefault(repo, {})[revision] = files

    def push_folder(self, repo: str, folder: Path) -> None:
        """Push all files of a directory."""
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        self.push(repo, {name: path.read_bytes() for name, path in files.items()})


@contextmanager
def serving_modelscope() -> Iterator[ModelScopeHub]:
    """A hub that answers at `url` until the end of the context."""
    hub = ModelScopeHub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            hub.requests.append(self.path)
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            parts = url.path.removeprefix("/api/v1/").split("/")
            if len(parts) < 4 or parts[3] != "repo":
                return self.answer(404, b"{}")
            kind, owner, name, _, *listing = parts
            files = hub.repos.get(f"{kind}/{owner}/{name}", {}).get(query.get("Revision", "master"))
            if files is None or (not listing and query["FilePath"] not in files):
                missing = {"Code": 10010205001, "Message": "record not found", "Success": False}
                self.answer(404, json.dumps(missing).encode())
            elif listing:
                entries = [
                    {"Path": path, "Name": path.rpartition("/")[2], "Type": "blob", "Size": len(content)}
                    | {"Sha256": hashlib.sha256(content).hexdigest()}
                    for path, content in files.items()
                ]
                self.answer(200, json.dumps({"Code": 200, "Data": {"Files": entries}, "Success": True}).encode())
            else:
                self.answer(200, files[query["FilePath"]], "application/octet-stream")

    with serving(Handler) as hub.url:
        yield hub


def use_modelscope(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `modelscope` in this process request the hub at `url`, with an own cache and few retries."""
    import modelscope_hub.config as hub_config

    monkeypatch.setenv("MODELSCOPE_ENDPOINT", url)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(cache / "modelscope"))
    monkeypatch.setenv("MODELSCOPE_HOME", str(cache / "credentials"))
    monkeypatch.setattr(hub_config, "_default_config", None)
