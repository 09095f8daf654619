import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sync_workers import record_of, same_values

from roll_core.config.weight_transports import load_transport
from roll_core.errors import (
    ContractError,
    CorruptTensorError,
    MissingTensorError,
    ReceiverTimeoutError,
    StaleWeightsError,
    UnexpectedTensorError,
    WeightsUnchangedError,
    WeightSyncError,
    WorkerDiedError,
    WorkerError,
)
from roll_core.runtime.cluster.executors.base import WorkerCall
from roll_core.spec.multilinear import MULTILINEAR
from roll_testing.errors import raises_error

COPYING = ["shm", "cuda_ipc", "collective", "disk", "acme"]
"""The last one is a third party's: the template of `roll-core new transport`."""
EVERYWHERE = pytest.mark.parametrize("transport", ["shared", *COPYING])
BETWEEN_PROCESSES = pytest.mark.parametrize("transport", COPYING)
ONE_OF_EACH = pytest.mark.parametrize("transport", ["shared", "shm"])
"""For what driver and workers compare of manifests and receipts, whatever has carried the tensors."""


@EVERYWHERE
def test_every_receiver_has_the_trainer_weights_after_publishes(with_duo, transport):
    async def scenario(duo):
        for version in range(3):
            report = await duo.publisher.publish(version)
            (sent,) = await WorkerCall(duo.train, "values").all()
            for held in await WorkerCall(duo.infer, "values").all():
                assert held.keys() == sent.keys()
                assert all(same_values(held[name], sent[name]) for name in sent)
            await duo.step()
        return report

    report = with_duo(transport, scenario)
    weight_bytes = 4 * (300 * 256 + 2 * 64 * 96 + 40 * 30 + 1 + 5) + 2 * 33000 + 17
    assert report.weight_bytes == weight_bytes
    assert report.copied_bytes == (0 if transport == "shared" else weight_bytes)
    assert 0 < report.proof_s < report.seconds


def test_shared_hands_over_the_very_memory(with_duo):
    async def scenario(duo):
        await duo.publisher.publish(0)
        await duo.step()
        (trained,) = await WorkerCall(duo.train, "values").all()
        (held,) = await WorkerCall(duo.infer, "values").all()
        assert all(same_values(held[name], trained[name]) for name in trained)

    with_duo("shared", scenario, receivers=1)


def test_engine_that_copies_shared_weights_returns_digests(with_duo):
    async def scenario(duo):
        await duo.fault("clone", 0)
        await duo.publisher.publish(0)
        await duo.step()
        (trained,) = await WorkerCall(duo.train, "values").all()
        copied, live = await WorkerCall(duo.infer, "values").all()
        assert copied["embed"] != trained["embed"] == live["embed"]
        await duo.publisher.publish(1)
        await duo.step()
        await duo.fault("pretend", 0)
        with raises_error(StaleWeightsError, "rank 0", "version 2"):
            await duo.publisher.publish(2)

    with_duo("shared", scenario)


@pytest.mark.parametrize(
    ("transport", "fault", "error", "words"),
    [
        *((transport, "refuse:left", MissingTensorError, ["the model has no left"]) for transport in COPYING),
        *(
            (transport, *case)
            for transport in ("shared", "shm")
            for case in (
                ("drop:half", MissingTensorError, ["half", "8 of 9"]),
                ("swap:left,right", CorruptTensorError, ["left and right swapped"]),
                ("flip:embed", CorruptTensorError, ["embed", "F32 [300, 256]"]),
                ("flip:counts", CorruptTensorError, ["counts"]),
                ("ignore", StaleWeightsError, ["version 0", "expected 1"]),
                ("grow:lm_head.bias", UnexpectedTensorError, ["lm_head.bias"]),
            )
        ),
    ],
)
def test_receiver_with_other_weights_is_named(with_duo, transport, fault, error, words):
    async def scenario(duo):
        await duo.publisher.publish(0)
        await duo.step()
        await duo.fault(fault, 1)
        with pytest.raises(error) as caught:
            await duo.publisher.publish(1)
        assert type(caught.value) is error
        for word in ["actor_infer rank 1", *words]:
            assert word in str(caught.value)
        await duo.fault("", 1)
        if not fault.startswith("grow"):
            await duo.publisher.publish(1)  # the fault is gone, and so is its trace

    with_duo(transport, scenario)


def test_digests_that_devices_compute_prove_a_publish(with_duo):
    async def scenario(duo):
        duo.publisher.plan = replace(duo.publisher.plan, device_digests=True)
        await duo.publisher.publish(0)
        with raises_error(WeightsUnchangedError, "actor_train rank 0", "version 1"):
            await duo.publisher.publish(1)
        await duo.step()
        await duo.fault("xxh3", 0)
        with raises_error(ContractError, "actor_infer rank 0", "embed", MULTILINEAR):
            await duo.publisher.publish(2)
        await duo.fault("", 0)
        await duo.fault("flip:counts", 1)
        with raises_error(CorruptTensorError, "actor_infer rank 1", "counts", MULTILINEAR):
            await duo.publisher.publish(2)

    with_duo("shm", scenario)


