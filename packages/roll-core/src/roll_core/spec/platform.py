"""The interface of hardware platforms: devices, their addresses, and environment variables for workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RoleKind = Literal["train", "score", "generate", "reward"]
"""Kind of a role: train a model, score (forward passes only), generate, or compute rewards."""
ROLE_KINDS: tuple[RoleKind, ...] = get_args(RoleKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Result of probing for a platform's hardware."""

    found: bool
    why: str
    """What was examined and found, as text for users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVar:
    """One environment variable for a worker process, and the reason for it."""

    name: str
    value: str
    reason: str
    required: bool = False
    """True if workers fail without it: it then also overrides the driver's environment. Otherwise the driver's
    environment takes precedence. `system_envs` of the config override both."""


class Platform(ABC):
    """One kind of hardware.

    Constructing a platform and calling its methods is cheap and has no side effects: no device stays open after a call,
    and the environment does not change. `PlatformConformance` of `roll_testing` checks this.
    """

    name: str
    device_type: str
    """Torch device type, `cpu` or `cuda`."""
    ray_resource: str
    """Ray resource name of a slot: `CPU`, `GPU`, `NPU`."""
    visible_devices: str
    """Environment variable that restricts a process to some devices; empty if there is none."""
    also_visible_devices: tuple[str, ...] = ()
    """Further variables with the same meaning, for libraries that read those. They are set to the same value."""
    collective_backend: str
    """`gloo`, `nccl` or `hccl`."""
    slots_share_cores: bool = False
    """True if slots are shares of the host's CPU cores rather than accelerators. A config may then use more slots than
    there are cores, and roles without `device_mapping` run on this platform, too."""

    @abstractmethod
    def probe(self) -> Probe:
        """Detect the hardware."""

    @abstractmethod
    def device_count(self) -> int:
        """Number of slots on this host."""

    def device(self, local_index: int) -> str:
        """Torch device string of a slot on this host."""
        return f"{self.device_type}:{local_index}"

    @abstractmethod
    def supports(self, dtype: str) -> str:
        """Empty if `dtype` is supported; otherwise the reason, and what to use instead.

        `dtype` is a model dtype, or `fp8`: matrix products and activations in E4M3. On a host without devices, such as
        the head node of a cluster, the result refers to the devices that the installed software targets.
        """

    def environment(self, kind: RoleKind, local_indices: Sequence[int]) -> tuple[EnvVar, ...]:
        """Environment variables for a worker of this kind on these slots."""
        return ()

    @abstractmethod
    def memory(self, local_index: int) -> Mapping[str, int]:
        """Memory of a slot in bytes, `total` and `used`, where `used` includes all processes. Raises `UnsupportedError`
        if the platform cannot measure it."""


document_fields(__name__)
