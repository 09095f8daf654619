"""Hook that provides the transports. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import WeightTransportProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1


@hookimpl
def roll_weight_transports() -> Iterator[WeightTransportProvider]:
    """Transports on a device, on a host, over a network and through a file system."""
    yield WeightTransportProvider(
        name="cuda_ipc",
        target="roll_weight_transports.cuda_ipc:CudaIpcTransport",
        summary="Device memory, between processes on the same device",
        priority=40,
    )
    yield WeightTransportProvider(
        name="shm",
        target="roll_weight_transports.shm:ShmTransport",
        summary="Shared memory, between processes of one host",
        priority=30,
    )
    yield WeightTransportProvider(
        name="collective",
        target="roll_weight_transports.collective:CollectiveTransport",
        summary="Broadcasts by gloo, nccl or hccl, between any processes",
        priority=20,
    )
    yield WeightTransportProvider(
        name="disk",
        target="roll_weight_transports.disk:DiskTransport",
        summary="Files in model_update_dir, for hosts without a connection",
        priority=10,
        uses_directory=True,
    )