def test_receiver_with_values_of_the_previous_version_is_stale(with_duo):
    async def scenario(duo):
        await duo.publisher.publish(3)
        await duo.step()
        await duo.fault("pretend", 0)
        with raises_error(StaleWeightsError, "actor_infer rank 0", "version 4", "version 3"):
            await duo.publisher.publish(4)

    with_duo("shm", scenario)


@ONE_OF_EACH
def test_version_older_than_the_loaded_one_is_refused(with_duo, transport):
    async def scenario(duo):
        await duo.publisher.publish(5)
        with raises_error(StaleWeightsError, "actor_infer", "version 4", "version 5"):
            await duo.publisher.publish(4)

    with_duo(transport, scenario)


@ONE_OF_EACH
def test_unchanged_optimizer_step_raises_and_names_learning_rate(with_duo, transport):
    async def scenario(duo):
        await duo.publisher.publish(0)
        await duo.publisher.publish(0)  # the same version again is no claim that something changed
        await duo.step(learning_rate=0.0)
        with raises_error(WeightsUnchangedError, "actor_train rank 0", "1", "embed", "0"):
            await duo.publisher.publish(1)
        await duo.step()
        await duo.publisher.publish(2)

    with_duo(transport, scenario)


@ONE_OF_EACH
def test_steps_without_gradient_may_keep_weights_others_not(with_duo, transport):
    async def scenario(duo):
        await duo.publisher.publish(0, changed_at=0)
        for version in (1, 2):  # as after steps whose gradient was exactly zero
            await duo.publisher.publish(version, changed_at=0)
        with pytest.raises(WeightsUnchangedError):
            await duo.publisher.publish(4, changed_at=3)
        await duo.step()
        await duo.publisher.publish(5, changed_at=4)  # momentum moves weights without a gradient

    with_duo(transport, scenario)


@ONE_OF_EACH
def test_an_export_of_a_stale_copy_is_noticed(with_duo, transport):
    async def scenario(duo):
        await WorkerCall(duo.train, "set_fault").all("stale")
        await duo.publisher.publish(0)
        await duo.step()
        with raises_error(WeightsUnchangedError, "actor_train rank 0", "version 1", "embed"):
            await duo.publisher.publish(1)

    with_duo(transport, scenario)


@BETWEEN_PROCESSES
def test_an_export_that_loses_a_tensor_is_named(with_duo, transport):
    async def scenario(duo):
        await duo.publisher.publish(0)
        await duo.step()
        await WorkerCall(duo.train, "set_fault").all("skip:bias")
        with raises_error(MissingTensorError, "actor_train rank 0"):
            await duo.publisher.publish(1)
        await WorkerCall(duo.train, "set_fault").all("")
        await duo.publisher.publish(1)

    with_duo(transport, scenario)


@ONE_OF_EACH
def test_an_export_of_nothing_is_named(with_duo, transport):
    async def scenario(duo):
        await WorkerCall(duo.train, "set_fault").all("nothing")
        with raises_error(MissingTensorError, "actor_train rank 0", "version 4"):
            await duo.publisher.publish(4)

    with_duo(transport, scenario)


@EVERYWHERE
def test_a_receiver_that_sleeps_is_silent_after_the_deadline(with_duo, transport):
    async def scenario(duo):
        await duo.publisher.publish(0)
        await duo.step()
        await duo.fault("sleep:left", 1)
        duo.deadline(3.0)
        begun = time.monotonic()
        with raises_error(ReceiverTimeoutError, "actor_infer rank 1", "version 1", "3"):
            await duo.publisher.publish(1)
        assert time.monotonic() - begun < 15

    with_duo(transport, scenario)


def test_silent_receiver_error_names_a_missing_tensor(with_duo):
    async def scenario(duo):
        await duo.fault("sleep:embed", 1)
        duo.deadline(3.0)
        with pytest.raises(ReceiverTimeoutError, match=r"did not read \w+"):
            await duo.publisher.publish(0)

    with_duo("shm", scenario)


@pytest.mark.parametrize(
    ("transport", "tensor"), [*((each, "embed") for each in COPYING), ("shm", "bias"), ("collective", "bias")]
)
def test_a_killed_receiver_is_the_error_not_its_echo(with_duo, transport, tensor):
    async def scenario(duo):
        await duo.publisher.publish(0)
        await duo.step()
        await duo.fault(f"die:{tensor}", 1)
        begun = time.monotonic()
        with raises_error(WorkerDiedError, "actor_infer rank 1"):
            await duo.publisher.publish(1)
        assert time.monotonic() - begun < 15
        await WorkerCall(duo.train, "values", 10).all()  # the sender is free again

    with_duo(transport, scenario)


