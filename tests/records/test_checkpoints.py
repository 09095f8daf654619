import asyncio
import errno
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.errors import CheckpointError, WorkerTimeoutError
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.records.manifest import read_manifest, verify
from roll_core.runtime.run.run_saver import SavedRun
from roll_testing.errors import mentions, raises_error
from roll_tools.checkpoint_listing import list_checkpoints


def save(store: CheckpointDirectory, step: int, content: bytes = b"weights") -> Path:
    with store.writing(step, {"order": step}) as path:
        (path / "actor").mkdir()
        (path / "actor" / "model.safetensors").write_bytes(content)
        (path / "größe.bin").write_bytes(b"")
    return store.directory / f"step-{step}"


def visible(store: CheckpointDirectory) -> list[str]:
    return sorted(p.name for p in store.directory.iterdir())


def test_checkpoint_contains_files_state_and_manifest(tmp_path: Path) -> None:
    store = CheckpointDirectory(tmp_path)
    path = save(store, 7, b"hello")
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 7
    assert set(manifest["files"]) == {"actor/model.safetensors", "größe.bin", "state.json"}
    # printf hello | sha256sum
    digest = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    assert manifest["files"]["actor/model.safetensors"] == {"bytes": 5, "sha256": digest}
    assert verify(path) == []
    [only] = store.list()
    assert (only.step, only.path) == (7, path)
    assert json.loads((path / "state.json").read_text()) == {"order": 7}


def test_nothing_is_visible_before_the_block_ends(tmp_path: Path) -> None:
    store = CheckpointDirectory(tmp_path)
    with store.writing(1, {}):
        assert store.list() == []
        assert store.latest_good() is None
    assert visible(store) == ["step-1"]


def test_block_that_raises_leaves_nothing_and_keeps_its_error(tmp_path: Path) -> None:
    store = CheckpointDirectory(tmp_path)
    save(store, 1)
    silent = WorkerTimeoutError("actor_train", "save", 5.0, [1])  # a TimeoutError is an OSError for Python

    def write(path: Path) -> None:
        (path / "half").write_bytes(b"x")
        raise silent

    with pytest.raises(WorkerTimeoutError), store.writing(2, {}) as path:
        write(path)
    assert visible(store) == ["step-1"]


def test_killed_writer_leaves_no_checkpoint_and_is_swept(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
with CheckpointDirectory(Path(sys.argv[1])).writing(5, {}) as path:
    (path / "half").write_bytes(b"x" * 1000)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    store = CheckpointDirectory(tmp_path)
    save(store, 4)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len(visible(store)) == 2
    latest = store.latest_good()
    assert latest is not None
    assert latest.step == 4
    save(store, 6)
    assert visible(store) == ["step-4", "step-6"]


def test_sweep_keeps_files_of_live_and_remote_writers(tmp_path: Path) -> None:
    store = CheckpointDirectory(tmp_path)
    living = tmp_path / f".step-3.tmp-{socket.gethostname()}-{os.getppid()}-0a0b0c0d"
    foreign = tmp_path / ".step-3.tmp-another-host-1-0a0b0c0d"
    forgotten = tmp_path / ".step-2.old-another-host-1-0a0b0c0d"
    for path in (living, foreign, forgotten):
        path.mkdir()
    os.utime(forgotten, (0, time.time() - 2 * 24 * 3600))
    store.sweep()
    assert living.exists()
    assert foreign.exists()
    assert not forgotten.exists()


def test_sweep_removes_files_of_an_earlier_process_of_equal_pid(tmp_path: Path) -> None:
    store = CheckpointDirectory(tmp_path)
    earlier = tmp_path / f".step-3.tmp-{socket.gethostname()}-{os.getpid()}-0a0b0c0d"
    earlier.mkdir()
    with store.writing(4, {}) as path:
        assert not earlier.exists()
        CheckpointDirectory(tmp_path / ".." / tmp_path.name).sweep()
        assert path.is_dir()
    assert visible(store) == ["step-4"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointDirectory(tmp_path, keep=2)
    for step in (2, 9, 10, 100):
        save(store, step)
    assert visible(store) == ["step-10", "step-100"]


def test_a_checkpoint_that_cannot_be_removed_stays_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, rename = CheckpointDirectory(tmp_path, keep=1), os.rename
    save(store, 1)

    def busy(source: Path, target: Path) -> None:
        if source == store.path(1):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(source))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", busy)
        save(store, 2)
    assert visible(store) == ["step-1", "step-2"]
    assert mentions(caplog.text, store.path(1), errno.EBUSY)
    save(store, 3)
    assert visible(store) == ["step-3"]


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointDirectory(tmp_path)
    save(store, 3, b"old")
    path = save(store, 3, b"new")
    assert (path / "actor" / "model.safetensors").read_bytes() == b"new"
    assert visible(store) == ["step-3"]
    assert verify(path) == []


def test_flipped_bit_is_detected_and_the_previous_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointDirectory(tmp_path)
    save(store, 1)
    file = save(store, 2, b"\x00" * 4096) / "actor" / "model.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[1234] ^= 1
    file.write_bytes(damaged)
    latest = store.latest_good()
    assert latest is not None
    assert latest.step == 1
    assert mentions(caplog.text, "step-2", "actor/model.safetensors")


@settings(max_examples=40)
@given(data=st.data())
def test_any_change_of_any_byte_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = save(CheckpointDirectory(tmp_path_factory.mktemp("c")), 1, b"some weights")
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.stat().st_size and p.name != "manifest.json")
    file = data.draw(st.sampled_from(files))
    content = bytearray(file.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    assert len(verify(path)) == 1
    assert file.name in verify(path)[0]


@settings(max_examples=60)
@given(data=st.data())
def test_any_manifest_change_is_detected_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = save(CheckpointDirectory(tmp_path_factory.mktemp("c")), 1, b"some weights")
    before = read_manifest(path)
    file = path / "manifest.json"
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, 9999)) % len(content)] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    assert verify(path) or read_manifest(path) == before  # another blank is no damage


