"""How a run finds the way that its weights take, and what it says of the ways that it does not take."""

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from sync_workers import ProcessGroup, same_values

from roll_core.errors import WorkerDiedError
from roll_core.runtime.weights import controller as publishing
from roll_core.spec.providers import InferCapabilities, TrainCapabilities

ALL = ("cuda_ipc", "shm", "collective")


@pytest.fixture
def groups():
    found = ProcessGroup("actor_train", "train", 1), ProcessGroup("actor_infer", "generate", 1)
    yield found
    for group in found:
        group.close()


@pytest.fixture
def way(groups, monkeypatch):
    """Publishes once, after `prepare(train, infer)`, and returns what the record has."""
    train, infer = groups
    monkeypatch.setattr(publishing, "served_adapters", lambda *_: None)

    async def nobody():
        """Has died."""

    def run(transports, prepare):
        record = {}
        engine = SimpleNamespace(
            group=infer,
            revive=nobody,
            config=SimpleNamespace(model_args=SimpleNamespace(dtype="fp32"), weight_format="dtype"),
        )
        config = SimpleNamespace(model_update_dir=None, model_update_buffer_size_mb=1, model_update_timeout=20.0)
        active = SimpleNamespace(
            engine=lambda name: engine,
            train_role=lambda name: SimpleNamespace(group=train),
            config=config,
            busy_roles=(),
        )
        kept = SimpleNamespace(weight_transport=lambda source, target, transport: record.update({target: transport}))
        executor = SimpleNamespace(shares_memory=False)
        found = publishing.Publishing(active, [SimpleNamespace(name="actor_infer")], None, executor, kept)
        abilities = {
            "actor_train": TrainCapabilities(weight_transports=transports),
            "actor_infer": InferCapabilities(weight_transports=transports),
        }
        monkeypatch.setattr(found, "_capabilities", abilities.get)

        async def scenario():
            await prepare(train, infer)
            link = await found._connect("actor_train", "actor_infer")
            await link.publisher.publish(0)
            (sent,), (held,) = await train.call("values"), await infer.call("values")
            assert all(same_values(held[name], sent[name]) for name in sent)
            return link.publisher

        return asyncio.run(scenario()), record["actor_infer"]

    return run


def said(caplog):
    (line,) = [each.getMessage() for each in caplog.records if "reach" in each.getMessage()]
    return line


async def as_it_is(train, infer):
    """Nothing to prepare."""


def test_memory_of_the_shared_device_is_lent(way, caplog):
    caplog.set_level(logging.INFO)
    publisher, recorded = way(ALL, as_it_is)
    assert publisher.transport == recorded == "cuda_ipc"
    assert said(caplog) == "weights of actor_train reach actor_infer by cuda_ipc"


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (("another", ""), "no rank of actor_train has whole tensors on the device of rank 0 of actor_infer"),
        (
            ("the one device", "invalid device context"),
            "it was tried, and failed: actor_infer rank 0: the sender's memory on cpu cannot be opened: invalid device"
            " context",
        ),
    ],
)
def test_where_it_cannot_be_the_log_says_why_and_the_next_way_is_taken(way, caplog, device, why):
    caplog.set_level(logging.INFO)
    publisher, recorded = way(ALL, lambda _, infer: infer.call("use_device", *device))
    assert publisher.transport == recorded == "shm"
    assert said(caplog) == f"weights of actor_train reach actor_infer by shm (cuda_ipc: {why})"


def test_a_backend_that_does_not_work_gives_way_to_gloo(way, caplog, groups):
    caplog.set_level(logging.INFO)
    for slot, group in enumerate(groups):
        group.members = tuple(replace(each, slots=(slot,)) for each in group.members)

    async def on_devices(*both):
        for group in both:
            await group.call("use_backend", "madeup")

    publisher, recorded = way(("collective",), on_devices)
    assert (publisher.transport, publisher.backend, recorded) == ("collective", "gloo", "collective")
    assert "(not madeup: it was tried, and failed: " in said(caplog)
    assert "this torch has no collective backend madeup" in said(caplog)


def test_an_engine_that_dies_while_it_is_tried_is_dead_and_not_a_reason(way, monkeypatch):
    async def dies(publisher):
        raise WorkerDiedError("actor_infer", 0, "here", "receive_weights", "its process was killed")

    monkeypatch.setattr(publishing.WeightPublisher, "rehearse", dies)
    with pytest.raises(WorkerDiedError):
        way(ALL, as_it_is)