@BETWEEN_PROCESSES
def test_receiver_that_exits_before_connecting_frees_the_sender(with_duo, transport):
    async def scenario(duo):
        duo.deadline(60.0)
        os.kill(duo.infer.members[1].pid, signal.SIGKILL)
        begun = time.monotonic()
        with raises_error(WorkerDiedError, "actor_infer rank 1"):
            await duo.publisher.publish(0)
        await WorkerCall(duo.train, "values", 10).all()
        await WorkerCall(duo.infer, "values", 10).at(0)
        assert time.monotonic() - begun < 15

    with_duo(transport, scenario)


@BETWEEN_PROCESSES
def test_a_killed_sender_is_the_error_and_frees_the_receivers(with_duo, transport):
    async def scenario(duo):
        await duo.publisher.publish(0)
        await duo.step()
        await WorkerCall(duo.train, "set_fault").all("die:left")
        with raises_error(WorkerDiedError, "actor_train rank 0"):
            await duo.publisher.publish(1)
        await WorkerCall(duo.infer, "values", 10).all()

    with_duo(transport, scenario)


def test_a_mistake_of_the_engine_s_is_reported_as_such(with_duo):
    async def scenario(duo):
        await duo.fault("crash", 0)
        with raises_error(WorkerError, "actor_infer rank 0"):
            await duo.publisher.publish(0)

    with_duo("shm", scenario)


def test_a_transport_that_cannot_cancel_does_not_hide_the_cause(with_duo, monkeypatch, caplog):
    addresses = []

    def broken(address, options):
        addresses.append(address)
        raise LookupError(4711)

    async def scenario(duo):
        monkeypatch.setattr(load_transport(record_of("shm")), "cancel_transfer", broken)
        await duo.fault("refuse:left", 1)
        with raises_error(MissingTensorError, "actor_infer rank 1", "left"):
            await duo.publisher.publish(0)

    with_duo("shm", scenario)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == len(addresses) > 0
    assert all("shm" in message and "4711" in message for message in warned)
    assert not any(address in message for address, message in zip(addresses, warned, strict=True))  # it has a secret


def test_weights_travel_in_the_dtype_of_the_receiver(with_duo):
    async def scenario(duo):
        duo.publisher.plan = replace(duo.publisher.plan, dtype="BF16")
        await duo.publisher.publish(0)
        (sent,) = await WorkerCall(duo.train, "values").all()
        (held, _) = await WorkerCall(duo.infer, "values").all()
        assert held["scalar"] == sent["scalar"] == 2.5
        assert held["bias"] != sent["bias"]
        assert held["bias"] == pytest.approx(sent["bias"], rel=2**-8)
        assert held["counts"] == sent["counts"]

    with_duo("shm", scenario)


@pytest.mark.parametrize("transport", ["shm", "cuda_ipc"])
@pytest.mark.parametrize("fault", ["", "die:left", "sleep:left"])
def test_shared_memory_is_freed_if_any_process_is_killed(with_duo, fault, transport):
    before = set(os.listdir("/dev/shm"))

    async def scenario(duo):
        await duo.publisher.publish(0)
        duo.deadline(1.0 if fault else 20)
        if fault.startswith("die"):
            await WorkerCall(duo.train, "set_fault").all(fault)
        else:
            await duo.fault(fault)
        try:
            await duo.publisher.publish(0)
        except (WeightSyncError, WorkerDiedError):
            assert fault
        for process in [*duo.train.processes, *duo.infer.processes]:
            process.kill()
            process.join()
        return [process.pid for process in [*duo.train.processes, *duo.infer.processes]]

    pids = with_duo(transport, scenario)
    # torch's own manager removes host memory of the dead a moment later.
    left = True
    until = time.monotonic() + 20
    while left and time.monotonic() < until:
        new = set(os.listdir("/dev/shm")) - before
        left = {name for name in new if any(re.search(rf"[-_]{pid}[-_]", name) for pid in pids)}
        time.sleep(0.05)
    assert not left


@pytest.mark.parametrize("fault", ["", "die:left", "sleep:left", "refuse:left", "crash"])
def test_disk_files_are_removed_if_any_process_fails(with_duo, tmp_path, monkeypatch, fault):
    async def scenario(duo):
        await duo.publisher.publish(0)
        assert len(list(Path(duo.directory).iterdir())) == 1  # open, for the next publish
        duo.deadline(1.0 if fault else 20)
        await duo.step()
        await (WorkerCall(duo.train, "set_fault").all(fault) if fault.startswith("die") else duo.fault(fault))
        try:
            await duo.publisher.publish(1)
        except (WorkerDiedError, WorkerError, WeightSyncError):
            assert fault
        else:
            assert not fault
            await WorkerCall(duo.train, "close").all()
        return Path(duo.directory)

    assert list(with_duo("disk", scenario).iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(with_duo):
    async def scenario(duo):
        duo.directory = "/proc/nowhere"
        duo.deadline(20)
        with pytest.raises(
            WeightSyncError, match=r"actor_train rank 0 .* written to /proc/nowhere.* \(model_update_dir\)"
        ):
            await duo.publisher.publish(0)

    with_duo("disk", scenario)
