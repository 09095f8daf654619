"""Who may meet in the store of a collective, and where it listens."""

import os
import socket
import threading
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from roll_core.spec.transport import SenderSetup
from roll_weight_transports import rendezvous
from roll_weight_transports.collective import LOOPBACK, CollectiveSender, connect
from roll_weight_transports.rendezvous import HostedStore, RemoteStore

SOON = timedelta(seconds=20)


@pytest.fixture
def hosted():
    store = HostedStore(LOOPBACK, "secret")
    yield store
    store.close()


@pytest.fixture
def remote(hosted):
    store = RemoteStore(LOOPBACK, hosted.port, "secret", SOON)
    yield store
    store.close()


def test_both_sides_see_the_same_keys(hosted, remote):
    remote.set("a", "1")
    hosted.set("b", b"\x00\xff")
    assert (hosted.get("a"), remote.get("b")) == (b"1", b"\x00\xff")
    remote.set("c", b"\xff\x00")
    assert hosted.get("c") == b"\xff\x00"
    assert remote.check(["a", "b"])
    assert not remote.check(["a", "d"])
    assert [remote.add("n", 2), hosted.add("n", 3)] == [2, 5]
    assert remote.compare_set("a", "1", "2") == b"2"
    assert remote.compare_set("a", "1", "3") == b"2"
    assert remote.delete_key("a")
    assert not remote.check(["a"])


def test_a_wait_ends_with_the_key_or_with_its_timeout(hosted, remote):
    threading.Timer(0.05, hosted.set, ("late", "x")).start()
    remote.wait(["late"], SOON)
    for store in (hosted, remote):
        with pytest.raises(dist.DistStoreError):
            store.wait(["never"], timedelta(seconds=0.05))


def test_a_host_that_closes_is_an_error_of_the_network(hosted, remote):
    hosted.close()
    with pytest.raises(dist.DistNetworkError):
        remote.check(["a"])


def test_a_late_reply_is_not_taken_for_that_of_the_next_request(monkeypatch):
    replying = threading.Event()

    class Busy(HostedStore):
        def check(self, keys):
            replying.wait(20)
            return super().check(keys)

    monkeypatch.setattr(rendezvous, "SLACK_S", 0.1)
    hosted = Busy(LOOPBACK, "secret")
    remote = RemoteStore(LOOPBACK, hosted.port, "secret", SOON)
    hosted.set("key", "value")
    with pytest.raises(dist.DistNetworkError):
        remote.check(["key"])
    replying.set()
    with pytest.raises(dist.DistNetworkError):
        remote.get("key")
    remote.close()
    hosted.close()


def test_a_client_without_the_secret_learns_and_sets_nothing(hosted, remote):
    hosted.set("key", "value")
    with pytest.raises(dist.DistNetworkError):
        RemoteStore(LOOPBACK, hosted.port, "another", SOON)
    with socket.create_connection((LOOPBACK, hosted.port), timeout=20) as foreign:
        nonce = foreign.recv(64)
        foreign.sendall(bytes(64))  # its own nonce, and no proof
        assert foreign.recv(64) == b""
        assert len(nonce) == 32
    with pytest.raises(dist.DistError):
        dist.TCPStore(LOOPBACK, hosted.port, is_master=False, timeout=timedelta(seconds=1)).set("key", "other")
    assert remote.get("key") == b"value"


def test_a_sender_listens_on_the_address_that_is_used_alone():
    def listeners():
        found = psutil.Process(os.getpid()).net_connections(kind="inet")
        return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}

    before = listeners()
    sender = CollectiveSender(SenderSetup(receivers=(0,), bucket_bytes=1 << 10))
    secret, _, where = sender.address.partition("@")
    assert listeners() - before == {(LOOPBACK, int(where.rpartition(":")[2]))}
    connect(sender.address, SOON).close()
    with pytest.raises(dist.DistNetworkError):
        connect(sender.address.replace(secret, "0" * len(secret)), SOON)
    sender.close()
    assert listeners() == before
