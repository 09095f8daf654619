"""Runs tests in processes with two simulated devices. The process of pytest has none."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roll_platform_sim import settings
from roll_testing.ranks import shared_host

HOST = f"tests-{os.getpid()}"
MEMORY_BYTES = 512 * 1024**2
ENVIRONMENT = {
    settings.DEVICES: "2",
    settings.MEMORY_GIB: str(MEMORY_BYTES / 1024**3),
    settings.HOST: HOST,
    "GLOO_SOCKET_IFNAME": "lo",
}


def on_devices(num_ranks: int = 1) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in a new process, or in `num_ranks` of them; it may have the parameter `rank`."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            host = shared_host(tuple(sorted(ENVIRONMENT.items())), ("torch", "pytest", "sim_process"))
            module = Path(test.__code__.co_filename).stem
            host.run(call, module, test.__name__, arguments, num_ranks=num_ranks, timeout_s=120)

        signature = inspect.signature(test)
        parameters = [each for each in signature.parameters.values() if each.name != "rank"]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def call(rank: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    """Run a test in this process."""
    test = inspect.unwrap(getattr(importlib.import_module(module), name))
    if "rank" in inspect.signature(test).parameters:
        arguments = {**arguments, "rank": rank}
    test(**arguments)
