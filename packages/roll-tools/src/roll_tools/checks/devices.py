"""Checks of the devices, as their platform reports them."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from roll_core.errors import UnsupportedError
from roll_core.spec.config import Dtype
from roll_core.spec.diagnostics import CheckResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.diagnostics import CheckContext

GIB = 1024**3
LEAST_BYTES = 16 * GIB
"""Recommended memory of one device, in bytes; 40 GiB are recommended for models of 7 billion parameters."""
USED_SHARE = 0.1
"""Share of a device's memory in use above which the device counts as occupied."""


def dtypes(context: CheckContext) -> Iterator[CheckResult]:
    """Check which model dtypes work; an error if fp32 or a dtype that the config uses does not."""
    platform = context.platform
    if platform is None or not platform.device_count():
        return
    roles_of = _dtypes_of(context)
    for dtype in get_args(Dtype):
        why = platform.supports(dtype)
        roles = roles_of.get(dtype, [])
        if not why:
            yield CheckResult(level="ok", subject=dtype, found=f"{platform.name} computes in it")
        elif roles or dtype == "fp32":
            remedy = f"change model_args.dtype of {', '.join(roles)}" if roles else "use other devices"
            yield CheckResult(level="error", subject=dtype, found=why, remedy=remedy)
        else:
            yield CheckResult(level="note", subject=dtype, found=why)


def device_memory(context: CheckContext) -> Iterator[CheckResult]:
    """Check the memory of each device, or that of the host if slots share it."""
    platform = context.platform
    if platform is None:
        return
    for index in range(1 if platform.slots_share_cores else platform.device_count()):
        subject = platform.device(index)
        try:
            memory = platform.memory(index)
        except UnsupportedError as error:
            yield CheckResult(level="note", subject=subject, found=str(error))
            continue
        total, used = memory["total"], memory["used"]
        status = f"{total / GIB:.1f} GiB, of which {used / GIB:.1f} are in use"
        expected = f"{LEAST_BYTES / GIB:.0f} GiB or more, 40 for 7B models"
        if platform.slots_share_cores:
            yield CheckResult(level="ok", subject=subject, found=status)
        elif total < LEAST_BYTES:
            remedy = "train small models or adapters (lora_target), or offload states"
            yield CheckResult(level="warning", subject=subject, found=status, wanted=expected, remedy=remedy)
        elif used > USED_SHARE * total:
            remedy = "end the programs that use it, or remove the device from device_mapping"
            yield CheckResult(level="warning", subject=subject, found=status, wanted="nothing in use", remedy=remedy)
        else:
            yield CheckResult(level="ok", subject=subject, found=status, wanted=expected)


def _dtypes_of(context: CheckContext) -> dict[str, list[str]]:
    """Names of the config's roles, by the dtype of their model."""
    roles: dict[str, list[str]] = {}
    for name, role in context.config.roles().items() if context.config is not None else ():
        if role.kind != "reward":
            roles.setdefault(role.model_args.dtype, []).append(name)
    return roles
