"""Tensors survive the way through a bucket, whatever fits into it."""

from __future__ import annotations

import asyncio
import json
import logging
import sys

import pytest
import torch
from sync_workers import HostMemory, ProcessGroup

from roll_core.runtime.cluster.executors.base import WorkerCall
from roll_core.spec.model import MeshInfo
from roll_testing.errors import mentions
from roll_weight_transports import device_memory
from roll_weight_transports.buckets import BucketInfo, BucketWriter, read_bucket
from roll_weight_transports.device_memory import slot_devices

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines run on Linux")


@pytest.fixture(params=[(), ("cpu",)], ids=["by the host", "on a device"])
def devices(request, monkeypatch):
    """The device is the host's memory, lent as a device's is."""
    if request.param:
        monkeypatch.setitem(device_memory.KINDS, "cpu", HostMemory())
    return request.param


def sent_through(tensors, bucket_bytes, devices=()):
    """What arrives, and the number of buckets."""
    writer = BucketWriter(bucket_bytes, devices)
    incoming, arrived, count = iter(tensors), [], 0
    following = next(incoming, None)
    while following is not None:
        bucket, following = writer.fill(incoming, following)
        received = BucketInfo(**json.loads(json.dumps(bucket.plain())))
        assert bool(received.handles) == bool(devices) != bool(received.path)
        arrived += read_bucket(received)
        count += 1
    writer.close()
    return arrived, count


def some_tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (), (7,), (0, 4), (64, 33), (1,)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16, torch.int64]
    return [(f"t{at}", each.to(dtype)) for at, (each, dtype) in enumerate(zip(tensors, dtypes, strict=True))]


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_tensors_arrive_as_they_were_sent(devices, bucket_bytes):
    arrived, _ = sent_through(some_tensors(), bucket_bytes, devices)
    assert [name for name, _ in arrived] == [name for name, _ in some_tensors()]
    for (_, one), (_, other) in zip(arrived, some_tensors(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_a_tensor_that_is_larger_than_a_bucket_travels_alone():
    tensors = [("small", torch.ones(1)), ("large", torch.ones(100)), ("next", torch.ones(1))]
    assert sent_through(tensors, 16)[1] == 3
    assert sent_through(tensors, 4096)[1] == 1


def test_strided_tensors_arrive_in_their_own_order():
    matrix = torch.arange(6.0).view(2, 3)
    ((_, arrived),) = sent_through([("t", matrix.t())], 1024)[0]
    assert arrived.tolist() == matrix.t().tolist()


def test_received_tensors_survive_a_refilled_bucket(devices):
    arrived, count = sent_through([("a", torch.full((8,), 1.0)), ("b", torch.full((8,), 2.0))], 32, devices)
    assert count == 2
    assert arrived[0][1].tolist() == [1.0] * 8


@pytest.fixture
def engine(monkeypatch):
    """Another process that reads what this one lends."""
    monkeypatch.setitem(device_memory.KINDS, "cpu", HostMemory())
    group = ProcessGroup("actor_infer", "generate", 1)
    yield group
    group.close()


def test_engine_process_reads_device_buckets_in_turn(engine):
    tensors = [("a", torch.arange(60.0)), ("b", torch.arange(60.0) * 2), ("c", torch.ones(5))]

    async def scenario():
        writer, found = BucketWriter(256, ("cpu",)), {}
        trial = writer.trial(tensors[0][1])
        writer.check_trial([await WorkerCall(engine, "opening_failure").at(0, trial.plain())])
        assert writer.trial(tensors[0][1]) is None  # once is enough
        incoming = iter(tensors)
        following = next(incoming)
        while following is not None:
            bucket, following = writer.fill(incoming, following)
            assert list(bucket.handles) == ["the one device"]
            found |= await WorkerCall(engine, "read_bucket").at(0, bucket.plain())
        writer.release()
        assert writer._memory is None
        return found

    assert asyncio.run(scenario()) == {name: tensor.tolist() for name, tensor in tensors}


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (("another", ""), "the bucket is on the one device, and this process computes on another"),
        (("the one device", "no peer access"), "RuntimeError: no peer access"),
    ],
)
def test_process_without_device_access_gets_host_buckets(engine, caplog, device, words):
    caplog.set_level(logging.WARNING)

    async def scenario():
        await WorkerCall(engine, "use_device").all(*device)
        writer = BucketWriter(256, ("cpu",))
        trial = writer.trial(torch.ones(1))
        writer.check_trial([await WorkerCall(engine, "opening_failure").at(0, trial.plain())])
        bucket, _ = writer.fill(iter(()), ("a", torch.arange(3.0)))
        found = await WorkerCall(engine, "read_bucket").at(0, bucket.plain())
        writer.close()
        return bucket, found

    bucket, found = asyncio.run(scenario())
    assert not bucket.handles
    assert found == {"a": [0.0, 1.0, 2.0]}
    assert words in caplog.text


def test_unsharable_memory_falls_back_to_the_host(monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    kind = HostMemory()
    monkeypatch.setitem(device_memory.KINDS, "cpu", kind)

    def share(memory):
        raise RuntimeError("operation not supported")

    monkeypatch.setattr(kind, "share", share)
    writer = BucketWriter(256, ("cpu",))
    assert writer.trial(torch.ones(1)) is None
    bucket, _ = writer.fill(iter(()), ("a", torch.ones(1)))
    assert bucket.path
    assert mentions(caplog.text, "operation")
    writer.close()


def test_every_device_of_the_engine_has_the_bucket(monkeypatch):
    class Several(HostMemory):
        def uuid(self, device):
            return f"GPU-{device}"

        def allocate(self, num_bytes, device):
            return super().allocate(num_bytes, "cpu")

    monkeypatch.setitem(device_memory.KINDS, "cpu", Several())
    writer = BucketWriter(256, ("cpu:0", "cpu:1"))
    bucket, _ = writer.fill(iter(()), ("a", torch.arange(4.0)))
    assert list(bucket.handles) == ["GPU-cpu:0", "GPU-cpu:1"]
    for memory in writer._memory._on.values():
        assert memory[:16].view(torch.float32).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert len({memory.data_ptr() for memory in writer._memory._on.values()}) == 2
    writer.close()


@pytest.mark.parametrize(
    ("device", "num_slots", "devices"),
    [("cuda:0", 2, ("cuda:0", "cuda:1")), ("cuda:6", 1, ("cuda:6",)), ("cpu", 3, ("cpu",) * 3)],
)
def test_the_slots_of_a_worker_are_devices_side_by_side(device, num_slots, devices):
    assert slot_devices(MeshInfo(role="r", device=device, num_slots=num_slots)) == devices
    assert slot_devices(MeshInfo(role="r", device=device), num_slots) == devices
