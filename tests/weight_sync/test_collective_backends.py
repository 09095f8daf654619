"""The library that a broadcast uses, and one that works asynchronously to the host.

`stand_in` is a backend that a package has registered with torch, as Ascend's does; it uses gloo.
"""

import asyncio
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from sync_workers import ProcessGroup, record_of, same_values

from roll_core.errors import CorruptTensorError, UnsupportedError, WorkerDiedError
from roll_core.runtime.cluster.executors.base import WorkerCall
from roll_core.runtime.weights.plan import SyncPlan
from roll_core.runtime.weights.publisher import WeightPublisher
from roll_core.spec.transport import (
    Deadline,
    DeviceFacts,
    ReceiverSetup,
    ReceiversLostError,
    RoleFacts,
    Route,
    SenderLostError,
    SenderSetup,
    WorkerFacts,
)
from roll_core.spec.weights import make_manifest
from roll_testing.errors import raises_error
from roll_weight_transports import collective as groups
from roll_weight_transports.collective import CollectiveReceiver, CollectiveSender, CollectiveTransport


def facts(role, *workers, follower=None):
    """Workers are (backend, slots)."""
    devices = [
        DeviceFacts(device="cpu" if backend == "gloo" else "cuda:0", backend=backend, is_leader=rank != follower)
        for rank, (backend, _) in enumerate(workers)
    ]
    found = [
        WorkerFacts(host="h", pid=rank, slots=slots, device=devices[rank]) for rank, (_, slots) in enumerate(workers)
    ]
    return RoleFacts(role=role, workers=tuple(found))


@pytest.mark.parametrize(
    ("train", "infer", "backend", "why"),
    [
        ([("nccl", (0,))], [("nccl", (1,))], "nccl", ""),
        ([("hccl", (0,))], [("hccl", (2, 3)), ("hccl", (4, 5))], "hccl", ""),
        ([("nccl", (0,)), ("nccl", (1,))], [("nccl", (1,)), ("nccl", (2,))], "nccl", ""),
        ([("gloo", (0,))], [("gloo", (0,))], "gloo", ""),
        ([("gloo", (0,))], [("nccl", (1,))], "gloo", ""),
        (
            [("nccl", (0,))],
            [("nccl", (1,)), ("gloo", ())],
            "gloo",
            "not nccl: rank 1 of actor_infer receives weights on cpu",
        ),
        ([("nccl", (0,))], [("hccl", (1,))], "gloo", "not nccl: rank 0 of actor_infer receives weights on cuda:0"),
        (
            [("nccl", (0,))],
            [("nccl", (1,)), ("nccl", (0, 1))],
            "gloo",
            "not nccl: rank 1 of actor_infer is on the device of rank 0 of actor_train",
        ),
        (
            [("nccl", (0,))],
            [("nccl", (1,)), ("nccl", (1,))],
            "gloo",
            "not nccl: rank 1 of actor_infer is on the device of rank 0 of actor_infer",
        ),
    ],
)
def test_backend_is_the_platforms_if_every_rank_has_a_device(train, infer, backend, why):
    routes = CollectiveTransport().routes(facts("actor_train", *train), facts("actor_infer", *infer))
    assert (routes[0].options["backend"], routes[0].note) == (backend, why)
    assert routes[0].self_test == (backend != "gloo")
    assert [route.options["backend"] for route in routes[1:]] == (["gloo"] if backend != "gloo" else [])


def test_the_sender_is_the_leader_of_the_first_replica():
    train = facts("actor_train", ("nccl", (0,)), ("nccl", (1,)), follower=0)
    routes = CollectiveTransport().routes(train, facts("actor_infer", ("nccl", (0,))))
    assert routes[0].options == {"backend": "nccl"}


def register(asked=None):
    def create(store, rank, size, timeout):
        if asked is not None:
            asked.append((rank, size, timeout))
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=30)
        return dist.ProcessGroupGloo(store, rank, size, options)

    dist.Backend._plugins["STAND_IN"] = dist.Backend._BackendPlugin(create, False)


@pytest.fixture
def stand_in(monkeypatch):
    asked = []
    monkeypatch.setattr(dist.Backend, "_plugins", {})
    register(asked)
    return asked


TENSORS = {name: torch.randn(3000) for name in "abcde"}
MANIFEST = make_manifest(1, TENSORS.items())
HOW = {"backend": "stand_in"}


def sender_of():
    return CollectiveSender(SenderSetup(receivers=(0,), bucket_bytes=16 << 10, options=HOW))


def receiver_of(sender, seconds):
    return CollectiveReceiver(
        ReceiverSetup(
            address=sender.address,
            rank=0,
            num_receivers=1,
            bucket_bytes=16 << 10,
            deadline=Deadline(seconds),
            options=HOW,
        )
    )


def in_thread(act):
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_registered_backend_reuses_one_group_for_all_publishes(stand_in):
    sender = sender_of()
    held = []

    def receive():
        receiver = receiver_of(sender, 20)
        for _ in range(2):
            held.append({name: tensor.clone() for name, tensor in receiver.receive(MANIFEST, Deadline(20))})
        receiver.close()

    thread = in_thread(receive)
    for _ in range(2):
        assert tuple(sender.send(MANIFEST, iter(TENSORS.items()), Deadline(20))) == MANIFEST.tensors
    thread.join()
    sender.close()
    assert all(torch.equal(each[name], TENSORS[name]) for each in held for name in TENSORS)
    assert len(held) == len(stand_in) == 2
    assert sorted(stand_in) == [(0, 2, timedelta(days=1)), (1, 2, timedelta(days=1))]


