"""With `cuda_ipc` each engine is fed by the trainer's rank on its own device."""

import asyncio
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sync_workers import Engine, HostMemory, ProcessGroup, Trainer, record_of, same_values

from roll_core.config.weight_transports import load_transport
from roll_core.errors import CorruptTensorError, UnexpectedTensorError, WeightSyncError, WorkerDiedError
from roll_core.runtime.cluster.executors.base import WorkerCall
from roll_core.runtime.weights.plan import SendHandle, SyncPlan, role_facts
from roll_core.runtime.weights.publisher import WeightPublisher
from roll_core.runtime.weights.transfer import WeightReceiver, WeightSender
from roll_core.spec.transport import DeviceFacts, ReceiversLostError, RoleFacts, Route, WorkerFacts
from roll_core.spec.weights import make_manifest
from roll_core.types import DataRank
from roll_testing.errors import raises_error
from roll_weight_transports import device_memory
from roll_weight_transports.cuda_ipc import CudaIpcTransport, sources_of


def with_groups(num_train, num_infer, scenario):
    train, infer = ProcessGroup("actor_train", "train", num_train), ProcessGroup("actor_infer", "generate", num_infer)
    try:
        return asyncio.run(scenario(train, infer))
    finally:
        train.close()
        infer.close()


def publisher_between(train, infer, sources):
    route = Route(sources=sources)
    plan = SyncPlan(transport=record_of("cuda_ipc"), route=route, bucket_bytes=64 << 10, deadline_s=20)
    return WeightPublisher(train, infer, plan)


def test_every_engine_is_sent_to_from_its_own_device(monkeypatch):
    monkeypatch.setitem(device_memory.KINDS, "cpu", HostMemory())

    async def scenario(train, infer):
        await WorkerCall(train, "use_device").each([("GPU-a",), ("GPU-b",), ("GPU-c",)])
        await WorkerCall(infer, "use_device").each([("GPU-c",), ("GPU-a",)])
        devices = [await WorkerCall(group, "device_facts").all() for group in (train, infer)]
        assert devices[0][1] == DeviceFacts(device="cpu", uuid="GPU-b", backend="gloo")
        sides = [role_facts(group, ("cuda_ipc",), each) for group, each in zip((train, infer), devices, strict=True)]
        assert CudaIpcTransport().available(*sides) is None
        (route,) = CudaIpcTransport().routes(*sides)
        assert (route.sources, route.self_test) == ((2, 0), True)
        publisher = publisher_between(train, infer, route.sources)
        await publisher.self_test()
        for version in range(2):
            report = await publisher.publish(version)
            sent = (await WorkerCall(train, "values").all())[0]
            for held in await WorkerCall(infer, "values").all():
                assert held.keys() == sent.keys()
                assert all(same_values(held[name], sent[name]) for name in sent)
            await WorkerCall(train, "step").all(0.125)
        return report

    report = with_groups(3, 2, scenario)
    assert report.copied_bytes == 2 * report.weight_bytes


def test_replicas_of_the_trainer_that_have_diverged_are_found():
    async def scenario(train, infer):
        await WorkerCall(train, "step").at(1, 0.125)
        with raises_error(CorruptTensorError, "ranks 0", "1", "actor_train"):
            await publisher_between(train, infer, (0, 1)).publish(0)

    with_groups(2, 2, scenario)


@pytest.mark.parametrize("victim", ["engine", "trainer"])
def test_dead_worker_is_named_and_the_others_are_freed(victim):
    async def scenario(train, infer):
        publisher = publisher_between(train, infer, (0, 1))
        await publisher.publish(0)
        await WorkerCall(train, "step").all(0.125)
        group, others = (infer, train) if victim == "engine" else (train, infer)
        await WorkerCall(group, "set_fault").at(1, "die:left")
        with raises_error(WorkerDiedError, group.role, "rank 1"):
            await publisher.publish(1)
        await WorkerCall(others, "values", 10).all()

    with_groups(2, 2, scenario)


