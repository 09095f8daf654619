"""Compares a plugin with the sources of an engine that is not installed: `python tools/engine_names.py PLUGIN SOURCES`.

PLUGIN is a package of ours, for example `roll-infer-vllm`. SOURCES is a folder with the engine's Python package, for
example an unpacked wheel of another version. Exit code 1 if something that the plugin uses is missing there:

* modules and names that it imports; of the alternatives of a `try`, one suffices;
* keywords with which it calls imported functions and classes;
* positional parameters of methods that it overrides, unless it takes `*args`;
* methods and keywords of calls of the engine object (`engine.…`, `self._engine.…`).

Names are looked up in the source text. Behaviour, and calls of objects of other types, are not compared.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from environments import REPOSITORY

ENGINE_OBJECTS = {"vllm": ("vllm.v1.engine.async_llm", "AsyncLLM")}
"""Module and class of the objects named `engine` or `_engine`, by package."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(eq=False)
class Sources:
    """Sources of one version of an engine."""

    root: Path
    missing: list[str] = field(default_factory=list)

    @cache  # noqa: B019 - one object per process
    def module(self, name: str) -> ast.Module | None:
        """The parsed module; None if it does not exist."""
        path = self.root / name.replace(".", "/")
        file = next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)
        return ast.parse(file.read_text(encoding="utf-8")) if file else None

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Module and node that define `name`, through re-exports; None if it is not defined."""
        tree = self.module(module)
        if self.module(f"{module}.{name}"):
            return module, ast.Pass()
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, Definition) and node.name == name:
                return module, node
            origin = _imported_name(node, name)
            if isinstance(node, ast.ImportFrom) and origin:
                base = module.split(".") if self.module(f"{module}.__init__") else module.split(".")[:-1]
                base = base[: len(base) - node.level + 1] if node.level else []
                if found := self.find(".".join([*base, *filter(None, [node.module])]), origin):
                    return found
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
                return module, node
        return None

    def method(self, module: str, owner: ast.ClassDef, name: str) -> Definition | None:
        """The method of a class or of its bases in the engine; None if there is none."""
        for node in owner.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return node
        for base in owner.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            found = self.find(module, base.id) if isinstance(base, ast.Name) else None
            if found and isinstance(found[1], ast.ClassDef) and (method := self.method(*found, name)):  # type: ignore[arg-type]
                return method
        return None

    def keywords(self, module: str, node: ast.AST) -> set[str] | None:
        """Names that a call of this function or class accepts; None for any, or if that is unknown."""
        if isinstance(node, ast.ClassDef):
            init = self.method(module, node, "__init__") or self.method(module, node, "__new__")
            if init is None:
                return None if node.bases else {each.target.id for each in node.body if _is_field(each)}  # type: ignore[attr-defined]
            node = init
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.args.kwarg:
            return None
        return {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def compare(file: Path, package: str, sources: Sources) -> None:
    """Record in `sources` what one module of the plugin uses and the engine lacks."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    optional = {id(part): node for node in ast.walk(tree) if isinstance(node, ast.Try) for part in ast.walk(node)}
    imported: dict[str, tuple[str, ast.AST]] = {}
    absent: dict[str, tuple[int, str]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != package:
            continue
        for each in node.names:
            name = each.asname or each.name
            if found := sources.find(node.module or "", each.name):
                imported[name] = found
            elif id(node) in optional:
                absent[name] = node.lineno, f"{node.module}.{each.name}"
            else:
                sources.missing.append(f"{file.name}:{node.lineno}: {node.module}.{each.name}")
    for name, (line, path) in absent.items():
        if name not in imported:
            sources.missing.append(f"{file.name}:{line}: {path}, and its alternatives")
    engine = sources.find(*ENGINE_OBJECTS[package]) if package in ENGINE_OBJECTS else None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            _compare_call(node, file, imported, engine, sources)
        elif isinstance(node, ast.ClassDef):
            _compare_overrides(node, file, imported, sources)


def _compare_call(
    call: ast.Call,
    file: Path,
    imported: dict[str, tuple[str, ast.AST]],
    engine: tuple[str, ast.AST] | None,
    sources: Sources,
) -> None:
    function, target = call.func, None
    if isinstance(function, ast.Name) and function.id in imported:
        target = imported[function.id]
    elif isinstance(function, ast.Attribute) and engine and isinstance(engine[1], ast.ClassDef):
        owner = function.value
        if (owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")) in ("engine", "_engine"):
            method = sources.method(engine[0], engine[1], function.attr)
            if method is None:
                sources.missing.append(f"{file.name}:{call.lineno}: {engine[1].name}.{function.attr}")
                return
            target = engine[0], method
    accepted = sources.keywords(*target) if target else None
    for keyword in call.keywords if accepted is not None else ():
        if keyword.arg and keyword.arg not in accepted:
            sources.missing.append(f"{file.name}:{call.lineno}: {ast.unparse(function)}({keyword.arg}=)")


def _compare_overrides(
    ours: ast.ClassDef, file: Path, imported: dict[str, tuple[str, ast.AST]], sources: Sources
) -> None:
    for base in ours.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        found = imported.get(base.id) if isinstance(base, ast.Name) else None
        if not found or not isinstance(found[1], ast.ClassDef):
            continue
        for method in ours.body:
            if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or method.name.startswith("__"):
                continue
            theirs = sources.method(found[0], found[1], method.name)
            if isinstance(theirs, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [[each.arg for each in one.args.args if each.arg != "self"] for one in (method, theirs)]
                if names[0] != (names[1][: len(names[0])] if method.args.vararg else names[1]):
                    sources.missing.append(f"{file.name}:{method.lineno}: {ours.name}.{method.name}{tuple(names[1])}")


def _imported_name(node: ast.AST, name: str) -> str:
    """Name in its own module of what `node` imports as `name`; empty if it does not. `*` may import any name."""
    names = node.names if isinstance(node, ast.ImportFrom) else ()
    return next(
        (name if each.name == "*" else each.name for each in names if (each.asname or each.name) in (name, "*")), ""
    )


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def main(plugin: str, folder: str) -> int:
    """Print what is missing; 1 if anything is."""
    (source,) = (REPOSITORY / "packages" / plugin / "src").glob("roll_*")
    sources = Sources(Path(folder))
    for file in sorted(source.rglob("*.py")):
        compare(file, plugin.rpartition("-")[2], sources)
    print(*(sources.missing or ["nothing is missing"]), sep="\n")
    return 1 if sources.missing else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
