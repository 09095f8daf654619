"""Which transport connects two roles, and the reason for each that does not."""

from dataclasses import replace

import pytest

from roll_core.config.weight_transports import choose_transport, load_transport
from roll_core.errors import UnknownProviderError, UnsupportedError
from roll_core.plugins.loader import Plugin, load_plugins
from roll_core.plugins.registry import Registry
from roll_core.spec.providers import WeightTransportProvider
from roll_core.spec.transport import DeviceFacts, RoleFacts, WeightTransport, WorkerFacts
from roll_testing.errors import raises_error

ALL = ("disk", "collective", "shm", "cuda_ipc", "shared")


class Paper(WeightTransport):
    """A transport of another package; it serves one receiver."""

    def available(self, sender, receiver):
        return None if len(receiver.workers) == 1 else "paper has room for one receiver"


def paper(**changes):
    record = WeightTransportProvider(name="paper", target=f"{__name__}:Paper", summary="", any_strategy=True)
    return replace(record, **changes)


def registry_with(*records):
    acme = Plugin(package="roll-acme", version="1", entry_point="acme", target="", state="loaded", providers=records)
    return Registry([*load_plugins(environ={"ROLL_PLUGINS": "roll-weight-transports"}), acme])


REGISTRY = registry_with()


def role(name, *workers, transports=ALL, directory=""):
    """Workers are (host, pid, uuid of the device)."""
    found = tuple(
        WorkerFacts(host=host, pid=pid, device=DeviceFacts(device="cuda:0" if uuid else "cpu", uuid=uuid))
        for host, pid, uuid in workers
    )
    return RoleFacts(role=name, workers=found, weight_transports=transports, directory=directory)


def pair(where, trains=ALL, infers=ALL, directory=""):
    train, infer = {
        "one process": ([("a", 1, "")], [("a", 1, "")]),
        "one host": ([("a", 1, "")], [("a", 2, "")]),
        "one device": ([("a", 1, "GPU-1")], [("a", 2, "GPU-1")]),
        "one device on each of two hosts": ([("a", 1, "GPU-1"), ("b", 1, "GPU-1")], [("b", 2, "GPU-1")]),
        "two devices": ([("a", 1, "GPU-1")], [("a", 2, "GPU-2")]),
        "two hosts": ([("a", 1, "")], [("b", 1, "")]),
    }[where]
    return (
        role("actor_train", *train, transports=trains, directory=directory),
        role("actor_infer", *infer, transports=infers),
    )


def chosen(where, *, registry=REGISTRY, wanted=None, rejected=None, **kwargs):
    found = choose_transport(registry, *pair(where, **kwargs), wanted, rejected=rejected)
    return found.provider.name, [each.partition(":")[0] for each in found.passed_over]


@pytest.mark.parametrize(
    ("where", "transport", "passed_over"),
    [
        ("one process", "shared", []),
        ("one host", "shm", ["shared", "cuda_ipc"]),
        ("one device", "cuda_ipc", ["shared"]),
        ("one device on each of two hosts", "cuda_ipc", ["shared"]),
        ("two devices", "shm", ["shared", "cuda_ipc"]),
        ("two hosts", "collective", ["shared", "cuda_ipc", "shm"]),
    ],
)
def test_available_transport_of_highest_priority_is_used(where, transport, passed_over):
    assert chosen(where) == (transport, passed_over)


def test_a_transport_that_one_strategy_does_not_list_is_not_used():
    assert chosen("one device", trains=("shm", "collective")) == ("shm", ["shared", "cuda_ipc"])
    assert chosen("one device", infers=("collective",)) == ("collective", [])


def test_failed_self_test_falls_back_to_the_next_transport():
    assert chosen("one device", rejected={"cuda_ipc": "no peer access"}) == ("shm", ["shared", "cuda_ipc"])
    found = choose_transport(REGISTRY, *pair("one device"), rejected={"cuda_ipc": "no peer access"})
    assert found.passed_over[1] == "cuda_ipc: no peer access"


def test_a_directory_selects_the_transport_that_uses_one():
    assert chosen("one host", directory="s3://weights")[0] == "disk"
    with pytest.raises(UnsupportedError, match=r"shm: .*model_update_dir"):
        chosen("one host", directory="s3://weights", trains=("shm",))
    with raises_error(UnsupportedError, "disk"):
        chosen("one process", directory="/weights")


def test_if_none_is_available_the_error_has_the_reason_for_each():
    with pytest.raises(UnsupportedError) as caught:
        chosen("one host", trains=("shared", "cuda_ipc", "disk"), infers=("shared", "cuda_ipc", "shm"))
    message = str(caught.value)
    reasons = dict(each.split(": ", 1) for each in message[message.index("(") + 1 :].rpartition("):")[0].split("; "))
    assert list(reasons) == ["shared", "cuda_ipc", "shm", "disk"]
    assert "cpu" in reasons["cuda_ipc"]
    assert "train strategy" in reasons["shm"]
    assert "infer strategy" in reasons["disk"]


def test_a_plugins_transport_is_used_if_the_config_names_it():
    registry = registry_with(paper())
    assert chosen("one host", registry=registry)[0] == "shm"
    assert chosen("one host", registry=registry, wanted="paper") == ("paper", [])
    assert chosen("one host", registry=registry, wanted="roll-acme/paper") == ("paper", [])
    with raises_error(UnsupportedError, "paper"):
        chosen("one process", registry=registry, wanted="paper")
    with raises_error(UnsupportedError, "paper", "infer"):
        chosen("one host", registry=registry, wanted="paper", infers=())


def test_plugin_transport_with_a_priority_can_be_chosen():
    registry = registry_with(paper(priority=45))
    assert chosen("one device", registry=registry) == ("paper", ["shared"])
    listed_only = registry_with(paper(priority=45, any_strategy=False))
    assert chosen("one device", registry=listed_only) == ("cuda_ipc", ["shared"])
    assert chosen("one device", registry=listed_only, trains=(*ALL, "paper"), infers=("paper",)) == ("paper", [])


def test_config_may_name_a_builtin_transport():
    assert chosen("one host", wanted="collective") == ("collective", [])
    with raises_error(UnsupportedError, "shm", "hosts"):
        chosen("two hosts", wanted="shm")
    with pytest.raises(UnknownProviderError, match="shm"):
        chosen("one host", wanted="shn")


def test_a_transport_is_one_object_per_process():
    assert load_transport(paper()) is load_transport(paper())
    assert isinstance(load_transport(paper()), Paper)
