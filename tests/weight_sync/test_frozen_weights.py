"""Frozen tensors are sent once to engines that keep them, and each receipt proves that they still have them."""

import pytest
from sync_workers import same_values
from test_publish import COPYING

from roll_core.errors import CorruptTensorError, MissingTensorError, StaleWeightsError, WeightsUnchangedError
from roll_core.runtime.cluster.executors.base import WorkerCall
from roll_testing.errors import raises_error

FROZEN = ("embed", "half")
FROZEN_BYTES = 4 * 300 * 256 + 2 * 1000 * 33
WEIGHT_BYTES = FROZEN_BYTES + 4 * (2 * 64 * 96 + 40 * 30 + 1 + 5) + 17


async def publish(duo, version, *, keeps_weights=True, step=True):
    """Publish after a step and return the copied bytes; all engines then have all of the trainer's values."""
    if step:
        await duo.step()
    report = await duo.publisher.publish(version, keeps_weights=keeps_weights)
    assert report.weight_bytes == WEIGHT_BYTES
    (sent,) = await WorkerCall(duo.train, "values").all()
    for held in await WorkerCall(duo.infer, "values").all():
        assert held.keys() == sent.keys()
        assert all(same_values(held[name], sent[name]) for name in sent)
    return report.copied_bytes


@pytest.fixture
def with_frozen(with_duo):
    """Runs `scenario(duo)` with a trainer that has frozen tensors."""

    def run(scenario, transport="shm", receivers=2):
        async def whole(duo):
            await WorkerCall(duo.train, "freeze").all(*FROZEN)
            await scenario(duo)

        with_duo(transport, whole, receivers)

    return run


@pytest.mark.parametrize("transport", COPYING)
def test_frozen_tensors_are_sent_once(with_frozen, transport):
    async def scenario(duo):
        copied = [await publish(duo, version) for version in range(3)]
        assert copied == [WEIGHT_BYTES, WEIGHT_BYTES - FROZEN_BYTES, WEIGHT_BYTES - FROZEN_BYTES]

    with_frozen(scenario, transport)


def test_engine_that_may_have_lost_them_receives_all(with_frozen):
    async def scenario(duo):
        await publish(duo, 0)
        assert await publish(duo, 1) == WEIGHT_BYTES - FROZEN_BYTES
        assert await publish(duo, 2, keeps_weights=False) == WEIGHT_BYTES  # after a sleep
        assert await publish(duo, 3) == WEIGHT_BYTES - FROZEN_BYTES
        for method in ("close", "begin"):  # another engine in the place of rank 1
            await WorkerCall(duo.infer, method).at(1)
        duo.infer.replaced += 1
        assert await publish(duo, 4) == WEIGHT_BYTES
        await duo.fault("drop:bias", 0)
        with raises_error(MissingTensorError, "rank 0", "bias"):
            await publish(duo, 5)
        await duo.fault("")
        assert await publish(duo, 6) == WEIGHT_BYTES

    with_frozen(scenario)


def test_engine_that_lost_them_unnoticed_is_found(with_frozen):
    async def scenario(duo):
        await publish(duo, 0)
        await duo.fault("forget", 1)
        with raises_error(MissingTensorError, "rank 1", "embed"):
            await publish(duo, 1)

    with_frozen(scenario)


def test_engine_with_other_frozen_values_is_found_at_once(with_frozen):
    async def scenario(duo):
        await duo.fault("flip:embed", 1)
        with raises_error(CorruptTensorError, "rank 1", "embed"):
            await publish(duo, 0)

    with_frozen(scenario)


def test_unchanged_weights_are_found_beside_frozen_ones(with_frozen):
    async def scenario(duo):
        await publish(duo, 0)
        for version, keeps_weights in ((1, True), (2, False)):
            with raises_error(WeightsUnchangedError):
                await publish(duo, version, keeps_weights=keeps_weights, step=False)

    with_frozen(scenario)


def test_engines_keep_copies_of_shared_tensors(with_frozen):
    async def scenario(duo):
        await duo.fault("clone")
        await publish(duo, 0)
        await publish(duo, 1)
        with raises_error(WeightsUnchangedError):
            await publish(duo, 2, step=False)
        await duo.fault("pretend")
        with raises_error(StaleWeightsError, "version 3"):
            await publish(duo, 3)

    with_frozen(scenario, "shared")
