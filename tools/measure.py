"""Print how large and how tangled the source is, as a Markdown table: `python tools/measure.py [--trace]`.

`--trace` runs the quick start's GRPO (two steps of 8 prompts × 8 samples, a model of one SFT step) and counts the files
and functions of ours that the second step enters: those of roll-core without its algorithms, and those of the
algorithms with the trainer's backend (roll-modeling). The embedded engine's are left out.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import sys
import tempfile
import threading
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

REPOSITORY = Path(__file__).resolve().parents[1]
SMALL = 60
ENGINE = ("/roll_infer_hf/", "/roll_strategy_hf/")
"""Parts of a path that the trace leaves out."""
TRAINER = ("/roll_core/algorithms/", "/roll_modeling/")
"""Parts of a path that the trace counts as the trainer's, not the core's."""


@cache
def modules() -> dict[str, Path]:
    """Every module of every package in `packages/*/src`, by dotted name."""
    found = {}
    for source in sorted((REPOSITORY / "packages").glob("*/src")):
        for path in sorted(source.rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    """Its syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def num_lines(path: Path) -> int:
    """Lines of the file, blank ones and comments too."""
    return len(path.read_text(encoding="utf-8").splitlines())


def package(path: Path) -> str:
    """Distribution that a source file belongs to."""
    return path.relative_to(REPOSITORY / "packages").parts[0]


def imports() -> dict[str, set[str]]:
    """Modules of ours that each module imports, wherever the import stands: in functions and for annotations, too."""
    known = modules()
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        graph[name] = set()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted = [f"{node.module}.{each.name}" for each in node.names]
                graph[name] |= {each if each in known else node.module for each in wanted}
            elif isinstance(node, ast.Import):
                graph[name] |= {each.name for each in node.names}
        graph[name] = {each for each in graph[name] if each in known and each != name}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import each other, directly or through others (strongly connected components)."""
    reach = {name: _reachable(graph, name) for name in graph}
    found = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in graph if a in reach[a]}
    return [list(each) for each in sorted(found)]


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            todo += graph[name]
    return seen


def repeated_classes() -> dict[str, list[str]]:
    """`package: class` -> modules, of class names that a package defines more than once."""
    places: dict[str, list[str]] = {}
    for name, path in modules().items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(f"{package(path)}: {node.name}", []).append(name)
    return {name: each for name, each in sorted(places.items()) if len(each) > 1}


def traced_step() -> Counter[str]:
    """Number of named functions that one GRPO step enters, by file."""
    os.chdir(REPOSITORY)
    sys.path.insert(0, str(REPOSITORY))
    sys.path.insert(0, str(REPOSITORY / "examples" / "quickstart"))
    import make_data

    from roll_core.config import load
    from roll_core.pipelines.rlvr import RLVRPipeline
    from roll_core.plugins.registry import load_registry
    from roll_core.runtime.records.console import Console
    from roll_core.runtime.run.loop import execute

    entered: set[Any] = set()
    is_on = False

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if is_on and event == "call":
            entered.add(frame.f_code)

    step = RLVRPipeline.step

    async def traced(self: RLVRPipeline, run: Any) -> None:
        nonlocal is_on
        is_on = run.step == 1
        await step(self, run)
        is_on = False

    RLVRPipeline.step = traced  # type: ignore[method-assign]
    threading.setprofile(profile)
    sys.setprofile(profile)
    make_data.main(REPOSITORY / "examples" / "quickstart" / "data")
    registry = load_registry()
    common = ["executor=local", "eval_steps=0", "track_with=[]"]
    batch = [
        f"actor_train.training_args.{key}"
        for key in ("per_device_train_batch_size=32", "gradient_accumulation_steps=2")
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, overrides in (("sft", ["max_steps=1"]), ("grpo", ["max_steps=2", "rollout_batch_size=8", *batch])):
            config = load(
                REPOSITORY / f"examples/quickstart/{name}.yaml", [f"output_dir={folder}", *common, *overrides], registry
            )
            result = execute(config, registry, console=Console(stream=io.StringIO(), terminal=False))
            if result.error is not None:
                raise result.error
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    ours = str(REPOSITORY / "packages")
    return Counter(
        code.co_filename
        for code in entered
        if code.co_filename.startswith(ours)
        and not code.co_name.startswith("<")  # a comprehension or a lambda is part of its function
        and not any(part in code.co_filename for part in ENGINE)
    )


def table(rows: Sequence[tuple[str, object]]) -> str:
    """The rows in Markdown."""
    return "\n".join(["| measure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def main(arguments: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", action="store_true", help="also trace one GRPO step (a minute)")
    parser.add_argument("--names", action="store_true", help="also list circles, repeated class names, small modules")
    given = parser.parse_args(arguments)
    lines = {path: num_lines(path) for path in modules().values()}
    core = {path: count for path, count in lines.items() if package(path) == "roll-core"}
    small = [path for path, count in core.items() if count < SMALL and path.name != "__init__.py"]
    found, repeated = circles(imports()), repeated_classes()
    rows: list[tuple[str, object]] = [
        ("lines in roll-core's src", f"{sum(core.values()):,}"),
        ("lines in all src", f"{sum(lines.values()):,}"),
        (f"modules of roll-core below {SMALL} lines (not `__init__`)", len(small)),
        ("import circles", len(found)),
        ("class names defined twice within one package", len(repeated)),
    ]
    if given.trace:
        step = traced_step()
        trainer = Counter({path: count for path, count in step.items() if any(part in path for part in TRAINER)})
        core_entered = Counter({path: count for path, count in (step - trainer).items() if "/roll_core/" in path})
        for what, entered in (
            ("roll-core without algorithms", core_entered),
            ("algorithms and roll-modeling", trainer),
            ("total, engine not counted", step),
        ):
            rows.append((f"files / functions entered in one GRPO step: {what}", f"{len(entered)} / {entered.total()}"))
    print(table(rows))
    if given.names:
        print(*(" <-> ".join(each) for each in found), sep="\n")
        print(*(f"{name}: {', '.join(each)}" for name, each in repeated.items()), sep="\n")
        print(*(str(path.relative_to(REPOSITORY)) for path in sorted(small)), sep="\n")
        if given.trace:
            print(*(f"{count:4} {path.partition('/src/')[2]}" for path, count in sorted(step.items())), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
