import torch

from roll_core.runtime.weight_sync import collective
from roll_core.runtime.weight_sync.plan import Deadline
from roll_core.spec.weights import make_manifest


def test_the_next_bucket_is_exported_while_one_travels(monkeypatch):
    """And no earlier than its memory is free: two buffers, so the third waits for the first."""
    done = []
    tensors = {name: torch.full((1024,), float(number)) for number, name in enumerate("abcd")}
    manifest = make_manifest(1, tensors.items())

    class Work:
        def __init__(self, number):
            self.number = number

        def wait(self, _timeout):
            done.append(f"arrived {self.number}")

    def broadcast(_group, memory, bucket, _deadline):
        number = int(memory[: bucket.num_bytes].view(torch.float32)[0])
        done.append(f"send {number}")
        return Work(number)

    def export():
        for number, item in enumerate(tensors.items()):
            done.append(f"export {number}")
            yield item

    monkeypatch.setattr(collective, "_broadcast", broadcast)
    monkeypatch.setattr(collective, "_all_done", lambda *_: None)
    sender = collective.CollectiveSender(1, 4096, collective.LOOPBACK)
    monkeypatch.setattr(sender, "_group", object())
    sent = sender.send(manifest, export(), Deadline(5))
    monkeypatch.setattr(sender, "_group", None)
    sender.close()
    assert tuple(sent) == manifest.tensors
    assert done == [
        "export 0", "send 0", "export 1", "send 1",
        "arrived 0", "export 2", "send 2",
        "arrived 1", "export 3", "send 3",
        "arrived 2", "arrived 3",
    ]  # fmt: skip
