"""Where the ranks of a role meet: on the address in use, and no other client is admitted."""

import socket

import pytest
from process_group_program import LOOPBACK, SIZE, ask, meet, nothing

from roll_testing.ranks import RankHost, free_port


@pytest.fixture(scope="module")
def host():
    # As a run sets it for workers that meet on the loopback address.
    host = RankHost(environment={"GLOO_SOCKET_IFNAME": "lo"}, preload=("process_group_program",))
    yield host
    host.close()


def test_ranks_listen_on_own_address_and_require_the_secret(host):
    port = free_port()
    first, second = host.run(meet, port, "secret", ask, num_ranks=SIZE)
    assert (first["total"], second["total"]) == (3.0, 3.0)
    assert first["said"] == second["said"] == ["x", "xx"]
    assert (LOOPBACK, port) in first["listeners"]
    assert {address for address, _ in first["listeners"] | second["listeners"]} == {LOOPBACK}
    assert second["refused"] == ["DistNetworkError", "DistNetworkError", b""]


def test_torch_store_listens_only_on_the_same_address(host):
    port = free_port()
    first, second = host.run(meet, port, "", nothing, num_ranks=SIZE)
    assert first["listeners"] >= {(LOOPBACK, port)}
    assert {address for address, _ in first["listeners"] | second["listeners"]} == {LOOPBACK}


def test_a_port_is_free_again_when_the_group_is_closed(host):
    port = free_port()
    for _ in range(2):
        found = host.run(meet, port, "secret", nothing, num_ranks=SIZE)
        assert [each["total"] for each in found] == [3.0, 3.0]


def test_a_port_stays_reserved_for_the_stores_of_its_caller():
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError):  # noqa: PT011 - the system's words
        other.bind(("127.0.0.1", port))
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("127.0.0.1", port))
        store.listen()
