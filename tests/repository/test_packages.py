"""Every package stands in the lists of packages, and requires what it imports."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from roll_testing.packaging import PUBLIC

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))
NAMES = {package.name for package in PACKAGES}
PROJECTS = {
    package.name: tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for package in PACKAGES
}
MODULES = {source.name for package in PACKAGES for source in package.glob("src/*")}
WORKSPACE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LINTER = WORKSPACE["tool"]["importlinter"]


def test_workspace_lists_every_package():
    dependencies = {re.split(r"\W*\[", text)[0] for text in WORKSPACE["project"]["dependencies"]}
    assert dependencies == NAMES
    assert set(WORKSPACE["tool"]["uv"]["sources"]) == NAMES
    assert set(LINTER["root_packages"]) == MODULES


def test_import_contract_has_every_package():
    (layers,) = (contract["layers"] for contract in LINTER["contracts"] if "roll_testing" in contract.get("layers", ()))
    assert sorted(re.findall(r"\w+", " ".join(layers))) == sorted(MODULES)


def test_modules_of_core_are_public_or_protected():
    core = ROOT / "packages/roll-core/src/roll_core"
    modules = {
        f"roll_core.{path.stem}" for path in core.iterdir() if path.suffix in ("", ".py") and path.stem[0] != "_"
    }
    protected = {name for contract in LINTER["contracts"] for name in contract.get("protected_modules", ())}
    public = {name for name in PUBLIC if name.startswith("roll_core.")}
    assert modules - protected == public - protected


@pytest.mark.parametrize(
    ("page", "lines"), [("docs/packages.md", r"^\| (`roll-.*?) \|"), ("CHANGELOG.md", r"^- \[(roll-.*?)\]")]
)
def test_page_lists_every_package(page, lines):
    """A cell may shorten names: `roll-platform-cuda`, `-rocm`."""
    listed = set()
    for cell in re.findall(lines, (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE):
        names = re.findall(r"[a-z0-9-]+", cell)
        listed |= {names[0].rpartition("-")[0] + name if name.startswith("-") else name for name in names}
    assert listed == NAMES


DISTRIBUTIONS = {
    "megatron": ["megatron-core"],
    **packages_distributions(),
    "opentelemetry": ["opentelemetry-sdk"],
    "pydantic_core": ["pydantic"],  # pydantic requires one version of it, and documents its errors
}
"""Distributions by module. The environment of the tests may lack megatron-core."""
TEMPLATES = {"templates", "starters"}
"""Folders with files of other packages."""
UNDECLARED = {
    ("roll-infer-sglang", "requests"): "part of sglang's server",
    ("roll-infer-vllm", "uvicorn"): "part of vLLM's server",
    ("roll-kernels", "hatchling"): "runs the build hook that imports it",
    ("roll-rewards", "langdetect"): "one instruction of IFEval; its error names the distribution",
    ("roll-tools", "ipython"): "the table of a run in a notebook",
    ("roll-tools", "roll-modeling"): "`checkpoint convert` builds strategies, which require it",
    ("roll-tools", "roll-pipeline-agentic"): "the audit of chat templates; without the package, a note names it",
}
UNIMPORTED = {
    ("roll-kernels", "ninja"): "torch's cpp_extension runs it",
    ("roll-platform-npu", "torch-npu"): "torch imports it",
    ("roll-testing", "pytest-timeout"): "plugin of pytest; `./run gpu` takes its requirements from roll-testing",
}


def imports(node: ast.AST) -> Iterator[str]:
    """Top-level names of all modules that the file imports at run time, also in functions."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        children: Iterable[ast.AST] = node.orelse
    else:
        children = ast.iter_child_nodes(node)
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module.partition(".")[0]
    for child in children:
        yield from imports(child)


def imported(package: str) -> dict[str, set[str]]:
    """The distributions of each module that the package imports, apart from its own and those of Python."""
    source = ROOT / "packages" / package / "src"
    files = [path for path in source.rglob("*.py") if not TEMPLATES & set(path.relative_to(source).parts)]
    modules = {name for file in files for name in imports(ast.parse(file.read_text(encoding="utf-8")))}
    modules -= sys.stdlib_module_names | {package.replace("-", "_")}
    return {module: set(map(canonicalize_name, DISTRIBUTIONS.get(module, [module]))) for module in modules}


