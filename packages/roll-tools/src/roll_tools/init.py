"""`roll-core init [KIND] [DIR]`: writes a pipeline's starter, a first run to edit."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.config import load
from roll_core.errors import ConfigError, PluginError, RunDirectoryError, UnknownProviderError
from roll_core.plugins.requirements import check_extra
from roll_core.plugins.targets import data_file
from roll_core.spec.providers import PipelineProvider

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.plugins.registry import Registry

PLACEHOLDER = re.compile(r"\bstarter([/.])")
"""The folder in a starter's texts: `starter/data/train.jsonl`, `starter.rewards:score`."""
NOT_COPIED = {"__pycache__", ".mypy_cache", ".ruff_cache"}


def write_starter(kind: str | None, folder: Path | None, registry: Registry) -> int:
    """Write the starter `kind` into `folder`, and print how to run it. Asks for an argument that is None.

    Names packages that the run needs and that are not installed. Raises `UnknownProviderError` for an unknown kind, and
    `RunDirectoryError` if a file exists or cannot be written; an existing file is never changed.
    """
    kinds: dict[str, PipelineProvider] = {}
    for provider in registry.providers(PipelineProvider):
        if provider.starter:
            kinds.setdefault(provider.starter.rpartition(":")[2], provider)
    kind = kind or _ask_kind(kinds)
    record = kinds.get(kind) or registry.find(PipelineProvider, kind)
    if not record.starter:
        raise UnknownProviderError(f"pipeline {kind!r} has no starter; available: {', '.join(sorted(kinds))}")
    folder = folder or _ask_folder(kind)
    start = _start_of(folder)
    written = _write(data_file(record.starter, owner=registry.owner(record)), folder, start)
    configs = [file.relative_to(start) for file in written if file.suffix == ".yaml"]
    sys.stdout.writelines(f"wrote {file}\n" for file in written)
    with contextlib.chdir(start):
        try:
            for config in configs:
                load(config, (), registry, needs=True)
            check_extra("train", what="a run")
        except (ConfigError, PluginError) as error:
            sys.stdout.write(f"\nThe run cannot start yet:\n{error}\n")
    commands = [] if start == Path() else [f"cd {shlex.quote(str(start))}"]
    commands.append(f"roll-core run {shlex.join(map(str, configs))}")
    sys.stdout.write("\nNext:\n" + "".join(f"  {command}\n" for command in commands))
    return 0


def _start_of(folder: Path) -> Path:
    """Directory in which the run starts.

    It is the working directory if `folder` can be a package of it, so that rewards are `first.rewards:score`. Otherwise
    it is `folder` itself.
    """
    parts = folder.parts
    packaged = bool(parts) and all(part.isidentifier() for part in parts)
    if packaged and (spec := importlib.util.find_spec(parts[0])) is not None:
        places = [Path(location).resolve() for location in spec.submodule_search_locations or ()]
        packaged = Path(parts[0]).resolve() in places
    return Path() if packaged else folder


def _write(source: Path, folder: Path, start: Path) -> list[Path]:
    """Copy the files of `source` to `folder`, with names that are valid in `start`. Returns their sorted paths.

    Raises `RunDirectoryError` that names the first existing file, before anything is written.
    """
    home = folder.parts if start == Path() else ()
    texts: dict[Path, str] = {}
    for file in sorted(source.rglob("*")):
        path = file.relative_to(source)
        if file.is_file() and NOT_COPIED.isdisjoint(path.parts):
            text = file.read_text(encoding="utf-8")
            texts[folder / path] = PLACEHOLDER.sub(lambda match: "".join(part + match[1] for part in home), text)
    for file in texts:
        if os.path.lexists(file):
            raise RunDirectoryError(f"{file} exists, and is not overwritten: choose another DIR, or delete it")
    try:
        for file, text in texts.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("x", encoding="utf-8") as new:
                new.write(text)
    except OSError as error:
        raise RunDirectoryError(f"{folder} cannot be written: {error}") from error
    return list(texts)


def _ask_kind(kinds: Mapping[str, PipelineProvider]) -> str:
    from rich.console import Console
    from rich.prompt import Prompt

    console = Console(highlight=False, markup=False)
    for name, record in kinds.items():
        console.print(f"  {name:<12} {record.summary}")
    return Prompt.ask("kind", console=console, choices=list(kinds), default="rlvr")


def _ask_folder(kind: str) -> Path:
    from rich.prompt import Prompt

    return Path(Prompt.ask("directory", default=f"my_{kind}"))
