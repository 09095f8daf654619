"""Rules for every file of all packages, checked on syntax trees."""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from roll_core.plugins.loader import load_plugins
from roll_core.plugins.registry import Registry
from roll_core.spec.providers import (
    AdvantageProvider,
    ExecutorProvider,
    PipelineProvider,
    PolicyLossProvider,
    RewardProvider,
    WeightTransportProvider,
)

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
CORE = PACKAGES / "roll-core" / "src" / "roll_core"
IN_CORE = sorted(CORE.rglob("*.py"))
MODELING = sorted((PACKAGES / "roll-modeling").rglob("src/**/*.py"))
MODULES = sorted(PACKAGES.glob("*/src/**/*.py"))
NAMES = {
    *("vllm", "sglang", "deepspeed", "megatron", "fsdp2", "hf", "cuda", "rocm", "npu", "ray"),
    *(f"{name}_{kind}" for name in ("hf", "fsdp2", "deepspeed", "megatron") for kind in ("train", "infer")),
}
"""Engines, backends, platforms, executors. What is done may depend on what a part can do, never on its name."""
OWN_PARTS = {
    name
    for kind in (
        *(ExecutorProvider, WeightTransportProvider, AdvantageProvider, PolicyLossProvider),
        *(PipelineProvider, RewardProvider),
    )
    for name in Registry(load_plugins(environ={"ROLL_PLUGINS": "roll-weight-transports"})).names(kind)
}
"""Executors, weight transports, advantage estimators, policy losses, pipelines and rewards that come with the core."""
FORBIDDEN_CALLS = {"eval", "exec", "pickle.load", "pickle.loads", "yaml.load", "cloudpickle.loads"}
OUR_OWN = "roll-executor-ray/src/roll_executor_ray/worker.py"
"""Messages between a driver and the workers that it started are not foreign; Ray itself carries them that way."""
OWN_PICKLES = "roll-testing/src/roll_testing/"
"""Kits load what they have pickled themselves."""
IN_A_BOX = "roll-rewards/src/roll_rewards/{}.py"
"""Programs of responses run in a process that can do nothing else."""
HEAVY = {"torch", "ray", "transformers", "datasets", "tensorboard", "math_verify"}
LIGHT = ("spec", "config", "plugins", "cli")


def area(path: Path) -> str:
    return path.relative_to(CORE).parts[0]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def violations(paths: Iterable[Path], rule: Callable[[ast.Module], Iterator[tuple[int, str]]]) -> list[str]:
    """`file:line what` of each violation of a rule."""
    return [
        f"{path.relative_to(PACKAGES)}:{line} {what}" for path in paths for line, what in sorted(set(rule(tree(path))))
    ]


def calls(module: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(module) if isinstance(node, ast.Call))


def test_the_core_compares_with_no_parts_name():
    def rule(module):
        for node in ast.walk(module):
            compares = isinstance(node, ast.Compare)
            parts = [node.left, *node.comparators] if compares else []
            parts += [node.value] if isinstance(node, ast.MatchValue) else []
            for part in parts:
                for item in part.elts if isinstance(part, ast.Tuple | ast.List | ast.Set) else [part]:
                    if isinstance(item, ast.Constant) and item.value in NAMES | OWN_PARTS:
                        yield node.lineno, item.value

    assert violations([*(path for path in IN_CORE if area(path) != "builtin"), *MODELING], rule) == []


def test_core_never_uses_torch_devices_of_one_vendor():
    def rule(module):
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in {"torch.cuda", "torch.npu", "torch.xpu"}:
                yield node.lineno, ast.unparse(node)

    assert violations(MODULES, rule) == []


def test_nothing_foreign_is_evaluated_or_unpickled():
    def rule(module):
        for node in calls(module):
            name = ast.unparse(node.func)
            words = {each.arg: getattr(each.value, "value", None) for each in node.keywords}
            unsafe_load = name == "torch.load" and words.get("weights_only") is not True
            if name in FORBIDDEN_CALLS or unsafe_load or words.get("shell"):
                yield node.lineno, name

    found = violations(MODULES, rule)
    allowed = (
        (OUR_OWN, "cloudpickle.loads"),
        (OWN_PICKLES, "pickle.loads"),
        *((IN_A_BOX.format(name), "exec") for name in ("box", "guest")),
    )
    assert [
        each for each in found if not any(each.startswith(file) and each.endswith(what) for file, what in allowed)
    ] == []


def test_light_floors_import_nothing_heavy_at_their_top():
    def rule(module):
        todo = list(module.body)
        while todo:
            node = todo.pop()
            if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
                todo += node.body + node.orelse
            elif isinstance(node, ast.Import):
                yield from ((node.lineno, each.name) for each in node.names if each.name.split(".")[0] in HEAVY)
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in HEAVY:
                yield node.lineno, node.module

    assert violations([path for path in IN_CORE if area(path) in LIGHT], rule) == []


def test_workers_are_called_through_their_stub():
    def rule(module):
        for node in calls(module):
            called = isinstance(node.func, ast.Attribute) and node.func.attr == "call"
            if called and any(isinstance(arg, ast.Constant) and isinstance(arg.value, str) for arg in node.args):
                yield node.lineno, ast.unparse(node.func)

    assert violations(MODULES, rule) == []


VALIDATORS = {"field_validator", "model_validator", "field_serializer", "model_serializer"}


def decorators(function: ast.FunctionDef) -> set[str]:
    calls = (each.func if isinstance(each, ast.Call) else each for each in function.decorator_list)
    return {ast.unparse(each).rpartition(".")[2] for each in calls}


def test_no_validator_replaces_one_of_a_base_by_chance():
    """pydantic runs a validator of the same name instead of the base's; `@override` marks those that mean it."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)

    def validators(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
        functions = (each for each in node.body if isinstance(each, ast.FunctionDef))
        return {each.name: each for each in functions if decorators(each) & VALIDATORS}

    def bases(node: ast.ClassDef, seen: tuple[str, ...] = ()) -> Iterator[ast.ClassDef]:
        for base in node.bases:
            name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            for found in classes.get(name, []) if name not in seen else []:
                yield found
                yield from bases(found, (*seen, name))

    found = [
        f"{node.name}.{name} of {base.name}"
        for group in classes.values()
        for node in group
        for base in bases(node)
        for name in validators(node).keys() & {each.name for each in base.body if isinstance(each, ast.FunctionDef)}
        if "override" not in decorators(validators(node)[name])
    ]
    assert not found
