"""What the ranks of `test_process_group.py` do."""

from __future__ import annotations

import socket

import psutil
import torch
import torch.distributed as dist

from roll_core.runtime.cluster.executors.base import Peers, Place
from roll_core.runtime.workers.strategy import mesh_info
from roll_modeling.process_group import ProcessGroup
from roll_weight_transports.rendezvous import RemoteStore

LOOPBACK = "127.0.0.1"
SIZE = 2


def meet(rank, port, secret, stranger):
    """Collectives of two ranks in the group of a run; where this rank listens, and what a stranger gets."""
    place = Place(rank=rank, world_size=SIZE, node=0, slots=(rank,), local_indices=(rank,), device="cpu", num_threads=1)
    peers = Peers(master_addr=LOOPBACK, master_port=port, secret=secret)
    mesh = mesh_info("student", place, peers, backend="gloo", timeout_s=60)
    group = ProcessGroup(mesh)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    half = dist.new_group([0])
    said = [None] * SIZE
    dist.all_gather_object(said, "x" * (rank + 1))
    if rank == 0:
        dist.all_reduce(total, group=half)
    listeners = {tuple(each.laddr) for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"}
    refused = stranger(port) if rank else None
    dist.barrier()
    group.close()
    return {"total": total.item(), "said": said, "listeners": listeners, "refused": refused}


def ask(port):
    """A client with another secret, and torch's own client: can they list or set keys?"""
    errors = []
    for secret in ("", "another"):
        try:
            RemoteStore(LOOPBACK, port, secret, dist.default_pg_timeout).set("key", "other")
        except dist.DistNetworkError as error:
            errors.append(type(error).__name__)
    with socket.create_connection((LOOPBACK, port), timeout=20) as foreign:
        foreign.recv(64)
        foreign.sendall(bytes(64))
        errors.append(foreign.recv(64))
    return errors


def nothing(port):
    """No stranger."""
