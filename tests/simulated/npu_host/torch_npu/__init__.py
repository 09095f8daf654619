"""Stand-in for torch-npu: simulated devices under the names of Ascend's. What is never called here raises if it is."""

import os

from roll_platform_sim.device import register

__version__ = "2.13.0"

register(
    "npu",
    num_devices=int(os.environ["NPU_HOST_DEVICES"]),
    visible_devices="ASCEND_RT_VISIBLE_DEVICES",
    collective_backend="hccl",
)


def autoload() -> None:
    """Entry point by which torch loads this module."""


def __getattr__(name: str) -> object:
    if not name.startswith("npu_"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"torch_npu.{name} is not simulated")

    return missing