class NeverDone:
    def is_completed(self):
        return False


class Hanging:
    """A library that does not see that its peers are gone."""

    aborted = False

    def __init__(self):
        self.callers = set()

    def broadcast(self, *_):
        self.callers.add(threading.get_ident())
        return NeverDone()

    def abort(self):
        self.aborted = True


@pytest.fixture
def hanging(monkeypatch):
    group = Hanging()
    monkeypatch.setattr(groups, "_torch_group", lambda *_: group)
    return group


def begin(end, act):
    found = []

    def work():
        try:
            act(end)
        except (ReceiversLostError, SenderLostError) as error:
            found.append(error)

    return in_thread(work), found


def test_the_driver_frees_ends_that_wait_for_a_device_in_vain(hanging):
    sender = sender_of()
    receiver = receiver_of(sender, 60)
    sending, sent = begin(sender, lambda end: end.send(MANIFEST, iter(TENSORS.items()), Deadline(60)))
    receiving, received = begin(receiver, lambda end: list(end.receive(MANIFEST, Deadline(60))))
    until = time.monotonic() + 30
    while len(hanging.callers) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert sending.is_alive()
    assert receiving.is_alive()
    CollectiveTransport().cancel_transfer(sender.address, HOW)
    sending.join(30)
    receiving.join(30)
    assert (type(sent[0]), sent[0].disconnected, sent[0].tensor_name) == (ReceiversLostError, (0,), "a")
    assert isinstance(received[0], SenderLostError)
    assert "called off" in str(received[0])
    receiver.close()
    sender.close()
    assert hanging.aborted


def test_a_device_that_is_late_is_silent_at_the_deadline(hanging):
    sender = sender_of()
    receiver = receiver_of(sender, 60)
    receiving, _ = begin(receiver, lambda end: list(end.receive(MANIFEST, Deadline(5))))
    with pytest.raises(ReceiversLostError) as caught:
        sender.send(MANIFEST, iter(TENSORS.items()), Deadline(0.5))
    assert (caught.value.timed_out, caught.value.disconnected) == ((0,), ())
    receiving.join(30)
    assert not receiving.is_alive()
    sender.close()
    receiver.close()


def test_cancelling_a_closed_transfer_is_no_error():
    sender = CollectiveSender(SenderSetup(receivers=(0,), bucket_bytes=16 << 10))
    address = sender.address
    sender.close()
    del sender
    assert CollectiveTransport().cancel_transfer(address, HOW) is None


def test_torch_s_own_backends_are_made_by_their_class(monkeypatch):
    made, watchdogs = [], []
    monkeypatch.delenv(groups.WATCHDOGS[0], raising=False)
    monkeypatch.setenv(groups.WATCHDOGS[1], "2")

    class ProcessGroupOWNCCL:
        class Options:
            _timeout = None

        def __init__(self, store, rank, size, options):
            made.append((store, rank, size, options._timeout))
            watchdogs.extend(os.environ[name] for name in groups.WATCHDOGS)

    monkeypatch.setattr(dist, "ProcessGroupOWNCCL", ProcessGroupOWNCCL, raising=False)
    group = groups.make_group("ownccl", "cpu", "store", 2, 5, groups.LOOPBACK, Deadline(1))
    assert isinstance(group, groups.DeviceBroadcastGroup)
    assert made == [("store", 2, 5, timedelta(days=1))]
    assert watchdogs == ["0", "0"]
    assert [os.environ.get(name) for name in groups.WATCHDOGS] == [None, "2"]


def test_a_backend_that_this_torch_does_not_have_is_named():
    with raises_error(UnsupportedError, "madeup"):
        groups.make_group("madeup", "cpu", None, 0, 2, groups.LOOPBACK, Deadline(1))


def test_processes_receive_weights_and_name_faults_as_with_gloo():
    train, infer = ProcessGroup("actor_train", "train", 1), ProcessGroup("actor_infer", "generate", 2)

    async def scenario():
        for group in (train, infer):
            await WorkerCall(group, "use_stand_in").all()
        route = Route(options={"backend": "stand_in"})
        plan = SyncPlan(transport=record_of("collective"), route=route, bucket_bytes=64 << 10, deadline_s=20)
        publisher = WeightPublisher(train, infer, plan)
        await publisher.self_test()
        for version in range(2):
            await publisher.publish(version)
            (sent,) = await WorkerCall(train, "values").all()
            for held in await WorkerCall(infer, "values").all():
                assert all(same_values(held[name], sent[name]) for name in sent)
            await WorkerCall(train, "step").all(0.125)
        await WorkerCall(infer, "set_fault").at(1, "flip:embed")
        with raises_error(CorruptTensorError, "actor_infer rank 1"):
            await publisher.publish(2)
        await WorkerCall(train, "step").all(0.125)
        await WorkerCall(infer, "set_fault").at(1, "die:left")
        with raises_error(WorkerDiedError, "actor_infer rank 1"):
            await publisher.publish(3)
        await WorkerCall(train, "values", 10).all()  # the sender is free again

    try:
        asyncio.run(scenario())
    finally:
        train.close()
        infer.close()
