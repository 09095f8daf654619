"""With `cuda_ipc` each engine is fed by the trainer's rank on its own device."""

import asyncio

import pytest
from sync_workers import ProcessGroup, Trainer, same_values

from roll_core.errors import CorruptTensorError, UnexpectedTensorError, WeightSyncError, WorkerDiedError
from roll_core.runtime.weights import DeviceFacts, PlacementFacts, WeightPublisher, WeightSender
from roll_core.runtime.weights.plan import SyncPlan
from roll_core.runtime.weights.select import sources_of
from roll_core.spec.transport import ReceiversLostError


def with_groups(num_train, num_infer, scenario):
    train, infer = ProcessGroup("actor_train", "train", num_train), ProcessGroup("actor_infer", "generate", num_infer)
    try:
        return asyncio.run(scenario(train, infer))
    finally:
        train.close()
        infer.close()


def publisher_between(train, infer, sources):
    return WeightPublisher(train, infer, "cuda_ipc", bucket_bytes=64 << 10, deadline_s=20, sources=sources)


def test_each_engine_is_fed_from_its_own_device():
    async def scenario(train, infer):
        await train.call_each("use_device", [("GPU-a",), ("GPU-b",), ("GPU-c",)])
        await infer.call_each("use_device", [("GPU-c",), ("GPU-a",)])
        devices = [await group.call("device_facts") for group in (train, infer)]
        assert devices[0][1] == DeviceFacts(device="cpu", uuid="GPU-b", backend="gloo")
        facts = PlacementFacts.of(train, infer, shares_memory=False, train_devices=devices[0], infer_devices=devices[1])
        assert (facts.sources, facts.obstacle("cuda_ipc")) == ((2, 0), "")
        publisher = publisher_between(train, infer, facts.sources)
        await publisher.rehearse()
        for version in range(2):
            report = await publisher.publish(version)
            sent = (await train.call("values"))[0]
            for held in await infer.call("values"):
                assert held.keys() == sent.keys()
                assert all(same_values(held[name], sent[name]) for name in sent)
            await train.call("step", 0.125)
        return report

    report = with_groups(3, 2, scenario)
    assert report.copied_bytes == 2 * report.weight_bytes


def test_replicas_of_the_trainer_that_have_diverged_are_found():
    async def scenario(train, infer):
        await train.call_rank(1, "step", 0.125)
        with pytest.raises(CorruptTensorError, match="ranks 0 and 1 of actor_train hold different values of embed"):
            await publisher_between(train, infer, (0, 1)).publish(0)

    with_groups(2, 2, scenario)


@pytest.mark.parametrize("victim", ["engine", "trainer"])
def test_who_dies_is_named_and_the_others_are_free_again(victim):
    async def scenario(train, infer):
        publisher = publisher_between(train, infer, (0, 1))
        await publisher.publish(0)
        await train.call("step", 0.125)
        group, others = (infer, train) if victim == "engine" else (train, infer)
        await group.call_rank(1, "set_fault", "die:left")
        with pytest.raises(WorkerDiedError, match=f"{group.role} rank 1"):
            await publisher.publish(1)
        await others.call("values", deadline_s=10)

    with_groups(2, 2, scenario)


def test_a_rehearsal_says_why_memory_cannot_be_lent_and_leaves_the_ends_free():
    async def scenario(train, infer):
        await infer.call_rank(1, "use_device", "the one device", "peer access is not supported")
        with pytest.raises(WeightSyncError, match=r"actor_infer rank 1: .* peer access is not supported"):
            await publisher_between(train, infer, (0, 0)).rehearse()
        publisher = WeightPublisher(train, infer, "shm", deadline_s=20)
        await publisher.publish(0)

    with_groups(1, 2, scenario)


class Members:
    def __init__(self, role, *hosts):
        from types import SimpleNamespace

        self.role, self.members = role, [SimpleNamespace(host=host, node=0) for host in hosts]


def facts_of(*uuids, followers=()):
    return [
        DeviceFacts(device="cuda:0" if uuid else "cpu", uuid=uuid, leads=rank not in followers)
        for rank, uuid in enumerate(uuids)
    ]


@pytest.mark.parametrize(
    ("train", "followers", "infer", "sources", "why"),
    [
        (["a"], (), ["a"], (0,), ""),
        (["a", "b"], (), ["b", "a"], (1, 0), ""),
        (["a", "b"], (), ["b"], (1,), ""),
        (["a", "a"], (), ["a", "a"], (0, 0), ""),
        (["a", "a"], (0,), ["a"], (1,), ""),
        (["a"], (), ["b"], (), "no rank of actor_train has whole tensors on the device of rank 0 of actor_infer"),
        (["a", "b"], (1,), ["a", "b"], (), "no rank of actor_train has whole tensors on the device of rank 1"),
        (["a"], (), ["a", ""], (), "rank 1 of actor_infer computes on cpu, whose memory cannot be lent"),
        ([""], (), [""], (), "rank 0 of actor_infer computes on cpu, whose memory cannot be lent"),
        ([""], (), ["a"], (), "no rank of actor_train has whole tensors on the device of rank 0"),
    ],
)
def test_the_sender_is_a_leader_on_the_engine_s_device(train, followers, infer, sources, why):
    ends = Members("actor_train", *["h"] * len(train)), Members("actor_infer", *["h"] * len(infer))
    found = sources_of(*ends, facts_of(*train, followers=followers), facts_of(*infer))
    assert found[0] == sources
    assert found[1].startswith(why)
    assert bool(found[1]) == bool(why)


def test_equal_names_on_two_hosts_are_two_devices():
    ends = Members("actor_train", "one"), Members("actor_infer", "two")
    assert sources_of(*ends, facts_of("a"), facts_of("a"))[0] == ()


@pytest.mark.parametrize("error", [ReceiversLostError("left", gone=(0,)), UnexpectedTensorError("left")])
def test_a_sender_that_gives_up_ends_its_export_because_other_ranks_are_in_it(monkeypatch, error):
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
    monkeypatch.setattr("roll_core.runtime.weights.sender.open_sending_end", lambda *_, **__: End())
    plan = SyncPlan(version=1, transport="shm", num_receivers=1)
    sender.prepare(plan)
    exported.clear()
    assert sender.send(plan).manifest is None
    assert exported == ["hung up", *strategy.tensors]