def test_without_digests_only_sizes_are_looked_at(tmp_path: Path) -> None:
    path = save(CheckpointDirectory(tmp_path), 1, b"weights")
    (path / "actor" / "model.safetensors").write_bytes(b"WEIGHTS")
    assert verify(path, digests=False) == []
    assert len(verify(path)) == 1
    (path / "actor" / "model.safetensors").write_bytes(b"weight")
    assert len(verify(path, digests=False)) == 1


@pytest.mark.parametrize(
    "manifest",
    ["", "{", "[]", '{"step": 1}', '{"format": 99, "step": 1, "files": {}}', '{"format": 2, "step": 1, "files": {}}'],
)
def test_a_manifest_that_is_not_one_is_damage(tmp_path: Path, manifest: str) -> None:
    store = CheckpointDirectory(tmp_path)
    path = save(store, 1)
    (path / "manifest.json").write_text(manifest)
    assert len(verify(path)) == 1
    with raises_error(CheckpointError, "step-1", "manifest.json"):
        store.latest_good()


HOSTILE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.just(10**400)
    | st.just("../" * 9 + "etc/passwd"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("/etc/passwd"), inner, max_size=3),
    max_leaves=6,
)


def forge(path: Path, name: str, found: object) -> None:
    """Write JSON as the manifest, with the digest of itself, or as the state, with its digest in the manifest."""
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    if name == "state.json":
        content = json.dumps(found).encode()
        (path / name).write_bytes(content)
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        found = manifest
    if isinstance(found, dict):
        found = {key: value for key, value in found.items() if key != "sha256"}
        found["sha256"] = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(found), encoding="utf-8")


