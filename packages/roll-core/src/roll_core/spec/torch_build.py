"""Which torch build is installed (CPU, CUDA, HIP), read without importing torch."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from roll_core.field_docs import document_fields


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
    said = _strings(tree)
    if not said.get("__version__"):
        return None
    return TorchBuild(version=said["__version__"], cuda=said.get("cuda", ""), hip=said.get("hip", ""))


def _strings(tree: ast.Module) -> dict[str, str]:
    """String constants assigned to names at the top level of a module."""
    found: dict[str, str] = {}
    for node in tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return found


document_fields(__name__)
