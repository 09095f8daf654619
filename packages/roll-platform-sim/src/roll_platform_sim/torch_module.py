"""torch's module of the device type, `torch.sim`: the functions that torch and its users call on `torch.cuda`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.accelerator import (  # noqa: F401 - part of this module's interface
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_peak_memory_stats,
    set_stream,
    synchronize,
)

import roll_platform_sim.roll_sim as _native  # type: ignore[import-not-found]

Device = torch.device | str | int | None
"""A device, its number or its name. None, and devices without a number, stand for the current device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    """Properties of a device."""

    name: str
    total_memory: int
    uuid: str
    multi_processor_count: int = 1


# -- devices -----------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    """True if a device is visible."""
    return device_count() > 0


def is_initialized() -> bool:
    """True once this process has used a device."""
    return bool(_native.is_initialized())


def init() -> None:
    """Does nothing: the first use initializes devices."""


def _is_in_bad_fork() -> bool:
    return bool(_native.in_bad_fork())


def device_count() -> int:
    """Number of visible devices."""
    return int(_native.num_devices())


def current_device() -> int:
    """Number of this thread's current device."""
    return int(_native.current_device())


def set_device(device: Device) -> None:
    """Set this thread's current device."""
    _native.set_device(_index(device))


class device:
    """Context manager that makes a device the current one of its thread."""

    def __init__(self, device: Device) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        _native.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        _native.set_device(self._before)


def get_device_properties(device: Device = None) -> DeviceProperties:
    """Name, memory and identity of a device."""
    index = _index(device)
    uuid = f"simulated-{_native.number_on_host(index)}"
    return DeviceProperties(name="Simulated device", total_memory=mem_get_info(index)[1], uuid=uuid)


def get_device_name(device: Device = None) -> str:
    """Name of a device."""
    return get_device_properties(device).name


def is_bf16_supported() -> bool:
    """True: CPUs compute in bfloat16."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Dtypes of `torch.autocast`."""
    return [torch.bfloat16, torch.float16]


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total bytes of a device. Free is what no process of the host has reserved."""
    free, total = _native.memory_info(_index(device))
    return free, total


# -- streams and events ------------------------------------------------------------------------------------------------


Stream = torch.Stream
"""A stream. Operators run at once, in the order of the calls: streams never overlap."""
Event = torch.Event


def current_stream(device: Device = None) -> torch.Stream:
    """Current stream of a device in this thread."""
    return torch.accelerator.current_stream(_device(device))


def default_stream(device: Device = None) -> torch.Stream:
    """Stream of a device that is current until another one is chosen."""
    where = _device(device)
    return torch.Stream(stream_id=0, device_index=where.index, device_type=_PRIVATE_USE_1)


def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """Context manager that makes a stream the current one of its device."""
    return nullcontext() if stream is None else stream


# -- random numbers ----------------------------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def initial_seed() -> int:
    """Seed of the current device's generator."""
    return _generator(None).initial_seed()


def get_rng_state(device: Device = None) -> torch.Tensor:
    """State of a device's generator, on the host."""
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    """Set the state of a device's generator."""
    _generator(device).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    """States of the generators of all devices."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    """Set the states of the generators of all devices."""
    for index, state in enumerate(states):
        set_rng_state(state, index)


_PRIVATE_USE_1 = 20
"""Number of the device type in torch."""


def _generator(device: Device) -> torch.Generator:
    generator: torch.Generator = _native.default_generator(_index(device))
    return generator


def _device(device: Device) -> torch.device:
    return torch.device(torch._C._get_privateuse1_backend_name(), _index(device))


def _index(device: Device) -> int:
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return current_device() if index is None or index < 0 else index