@settings(max_examples=150)
@given(data=st.data())
def test_forged_manifests_and_states_are_reported_as_damage(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    role = {"strategy": "hf_train", "world_size": 1, "weight_version": 1}
    store = CheckpointDirectory(tmp_path_factory.mktemp("c"))
    with store.writing(1, {"pipeline": "sft", "pipeline_state": {}, "roles": {"sft_train": role}}) as path:
        (path / "weights").write_bytes(b"x")
    path = store.directory / "step-1"
    name = data.draw(st.sampled_from(["manifest.json", "state.json"]))
    found = json.loads((path / name).read_text(encoding="utf-8"))
    places = [found, *(each for each in found.values() if isinstance(each, dict))]
    places += [each for place in places[1:] for each in place.values() if isinstance(each, dict)]
    place = data.draw(st.sampled_from(places))
    place[data.draw(st.sampled_from(sorted(place) or [""]) | st.text())] = data.draw(HOSTILE)
    forge(path, name, data.draw(st.sampled_from([found, found, found, found.get("files")])))
    for digests in (True, False):
        assert all(isinstance(problem, str) for problem in verify(path, digests=digests))
    assert list_checkpoints(store.directory, as_json=data.draw(st.booleans()), digests=True, store={}) in (0, 1)
    try:
        saved = SavedRun.of(CheckpointDirectory.open(path))
    except CheckpointError:
        return
    assert all("/" not in name and name not in ("", "..") for name in saved.roles)
    assert all(type(role.world_size) is int and type(role.strategy) is str for role in saved.roles.values())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("files", None),
        ("files", []),
        ("files", {"state.json": None}),
        ("files", {"state.json": {"bytes": "1", "sha256": ""}}),
        ("files", {"../secret": {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}}),
        ("files", {"/etc/hostname": {"bytes": 1, "sha256": ""}}),
        ("files", {"a" * 5000: {"bytes": 1, "sha256": ""}}),
        ("step", None),
        ("step", True),
        ("step", 10**400),
        ("created", "now"),
        ("created", 1e300),
    ],
)
def test_a_forged_field_of_a_manifest_is_a_checkpoint_error(tmp_path: Path, key: str, value: object) -> None:
    path = save(CheckpointDirectory(tmp_path / "c"), 1)
    (tmp_path / "c" / "secret").write_bytes(b"x")
    forge(path, "manifest.json", json.loads((path / "manifest.json").read_text(encoding="utf-8")) | {key: value})
    with raises_error(CheckpointError, path):
        CheckpointDirectory.open(path)


def test_state_may_have_any_text_that_json_can_have(tmp_path: Path) -> None:
    store, state = CheckpointDirectory(tmp_path), {"detail": json.loads('"\\ud83d"'), "größe": "超"}
    with store.writing(1, state):
        pass
    [only] = store.list()
    assert json.loads((only.path / "state.json").read_text(encoding="utf-8")) == state


def test_state_must_be_json(tmp_path: Path) -> None:
    store = CheckpointDirectory(tmp_path)
    with pytest.raises(TypeError), store.writing(1, {"set": {1, 2}}):
        pass
    assert visible(store) == []


def test_full_disk_raises_and_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    store = CheckpointDirectory(tmp_path)
    before = save(store, 1)

    def fill(path: Path) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("serialization failed") from error  # as libraries wrap it

    with (
        raises_error(CheckpointError, "step 2", "step-1"),
        store.writing(2, {}) as path,
    ):
        fill(path)
    assert visible(store) == ["step-1"]
    assert verify(before) == []


@pytest.mark.skipif(not os.path.ismount("/dev/shm") or os.geteuid() != 0, reason="needs root to mount a tiny disk")
def test_a_really_full_disk(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], check=False)
    if mounted.returncode:
        pytest.skip("may not mount")
    try:
        store = CheckpointDirectory(tmp_path)
        save(store, 1, b"x" * 100_000)
        with raises_error(CheckpointError, "step 2"):
            save(store, 2, b"y" * 200_000)
        assert visible(store) == ["step-1"]
        latest = store.latest_good()
        assert latest is not None
        assert latest.step == 1
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_background_write_does_not_block_and_can_be_cancelled(tmp_path: Path) -> None:
    store = CheckpointDirectory(tmp_path)
    save(store, 1)

    async def write(step: int) -> None:
        async with store.writing_aside(step, {"order": step}) as path:
            with (path / "large").open("wb") as file:
                file.truncate(1 << 40)  # without holes it would take an hour to read

    async def both() -> None:
        async with store.writing_aside(2, {"order": 2}) as path:
            (path / "small").write_bytes(b"x")
        writing = asyncio.create_task(write(3))
        await asyncio.sleep(0.2)
        assert not writing.done()
        writing.cancel()
        await asyncio.wait({writing})
        assert writing.cancelled()

    started = time.monotonic()
    asyncio.run(both())
    assert time.monotonic() - started < 10
    assert visible(store) == ["step-1", "step-2"]
    assert verify(tmp_path / "step-2") == []


def test_an_error_of_the_disk_is_a_checkpoint_error(tmp_path: Path) -> None:
    store = CheckpointDirectory(tmp_path)
    with raises_error(CheckpointError, "step 2", "Input/output"), store.writing(2, {}):
        raise OSError(errno.EIO, "Input/output error")
