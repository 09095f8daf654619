"""The interface of hardware platforms: devices, their addresses, and environment variables for workers.

`visible_devices` and `torch_build` help to write one.
"""

from __future__ import annotations

import ast
import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RoleKind = Literal["train", "score", "generate", "reward"]
"""Kind of a role: train a model, score (forward passes only), generate, or compute rewards."""
ROLE_KINDS: tuple[RoleKind, ...] = get_args(RoleKind)

HOST_DEVICE = "cpu"
"""Torch device of workers without slots."""
HOST_BACKEND = "gloo"
"""Collective backend of workers without slots. A platform's own backend may support only tensors on its devices."""


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
    resource_name: str
    """Name of a slot in a cluster's list of resources: `CPU`, `GPU`, `NPU`. Executors reserve slots by it."""
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


def visible_devices(value: str | None, num_devices: int) -> tuple[str, ...]:
    """Devices visible to a process, in the process's order: indices on the host, or ids such as `GPU-8a44…`.

    `value` is the variable's value; None (not set) makes all `num_devices` devices visible. The rules are those of the
    drivers: entries after the first invalid one are ignored, and a duplicate entry hides all devices.
    """
    if value is None:
        return tuple(str(index) for index in range(num_devices))
    seen: list[str] = []
    for entry in (text.strip() for text in value.split(",")):
        is_number = entry.isascii() and entry.isdigit()
        if is_number and int(entry) >= num_devices:
            break
        if not is_number and not entry.startswith(("GPU-", "MIG-")):
            break
        device = str(int(entry)) if is_number else entry
        if device in seen:
            return ()
        seen.append(device)
    return tuple(seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """Version of the installed torch, from its `version.py`."""

    version: str
    """Same as `torch.__version__`, for example `2.13.0+cu130`."""
    cuda: str = ""
    """CUDA version of the build, for example `13.0`; empty without CUDA."""
    hip: str = ""
    """HIP version of the build, for example `7.0.51831`; empty without HIP."""

    def __str__(self) -> str:
        made_for = f"CUDA {self.cuda}" if self.cuda else f"HIP {self.hip}" if self.hip else "no GPU of NVIDIA or AMD"
        return f"torch {self.version} (built for {made_for})"


def torch_build() -> TorchBuild | None:
    """Build of the torch that `import torch` would load. None if torch is missing or its version cannot be read."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        tree = ast.parse(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except (ImportError, OSError, SyntaxError, ValueError):  # ValueError: a broken module in sys.modules, or NULs
        return None
    constants = _strings(tree)
    if not constants.get("__version__"):
        return None
    return TorchBuild(version=constants["__version__"], cuda=constants.get("cuda", ""), hip=constants.get("hip", ""))


def _strings(tree: ast.Module) -> dict[str, str]:
    """String constants assigned to names at the top level of a module."""
    constants: dict[str, str] = {}
    for node in tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            constants.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return constants


document_fields(__name__)
