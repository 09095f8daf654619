import threading
import time

import pytest
import torch
from sync_workers import HostMemory

from roll_core.errors import UnsupportedError, WeightSyncError
from roll_core.spec.transport import Deadline, ReceiverSetup, ReceiversLostError, SenderSetup
from roll_core.spec.weights import make_manifest
from roll_testing.errors import raises_error
from roll_weight_transports import cuda_ipc, device_memory

BUCKET = 16 << 10


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """The host's memory, lent as a device's is."""
    kind = HostMemory()
    monkeypatch.setitem(device_memory.KINDS, "cpu", kind)
    return kind


def sender_of(receivers, device="cpu"):
    return cuda_ipc.CudaIpcTransport().sender(SenderSetup(receivers=receivers, bucket_bytes=BUCKET, device=device))


def receiver_of(address, rank):
    setup = ReceiverSetup(address=address, rank=rank, num_receivers=1, bucket_bytes=BUCKET, deadline=Deadline(20))
    return cuda_ipc.CudaIpcTransport().receiver(setup)


def in_thread(act, *args):
    thread = threading.Thread(target=act, args=args, daemon=True)
    thread.start()
    return thread


def receive(address, manifest, held, rank=0, pause_s=0.0, publishes=1):
    receiver = receiver_of(address, rank)
    for _ in range(publishes):
        for name, tensor in receiver.receive(manifest, Deadline(20)):
            time.sleep(pause_s)
            held[name] = tensor.clone()
    receiver.close()


def test_receivers_get_all_tensors_with_full_memory_or_slow_peer(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "BUCKET_BYTES", BUCKET)
    tensors = {f"{number}": torch.full((number % 5 * 1500 + 7,), float(number)) for number in range(40)}
    tensors["larger than a bucket"] = torch.randn(10_000)
    tensors["none"] = torch.zeros(0, 3)
    manifest = make_manifest(1, tensors.items())
    sender = sender_of((1, 4))
    held = {1: {}, 4: {}}
    threads = [
        in_thread(receive, sender.address, manifest, held[rank], rank, pause_s, 2)
        for rank, pause_s in ((1, 0.002), (4, 0.0))
    ]
    for _ in range(2):
        sent = sender.send(manifest, iter(tensors.items()), Deadline(20))
        assert tuple(sent) == manifest.tensors
    for thread in threads:
        thread.join()
    sender.close()
    for each in held.values():
        assert each.keys() == tensors.keys()
        assert all(torch.equal(each[name], tensors[name]) for name in tensors)


class SlowDevice(HostMemory):
    """Carries out what it was told when it is waited for, and no earlier."""

    def allocate(self, num_bytes, device):
        self.shown = torch.empty(num_bytes, dtype=torch.uint8)
        self.told = torch.empty(num_bytes, dtype=torch.uint8)
        return self.told

    def share(self, memory):
        return super().share(self.shown)

    def synchronize(self, device):
        self.shown.copy_(self.told)


def test_a_bucket_is_announced_once_the_device_has_written_it(monkeypatch, device):
    tensors = {"a": torch.arange(3000), "b": torch.randn(5000)}
    manifest = make_manifest(1, tensors.items())
    monkeypatch.setitem(device_memory.KINDS, "cpu", SlowDevice())
    sender = sender_of((0,))
    monkeypatch.setitem(device_memory.KINDS, "cpu", device)
    held = {}
    thread = in_thread(receive, sender.address, manifest, held)
    sender.send(manifest, iter(tensors.items()), Deadline(20))
    thread.join()
    sender.close()
    assert all(torch.equal(held[name], tensors[name]) for name in tensors)


def test_a_bucket_is_given_back_once_the_device_has_read_it(monkeypatch, device):
    tensors = {"a": torch.arange(100)}
    manifest = make_manifest(1, tensors.items())
    sender = sender_of((0,))
    reading, read = threading.Event(), threading.Event()

    class Busy(HostMemory):
        def synchronize(self, device):
            reading.set()
            read.wait(60)

    monkeypatch.setitem(device_memory.KINDS, "cpu", Busy())
    receiver = receiver_of(sender.address, 0)
    thread = in_thread(lambda: list(receiver.receive(manifest, Deadline(20))))
    sending = in_thread(sender.send, manifest, iter(tensors.items()), Deadline(20))
    assert reading.wait(60)
    sending.join(0.1)
    assert sending.is_alive()
    read.set()
    sending.join(60)
    thread.join(60)
    assert not sending.is_alive()
    receiver.close()
    sender.close()


def test_memory_is_freed_between_publishes():
    tensors = {"a": torch.arange(100)}
    manifest = make_manifest(1, tensors.items())
    sender = sender_of((0,))
    receiver = receiver_of(sender.address, 0)
    for _ in range(2):
        thread = in_thread(lambda: list(receiver.receive(manifest, Deadline(20))))
        sender.send(manifest, iter(tensors.items()), Deadline(20))
        thread.join()
        assert (sender._buffer, receiver._buffer) == (None, None)
    receiver.close()
    sender.close()


@pytest.mark.parametrize(
    ("name", "refuses", "facts"),
    [
        ("device-2", "", ("device-2",)),
        ("the one device", "invalid-context", ("invalid-context",)),
    ],
)
def test_unopenable_memory_ends_the_publish_on_both_sides(monkeypatch, name, refuses, facts):
    manifest = make_manifest(1, [("a", torch.arange(100))])
    sender = sender_of((0,))
    kind = HostMemory(name)
    kind.refuses = refuses
    monkeypatch.setitem(device_memory.KINDS, "cpu", kind)
    receiver = receiver_of(sender.address, 0)
    lost = []

    def send():
        with pytest.raises(ReceiversLostError) as caught:
            sender.send(manifest, iter([("a", torch.arange(100))]), Deadline(20))
        lost.extend(caught.value.disconnected)

    sending = in_thread(send)
    with raises_error(WeightSyncError, *facts):
        list(receiver.receive(manifest, Deadline(20)))
    receiver.close()
    sending.join(60)
    assert lost == [0]
    sender.close()


def test_out_of_device_memory_names_the_requested_bytes(monkeypatch, device):
    def allocate(num_bytes, device):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(device, "allocate", allocate)
    with raises_error(WeightSyncError, "1024", "cpu", "memory"):
        cuda_ipc.IpcMemory("cpu").allocate(1024)


def test_devices_with_unsharable_memory_are_refused():
    with raises_error(UnsupportedError, "npu:0"):
        sender_of((0,), "npu:0")
