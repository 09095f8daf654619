"""The `cpu` platform: this host's cores and memory. A slot is a share of the cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from roll_core.host import free_memory_bytes, hostname, memory_limit_bytes, usable_cores
from roll_core.spec.platform import Platform, Probe

if TYPE_CHECKING:
    from collections.abc import Mapping

GIB = 1024**3


class CpuPlatform(Platform):
    """Platform of the host's cores, which is always available. It has one slot for each core this process may use."""

    name = "cpu"
    device_type = "cpu"
    resource_name = "CPU"
    visible_devices = ""
    collective_backend = "gloo"
    slots_share_cores = True

    def probe(self) -> Probe:
        """Report the usable cores and the memory; the platform is always found."""
        total = self.memory(0)["total"] / GIB
        return Probe(found=True, why=f"{hostname()} has {usable_cores()} usable cores and {total:.1f} GiB of memory")

    def device_count(self) -> int:
        """Number of usable cores."""
        return usable_cores()

    def device(self, local_index: int) -> str:
        """Torch device string, `cpu` for every slot."""
        return "cpu"

    def supports(self, dtype: str) -> str:
        """Empty for `fp32`, `bf16` and `fp8`; otherwise the reason and alternatives.

        `fp8` matrix products work but are not faster. `fp16` lacks CPU kernels and the range that training needs.
        """
        if dtype in ("fp32", "bf16", "fp8"):
            return ""
        return f"{dtype} does not work on a CPU: use fp32, or bf16 for half the memory"

    def memory(self, local_index: int) -> Mapping[str, int]:
        """Bytes `total` and `used` of the host, or of its cgroup limit, because slots share the memory."""
        host = psutil.virtual_memory().total
        total = min(host, memory_limit_bytes() or host)
        return {"total": total, "used": max(0, total - free_memory_bytes())}
