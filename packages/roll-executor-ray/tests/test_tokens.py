"""A Ray that wants a token, which `ray start` decides by what it finds in the home of its user."""

import os
import socket
import subprocess
import sys

import pytest
import ray

from roll_core.builtin.cpu import CpuPlatform
from roll_core.errors import PlacementError
from roll_executor_ray.instance import RayInstance
from roll_testing.errors import raises_error


def refuse(**_):
    raise ConnectionError("Failed to connect to Ray cluster")


@pytest.mark.parametrize(("mode", "hint"), [(None, True), ("token", False), ("disabled", False)])
def test_rejected_connection_names_tokens_unless_configured(monkeypatch, mode, hint):
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # whatever other tests have left open here
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        instance = RayInstance(CpuPlatform())
        try:
            with raises_error(PlacementError, "RAY_ADDRESS") as caught:
                instance.open()
        finally:
            monkeypatch.setattr(ray, "shutdown", lambda: None)
            instance.close()
    assert ("set RAY_AUTH_MODE=token" in str(caught.value)) == hint


@pytest.mark.ray
@pytest.mark.slow
def test_driver_gives_up_an_address_that_never_replies(tmp_path):
    program = (
        "from roll_core.builtin.cpu import CpuPlatform\n"
        "from roll_core.errors import PlacementError\n"
        "from roll_executor_ray.instance import RayInstance\n"
        "instance = RayInstance(CpuPlatform())\n"
        "try:\n    instance.open()\n"
        "except PlacementError as error:\n    print(error)\n"
        "finally:\n    instance.close()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        # As with a Ray that listens on 127.0.0.1 only, which a driver replaces by the host's address.
        address = f"127.0.0.1:{server.getsockname()[1]}"
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=env | {"HOME": str(tmp_path), "RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=240,  # 13 minutes with Ray's own number of attempts
            check=True,
        )
    assert f"RAY_ADDRESS={address}" in done.stdout


LISTENERS = """
import ipaddress, os, psutil
from roll_core.builtin.cpu import CpuPlatform
from roll_executor_ray.instance import RayInstance

instance = RayInstance(CpuPlatform())
instance.open()
import ray

@ray.remote
class Worker:
    def pid(self):
        return os.getpid()

worker = Worker.remote()
ray.get(worker.pid.remote())
me = psutil.Process()
for process in (me, *me.children(recursive=True)):
    for each in process.net_connections(kind="inet"):
        if each.status == psutil.CONN_LISTEN:
            address = ipaddress.ip_address(each.laddr.ip)
            print("LISTENS", getattr(address, "ipv4_mapped", None) or address)
print("TOKEN", bool(os.environ.get("RAY_AUTH_TOKEN")), os.environ.get("RAY_AUTH_MODE"))
instance.close()
"""


@pytest.mark.ray
@pytest.mark.slow
def test_own_ray_listens_on_loopback_and_requires_a_token(tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", LISTENERS], env=env, capture_output=True, text=True, timeout=240, check=True
    )
    said = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    addresses = [value for what, value in said if what == "LISTENS"]
    assert set(addresses) == {"127.0.0.1"}
    assert len(addresses) >= 4  # driver, GCS, raylet, worker
    assert [value for what, value in said if what == "TOKEN"] == ["True token"]
