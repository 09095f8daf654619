"""`checkpoint_store`: copies of checkpoints on a file system of fsspec, and runs that resume from them."""

import asyncio
import json
import os
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import fsspec
import pytest
import torch
import yaml
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file

from roll_core.config import load
from roll_core.errors import CheckpointError, ConfigError, NoCheckpointError
from roll_core.runtime.records.checkpoint_directory import BestCheckpoint, Checkpoint, CheckpointDirectory
from roll_core.runtime.records.manifest import read_manifest
from roll_core.runtime.run.checkpoint_store import CheckpointUploader, RemoteFolder, fetch_newest
from shared_tests.forked import Forked


@pytest.fixture
def url():
    """A store in memory, empty."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield "memory://bucket/runs"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def full(monkeypatch):
    """Makes the store's file system fail to write files whose names end as given."""

    def fail(ending):
        put = MemoryFileSystem.put_file

        def put_file(self, lpath, rpath, **kwargs):
            if rpath.endswith(ending):
                raise OSError(28, "No space left on device")
            put(self, lpath, rpath, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
        monkeypatch.setattr("roll_core.runtime.run.checkpoint_store.RETRY_S", (0.0,))

    return fail


def record(result):
    return json.loads(result.run_dir.record.read_text(encoding="utf-8"))


def steps(url):
    return sorted(manifest.step for manifest in RemoteFolder(url, {}).manifests().values())


def saved(store, step):
    with store.writing(step, {}) as path:
        (path / "role").mkdir()
        (path / "role" / "weights").write_bytes(os.urandom(3000))
    return Checkpoint(step, store.path(step))


def upload_all(folder, checkpoints):
    for checkpoint in checkpoints:
        RemoteFolder(folder, {}).put_checkpoint(checkpoint.path, threading.Event())


def test_run_that_lost_its_disk_resumes_from_the_store(local_runs, url):
    runs = local_runs
    config = runs.sft(max_steps=4, save_steps=2, checkpoint_store=url)
    config["sft_train"]["training_args"] |= {"lr_scheduler_type": "constant"}
    first = runs.ok(config | {"max_steps": 2})
    copies = record(first)["checkpoint_store"]
    assert steps(copies) == [2]
    shutil.rmtree(first.run_dir.experiment)
    second = runs.ok(config | {"resume_from_checkpoint": "auto"})
    found = record(second)
    assert found["resumed_step"] == 2
    assert found["resumed_from"] == f"{copies}/step-2"
    whole = runs.ok(config | {"exp_name": "whole", "checkpoint_store": None})
    assert [{k: v for k, v in line.items() if "checkpoint_store" not in k} for line in runs.timeless(second)] == (
        runs.timeless(whole)
    )
    weights, expected = (load_file(each.run_dir.export / "model.safetensors") for each in (second, whole))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert not (second.run_dir.path / "resumed" / "checkpoints" / "step-2").exists()


def test_copies_keep_the_newest_and_the_best(tmp_path, url):
    local = CheckpointDirectory(tmp_path / "run" / "checkpoints", keep=1)

    async def upload():
        async with CheckpointUploader(RemoteFolder(url, {}), local, tmp_path / "run", required=True) as uploader:
            for step in (1, 2, 3, 4):
                best = BestCheckpoint(metric="m", mode="min", value=0.0, step=min(step, 2), path="")
                uploader.submit(saved(local, step), best)
                await uploader.finish()

    asyncio.run(upload())
    assert steps(url) == [2, 4]
    assert not any("step-3" in name or "step-1" in name for name in MemoryFileSystem.store)


def upload_in_turn(url, run, num_steps, *, required=True):
    """Uploads `num_steps` checkpoints one after the other, of which one is retained; the steps in the store after each
    upload, and all metrics."""
    local, found, metrics = CheckpointDirectory(run / "checkpoints", keep=1), [], {}

    async def upload():
        async with CheckpointUploader(RemoteFolder(url, {}), local, run, required=required) as uploader:
            for step in range(1, num_steps + 1):
                uploader.submit(saved(local, step), None)
                await uploader.finish()
                found.append(steps(url))
                metrics.update(uploader.take_metrics())

    asyncio.run(upload())
    return found, metrics


def test_interrupted_removal_is_retried_and_keeps_other_copies(tmp_path, url, monkeypatch):
    monkeypatch.setattr("roll_core.runtime.run.checkpoint_store.RETRY_S", (0.0, 0.0))
    remove, failing = MemoryFileSystem.rm, [OSError("slow down")]

    def throttled(self, path, **options):
        if failing:
            raise failing.pop()
        remove(self, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "rm", throttled)
    assert upload_in_turn(url, tmp_path / "run", 3)[0] == [[1], [2], [3]]  # no manifest of step 1 is left
    assert not any("step-1/" in name or "step-2/" in name for name in MemoryFileSystem.store)


def test_store_without_removal_gets_every_checkpoint_once(tmp_path, url, monkeypatch):
    monkeypatch.setattr("roll_core.runtime.run.checkpoint_store.RETRY_S", (0.0, 0.0))
    put, written = MemoryFileSystem.put_file, []

    def refuse(self, path):
        raise PermissionError(path)

    def put_file(self, lpath, rpath, **options):
        written.append(rpath)
        put(self, lpath, rpath, **options)

    monkeypatch.setattr(MemoryFileSystem, "rm_file", refuse)
    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    found, metrics = upload_in_turn(url, tmp_path / "run", 2)
    assert found == [[1], [1, 2]]
    assert "checkpoint_store/failures" not in metrics
    assert [name.rpartition("/runs/")[2] for name in written if name.endswith("weights")] == [
        "step-1/role/weights",
        "step-2/role/weights",
    ]


def test_a_local_checkpoint_stays_until_it_is_uploaded(tmp_path, url):
    local = CheckpointDirectory(tmp_path / "run" / "checkpoints", keep=1)
    folder = RemoteFolder(url, {})
    begun, go_on = threading.Event(), threading.Event()
    put = folder.put_checkpoint

    def slow(path, stop):
        begun.set()
        assert go_on.wait(60)
        put(path, stop)

    folder.put_checkpoint = slow

    async def upload():
        async with CheckpointUploader(folder, local, tmp_path / "run", required=True) as uploader:
            uploader.submit(saved(local, 1), None)
            await asyncio.to_thread(begun.wait, 60)
            uploader.submit(saved(local, 2), None)  # skipped, as 3 is newer
            uploader.submit(saved(local, 3), None)
            during = [each.step for each in local.list()]
            go_on.set()
            await uploader.finish()
            return during

    assert asyncio.run(upload()) == [1, 2, 3]
    assert [each.step for each in local.list()] == [3]
    assert steps(url) == [3]


@pytest.mark.parametrize("cut", ["no manifest", "half a manifest"])
def test_killed_upload_never_counts_as_complete(tmp_path, url, cut):
    older, newer = (saved(CheckpointDirectory(tmp_path / "a"), step) for step in (1, 2))
    upload_all(url, [older, newer])
    files = fsspec.filesystem("memory")
    manifest = "/bucket/runs/step-2/manifest.json"
    content = files.cat_file(manifest)
    files.rm_file(manifest)
    if cut == "half a manifest":
        files.pipe_file(manifest, content[: len(content) // 2])
    assert steps(url) == [1]
    assert fetch_newest(RemoteFolder(url, {}), tmp_path / "b").step == 1


def test_copy_with_a_flipped_bit_is_skipped_or_an_error(tmp_path, url):
    older, newer = (saved(CheckpointDirectory(tmp_path / "a"), step) for step in (1, 2))
    upload_all(url, [older, newer])
    files = fsspec.filesystem("memory")
    for step, expected in ((2, 1), (1, None)):
        name = f"/bucket/runs/step-{step}/role/weights"
        content = bytearray(files.cat_file(name))
        content[7] ^= 4
        files.pipe_file(name, bytes(content))
        if expected:
            assert fetch_newest(RemoteFolder(url, {}), tmp_path / f"b{step}").step == expected
        else:
            with pytest.raises(CheckpointError):
                fetch_newest(RemoteFolder(url, {}), tmp_path / f"b{step}")


def test_damaged_copy_leaves_no_files_beside_the_previous_one(tmp_path, url):
    written = {"001": ["metrics.jsonl", "trackers/wandb.txt"], "002": ["images.jsonl", "trackers/wandb.txt"]}
    for step, (name, files) in enumerate(written.items(), start=1):
        run = tmp_path / name
        for file in files:
            (run / file).parent.mkdir(parents=True, exist_ok=True)
            (run / file).write_text(name, encoding="utf-8")
        folder = RemoteFolder(f"{url}/{name}", {})
        folder.put_run(run, threading.Event())
        folder.put_checkpoint(saved(CheckpointDirectory(run / "checkpoints"), step).path, threading.Event())
    fsspec.filesystem("memory").pipe_file("/bucket/runs/002/step-2/role/weights", b"other")
    into = tmp_path / "into"
    assert fetch_newest(RemoteFolder(url, {}), into).step == 1
    found = {path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file()}
    assert {name for name in found if not name.startswith("checkpoints/step-1/")} == set(written["001"])
    assert (into / "trackers" / "wandb.txt").read_text(encoding="utf-8") == "001"


def test_newest_copy_is_the_last_step_despite_the_clock(tmp_path, url, monkeypatch):
    written = []
    for run, step, now in (("001", 5, 1000.0), ("002", 10, 5000.0), ("002", 20, 3000.0), ("003", 1, 2000.0)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        written.append(saved(CheckpointDirectory(tmp_path / run), step))
        upload_all(f"{url}/{run}", written[-1:])
    store = RemoteFolder(url, {})
    assert list(store.manifests()) == ["002/step-20", "002/step-10", "003/step-1", "001/step-5"]
    assert fetch_newest(store, tmp_path / "a").step == 20
    # The local checkpoint of that step is as new as its copy.
    assert fetch_newest(store, tmp_path / "b", after=read_manifest(written[2].path).created) is None


def test_copy_removed_by_another_run_is_skipped(tmp_path, url, monkeypatch):
    upload_all(url, [saved(CheckpointDirectory(tmp_path / "a"), step) for step in (1, 2)])
    find = MemoryFileSystem.find

    def find_then_remove(self, path, **given):
        names = find(self, path, **given)
        self.rm_file("/bucket/runs/step-1/manifest.json")
        return names

    monkeypatch.setattr(MemoryFileSystem, "find", find_then_remove)
    assert fetch_newest(RemoteFolder(url, {}), tmp_path / "b").step == 2


def test_a_full_store_is_a_warning_and_a_metric(local_runs, url, full):
    full("weights.safetensors")
    result = local_runs.ok(local_runs.sft(save_steps=2, checkpoint_store=url))
    assert [each.step for each in CheckpointDirectory(result.run_dir.checkpoints).list()] == [2, 4]
    assert steps(url) == []
    assert "No space left" in result.run_dir.log.read_text(encoding="utf-8")


def test_a_full_store_ends_the_run_if_it_is_required(local_runs, url, full):
    full("weights.safetensors")
    result = local_runs.run(local_runs.sft(save_steps=2, checkpoint_store={"url": url, "required": True}))
    assert isinstance(result.error, CheckpointError)
    assert CheckpointDirectory(result.run_dir.checkpoints).list()[0].step == 2


def test_unwritable_required_store_ends_the_run_before_step_one(local_runs, url, full):
    full("config.yaml")
    result = local_runs.run(local_runs.sft(checkpoint_store={"url": url, "required": True}))
    assert isinstance(result.error, CheckpointError)
    assert result.steps_done == 0


def test_a_url_without_checkpoints_cannot_be_resumed_from(local_runs, url):
    result = local_runs.run(local_runs.sft(resume_from_checkpoint=f"{url}/nothing"))
    assert isinstance(result.error, NoCheckpointError)
    assert result.error.exit_code == 2


def test_failures_are_counted(tmp_path, url, full):
    full("weights")
    local = CheckpointDirectory(tmp_path / "run" / "checkpoints")

    async def upload():
        async with CheckpointUploader(RemoteFolder(url, {}), local, tmp_path / "run", required=False) as uploader:
            uploader.submit(saved(local, 1), None)
            await uploader.finish()
            return uploader.take_metrics(), uploader.take_metrics()

    assert asyncio.run(upload()) == ({"checkpoint_store/failures": 1.0}, {})
    assert local.pinned == set()


def test_sigterm_waits_for_the_copy_and_a_killed_run_can_resume(local_runs):
    runs = local_runs
    store = f"file://{runs.folder}/store"
    config = runs.sft(max_steps=10_000, save_steps=1, max_ckpt_to_keep=2, checkpoint_store=store)
    config["sft_train"]["training_args"] |= {"lr_scheduler_type": "constant"}
    path = runs.folder / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = ["roll_core", "run", str(path), "resume_from_checkpoint=auto"]

    def started_until(step):
        process = Forked(command, output=runs.folder / "output.txt")
        deadline = time.monotonic() + 200
        while max(steps(f"{store}/sft"), default=0) < step:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return process

    process = started_until(3)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 75, output
    last = runs.folder / "output" / "sft" / "latest" / "run.json"
    done = json.loads(last.read_text(encoding="utf-8"))["steps_done"]
    assert max(steps(f"{store}/sft")) == done
    shutil.rmtree(runs.folder / "output")
    process = started_until(done + 3)
    process.kill()
    process.communicate()
    newest = max(steps(f"{store}/sft"))
    shutil.rmtree(runs.folder / "output")
    resumed = runs.ok(config | {"max_steps": newest + 1, "resume_from_checkpoint": True})
    assert record(resumed)["resumed_step"] == newest
    assert [line["step"] for line in runs.metrics(resumed)] == list(range(1, newest + 2))


@pytest.mark.parametrize(
    "wrong", ["/a/plain/path", "nosuchprotocol://x", {"url": "memory://x", "requird": True}, 3], ids=str
)
def test_a_store_that_cannot_be_opened_is_a_located_error(local_runs, wrong):
    path = local_runs.folder / "wrong.yaml"
    path.write_text(json.dumps(local_runs.sft(checkpoint_store=wrong)), encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load(path, [], local_runs.registry)
    assert [problem.key.split(".")[0] for problem in raised.value.problems] == ["checkpoint_store"]


def test_a_continuation_is_newer_than_a_run_with_a_clock_ahead(local_runs, url, monkeypatch):
    shared = {"checkpoint_store": url, "save_steps": 1, "exp_name": "ahead"}
    ahead = SimpleNamespace(time=lambda: time.time() + 86_400)
    with monkeypatch.context() as patch:
        patch.setattr("roll_core.runtime.records.manifest.time", ahead)
        local_runs.ok(local_runs.sft(**shared, max_steps=2))
    for max_steps in (3, 4):
        shutil.rmtree(local_runs.folder / "output" / "ahead")
        result = local_runs.ok(local_runs.sft(**shared, max_steps=max_steps, resume_from_checkpoint="auto"))
        assert record(result)["resumed_step"] == max_steps - 1


def test_retention_counts_the_copies_of_earlier_attempts(local_runs, url):
    shared = {"checkpoint_store": url, "save_steps": 1, "exp_name": "attempts", "max_ckpt_to_keep": 2}
    for max_steps in (2, 3, 4):
        result = local_runs.ok(local_runs.sft(**shared, max_steps=max_steps, resume_from_checkpoint="auto"))
        shutil.rmtree(result.run_dir.experiment)
    assert steps(f"{url}/attempts") == [3, 4]
