import pytest
import torch

from roll_core.spec.transport import Deadline, ReceiversLostError, SenderSetup
from roll_core.spec.weights import make_manifest
from roll_weight_transports import collective
from roll_weight_transports.collective import BroadcastGroup


class Work:
    def __init__(self, number):
        self.number = number


class Recorded(BroadcastGroup):
    """Says what it is told."""

    def __init__(self, done):
        self.done = done

    def memory(self, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def broadcast(self, memory, deadline):
        number = int(memory.view(torch.float32)[0])
        self.done.append(f"send {number}")
        return Work(number)

    def wait(self, work, deadline):
        self.done.append(f"arrived {work.number}")

    def all_done(self, deadline):
        pass

    def abort(self):
        pass


def test_the_next_bucket_is_exported_while_one_travels(monkeypatch):
    """And no earlier than its memory is free: two buffers, so the third waits for the first."""
    done = []
    tensors = {name: torch.full((1024,), float(number)) for number, name in enumerate("abcd")}
    manifest = make_manifest(1, tensors.items())

    def export():
        for number, item in enumerate(tensors.items()):
            done.append(f"export {number}")
            yield item

    sender = collective.CollectiveSender(SenderSetup(receivers=(0,), bucket_bytes=4096))
    monkeypatch.setattr(sender, "_group", Recorded(done))
    sent = sender.send(manifest, export(), Deadline(5))
    sender.close()
    assert tuple(sent) == manifest.tensors
    assert done == [
        "export 0", "send 0", "export 1", "send 1",
        "arrived 0", "export 2", "send 2",
        "arrived 1", "export 3", "send 3",
        "arrived 2", "arrived 3",
    ]  # fmt: skip


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_of_the_export_is_not_blamed_on_receivers(monkeypatch, number):
    """torch's errors are `RuntimeError`s, both those of the group and those of a trainer without memory."""
    tensors = {name: torch.ones(1024) for name in "ab"}
    manifest = make_manifest(1, tensors.items())

    def export():
        yield from list(tensors.items())[:number]
        raise torch.OutOfMemoryError("CUDA out of memory")

    sender = collective.CollectiveSender(SenderSetup(receivers=(0,), bucket_bytes=4096))
    monkeypatch.setattr(sender, "_group", Recorded([]))
    with pytest.raises(torch.OutOfMemoryError):
        sender.send(manifest, export(), Deadline(5))
    sender.close()


def test_an_error_of_the_group_is_a_lost_receiver(monkeypatch):
    class Broken(Recorded):
        def wait(self, work, deadline):
            raise RuntimeError("connection closed by peer")

    tensors = {name: torch.ones(1024) for name in "abc"}
    sender = collective.CollectiveSender(SenderSetup(receivers=(0, 1), bucket_bytes=4096))
    monkeypatch.setattr(sender, "_group", Broken([]))
    with pytest.raises(ReceiversLostError) as caught:
        sender.send(make_manifest(1, tensors.items()), iter(tensors.items()), Deadline(5))
    sender.close()
    assert (caught.value.tensor_name, caught.value.disconnected) == ("a", (0, 1))
