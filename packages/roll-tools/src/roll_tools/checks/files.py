"""Checks of the files that a config names: its output directory, models and data files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.data.modelscope import MODELSCOPE, Kind, cached_copy, lacks_modelscope, selects_modelscope
from roll_core.data.rows import is_hub_name
from roll_core.errors import DataError
from roll_core.spec.config import DataArguments
from roll_core.spec.diagnostics import CheckResult
from roll_core.spec.model import is_hub_id
from roll_tools.checks.host import existing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic import BaseModel

    from roll_core.spec.config import RunConfig
    from roll_core.spec.diagnostics import CheckContext

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def output(context: CheckContext) -> Iterator[CheckResult]:
    """Check that `output_dir` can be created and written.

    Writes an unnamed temporary file there, or in the nearest parent that exists.
    """
    if context.config is None:
        return
    folder = Path(context.config.output_dir).expanduser()
    place = existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0")
    except OSError as error:
        remedy = "change its owner or mode, or write elsewhere: output_dir=…"
        yield CheckResult(
            level="error", found=f"{place} cannot be written: {error}", wanted=str(folder.absolute()), remedy=remedy
        )
    else:
        yield CheckResult(level="ok", found=f"{place} can be written", wanted=str(folder.absolute()))


def models(context: CheckContext) -> Iterator[CheckResult]:
    """Check that models are directories with a `config.json`, or ids of the Hugging Face Hub."""
    for source, roles in _models_of(context.config).items():
        subject, folder = ", ".join(roles), Path(source).expanduser()
        if folder.is_dir():
            if (folder / "config.json").is_file():
                yield CheckResult(level="ok", subject=subject, found=f"{source} exists")
            else:
                remedy = "name a directory that save_pretrained wrote"
                status = f"{source} has no config.json"
                yield CheckResult(level="error", subject=subject, found=status, wanted="a model", remedy=remedy)
        elif is_hub_id(source):
            of_modelscope = context.config is not None and selects_modelscope(context.config.system_envs)
            yield _on_modelscope("model", source, subject, "a model") if of_modelscope else _on_the_hub(source, subject)
        else:
            remedy = "correct the path, or start the run that writes it first"
            status = f"there is no {folder.absolute()}"
            yield CheckResult(level="error", subject=subject, found=status, wanted="a model", remedy=remedy)


def data(context: CheckContext) -> Iterator[CheckResult]:
    """Check that data files can be read and are not empty. Paths are relative to the working directory."""
    if context.config is None:
        return
    for key, arguments in _data_of(context.config):
        names = [arguments.file_name] if isinstance(arguments.file_name, str) else arguments.file_name or []
        for name in names:
            if is_hub_name(name):
                yield _rows_of_the_hub(name, key)
                continue
            file = Path(name)
            try:
                with file.open("rb") as opened:
                    empty = not opened.read(1)
            except OSError as error:
                remedy = f"paths are relative to {Path.cwd()}"
                status = f"{name}: {error.strerror}"
                yield CheckResult(level="error", subject=key, found=status, wanted="rows", remedy=remedy)
                continue
            if empty:
                yield CheckResult(
                    level="error", subject=key, found=f"{name} is empty", wanted="rows", remedy="write it again"
                )
            else:
                size = file.stat().st_size
                yield CheckResult(level="ok", subject=key, found=f"{name}, {size / 1024**2:.1f} MiB")


def _rows_of_the_hub(name: str, subject: str) -> CheckResult:
    """Check that a data set of the Hub can be found, without a download of its rows."""
    from roll_core.data.hub import HubName, HubRows

    try:
        source = HubName.parse(name)
        if source.scheme == MODELSCOPE:
            return _on_modelscope("dataset", source.repo, subject, "rows")
        commit = HubRows(name).revision
    except DataError as error:
        remedy = "correct the name, or read it into the cache first: roll-core audit"
        return CheckResult(level="error", subject=subject, found=str(error), wanted="rows", remedy=remedy)
    return CheckResult(level="ok", subject=subject, found=f"{name} of the Hub, commit {commit[:8]}")


def _on_the_hub(source: str, subject: str) -> CheckResult:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(source, "config.json"), str)
    except HFValidationError as error:
        remedy = "correct the id: organisation/model"
        return CheckResult(level="error", subject=subject, found=str(error), wanted="a model", remedy=remedy)
    if cached:
        return CheckResult(level="ok", subject=subject, found=f"{source} of the Hub is in the cache")
    if offline := [name for name in OFFLINE if os.environ.get(name, "0").lower() not in ("", "0", "false")]:
        remedy = f"download it first (hf download {source}), or unset {offline[0]}"
        status = f"{source} is not in the cache, and {offline[0]} forbids to download it"
        return CheckResult(level="error", subject=subject, found=status, wanted="a model", remedy=remedy)
    return CheckResult(level="note", subject=subject, found=f"{source} will be downloaded from the Hub")


def _on_modelscope(kind: Kind, repo: str, subject: str, needed: str) -> CheckResult:
    if why := lacks_modelscope():
        return CheckResult(level="error", subject=subject, found=f"{repo} of ModelScope: {why}", wanted=needed)
    if cached_copy(kind, repo) is not None:
        return CheckResult(level="ok", subject=subject, found=f"{repo} of ModelScope is in the cache")
    return CheckResult(level="note", subject=subject, found=f"{repo} will be downloaded from ModelScope")


def _models_of(config: RunConfig | None) -> Mapping[str, list[str]]:
    """Names of roles, by the path or id of their model; a role without one uses `pretrain`."""
    roles: dict[str, list[str]] = {}
    for name, role in config.roles().items() if config is not None else ():
        if role.kind == "reward":
            continue
        source = role.model_args.model_name_or_path
        if source is None and role.model_args.random_init is None and config is not None:
            source = config.pretrain
        if source:
            roles.setdefault(source, []).append(name)
    return roles


def _data_of(config: BaseModel, key: str = "") -> Iterator[tuple[str, DataArguments]]:
    """Yield every `data_args` of a config with its dotted key."""
    for name in type(config).model_fields:
        value, path = getattr(config, name), f"{key}.{name}".lstrip(".")
        if isinstance(value, DataArguments):
            yield path, value
        elif hasattr(type(value), "model_fields"):
            yield from _data_of(value, path)
