"""Which torch is installed, and what it was built for, without importing it."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from roll_core.field_docs import document_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """What torch's own `version.py` says."""

    version: str
    """As `torch.__version__`, `2.13.0+cu130`."""
    cuda: str = ""
    """CUDA that it was built with, `13.0`; empty if none."""
    hip: str = ""
    """HIP that it was built with, `7.0.51831`; empty if none."""

    def __str__(self) -> str:
        made_for = f"CUDA {self.cuda}" if self.cuda else f"HIP {self.hip}" if self.hip else "no GPU of NVIDIA or AMD"
        return f"torch {self.version} (built for {made_for})"


def torch_build() -> TorchBuild | None:
    """The torch that would be imported; None if there is none, or one that does not say."""
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
    """Names at the top of a module to which a string is assigned."""
    found: dict[str, str] = {}
    for node in tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return found


document_fields(__name__)
