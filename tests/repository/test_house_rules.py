"""What holds for every file of the core and of the packages that were split from it, asked of their syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll_core.plugins.loader import load_plugins
from roll_core.plugins.registry import Registry
from roll_core.spec.providers import AdvantageProvider, PolicyLossProvider, WeightTransportProvider

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
CORE = PACKAGES / "roll-core" / "src" / "roll_core"
IN_CORE = sorted(CORE.rglob("*.py"))
MODELING = sorted((PACKAGES / "roll-modeling").rglob("src/**/*.py"))
OTHERS = sorted(
    path
    for name in ("roll-infer-hf", "roll-migrate", "roll-strategy-hf", "roll-testing")
    for path in (PACKAGES / name).rglob("src/**/*.py")
)
MODULES = [*IN_CORE, *MODELING, *OTHERS]
NAMES = {
    *("vllm", "sglang", "deepspeed", "megatron", "fsdp2", "hf", "cuda", "rocm", "npu"),
    *(f"{name}_{kind}" for name in ("hf", "fsdp2", "deepspeed", "megatron") for kind in ("train", "infer")),
}
"""Engines, backends and platforms. Whether something is done may depend on what a part can do, never on its name."""
OWN_PARTS = {
    name
    for kind in (WeightTransportProvider, AdvantageProvider, PolicyLossProvider)
    for name in Registry(load_plugins(environ={"ROLL_PLUGINS": ""})).names(kind)
}
"""Weight transports, advantage estimators and policy losses that come with the core."""
FORBIDDEN_CALLS = {"eval", "exec", "pickle.load", "pickle.loads", "yaml.load", "cloudpickle.loads"}
OUR_OWN = {("codecs.py", "cloudpickle.loads")}
"""Messages between a driver and the workers that it started are not foreign; Ray itself carries them that way."""
HEAVY = {"torch", "ray", "transformers", "datasets", "tensorboard", "math_verify"}
LIGHT = ("spec", "config", "plugins", "cli")


def area(path: Path) -> str:
    return path.relative_to(CORE).parts[0]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def compared_strings(module: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        for part in parts:
            for item in part.elts if isinstance(part, (ast.Tuple, ast.List, ast.Set)) else [part]:
                if isinstance(item, ast.Constant) and isinstance(item.value, str):
                    yield node.lineno, item.value


@pytest.mark.parametrize("path", [*(p for p in IN_CORE if area(p) != "builtin"), *MODELING], ids=lambda p: p.stem)
def test_the_core_compares_with_no_parts_name(path):
    found = [(line, name) for line, name in compared_strings(tree(path)) if name in NAMES | OWN_PARTS]
    assert found == []


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_the_core_never_asks_torch_for_one_vendors_devices(path):
    found = [
        node.lineno
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and node.attr in {"cuda", "npu", "xpu"}
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    assert found == []


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_nothing_foreign_is_evaluated_or_unpickled(path):
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            unsafe_load = name == "torch.load" and not any(
                k.arg == "weights_only" and isinstance(k.value, ast.Constant) and k.value.value is True
                for k in node.keywords
            )
            shell = any(k.arg == "shell" and getattr(k.value, "value", False) for k in node.keywords)
            if (path.name, name) not in OUR_OWN and (name in FORBIDDEN_CALLS or unsafe_load or shell):
                found.append((node.lineno, name))
    assert found == []


@pytest.mark.parametrize("path", [p for p in IN_CORE if area(p) in LIGHT], ids=lambda p: p.stem)
def test_light_floors_import_nothing_heavy_at_their_top(path):
    found, todo = [], list(tree(path).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            todo += node.body + node.orelse
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in HEAVY]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in HEAVY:
            found.append(node.module)
    assert found == []


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_workers_are_called_through_their_stub(path):
    found = [
        node.lineno
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"call", "call_each", "call_rank"}
        and any(isinstance(arg, ast.Constant) and isinstance(arg.value, str) for arg in node.args)
    ]
    assert found == []
