"""The transports that come with roll-core keep the contract of weight transports."""

from typing import ClassVar

import pytest
from sync_workers import HostMemory

from roll_testing import WeightTransportConformance
from roll_weight_transports import device_memory


class TestShm(WeightTransportConformance):
    name = "shm"


class TestCudaIpc(WeightTransportConformance):
    name = "cuda_ipc"

    @pytest.fixture(autouse=True)
    def _device(self, monkeypatch):
        """The host's memory in place of a device's."""
        monkeypatch.setitem(device_memory.KINDS, "cpu", HostMemory())


class TestCollective(WeightTransportConformance):
    name = "collective"


class TestDisk(WeightTransportConformance):
    name = "disk"
    options: ClassVar = {"directory": "{directory}"}