def test_failed_self_test_gives_its_reason_and_frees_the_workers():
    async def scenario(train, infer):
        await WorkerCall(infer, "use_device").at(1, "the one device", "peer access is not supported")
        with raises_error(WeightSyncError, "actor_infer rank 1", "access"):
            await publisher_between(train, infer, (0, 0)).self_test()
        publisher = WeightPublisher(train, infer, SyncPlan(transport=record_of("shm"), deadline_s=20))
        await publisher.publish(0)

    with_groups(1, 2, scenario)


def facts_of(role, *uuids, followers=(), host="h"):
    workers = tuple(
        WorkerFacts(
            host=host,
            pid=rank,
            device=DeviceFacts(device="cuda:0" if uuid else "cpu", uuid=uuid, is_leader=rank not in followers),
        )
        for rank, uuid in enumerate(uuids)
    )
    return RoleFacts(role=role, workers=workers)


@pytest.mark.parametrize(
    ("train", "followers", "infer", "sources", "why"),
    [
        (["a"], (), ["a"], (0,), None),
        (["a", "b"], (), ["b", "a"], (1, 0), None),
        (["a", "b"], (), ["b"], (1,), None),
        (["a", "a"], (), ["a", "a"], (0, 0), None),
        (["a", "a"], (0,), ["a"], (1,), None),
        (["a"], (), ["b"], (), "actor_train .* rank 0 of actor_infer"),
        (["a", "b"], (1,), ["a", "b"], (), "actor_train .* rank 1 of actor_infer"),
        (["a"], (), ["a", ""], (), "rank 1 of actor_infer .* cpu"),
        ([""], (), [""], (), "rank 0 of actor_infer .* cpu"),
        ([""], (), ["a"], (), "actor_train .* rank 0 of actor_infer"),
    ],
)
def test_the_sender_is_a_leader_on_the_engine_s_device(train, followers, infer, sources, why):
    found = sources_of(facts_of("actor_train", *train, followers=followers), facts_of("actor_infer", *infer))
    assert found[0] == sources
    assert found[1] is None if why is None else re.search(why, found[1])


def test_device_with_unsharable_memory_has_no_sender():
    sides = [facts_of(role, "a") for role in ("actor_train", "actor_infer")]
    sides = [
        replace(each, workers=(replace(each.workers[0], device=DeviceFacts(device="npu:0", uuid="a")),))
        for each in sides
    ]
    sources, why = sources_of(*sides)
    assert sources == ()
    assert "rank 0 of actor_infer" in why
    assert "npu:0" in why


def test_equal_names_on_two_hosts_are_two_devices():
    assert sources_of(facts_of("actor_train", "a", host="one"), facts_of("actor_infer", "a", host="two"))[0] == ()


@pytest.mark.parametrize("error", [ReceiversLostError("left", disconnected=(0,)), UnexpectedTensorError("left")])
def test_failed_sender_finishes_its_export_for_other_ranks(monkeypatch, error):
    exported = []

    class Exporting(Trainer):
        def export_weights(self):
            for name, tensor in super().export_weights():
                yield name, tensor
                exported.append(name)

    class End:
        address = "nowhere"

        def send(self, manifest, tensors, deadline):
            next(tensors)
            raise error

        def close(self):
            exported.append("hung up")

    strategy = Exporting()
    sender = WeightSender(strategy, role="actor_train", rank=0)
    monkeypatch.setattr(load_transport(record_of("shm")), "sender", lambda setup: End())
    plan = SyncPlan(version=1, transport=record_of("shm"), num_receivers=1)
    sender.prepare(plan)
    exported.clear()
    assert sender.send(plan).manifest is None
    assert exported == ["hung up", *strategy.tensors]


def test_after_a_failed_send_all_ranks_join_the_same_exports(monkeypatch):
    exports = {0: 0, 1: 0}

    class Exporting(Trainer):
        def __init__(self, rank):
            super().__init__()
            self.data_rank = DataRank(leader=rank == 0)
            self.rank = rank

        def export_weights(self):
            exports[self.rank] += 1
            yield from super().export_weights()

    class End:
        address = "nowhere"

        def send(self, manifest, tensors, deadline):
            raise ReceiversLostError("left", disconnected=(0,))

        def close(self):
            pass

    monkeypatch.setattr(load_transport(record_of("shm")), "sender", lambda setup: End())
    senders = [WeightSender(Exporting(rank), role="actor_train", rank=rank) for rank in exports]
    plan = SyncPlan(version=1, transport=record_of("shm"), num_receivers=1, sender_hosts=("127.0.0.1",) * 2)
    for attempt in range(2):
        handles = [sender.prepare(plan) for sender in senders]
        assert [handle is None for handle in handles] == [False, True]
        assert exports == {0: attempt + 1, 1: attempt + 1}
        outcome, nothing = [sender.send(plan) for sender in senders]
        assert (outcome.disconnected, nothing) == ((0,), None)
        assert exports == {0: attempt + 2, 1: attempt + 2}


