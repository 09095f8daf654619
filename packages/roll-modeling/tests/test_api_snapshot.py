"""The API of the shared packages, literally: `api.txt` has every name that our packages import, with its signature.

A line that changes or goes is a change for published plugins: it needs a minor release (RELEASING.md).
`ROLL_UPDATE_GOLDEN=1` writes the file.
"""

import ast
import importlib
import inspect
import os
from pathlib import Path

from pydantic import BaseModel

SNAPSHOT = Path(__file__).with_name("api.txt")
PACKAGES = Path(__file__).resolve().parents[2]


SHARED = ("roll_kernels", "roll_modeling", "roll_weight_transports")


def imported() -> set[tuple[str, str]]:
    """Module and name of everything that sources import from a shared package of which they are no part."""
    names: set[tuple[str, str]] = set()
    for path in PACKAGES.glob("*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            package = (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else ""
            if package in SHARED and package not in path.parts:
                names |= {(node.module, alias.name) for alias in node.names}
    return names


def described(module: str, name: str) -> list[str]:
    """`module.name(signature)`; of a class also its public methods and properties."""
    found = getattr(importlib.import_module(module), name, None)
    if found is None or inspect.ismodule(found):
        return [f"{module}.{name}: module"]
    if not callable(found):
        return [f"{module}.{name}: {type(found).__name__}"]
    lines = [f"{module}.{name}{signature(found)}"]
    members = vars(found).items() if inspect.isclass(found) else ()
    for key, value in sorted(members):
        if key.startswith("_"):
            continue
        if isinstance(value, property):
            lines.append(f"{module}.{name}.{key}: property")
        elif isinstance(value, (classmethod, staticmethod)):
            lines.append(f"{module}.{name}.{key}{signature(value.__func__)}")
        elif inspect.isfunction(value):
            lines.append(f"{module}.{name}.{key}{signature(value)}")
    return lines


def signature(found: object) -> str:
    """Names, kinds and defaults of the parameters; annotations are left out."""
    if isinstance(found, type) and issubclass(found, BaseModel):
        found.model_rebuild()  # without it, the signature depends on whether the schema was used before
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return ""
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    plain = [each if _is_plain(each.default) else each.replace(default=...) for each in bare]
    return str(inspect.Signature(plain))


def _is_plain(default: object) -> bool:
    return default is inspect.Parameter.empty or default is None or isinstance(default, (bool, int, float, str, tuple))


def test_names_imported_by_other_packages_keep_their_signatures():
    found = "".join(f"{line}\n" for module, name in sorted(imported()) for line in described(module, name))
    if os.environ.get("ROLL_UPDATE_GOLDEN"):
        SNAPSHOT.write_text(found, encoding="utf-8")
    assert SNAPSHOT.read_text(encoding="utf-8") == found
