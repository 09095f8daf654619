"""A Ray that does not come up in time, as on a host that is busy."""

import signal
import socket
import subprocess
import sys

import pytest
import ray

from roll_core.builtin.cpu import CpuPlatform
from roll_core.errors import PlacementError
from roll_executor_ray.instance import START_ATTEMPTS, RayInstance
from roll_testing.errors import raises_error

SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup"


class ReluctantRay:
    """Leaves a daemon behind each time that it does not come up."""

    def __init__(self, *failures):
        self.failures, self.daemons, self.addresses = list(failures), [], []

    def init(self, address, **_):
        self.addresses.append(address)
        self.daemons.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        if self.failures:
            raise self.failures.pop(0)


@pytest.fixture
def begin(monkeypatch):
    begun = []

    def begin(*failures):
        reluctant, instance = ReluctantRay(*failures), RayInstance(CpuPlatform())
        begun.append((reluctant, instance))
        monkeypatch.setattr(ray, "init", reluctant.init)
        instance.open()
        return reluctant

    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # whatever other tests have left open here
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    begin.begun = begun
    yield begin
    for reluctant, instance in begun:
        instance.close()
        for each in reluctant.daemons:
            each.kill()
            each.wait()


def test_failed_start_is_ended_and_retried(begin, caplog):
    reluctant = begin(Exception(SLOW))
    first, second = reluctant.daemons
    assert first.wait(30) == -signal.SIGKILL
    assert second.poll() is None
    assert [each.levelname for each in caplog.records] == ["WARNING"]


def test_start_that_never_succeeds_is_an_error(begin):
    with raises_error(PlacementError):
        begin(*[Exception(SLOW)] * (START_ATTEMPTS + 1))
    [(reluctant, _)] = begin.begun
    assert len(reluctant.daemons) == START_ATTEMPTS


def test_other_start_errors_are_not_retried(begin):
    with pytest.raises(PlacementError, match="no room"):
        begin(ValueError("no room for the object store"))
    [(reluctant, _)] = begin.begun
    assert len(reluctant.daemons) == 1


@pytest.mark.parametrize("port", ["", ":{port}"])
def test_a_ray_on_this_host_may_be_named_localhost(begin, monkeypatch, port):
    """Only `local` alone means a Ray of the run's own."""
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost{port}".format(port=server.getsockname()[1])
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert begin().addresses == [address]
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert begin().addresses == ["local"]


@pytest.mark.parametrize("address", ["127.0.0.1:999999999999999999999", f"{'a' * 70}.org:6379"])
def test_impossible_address_is_a_plain_error(begin, monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with raises_error(PlacementError, "RAY_ADDRESS", address):
        begin()
