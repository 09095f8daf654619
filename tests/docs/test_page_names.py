"""Files, classes, dotted names and config keys that a page has in backticks exist.

YAML and Python blocks are not checked here: `test_examples.py` loads and runs them.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted(REPOSITORY.glob("packages/*/README.md")),
]
FOLDERS = ("packages", "tests", "docs", "examples", "recipes", "tools", "benchmarks", "launchers", "docker")
SOURCES = {".py", ".pyi", ".yaml", ".toml", ".cpp", ".h", ".sh", ".json"}
PAGES_OF_OTHERS = {"coming-from", "from-roll", "moving"}
"""Pages with names of other frameworks. Files, modules and classes of this repository are checked there, too."""
NAMES_OF_OTHERS = {
    "bitsandbytes": "bnb_4bit_use_double_quant",
    "CUDA and Linux": "cudaIpcMemHandle_t pidfd_getfd ptrace_scope amx_bf16",
    "DeepSpeed and Megatron": "offload_states torch_dist",
    "Harbor": "network_mode storage_mb",
    "NeMo-RL": "use_leave_one_out_baseline",
    "papers on distillation": "kl_discount_factor teacher_update_rate",
    "pluggy and uv": "warn_on_impl uv.toml",
    "Ray": "RAY_health_check_period_ms RAY_health_check_timeout_ms RAY_health_check_failure_threshold"
    " RAY_gcs_rpc_server_reconnect_timeout_s",
    "SLURM": "KillWait",
    "transformers": "BitsAndBytesConfig",
    "TRL": "cpo_alpha rpo_alpha mean_token_accuracy trainer_state",
    "the reader, who writes it": "my_env.py my_losses.py ranked.py imported_rewards.py hinted_prompt",
    "a run on a GPU, which writes it": "benchmarks/results/gpu",
}
"""Names that the pages have and this repository lacks, by what they belong to."""
NEUTRAL = {"ABC", "Protocol", "Generic", "BaseModel", "Enum", "StrEnum", "NamedTuple", "TypedDict", "object"}
"""Bases without members of their own that a page would name."""

BLOCK = re.compile(r"^( *)```.*?^\1```|^    (?![-*`])[^\n]*$", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
CLASS = re.compile(r"\b[A-Z][a-z]+[A-Z]\w+(?:\.\w+)?")
TEXT = re.compile(r'(^[ \t]*)?"""(?:[^"\\]|\\.|"(?!""))*"""|^[ \t]*#[^\n]*$', re.DOTALL | re.MULTILINE)
"""A docstring (with group 1), another text in triple quotes, or a comment."""
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./-]*\w\.(?:py|md|toml|cpp|sh)|(?:" + "|".join(FOLDERS) + r")/[\w./-]+")
NAME = re.compile(r"(\w+(?:\.\w+)*)(?:\(\)|: .*|=.*)?")
LOOKS_LIKE_A_NAME = re.compile(r"[A-Z]\w*[a-z]\w|[a-z]\w+[_.][a-z]|ROLL_[A-Z]")
"""Neither a symbol of a formula, such as `A_i`, nor a variable of the environment that others read."""
OLD = re.compile(r"^\| .*? \|", re.MULTILINE)
"""First cell of a table of replaced names."""


@dataclass
class Class:
    bases: set[str] = field(default_factory=set)
    members: set[str] = field(default_factory=set)
    fields: dict[str, str] = field(default_factory=dict)
    """Annotations of the fields."""


@functools.cache
def files() -> frozenset[str]:
    """Paths of all files and folders, and their ends: `a/b/c`, `b/c`, `c`."""
    paths = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*")]
    paths += [path for path in REPOSITORY.iterdir() if path.name in FOLDERS or path.is_file()]
    parts = [path.relative_to(REPOSITORY).parts for path in paths if "__pycache__" not in path.parts]
    return frozenset("/".join(path[i:]) for path in parts for i in range(len(path)))


@functools.cache
def words() -> frozenset[str]:
    """Words of the sources, without comments and docstrings of Python, and without tests."""
    result: set[str] = set()
    folders = [REPOSITORY / folder for folder in FOLDERS if folder not in ("docs", "tests")]
    for path in (path for folder in folders for path in folder.rglob("*")):
        if path.suffix in SOURCES or path.name.startswith("Dockerfile"):
            text = path.read_text(encoding="utf-8", errors="replace")
            if path.suffix == ".py":
                text = TEXT.sub(lambda match: match[0] if match[0].startswith('"') and match[1] is None else "", text)
            result.update(re.findall(r"[\w-]+\.(?:py|sh)\b", text), re.findall(r"\w+", text))
    return frozenset(result)


@functools.cache
def sources() -> tuple[dict[str, set[str]], dict[str, Class]]:
    """Names in each module of the packages, and all classes. Classes of one name are joined."""
    modules: dict[str, set[str]] = {}
    classes: dict[str, Class] = {}
    for path in REPOSITORY.glob("packages/*/src/roll*/**/*.py"):
        module = path.relative_to(REPOSITORY).as_posix().partition("/src/")[2].replace("/", ".")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = modules.setdefault(module.removesuffix(".py").removesuffix(".__init__"), set())
        for node in tree.body:
            names.update(defined(node))
        for child in ast.walk(tree):
            if isinstance(child, ast.ClassDef):
                add(classes.setdefault(child.name, Class()), child)
    for module in list(modules):
        parent, _, name = module.rpartition(".")
        modules.setdefault(parent, set()).add(name)
    return modules, classes


def defined(node: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module defines."""
    for child in ast.walk(node) if isinstance(node, ast.If | ast.Try) else [node]:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child.name
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in child.names)
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))


