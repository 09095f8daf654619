"""The contract of hardware platforms: what is there, how it is addressed, which environment it wants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RoleKind = Literal["train", "score", "generate", "reward"]
"""What a role does: trains a model, computes forward passes of one, generates, scores samples."""
ROLE_KINDS: tuple[RoleKind, ...] = get_args(RoleKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a platform found when it looked for its hardware."""

    found: bool
    why: str
    """What was looked at and seen, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVar:
    """One environment variable for a worker process, with the reason for it."""

    name: str
    value: str
    reason: str
    required: bool = False
    """Workers do not work otherwise: it also replaces what the environment of the driver says. A variable that is not
    required gives way to it. `system_envs` of the config win over both."""


class Platform(ABC):
    """One kind of hardware.

    Constructing it and asking it anything is cheap and has no side effects: no device is opened for longer than the
    question takes, and the environment stays as it is. `PlatformConformance` of `roll_testing` holds that.
    """

    name: str
    device_type: str
    """Of torch devices, `cpu` or `cuda`."""
    ray_resource: str
    """Ray's name for a slot, `CPU`, `GPU`, `NPU`."""
    visible_devices: str
    """Environment variable that restricts a process to some devices; empty if there is none."""
    also_visible_devices: tuple[str, ...] = ()
    """Other names of the same, for libraries that read those: they are set to the same value."""
    collective_backend: str
    """`gloo`, `nccl`, `hccl`."""
    slots_share_cores: bool = False
    """Slots are shares of the host's cores rather than accelerators: a config may name more of them than there are
    cores, and roles without `device_mapping` compute there too."""

    @abstractmethod
    def probe(self) -> Probe:
        """Whether the hardware is there."""

    @abstractmethod
    def device_count(self) -> int:
        """Slots on this host."""

    @abstractmethod
    def device(self, local_index: int) -> str:
        """Torch device string of a slot on this host."""

    @abstractmethod
    def supports(self, dtype: str) -> str:
        """Empty if `dtype` works here, else why not and what to use. It is one of models, or `fp8`: products of
        matrices and activations in E4M3. Where no device is here, as on the head of a cluster, it is answered for the
        devices that the software is made for."""

    def environment(self, kind: RoleKind, local_indices: Sequence[int]) -> tuple[EnvVar, ...]:
        """Variables for a worker of this kind on these slots."""
        return ()

    @abstractmethod
    def memory(self, local_index: int) -> Mapping[str, int]:
        """Bytes `total` and `used` of a slot, by whatever process. Raises `UnsupportedError` where nobody counts."""


document_fields(__name__)
