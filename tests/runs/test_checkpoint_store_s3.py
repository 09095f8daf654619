"""`checkpoint_store` on S3, by the server of moto in this process: `./run test-engines s3` runs it."""

import asyncio
import secrets
import threading

import fsspec
import pytest

from roll_core.runtime.records.checkpoint_directory import Checkpoint, CheckpointDirectory
from roll_core.runtime.run.checkpoint_store import CheckpointUploader, RemoteFolder, fetch_newest

pytest.importorskip("s3fs")
server = pytest.importorskip("moto.server")


@pytest.fixture
def store(monkeypatch):
    """A folder in a new bucket, and the file system."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    serving = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    serving.start()
    host, port = serving.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}"}
    bucket = f"bucket-{secrets.token_hex(4)}"  # all servers of a process have the same buckets
    files = fsspec.filesystem("s3", **options)
    files.mkdir(bucket)
    yield RemoteFolder(f"s3://{bucket}/runs/sft", options), files
    serving.stop()


def test_copies_are_complete_retained_and_fetched(tmp_path, store):
    folder, _ = store
    local = CheckpointDirectory(tmp_path / "run" / "checkpoints", keep=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")

    async def upload():
        async with CheckpointUploader(folder, local, tmp_path / "run", required=True) as uploader:
            for step in (1, 2, 3):
                with local.writing(step, {}) as path:
                    (path / "role").mkdir()
                    (path / "role" / "weights").write_bytes(bytes([step]) * (6 << 20))  # two parts
                uploader.submit(Checkpoint(step, local.path(step)), None)
                await uploader.finish()

    asyncio.run(upload())
    assert list(folder.manifests()) == ["step-3"]
    found = fetch_newest(folder, tmp_path / "new")
    assert (found.step, found.origin) == (3, f"{folder.url}/step-3")
    assert (found.path / "role" / "weights").read_bytes() == bytes([3]) * (6 << 20)
    assert (tmp_path / "new" / "metrics.jsonl").read_text(encoding="utf-8") == '{"step": 1}\n'


def test_an_upload_without_its_manifest_is_not_a_checkpoint(tmp_path, store):
    folder, files = store
    local = CheckpointDirectory(tmp_path / "run" / "checkpoints")
    for step in (1, 2):
        with local.writing(step, {}) as path:
            (path / "weights").write_bytes(b"1234")
        folder.put_checkpoint(local.path(step), threading.Event())
    files.rm_file(f"{folder.url.removeprefix('s3://')}/step-2/manifest.json")
    assert list(folder.manifests()) == ["step-1"]
