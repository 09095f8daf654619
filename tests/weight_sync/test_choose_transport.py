from dataclasses import replace

import pytest

from roll_core.errors import UnsupportedError
from roll_core.runtime.weights import PlacementFacts, choose_transport
from roll_core.runtime.weights.select import passed_over
from roll_core.spec.providers import InferCapabilities, TrainCapabilities

TRAIN = TrainCapabilities(weight_transports=("shared", "shm", "collective", "disk"))
INFER = InferCapabilities(weight_transports=("shared", "shm", "collective"))
ONE_PROCESS = PlacementFacts(same_process=True, same_host=True)
ONE_HOST = PlacementFacts(same_process=False, same_host=True)
HOSTS = PlacementFacts(same_process=False, same_host=False)


@pytest.mark.parametrize(("facts", "transport"), [(ONE_PROCESS, "shared"), (ONE_HOST, "shm"), (HOSTS, "collective")])
def test_the_placement_decides_among_what_both_declare(facts, transport):
    assert choose_transport(TRAIN, INFER, facts) == transport


def test_the_order_is_the_infer_strategy_s():
    infer = InferCapabilities(weight_transports=("collective", "shm"))
    assert choose_transport(TRAIN, infer, ONE_HOST) == "collective"


def test_where_nothing_fits_each_declared_transport_has_its_reason():
    train = TrainCapabilities(weight_transports=("shared", "cuda_ipc"))
    infer = InferCapabilities(weight_transports=("shared", "cuda_ipc", "shm"))
    with pytest.raises(UnsupportedError) as caught:
        choose_transport(train, infer, ONE_HOST)
    message = str(caught.value)
    assert "shared: the workers are in different processes" in message
    assert "cuda_ipc: nothing is known of the workers' devices" in message
    assert "shm: the train strategy does not offer it" in message


ANY = TrainCapabilities(weight_transports=("shared", "cuda_ipc", "shm", "collective", "disk"))
WANTS_DEVICE = InferCapabilities(weight_transports=("shared", "cuda_ipc", "shm", "collective"))


@pytest.mark.parametrize(
    ("facts", "transport", "reasons"),
    [
        (ONE_PROCESS, "shared", []),
        (replace(ONE_PROCESS, sources=(0,), devices=""), "shared", []),
        (replace(ONE_HOST, sources=(0,), devices=""), "cuda_ipc", ["shared"]),
        (replace(ONE_HOST, devices="another device"), "shm", ["shared", "cuda_ipc: another device"]),
        (replace(HOSTS, sources=(0, 1), devices=""), "cuda_ipc", ["shared"]),
        (replace(HOSTS, devices="another device"), "collective", ["shared", "cuda_ipc: another device", "shm"]),
    ],
)
def test_device_memory_is_lent_where_every_engine_has_a_trainer_on_its_device(facts, transport, reasons):
    """On several hosts too: a trainer's rank and the engine that it feeds are on one of them."""
    assert choose_transport(ANY, WANTS_DEVICE, facts) == transport
    found = passed_over(ANY, WANTS_DEVICE, facts)
    assert len(found) == len(reasons)
    assert all(each.startswith(reason) for each, reason in zip(found, reasons, strict=True))


def test_a_trainer_that_does_not_lend_device_memory_is_passed_over():
    facts = replace(ONE_HOST, sources=(0,), devices="")
    assert choose_transport(TRAIN, WANTS_DEVICE, facts) == "shm"
    assert passed_over(TRAIN, WANTS_DEVICE, facts)[1] == "cuda_ipc: the train strategy does not offer it"


def test_strategies_that_declare_nothing_are_told_so():
    with pytest.raises(UnsupportedError, match="neither declares any"):
        choose_transport(TrainCapabilities(), InferCapabilities(), ONE_HOST)


def test_a_folder_is_a_wish_for_disk():
    infer = InferCapabilities(weight_transports=("shared", "shm", "collective", "disk"))
    facts = PlacementFacts(same_process=False, same_host=True, directory="s3://weights")
    assert choose_transport(TRAIN, infer, facts) == "disk"
    assert choose_transport(TRAIN, infer, ONE_HOST) == "shm"
    with pytest.raises(UnsupportedError, match="shm: model_update_dir asks for disk"):
        choose_transport(TRAIN, INFER, facts)
    alone = PlacementFacts(same_process=True, same_host=True, directory="/weights")
    with pytest.raises(UnsupportedError, match="disk: the workers are in one process"):
        choose_transport(TRAIN, infer, alone)


def test_disk_without_a_folder_says_which_key_names_one():
    only = InferCapabilities(weight_transports=("disk",))
    with pytest.raises(UnsupportedError, match="disk: model_update_dir names no folder"):
        choose_transport(TRAIN, only, HOSTS)
