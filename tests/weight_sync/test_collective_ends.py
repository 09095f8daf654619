import torch

from roll_core.spec.transport import Deadline, SenderSetup
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