def required(package: str, *extras: str) -> set[str]:
    """Names of the distributions that the package requires, and of those of its extras."""
    optional = PROJECTS[package].get("optional-dependencies", {})
    lines = [*PROJECTS[package]["dependencies"], *(line for extra in extras for line in optional[extra])]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def test_package_requires_what_it_imports():
    undeclared = set()
    for package, project in PROJECTS.items():
        names = required(package, *project.get("optional-dependencies", {}))
        if not names & {"roll-modeling", "torch"}:
            # A run has torch and others from `roll-core[train]`.
            names |= required("roll-core", "train") - required("roll-core")
        names |= required("roll-core", "images") - required("roll-core")  # where images are processed
        undeclared |= {(package, min(options)) for options in imported(package).values() if not options & names}
    assert undeclared == set(UNDECLARED)


def test_package_imports_what_it_requires():
    plugins = {name for name, project in PROJECTS.items() if "roll.plugins" in project.get("entry-points", {})}
    unimported = set()
    for package in PROJECTS:
        names = set().union(*imported(package).values())
        # A run loads plugins by their entry points.
        unimported |= {(package, name) for name in required(package) - names - plugins}
    assert unimported == set(UNIMPORTED)


def closure(package: str) -> set[str]:
    """Names of all distributions that installing the package alone requires, as far as packages of ours name them."""
    names: set[str] = set()
    pending = [Requirement(package)]
    seen: set[str] = set()
    while pending:
        requirement = pending.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        name = canonicalize_name(requirement.name)
        names.add(name)
        if name in PROJECTS:
            optional = PROJECTS[name].get("optional-dependencies", {})
            lines = [
                *PROJECTS[name]["dependencies"],
                *(line for extra in requirement.extras for line in optional[extra]),
            ]
            pending += map(Requirement, lines)
    return names


OF_RUNS = {"jinja2", "pyarrow", "roll-rewards", "roll-tools", "roll-trackers", "tensorboard"}
"""Distributions of the extra `train`, which a run needs. Train strategies require it."""
MODELS = {"peft", "safetensors", "tokenizers", "transformers"}
KERNELS = {"ninja", "roll-kernels"}
NOT_REQUIRED = {
    **dict.fromkeys(("roll-platform-cuda", "roll-platform-npu", "roll-platform-rocm"), OF_RUNS | MODELS | KERNELS),
    "roll-platform-sim": OF_RUNS | MODELS,
    "roll-kernels": OF_RUNS | MODELS,
    "roll-weight-transports": OF_RUNS | MODELS | KERNELS,
    **dict.fromkeys(("roll-infer-hf", "roll-infer-sglang", "roll-infer-vllm"), OF_RUNS | KERNELS | {"peft"}),
    **dict.fromkeys((f"roll-strategy-{name}" for name in ("deepspeed", "fsdp2", "hf", "megatron")), KERNELS),
}


@pytest.mark.parametrize("package", NOT_REQUIRED)
def test_package_alone_requires_no_more_than_it_uses(package):
    assert closure(package) & NOT_REQUIRED[package] == set()


def test_train_strategies_install_what_runs_need():
    for name in ("deepspeed", "fsdp2", "hf", "megatron"):
        assert closure(f"roll-strategy-{name}") >= OF_RUNS | MODELS


def test_packages_agree_on_versions_of_a_distribution():
    """A package may require a later torch than another one does."""
    ranges: dict[str, set[str]] = {}
    for project in PROJECTS.values():
        extras = project.get("optional-dependencies", {}).values()
        for requirement in map(Requirement, [*project["dependencies"], *(line for extra in extras for line in extra)]):
            ranges.setdefault(canonicalize_name(requirement.name), set()).add(str(requirement.specifier))
    assert [name for name, specifiers in ranges.items() if len(specifiers) > 1] == ["torch"]
