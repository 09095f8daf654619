"""The example of docs/weight-sync.md, as an author of an engine would copy it."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import torch

from roll_core.spec.transport import Deadline, DeviceFacts, ReceiverSetup, RoleFacts, SenderSetup, WorkerFacts
from roll_core.spec.weights import make_manifest, make_receipt

DOCS = Path(__file__).parents[2] / "docs" / "weight-sync.md"


def updater():
    return example(0)["update_weights"]


def example(number):
    """The names that an example of the page defines."""
    code = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)[number]
    names = {}
    exec(compile(code, str(DOCS), "exec"), names)
    return names


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(40, 3, generator=generator) for name in ("embed", "head")}


def test_update_after_a_shared_one_keeps_the_trainer_memory():
    update = updater()
    engine = SimpleNamespace(parameters=weights(0), owned=True)

    def publish(version, sent, shared):
        manifest = make_manifest(version, sent.items())
        receipt = asyncio.run(update(engine, version, manifest, iter(sent.items()), shared=shared))
        assert receipt.version == version
        assert receipt.digests == make_receipt(manifest, engine.parameters.items()).digests
        assert all(torch.equal(engine.parameters[name], each) for name, each in sent.items())

    live = weights(1)
    publish(1, weights(2), shared=False)
    publish(2, live, shared=True)
    assert all(engine.parameters[name] is each for name, each in live.items())
    publish(3, weights(3), shared=False)
    assert all(torch.equal(each, weights(1)[name]) for name, each in live.items())
    publish(4, weights(4), shared=False)
    publish(5, live, shared=True)


def test_transport_example_has_both_endpoints_and_availability():
    transport = example(1)["RdmaTransport"]()
    sender = transport.sender(SenderSetup(receivers=(0,), bucket_bytes=1))
    receiver = transport.receiver(
        ReceiverSetup(address=sender.address, rank=0, num_receivers=1, bucket_bytes=1, deadline=Deadline(1))
    )
    assert receiver.address == sender.address == "127.0.0.1:4711"
    here, there = (
        RoleFacts(role="a", workers=(WorkerFacts(host="node1", pid=1, device=DeviceFacts(uuid=uuid)),))
        for uuid in ("GPU-1", "")
    )
    assert transport.available(here, here) is None
    assert "node1" in transport.available(here, there)
