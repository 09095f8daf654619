"""A weight transport from another package passes the kit, and bytes that are lost on the way fail the proof."""

import os
import socket
import subprocess
import sys
import threading

import pytest
import torch

from roll_testing.new import TEMPLATES

sys.path.append(str(TEMPLATES / "transport"))

from roll_transport_acme.transport import AcmeTransport

from roll_core.errors import CorruptTensorError, MissingTensorError
from roll_core.runtime.weights.publisher import verify
from roll_core.spec.transport import Deadline, ReceiverSetup, ReceiversLostError, SenderLostError, SenderSetup
from roll_core.spec.weights import make_manifest, make_receipt

KIT = """
from roll_testing import WeightTransportConformance

class TestTcp(WeightTransportConformance):
    name = "acme"
"""
TENSORS = {name: torch.full((1000,), float(at)) for at, name in enumerate("abcd")}
MANIFEST = make_manifest(1, TENSORS.items())
BYTES = sum(tensor.nbytes for tensor in TENSORS.values())


@pytest.mark.slow(ci=True)
def test_the_kit_passes_in_an_environment_with_the_plugin(installed, tmp_path):
    (tmp_path / "test_tcp.py").write_text(KIT, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


class Proxy:
    """Forwards one connection to `address`; the receiver gets `change(position, data)` of the sender's bytes."""

    def __init__(self, address, change):
        token, _, where = address.partition("@")
        host, _, port = where.rpartition(":")
        self._upstream, self._change = (host, int(port)), change
        self._listener = socket.create_server((host, 0))
        self.address = f"{token}@{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        downstream, _ = self._listener.accept()
        with self._listener, downstream, socket.create_connection(self._upstream) as upstream:
            threading.Thread(target=self._forward_back, args=(downstream, upstream), daemon=True).start()
            at = 0
            while data := upstream.recv(4096):
                changed = self._change(at, data)
                at += len(data)
                downstream.sendall(changed)
                if len(changed) < len(data):
                    downstream.shutdown(socket.SHUT_RDWR)
                    upstream.shutdown(socket.SHUT_RDWR)
                    return

    def _forward_back(self, downstream, upstream):
        try:
            while data := downstream.recv(4096):
                upstream.sendall(data)
        except OSError:
            return  # the other direction has closed the sockets


def publish(change):
    """What the sender and the receiver ended with: tensors, or errors."""
    transport, found = AcmeTransport(), {}
    sender = transport.sender(SenderSetup(receivers=(0,), bucket_bytes=4096))
    proxy = Proxy(sender.address, change)

    def receive():
        setup = ReceiverSetup(address=proxy.address, rank=0, num_receivers=1, bucket_bytes=4096, deadline=Deadline(20))
        receiver = transport.receiver(setup)
        try:
            found["held"] = {name: tensor.clone() for name, tensor in receiver.receive(MANIFEST, Deadline(20))}
        except SenderLostError as error:
            found["received"] = error
        receiver.close()

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        sender.send(MANIFEST, iter(TENSORS.items()), Deadline(20))
    except ReceiversLostError as error:
        found["lost"] = error
    thread.join(60)
    sender.close()
    return found


@pytest.mark.parametrize("position", [0, 5000, BYTES - 1])
def test_changed_byte_fails_the_digest_and_names_the_tensor(position):
    def flip(at, data):
        if not at <= position < at + len(data):
            return data
        changed = bytearray(data)
        changed[position - at] ^= 1
        return bytes(changed)

    found = publish(flip)
    with pytest.raises(CorruptTensorError, match=f"for {'abcd'[position // 4000]} "):
        verify(MANIFEST, make_receipt(MANIFEST, found["held"].items()))


def test_truncated_stream_is_a_lost_connection_on_both_sides():
    found = publish(lambda at, data: data[: max(0, BYTES - 100 - at)])
    assert isinstance(found["received"], SenderLostError)
    assert found["lost"].disconnected == (0,)


def test_a_receipt_without_a_tensor_fails_the_proof():
    held = publish(lambda at, data: data)["held"]
    verify(MANIFEST, make_receipt(MANIFEST, held.items()))
    del held["d"]
    with pytest.raises(MissingTensorError, match=" d "):
        verify(MANIFEST, make_receipt(MANIFEST, held.items()))
