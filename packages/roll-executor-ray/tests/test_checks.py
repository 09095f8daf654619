"""What the doctor says of the cluster at `RAY_ADDRESS`."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_core.spec.diagnostics import CheckContext, CheckResult
from roll_executor_ray.checks import ray_cluster

CONTEXT = CheckContext(platform=None)
ADDRESSES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)


def only(results: Iterable[CheckResult]) -> CheckResult:
    (result,) = results
    return result


def test_a_ray_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert only(ray_cluster(CONTEXT)).level == "error"
        listener.listen()
        assert only(ray_cluster(CONTEXT)).level == "ok"


@pytest.mark.parametrize("address", [None, "", "local"])
def test_without_an_address_there_is_no_cluster_to_look_for(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert list(ray_cluster(CONTEXT)) == []


@given(address=ADDRESSES | ADDRESSES.map(lambda text: f"[{text}]:99999"))
def test_any_address_has_a_result(address: str) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise OSError("unreachable")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", unreachable)
        patch.setenv("RAY_ADDRESS", address)
        assert all(type(result) is CheckResult for result in ray_cluster(CONTEXT))
