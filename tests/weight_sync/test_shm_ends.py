import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from roll_core.spec.transport import Deadline, ReceiverSetup, SenderLostError, SenderSetup
from roll_core.spec.weights import make_manifest
from roll_testing.errors import raises_error
from roll_weight_transports import pool, shm

TENSORS = {"a": torch.randn(300, 20), "b": torch.randn(4000).bfloat16(), "c": torch.tensor(3)}
BUCKET = 16 << 10


def sender_of(num_receivers):
    return shm.ShmTransport().sender(SenderSetup(receivers=tuple(range(num_receivers)), bucket_bytes=BUCKET))


def receiver_of(address, rank, seconds):
    setup = ReceiverSetup(address=address, rank=rank, num_receivers=1, bucket_bytes=BUCKET, deadline=Deadline(seconds))
    return shm.ShmTransport().receiver(setup)


def receive_in_thread(address, manifest, found, publishes=1):
    def work():
        receiver = receiver_of(address, 0, 10)
        for _ in range(publishes):
            found.append({name: tensor.clone() for name, tensor in receiver.receive(manifest, Deadline(10))})
        receiver.close()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def assert_transfers(sender, manifest):
    found = []
    thread = receive_in_thread(sender.address, manifest, found, publishes=2)
    for _ in range(2):
        sent = sender.send(manifest, iter(TENSORS.items()), Deadline(10))
    thread.join()
    sender.close()
    assert [entry.digest for entry in sent] == [entry.digest for entry in manifest.tensors]
    assert len(found) == 2
    for held in found:
        assert held.keys() == TENSORS.keys()
        assert all(torch.equal(held[name], TENSORS[name]) for name in TENSORS)


def test_without_memfd_and_abstract_sockets_no_file_stays(monkeypatch, tmp_path):
    monkeypatch.setattr(pool.sys, "platform", "darwin")
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(shm.tempfile, "tempdir", str(tmp_path))
    sender = sender_of(1)
    assert Path(sender.address.partition(":")[2]).is_socket()
    assert_transfers(sender, make_manifest(1, TENSORS.items()))
    assert list(tmp_path.iterdir()) == []


def test_unauthenticated_client_gets_no_memory():
    sender = sender_of(1)
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(f"\0{sender.address.partition(':')[2]}")
    stranger.sendall(bytes(20))
    assert_transfers(sender, make_manifest(1, TENSORS.items()))
    assert stranger.recv(1) == b""
    stranger.close()


def test_silent_connection_does_not_block_a_receiver():
    sender = sender_of(1)
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(f"\0{sender.address.partition(':')[2]}")
    assert_transfers(sender, make_manifest(1, TENSORS.items()))
    silent.close()


def test_receiver_of_a_closed_sender_raises():
    sender = sender_of(1)
    sender.close()
    with pytest.raises(SenderLostError):
        receiver_of(sender.address, 0, 10)


def test_a_sender_that_fills_nothing_is_silent_at_the_deadline():
    sender = sender_of(1)
    receiver = receiver_of(sender.address, 0, 10)
    with raises_error(SenderLostError, "bucket 0"):
        next(receiver.receive(make_manifest(1, TENSORS.items()), Deadline(0.1)))
    receiver.close()
    sender.close()


def test_slow_receiver_gets_all_tensors_when_buffers_are_full(monkeypatch):
    monkeypatch.setattr(shm, "BUFFER_BYTES", 3 * BUCKET)
    tensors = {f"{number}": torch.full((number % 5 * 1500 + 7,), float(number)) for number in range(60)}
    manifest = make_manifest(1, tensors.items())
    sender = sender_of(3)
    held = [{}, {}, {}]

    def receive(rank):
        receiver = receiver_of(sender.address, rank, 20)
        for _ in range(2):
            for name, tensor in receiver.receive(manifest, Deadline(20)):
                if rank == 1:
                    time.sleep(0.002)
                held[rank][name] = tensor.clone()
        receiver.close()

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        sender.send(manifest, iter(tensors.items()), Deadline(20))
    for thread in threads:
        thread.join()
    sender.close()
    for each in held:
        assert each.keys() == tensors.keys()
        assert all(torch.equal(each[name], tensors[name]) for name in tensors)
