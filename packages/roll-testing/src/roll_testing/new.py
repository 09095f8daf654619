"""`roll-core new KIND NAME`: writes a plugin package whose conformance tests pass at once.

The templates are complete packages of a part called `acme`, in `templates/`. `new` copies one and replaces the name.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.plugins.registry import load_registry
from roll_core.spec import providers

if TYPE_CHECKING:
    from collections.abc import Sequence

TEMPLATES = Path(__file__).with_name("templates")
SHARED = "shared"
"""Folder of files that all packages have."""
KINDS: dict[str, type[providers.Provider]] = {
    "strategy": providers.TrainProvider,
    "infer": providers.InferProvider,
    "pipeline": providers.PipelineProvider,
    "reward": providers.RewardProvider,
    "environment": providers.EnvironmentProvider,
    "transport": providers.WeightTransportProvider,
    "platform": providers.PlatformProvider,
    "executor": providers.ExecutorProvider,
}
EXAMPLES = {
    "agent": "docs/agents.md#a-function",
    "estimator": "docs/plugins.md#roll_advantage_estimators",
    "loss": "docs/plugins.md#a-function-of-your-own",
    "tracker": "docs/plugins.md#roll_trackers",
}
"""Kinds of parts that are one function or method, and where the docs have an example."""
NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*", re.ASCII)
MAX_LENGTH = 40
NOT_COPIED = {"__pycache__", ".pytest_cache", ".ruff_cache"}


def new(words: Sequence[str]) -> int:
    """Run the command. A mistake in the arguments ends the process with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="roll-core new",
        description="Write a plugin package: a small working part, its configuration and its conformance tests.",
        epilog="example: roll-core new reward my_judge",
        allow_abbrev=False,
    )
    parser.add_argument("kind", metavar="KIND", type=_kind, help=f"kind of part: {', '.join(KINDS)}")
    parser.add_argument("name", metavar="NAME", help="name of the part in configs, such as my_judge")
    parser.add_argument("--dir", metavar="DIR", type=Path, default=Path(), help="parent folder (default: this one)")
    options = parser.parse_args(words)
    problem = name_problem(options.kind, options.name)
    folder = options.dir / f"roll-{options.kind}-{options.name.replace('_', '-')}"
    if not problem and folder.exists():
        problem = f"{folder} exists: choose another NAME or --dir, or delete it"
    if not problem and options.dir.exists() and not options.dir.is_dir():
        problem = f"--dir is {options.dir}, which is not a directory"
    if problem:
        parser.error(problem)
    try:
        write_package(options.kind, options.name, folder)
    except OSError as error:
        parser.error(f"{folder} cannot be written: {error}")
    sys.stdout.write(
        f"wrote {folder}\n\nNext:\n  cd {folder}\n  pip install -e '.[test]'\n  pytest\n  roll-core plugins\n"
    )
    return 0


def _kind(word: str) -> str:
    """A kind with a template. argparse reports the error at the argument."""
    if word in EXAMPLES:
        raise argparse.ArgumentTypeError(f"{word!r} is one function and has no template: copy {EXAMPLES[word]}")
    if word not in KINDS:
        raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(KINDS)}")
    return word


def name_problem(kind: str, name: str) -> str:
    """Why a part cannot have this name; empty if it can."""
    prefix = re.match(rf"roll[-_]{kind}[-_]", name)
    if prefix is not None:
        return f"NAME is {name!r}: leave out {prefix[0]!r}, which the package's name gets"
    if not NAME.fullmatch(name) or len(name) > MAX_LENGTH:
        return (
            f"NAME is {name!r}, expected at most {MAX_LENGTH} lower-case letters and digits, with single - or _ between"
            " words, and a letter first"
        )
    registry, part = load_registry(), name.replace("-", "_")
    for plugin in registry.plugins:
        if any(type(record) is KINDS[kind] and record.name == part for record in plugin.providers):
            return f"NAME is {name!r}, which is the name of a part of {plugin}: choose another one"
    return ""


def write_package(kind: str, name: str, folder: Path) -> None:
    """Write the package of a part into `folder`, which does not exist."""
    words = re.split("[-_]", name)
    spellings = {
        f"roll-{kind}-acme": f"roll-{kind}-{'-'.join(words)}",
        "ACME": "_".join(words).upper(),
        "Acme": "".join(word.capitalize() for word in words),
        "acme": "_".join(words),
    }
    pattern = re.compile("|".join(spellings))

    def renamed(text: str) -> str:
        return pattern.sub(lambda match: spellings[match[0]], text)

    folder.mkdir(parents=True)
    for source in (TEMPLATES / SHARED, TEMPLATES / kind):
        for file in sorted(source.rglob("*")):
            path = file.relative_to(source)
            if file.is_file() and NOT_COPIED.isdisjoint(path.parts):
                target = folder / renamed(str(path))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(renamed(file.read_text(encoding="utf-8")), encoding="utf-8")