def add(record: Class, node: ast.ClassDef) -> None:
    """Add bases and members of a class, attributes of `self` included."""
    record.bases |= {base for expression in node.bases for base in re.findall(r"^[\w.]+", ast.unparse(expression))}
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            record.members.add(child.name)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            record.fields[child.target.id] = ast.unparse(child.annotation)
        elif isinstance(child, ast.Name | ast.Attribute) and isinstance(child.ctx, ast.Store):
            record.members.add(child.id if isinstance(child, ast.Name) else child.attr)


def family(name: str) -> set[str]:
    """A class and its bases, by name."""
    _, classes = sources()
    bases = {base.rpartition(".")[2] for base in classes[name].bases} if name in classes else set()
    return {name}.union(*(family(base) for base in bases - {name}))


@functools.cache
def configs() -> dict[str, dict[str, str]]:
    """Fields of each class of a config, those of bases and derived classes included."""
    _, classes = sources()
    families = {name: family(name) for name in classes}
    names = {name for name, bases in families.items() if "Config" in bases or name.endswith(("Config", "Arguments"))}
    related = {name: {other for other in names if name in families[other]} | families[name] for name in names}
    return {
        name: {key: text for other in related[name] & classes.keys() for key, text in classes[other].fields.items()}
        for name in names
    }


def is_key(parts: list[str]) -> bool:
    """True if the keys lead from a field of a config to another one, or to values that a plugin defines."""
    starts = [fields for fields in configs().values() if parts[0] in fields]
    return not starts or any(leads_on(fields[parts[0]], parts[1:]) for fields in starts)


def leads_on(annotation: str, parts: list[str]) -> bool:
    inner = [configs()[name] for name in re.findall(r"\w+", annotation) if name in configs()]
    if not parts or not inner:
        return True
    if any(parts[0] in fields and leads_on(fields[parts[0]], parts[1:]) for fields in inner):
        return True
    is_mapping = re.search(r"\b(?:dict|Mapping)\b", annotation)
    return bool(is_mapping and any(not parts[1:] or parts[1] in fields for fields in inner))


def is_member(class_name: str, member: str) -> bool:
    _, classes = sources()
    names = family(class_name)
    known = [classes[name] for name in names if name in classes]
    is_foreign = any(name not in classes and name not in NEUTRAL for name in names)
    return is_foreign or any(member in record.members or member in record.fields for record in known)


