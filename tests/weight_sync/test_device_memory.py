"""Device memory without a device: what torch would be asked, and what arrives in its place."""

from types import SimpleNamespace

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing import reductions

from roll_core.errors import WeightSyncError
from roll_core.runtime.weights.plan import device_facts
from roll_core.spec.transport import DeviceFacts
from roll_core.types import DataRank
from roll_testing.errors import raises_error
from roll_weight_transports.device_memory import (
    ALLOCATOR_OPTIONS,
    CudaHandle,
    DeviceMemory,
    device_memory,
    fixed_segments,
)

HANDLE = CudaHandle(
    device_uuid="GPU-1",
    num_bytes=4096,
    tensor_offset=512,
    storage_handle=b"\x01" * 64,
    storage_size_bytes=8192,
    storage_offset_bytes=2048,
    ref_counter_handle=b"/torch_1_2_3",
    ref_counter_offset=7,
    event_handle=b"\x02" * 64,
    event_sync_required=True,
)


@pytest.fixture
def cuda(monkeypatch):
    """Two devices, of which torch lends and opens what `calls` then has."""
    calls = SimpleNamespace(opened=None)

    def reduce_tensor(tensor):
        of_storage = (0, HANDLE.storage_handle, HANDLE.storage_size_bytes, HANDLE.storage_offset_bytes)
        counted = (HANDLE.ref_counter_handle, HANDLE.ref_counter_offset, HANDLE.event_handle, True)
        kept = (torch.Tensor, tensor.size(), tensor.stride(), HANDLE.tensor_offset)
        return reductions.rebuild_cuda_tensor, (
            *kept, torch.storage.TypedStorage, tensor.dtype, *of_storage, tensor.requires_grad, *counted
        )  # fmt: skip

    def rebuild_cuda_tensor(*arguments):
        calls.opened = arguments
        return torch.zeros(4096, dtype=torch.uint8)

    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild_cuda_tensor)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid="GPU-2" if str(device) == "cuda:1" else "GPU-1"),
    )
    return calls


def test_opened_handle_equals_the_shared_handle(cuda):
    memory = torch.zeros(4096, dtype=torch.uint8)
    told = reductions.reduce_tensor(memory)[1]
    handle = DeviceMemory().share(memory)
    assert CudaHandle.unpacked(handle) == HANDLE
    DeviceMemory().open(handle, "cuda:0")
    assert cuda.opened == told


def test_the_arguments_are_those_of_this_torch_s_function():
    """By name and number: they are taken by their places."""
    code = reductions.rebuild_cuda_tensor.__code__
    names = code.co_varnames[: code.co_argcount]
    assert names == (
        "tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device",
        "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad", "ref_counter_handle",
        "ref_counter_offset", "event_handle", "event_sync_required",
    )  # fmt: skip


def test_memory_of_another_device_is_not_opened(cuda):
    with raises_error(WeightSyncError, "GPU", "1", "2"):
        DeviceMemory().open(HANDLE.packed(), "cuda:1")
    assert cuda.opened is None


def test_memory_shared_by_torch_in_another_way_is_refused(cuda, monkeypatch):
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (reductions.rebuild_tensor, ()))
    with raises_error(WeightSyncError, "CUDA", "IPC", "rebuild_tensor"):
        DeviceMemory().share(torch.zeros(8, dtype=torch.uint8))


@pytest.mark.parametrize("field", list(CudaHandle.model_fields))
@pytest.mark.parametrize("value", [None, 1.5, -1, "text", b"bytes", True, [], {}])
def test_a_field_of_another_type_is_refused(cuda, field, value):
    right = getattr(HANDLE, field)
    values = HANDLE.model_dump() | {field: value}
    if type(value) is type(right) and value != -1:
        CudaHandle.unpacked(msgpack.packb(values))
        return
    with raises_error(WeightSyncError, field):
        DeviceMemory().open(msgpack.packb(values), "cuda:0")
    assert cuda.opened is None


def test_invalid_handle_fields_and_ranges_are_refused():
    values = HANDLE.model_dump()
    with raises_error(WeightSyncError, "function"):
        CudaHandle.unpacked(msgpack.packb(values | {"function": "os.system"}))
    with raises_error(WeightSyncError, "device_uuid"):
        CudaHandle.unpacked(msgpack.packb({"num_bytes": 3}))
    with raises_error(WeightSyncError, "7681", "512", "8192"):
        CudaHandle.unpacked(msgpack.packb(values | {"num_bytes": 7681}))


@given(st.binary(max_size=200))
def test_any_invalid_bytes_raise_a_roll_error(data):
    with pytest.raises(WeightSyncError):
        CudaHandle.unpacked(data)


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False,max_split_size_mb:64"}, []),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments: True"},
            ["max_split_size_mb:64,expandable_segments:False", "max_split_size_mb:64,expandable_segments: True"],
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:9"},
            [],
        ),
        (
            {"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"},
            ["expandable_segments:False", "expandable_segments:True"],
        ),
    ],
)
def test_expandable_segments_are_off_while_allocating_shared(monkeypatch, variables, wanted):
    for name in ALLOCATOR_OPTIONS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    told = []
    with fixed_segments(told.append):
        assert told == wanted[:1]
    assert told == wanted
    with pytest.raises(MemoryError), fixed_segments(told.append):
        raise MemoryError
    assert told == wanted * 2


def test_only_cuda_devices_share_memory():
    assert isinstance(device_memory("cuda:3"), DeviceMemory)
    assert device_memory("cpu") is device_memory("npu:0") is None


@pytest.mark.parametrize(
    ("device", "properties", "uuid"),
    [
        ("acc:1", {"get_device_properties": lambda device: SimpleNamespace(uuid=f"ACC {device}")}, "ACC acc:1"),
        ("acc:1", {"get_device_properties": lambda device: SimpleNamespace()}, ""),
        ("acc:1", {}, ""),
        ("cpu", None, ""),
    ],
)
def test_a_worker_reports_the_uuid_that_torch_has_of_its_device(monkeypatch, device, properties, uuid):
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(**properties))
    found = device_facts(device, "acl", DataRank(index=2, leader=False))
    assert found == DeviceFacts(device=device, backend="acl", uuid=uuid, is_leader=False, replica=2)
