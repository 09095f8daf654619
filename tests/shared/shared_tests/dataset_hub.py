"""A local server with the API of the Hugging Face Hub, for data sets in memory."""

from __future__ import annotations

import hashlib
import io
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pyarrow
import pyarrow.parquet

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import pytest

Splits = dict[str, list[dict[str, Any]]]


class DatasetHub:
    """Data sets by id, each with its commits, the newest last: files by name."""

    def __init__(self) -> None:
        self.url = ""
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.requests: list[str] = []
        """Methods and paths of the requests so far."""

    def push(self, repo: str, subsets: Mapping[str, Splits]) -> str:
        """Add a commit, with a Parquet file for each split of each subset. Returns its id."""
        files, configs = {}, []
        for subset, splits in subsets.items():
            for split, rows in splits.items():
                files[f"{subset}/{split}-00000-of-00001.parquet"] = _parquet(rows)
            paths = [{"split": split, "path": f"{subset}/{split}-*"} for split in splits]
            configs.append({"config_name": subset, "data_files": paths})
        files["README.md"] = f"---\n{json.dumps({'configs': configs})}\n---\n".encode()
        commits = self.commits.setdefault(repo, {})
        commit = hashlib.sha1(f"{repo}{len(commits)}".encode()).hexdigest()
        commits[commit] = files
        return commit


@contextmanager
def serving_datasets() -> Iterator[DatasetHub]:
    """A hub that answers at `url` until the end of the context."""
    hub = DatasetHub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            is_api = parts[:2] == ["api", "datasets"]
            parts = parts[1 + is_api :]
            if len(parts) < 2:
                return self.answer(404)
            owner, name, kind, revision, *rest = parts if len(parts) > 2 else (*parts, "revision", "main")
            commits = hub.commits.get(f"{owner}/{name}")
            if commits is None:
                return self.answer(404, X_Error_Code="RepoNotFound")
            commit = list(commits)[-1] if revision == "main" else revision
            if commit not in commits:
                return self.answer(404, X_Error_Code="RevisionNotFound")
            path = "/".join(rest)
            if is_api:
                return self.answer(200, json.dumps(self._facts(kind, commit, commits[commit], path)).encode())
            content = commits[commit].get(path)
            if content is None:
                return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X_Repo_Commit": commit}
            begin, _, end = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
            if not begin:
                return self.answer(200, content, **headers)
            stop = min(int(end or len(content)), len(content) - 1) + 1
            span = f"bytes {begin}-{stop - 1}/{len(content)}"
            return self.answer(206, content[int(begin) : stop], Content_Range=span, **headers)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.do_GET()

        def _facts(self, kind: str, commit: str, files: Mapping[str, bytes], path: str) -> Any:
            if kind == "revision":
                siblings = [{"rfilename": name} for name in files]
                return {"id": "", "sha": commit, "siblings": siblings, "tags": [], "private": False, "gated": False}
            folders = {name.partition("/")[0] for name in files if "/" in name and not path}
            return [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
                if name.startswith(path)
            ] + [{"type": "directory", "path": folder, "oid": "0" * 40} for folder in folders]

    with serving(Handler) as hub.url:
        yield hub


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """URL at which `handler` answers until the end of the context."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def use_hub(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `datasets` in this process request the hub at `url`, with an own cache: it reads the environment once."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", url)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache / "datasets")


def _parquet(rows: Sequence[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    return file.getvalue()