def is_dotted_name(parts: list[str]) -> bool:
    """True for a module of the packages, a name in it, or a member of a class in it."""
    modules, classes = sources()
    length = max(i for i in range(1, len(parts) + 1) if ".".join(parts[:i]) in modules)
    names = parts[length:]
    if not names:
        return True
    if names[0] not in modules[".".join(parts[:length])]:
        return False
    return len(names) == 1 or names[0] not in classes or is_member(*names[:2])


def faults(text: str, exceptions: frozenset[str] = frozenset(), *, has_names_of_others: bool = False) -> Iterator[str]:
    """Spans of a page that name nothing, and classes in its drawings that do not exist, as `line: span`."""
    blocks = "\n".join(block[0] for block in BLOCK.finditer(text))
    own = {*re.findall(r"[\w./-]+", blocks), *re.findall(r"[\w.-]+", blocks), *re.findall(r"\w+", blocks), *exceptions}
    prose = BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    for span in SPAN.finditer(prose):
        if FILE.fullmatch(span[1]):
            exists = is_file(span[1].rstrip("/").removeprefix("./"), own)
        elif (name := NAME.fullmatch(span[1])) and LOOKS_LIKE_A_NAME.match(name[1]):
            exists = is_name(name[1].split("."), own, has_names_of_others=has_names_of_others)
        else:
            continue
        if not exists:
            yield f"{prose[: span.start()].count(chr(10)) + 1}: {span[1]}"
    for drawing in (block for block in FENCED.finditer(text) if block[1] in ("", "text")):
        for name in CLASS.findall(drawing[2]):
            if not is_name(name.split("."), set(exceptions), has_names_of_others=has_names_of_others):
                yield f"{text[: drawing.start()].count(chr(10)) + 1}: {name}"


def is_file(path: str, own: set[str]) -> bool:
    """True for a file of the repository or of the page, and for a path in a folder that only the reader has."""
    folder, slash, _ = path.partition("/")
    return path in files() or path in own or path in words() or bool(slash and folder not in files())


def is_name(parts: list[str], own: set[str], *, has_names_of_others: bool) -> bool:
    modules, classes = sources()
    if parts[0] in modules:
        return is_dotted_name(parts)
    if len(parts) > 1 and parts[0] in classes:
        return is_member(*parts[:2])
    return has_names_of_others or (all(part in words() or part in own for part in parts) and is_key(parts))


EXCEPTIONS = frozenset(name for names in NAMES_OF_OTHERS.values() for name in names.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_names_of_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.stem == "plugin-changes":
        text = OLD.sub("|", text)
    assert list(faults(text, EXCEPTIONS, has_names_of_others=page.stem in PAGES_OF_OTHERS)) == []


def test_every_exception_is_needed() -> None:
    spans = " ".join(fault for page in PAGES for fault in faults(page.read_text(encoding="utf-8")))
    assert [name for name in EXCEPTIONS if name not in spans] == []


@pytest.mark.parametrize(
    "span",
    [
        "no_such_file.py",
        "packages/roll-core/none.py",
        "NoSuchClass",
        "RLVRPipeline.no_such_method",
        "roll_core.errors.NoSuchError",
        "roll_core.no_such_module",
        "async_generation_ration: 1",
        "actor_infer.generating_args.no_such_key",
        "generating_args.num_train_epochs",
    ],
)
def test_a_name_that_does_not_exist_is_found(span: str) -> None:
    assert list(faults(f"one\n`{span}`\n")) == [f"2: {span}"]


QUESTIONS = re.compile(r"^\| ([^|`]+) \| `([\w/.-]+\.py)` \| (.+) \|$", re.MULTILINE)


def test_ways_through_the_code_lead_to_functions_of_their_files() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = QUESTIONS.findall(text.partition("## Ways through the code")[2])
    core = REPOSITORY / "packages" / "roll-core" / "src" / "roll_core"
    assert len(rows) >= 10
    for question, file, names in rows:
        path = REPOSITORY / file if file.startswith("packages/") else core / file
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name in SPAN.findall(names):
            first, _, member = name.partition(".")
            (node,) = [node for node in tree.body if first in defined(node)] or [None]
            assert node is not None, (question, name)
            assert not member or member in {child for part in node.body for child in defined(part)}, (question, name)