def test_every_publish_is_described_by_its_own_export(monkeypatch):
    """One trainer, and engines that take other tensors of it: an adapter, or fp8 from other ranks."""

    class Exporting(Trainer):
        def export_adapters(self):
            yield "lora_A", self.tensors["left"]

    class End:
        address = "nowhere"

    monkeypatch.setattr(load_transport(record_of("shm")), "sender", lambda setup: End())
    strategy = Exporting()
    strategy.fault = "in_layers"
    sender = WeightSender(strategy, role="actor_train", rank=0)
    whole = SyncPlan(transport=record_of("shm"))

    def names(plan):
        return [entry.name for entry in sender.prepare(plan).manifest.tensors]

    assert len(names(whole)) == 9
    assert names(replace(whole, adapters=True)) == ["lora_A"]
    fp8 = replace(whole, weight_format="fp8")
    assert sender.prepare(replace(fp8, route=Route(sources=(1,)))) is None
    assert len(names(fp8)) == 9 + 6  # a matrix has its scales beside it


@pytest.mark.parametrize("weight_format", ["dtype", "fp8"])
def test_buffers_travel_in_their_own_dtype(monkeypatch, weight_format):
    class Exporting(Trainer):
        def export_buffers(self):
            yield "gate.e_score_correction_bias", torch.tensor([1 + 2**-20, 5.0])

        def export_adapters(self):
            yield "lora_A", self.tensors["left"]

    monkeypatch.setattr(load_transport(record_of("shm")), "sender", lambda setup: SimpleNamespace(address="nowhere"))
    strategy = Exporting()
    strategy.fault = "in_layers"
    sender = WeightSender(strategy, role="actor_train", rank=0)
    plan = SyncPlan(transport=record_of("shm"), dtype="BF16", weight_format=weight_format)
    dtypes = {entry.name: entry.dtype for entry in sender.prepare(plan).manifest.tensors}
    assert dtypes["layers.0.bias.weight"] == "BF16"
    assert dtypes["gate.e_score_correction_bias"] == "F32"
    adapters = sender.prepare(replace(plan, adapters=True, weight_format="dtype")).manifest
    assert [entry.name for entry in adapters.tensors] == ["lora_A"]
    together = sender.prepare(replace(plan, transport=record_of("shared"), weight_format="dtype"))
    assert {name: str(tensor.dtype) for name, tensor in together.tensors}["gate.e_score_correction_bias"] == (
        "torch.float32"
    )


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_an_error_of_several_arguments_keeps_them_and_its_notes(monkeypatch, side):
    class BrokenError(WeightSyncError):
        """As a plugin may define it."""

        def __init__(self, message, link):
            super().__init__(message, link)
            self.link = link

        def __str__(self):
            return str(self.args[0])

    class End:
        address = "nowhere"

        def fail(self, *args):
            error = BrokenError("down", 7)
            error.add_note("note")
            raise error

        send = receive = fail

        def close(self):
            pass

    monkeypatch.setattr(load_transport(record_of("shm")), side, lambda setup: End())
    plan = SyncPlan(transport=record_of("shm"))
    if side == "sender":
        sender = WeightSender(Trainer(), role="actor_train", rank=0)
        sender.prepare(plan)
        outcome = sender.send(plan)
    else:
        receiver = WeightReceiver(Engine(), role="actor_train", rank=0)
        handle = SendHandle(manifest=make_manifest(0, []), address="nowhere")
        outcome = asyncio.run(receiver.receive(plan, handle))
    assert type(outcome.failure) is BrokenError
    assert (str(outcome.failure), outcome.failure.link) == ("actor_train rank 0: down", 7)
    assert outcome.failure.__notes__ == ["note"]
