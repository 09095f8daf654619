import os
import subprocess
import sys
import threading

import fsspec
import pytest
import torch

from roll_core.errors import WeightSyncError
from roll_core.host import hostname
from roll_core.spec.transport import Deadline, ReceiverSetup, ReceiversLostError, SenderLostError, SenderSetup
from roll_core.spec.weights import make_manifest
from roll_testing.errors import raises_error
from roll_weight_transports import disk

TENSORS = {
    "a": torch.randn(300, 20),
    "b": torch.randn(4000).bfloat16(),
    "none": torch.zeros(0, 3),
    "c": torch.tensor(3),
}
MANIFEST = make_manifest(1, TENSORS.items())
BUCKET = 16 << 10


def sender_of(num_receivers, directory):
    setup = SenderSetup(receivers=tuple(range(num_receivers)), bucket_bytes=BUCKET, options={"directory": directory})
    return disk.DiskTransport().sender(setup)


def receiver_of(address, rank):
    setup = ReceiverSetup(address=address, rank=rank, num_receivers=1, bucket_bytes=BUCKET, deadline=Deadline(10))
    return disk.DiskTransport().receiver(setup)


def receive_in_thread(address, rank, found, publishes=2):
    def work():
        receiver = receiver_of(address, rank)
        for _ in range(publishes):
            found.append({name: tensor.clone() for name, tensor in receiver.receive(MANIFEST, Deadline(10))})
        receiver.close()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.fixture(params=["a folder", "a store"])
def where(request, tmp_path):
    if request.param == "a folder":
        yield str(tmp_path)
        return
    yield "memory://weights"
    fsspec.filesystem("memory").store.clear()


def files_below(where):
    files, path = fsspec.core.url_to_fs(where)
    return files.find(path)


def test_every_receiver_reads_every_publish(where):
    sender = sender_of(2, where)
    found = [[], []]
    threads = [receive_in_thread(sender.address, rank, found[rank]) for rank in range(2)]
    for _ in range(2):
        sent = sender.send(MANIFEST, iter(TENSORS.items()), Deadline(10))
        assert [entry.digest for entry in sent] == [entry.digest for entry in MANIFEST.tensors]
    for thread in threads:
        thread.join()
    assert [file.rpartition("/")[2] for file in files_below(where)] == [disk.OPEN]
    sender.close()
    assert files_below(where) == []
    for held in (each for publishes in found for each in publishes):
        assert held.keys() == TENSORS.keys()
        assert all(torch.equal(held[name], TENSORS[name]) for name in TENSORS)


def test_silent_sender_raises_at_the_deadline(where):
    sender = sender_of(1, where)
    receiver = receiver_of(sender.address, 0)
    with raises_error(SenderLostError, "bucket-0"):
        list(receiver.receive(MANIFEST, Deadline(0.2)))
    sender.close()


def test_driver_can_cancel_a_blocked_transfer(where):
    sender = sender_of(1, where)
    threading.Timer(0.2, disk.DiskTransport().cancel_transfer, [sender.address, {}]).start()
    with pytest.raises(ReceiversLostError) as caught:
        sender.send(MANIFEST, iter(TENSORS.items()), Deadline(10))
    assert caught.value.disconnected == (0,)
    sender.close()
    assert files_below(where) == []


def test_a_bucket_that_was_cut_short_is_not_taken_for_whole(tmp_path):
    sender = sender_of(1, str(tmp_path))
    folder = disk.Folder(sender.address)
    folder.write("1/bucket-0", b"short")
    receiver = receiver_of(sender.address, 0)
    with raises_error(SenderLostError, "bucket-0", "5"):
        list(receiver.receive(MANIFEST, Deadline(5)))
    sender.close()


def test_only_files_of_dead_local_processes_are_removed(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ours = f"{disk.PREFIX}{hostname()}"
    kept = [f"{ours}-{os.getpid()}-ab", f"{disk.PREFIX}elsewhere-{gone.pid}-ab", "results", f"{ours}-x-ab"]
    for name in (f"{ours}-{gone.pid}-ab", *kept):
        (tmp_path / name / "1").mkdir(parents=True)
    sender_of(1, str(tmp_path)).close()
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(kept)


def test_files_of_another_users_dead_process_are_no_error(tmp_path, monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = tmp_path / f"{disk.PREFIX}{hostname()}-{gone.pid}-ab"
    left.mkdir()
    remove = disk.Folder.remove

    def remove_own(folder, name=""):
        if name == left.name:
            os.rmdir("/proc/1")  # nobody may, not even root
        remove(folder, name)

    monkeypatch.setattr(disk.Folder, "remove", remove_own)
    sender_of(1, str(tmp_path)).close()
    assert list(tmp_path.iterdir()) == [left]


def test_an_error_of_the_export_is_not_blamed_on_the_directory(where):
    def export():
        yield next(iter(TENSORS.items()))
        raise ConnectionResetError("a rank of the trainer is gone")

    sender = sender_of(1, where)
    with pytest.raises(ConnectionResetError):
        sender.send(MANIFEST, export(), Deadline(5))
    sender.close()


def test_a_full_disk_is_an_error_of_the_sync(tmp_path, monkeypatch):
    sender = sender_of(1, str(tmp_path))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.Folder, "write", full)
    with raises_error(WeightSyncError, "(model_update_dir)", "No space"):
        sender.send(MANIFEST, iter(TENSORS.items()), Deadline(5))
