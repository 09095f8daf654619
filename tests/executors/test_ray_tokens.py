"""A Ray that wants a token, which `ray start` decides by what it finds in the home of its user."""

import socket

import pytest
import ray

from roll_core.builtin.cpu import CpuPlatform
from roll_core.errors import PlacementError
from roll_core.runtime.executors.ray_instance import RayInstance


def refuse(**_):
    raise ConnectionError("Failed to connect to Ray cluster")


@pytest.mark.parametrize(("mode", "hint"), [(None, True), ("token", False), ("disabled", False)])
def test_who_is_not_let_in_is_told_of_tokens_unless_they_were_thought_of(monkeypatch, mode, hint):
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # whatever other tests have left open here
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        instance = RayInstance(CpuPlatform())
        try:
            with pytest.raises(PlacementError, match=r"joined at RAY_ADDRESS=.*: Failed to connect") as caught:
                instance.open()
        finally:
            monkeypatch.setattr(ray, "shutdown", lambda: None)
            instance.close()
    assert ("set RAY_AUTH_MODE=token" in str(caught.value)) == hint
