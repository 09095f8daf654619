"""How a run connects two roles: the transport it uses, and the log line with the reasons against others."""

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from sync_workers import HostMemory, ProcessGroup, record_of, same_values

from roll_core.errors import WorkerDiedError
from roll_core.plugins.loader import Plugin, load_plugins
from roll_core.plugins.registry import Registry
from roll_core.runtime.cluster.executors.base import WorkerCall
from roll_core.runtime.run import weight_sync as controller
from roll_core.runtime.weights.publisher import WeightPublisher
from roll_core.spec.providers import InferCapabilities, TrainCapabilities
from roll_weight_transports import device_memory

ALL = ("cuda_ipc", "shm", "collective")
ACME = Plugin(
    package="roll-acme", version="1", entry_point="a", target="", state="loaded", providers=(record_of("acme"),)
)
REGISTRY = Registry([*load_plugins(environ={"ROLL_PLUGINS": "roll-weight-transports"}), ACME])


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
    monkeypatch.setattr(controller, "served_adapters", lambda *_: None)
    monkeypatch.setitem(device_memory.KINDS, "cpu", HostMemory())

    async def nobody():
        """Has died."""

    def run(transports, prepare, wanted=None):
        record = {}
        engine = SimpleNamespace(
            group=infer,
            revive=nobody,
            config=SimpleNamespace(model_args=SimpleNamespace(dtype="fp32"), weight_format="dtype"),
        )
        config = SimpleNamespace(
            model_update_dir=None,
            weight_transport=wanted,
            model_update_buffer_size_mb=1,
            model_update_timeout=20.0,
        )
        active = SimpleNamespace(
            engine=lambda name: engine,
            train_role=lambda name: SimpleNamespace(group=train, capabilities=abilities["actor_train"]),
            config=config,
            busy_roles=(),
        )
        kept = SimpleNamespace(weight_transport=lambda source, target, transport: record.update({target: transport}))
        roles = [SimpleNamespace(name="actor_infer")]
        found = controller.WeightSyncController(active, roles, REGISTRY, kept, in_process=False)
        abilities = {
            "actor_train": TrainCapabilities(weight_transports=transports),
            "actor_infer": InferCapabilities(weight_transports=transports),
        }
        engine.capabilities = abilities["actor_infer"]

        async def scenario():
            await prepare(train, infer)
            link = await found._connect("actor_train", "actor_infer")
            await link.publisher.publish(0)
            (sent,), (held,) = await WorkerCall(train, "values").all(), await WorkerCall(infer, "values").all()
            assert all(same_values(held[name], sent[name]) for name in sent)
            return link.publisher

        return asyncio.run(scenario()), record["actor_infer"]

    return run


def said(caplog):
    (line,) = [each.getMessage() for each in caplog.records if "reach" in each.getMessage()]
    return line


async def as_it_is(train, infer):
    """Nothing to prepare."""


def test_memory_of_the_shared_device_uses_cuda_ipc(way, caplog):
    caplog.set_level(logging.INFO)
    publisher, recorded = way(ALL, as_it_is)
    assert publisher.plan.transport.name == recorded == "cuda_ipc"
    assert said(caplog) == "weights of actor_train reach actor_infer by cuda_ipc"


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (("another", ""), "device of rank 0 of actor_infer"),
        (("the one device", "invalid device context"), "invalid device context"),
    ],
)
def test_unsharable_memory_logs_why_and_uses_the_next_transport(way, caplog, device, why):
    caplog.set_level(logging.INFO)
    publisher, recorded = way(ALL, lambda _, infer: WorkerCall(infer, "use_device").all(*device))
    assert publisher.plan.transport.name == recorded == "shm"
    assert said(caplog).startswith("weights of actor_train reach actor_infer by shm (cuda_ipc: ")
    assert why in said(caplog)


def test_a_backend_that_does_not_work_gives_way_to_gloo(way, caplog, groups):
    caplog.set_level(logging.INFO)
    for slot, group in enumerate(groups):
        group.members = tuple(replace(each, slots=(slot,)) for each in group.members)

    async def on_devices(*both):
        for group in both:
            await WorkerCall(group, "use_backend").all("madeup")

    publisher, recorded = way(("collective",), on_devices)
    assert (publisher.plan.transport.name, recorded) == ("collective", "collective")
    assert publisher.plan.route.options == {"backend": "gloo"}
    assert "(madeup: " in said(caplog)
    assert "this torch has no collective backend madeup" in said(caplog)


def test_engine_exit_during_the_self_test_is_an_error(way, monkeypatch):
    async def dies(publisher):
        raise WorkerDiedError("actor_infer", 0, "here", "receive_weights", "its process was killed")

    monkeypatch.setattr(WeightPublisher, "self_test", dies)
    with pytest.raises(WorkerDiedError):
        way(ALL, as_it_is)
