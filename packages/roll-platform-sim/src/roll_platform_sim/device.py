"""Registration of the simulated devices as a device type of torch.

    import torch -> roll_platform_sim.autoload() -> register("sim") -> compile csrc/ once -> torch.device("sim:0")

torch calls `autoload` through the entry point `torch.backends`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_kernels.extensions import Extension, cache_folder
from roll_platform_sim import settings

if TYPE_CHECKING:
    from types import ModuleType

CSRC = Path(__file__).with_name("csrc")
EXTENSION = Extension(
    name="roll_sim",
    sources=tuple(
        CSRC / f"{name}.cpp"
        for name in ("attention", "collectives", "device", "memory", "operators", "varlen_attention")
    ),
    headers=(CSRC / "sim.h",),
    # The macro only makes the cache's key depend on the Python that the module is for.
    cflags=("-O1", "-std=c++20", f"-DPYTHON_ABI={sysconfig.get_config_var('SOABI')}"),
)

_registered: str | None = None


def register(
    name: str = "sim",
    *,
    num_devices: int | None = None,
    visible_devices: str = settings.VISIBLE,
    collective_backend: str = "simccl",
) -> None:
    """Make simulated devices the device type `name` of torch, in this process.

    By default there are `ROLL_SIM_DEVICES` of them. `visible_devices` names the variable that restricts a process to
    some of them. The first call on a host compiles the devices, which takes a minute or two. torch has one such device
    type per process. Calls after the first are ignored if they have the same name; otherwise raises `RuntimeError`.

    Raises `ExtensionError` if compilation fails.
    """
    global _registered
    import torch

    if _registered is not None:
        if _registered != name:
            raise RuntimeError(f"simulated devices are already registered as {_registered!r}, not as {name!r}")
        return
    num = settings.num_devices() if num_devices is None else num_devices
    native = _load()
    native.configure(settings.visible(visible_devices, num), settings.memory_bytes(), str(settings.table()))
    backends: Any = torch.utils.backend_registration
    backends.rename_privateuse1_backend(name)
    from roll_platform_sim import torch_module

    torch._register_device_module(name, torch_module)  # type: ignore[no-untyped-call]
    sys.modules[f"torch.{name}"] = torch_module
    backends.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    _register_collectives(native, name, collective_backend)
    _registered = name
    if path := os.environ.get(settings.TRACE):
        from roll_platform_sim.trace import trace_process

        trace_process(path)


def is_compiled() -> bool:
    """True if this host's cache has compiled devices, of any version of torch. Does not import torch."""
    return any(cache_folder().glob(f"{EXTENSION.name}-*/{EXTENSION.name}.so"))


def _load() -> ModuleType:
    """Import the compiled module, as a submodule of this package."""
    name = f"{__package__}.{EXTENSION.name}"
    spec = importlib.util.spec_from_file_location(name, EXTENSION.library())
    assert spec is not None and spec.loader is not None  # noqa: S101, PT018 - it is a file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _register_collectives(native: Any, device_type: str, backend: str) -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)  # type: ignore[attr-defined]
        return native.Collectives(rank, size, gloo, dist.PrefixStore("devices", store), backend)  # type: ignore[attr-defined]

    dist.Backend.register_backend(backend, create, devices=[device_type])
