"""Models and data sets of ModelScope, downloaded by the library `modelscope` into its cache (`MODELSCOPE_CACHE`).

pretrain: Qwen/Qwen3-0.6B, with MODEL_DOWNLOAD_TYPE=MODELSCOPE ─► with_local_models(config) ─► directory
file_name: modelscope://openai/gsm8k                           ─► snapshot_of("dataset", …)  ─► hub.HubRows
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from roll_core.errors import DataError, ModelError, RollError, install_command, one_line
from roll_core.spec.config import Config, ModelArguments
from roll_core.spec.model import is_hub_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.config import RunConfig
    from roll_core.spec.model import ModelSpec

log = logging.getLogger(__name__)

C = TypeVar("C", bound=Config)
Kind = Literal["model", "dataset"]

MODELSCOPE = "modelscope://"
"""Beginning of the name of a data set of ModelScope."""
_FAILURES: dict[Kind, type[RollError]] = {"model": ModelError, "dataset": DataError}
_ids: dict[str, str] = {}
"""Ids of the models that this process downloaded, by their directories."""


def selects_modelscope(system_envs: Mapping[str, str]) -> bool:
    """True if ids of models are those of ModelScope: by ROLL's `MODEL_DOWNLOAD_TYPE`, or else `USE_MODELSCOPE`.

    `system_envs` of the config take precedence over the environment.
    """
    variables = {**os.environ, **system_envs}
    if kind := variables.get("MODEL_DOWNLOAD_TYPE", ""):
        return kind.upper() == "MODELSCOPE"
    return variables.get("USE_MODELSCOPE", "").lower() in ("1", "true")


def lacks_modelscope() -> str:
    """What to install so that this environment can download from ModelScope; empty if it can."""
    is_installed = find_spec("modelscope") is not None
    return "" if is_installed else f"downloads from ModelScope need {install_command('roll-core[modelscope]')}"


def snapshot_of(kind: Kind, repo: str, revision: str | None = None) -> Path:
    """Directory with the files of a repository, downloaded unless the cache has them.

    If ModelScope cannot be reached, the copy in the cache is read, which is logged. Raises `ModelError`, `DataError`.
    """
    failure = _FAILURES[kind]
    name = f"{repo} of ModelScope"
    try:
        from modelscope import snapshot_download
        from modelscope.hub.errors import NetworkError
    except ImportError as error:
        raise failure(f"{name}: {lacks_modelscope() or one_line(error)}") from error
    arguments: dict[str, Any] = {"repo_id": repo, "repo_type": kind, "revision": revision}
    try:
        return Path(snapshot_download(**arguments))
    except NetworkError as error:
        reason = one_line(error)
        if (cached := cached_copy(kind, repo, revision)) is None:
            why = f"{name}: ModelScope cannot be reached, and the cache has no copy: {reason}"
            download = f"modelscope download --{kind} {repo}"
            raise failure(f"{why}; where it can be reached: {download} (MODELSCOPE_CACHE)") from error
    except Exception as error:  # of the library, or of its requests
        raise failure(f"{name}: {one_line(error)}") from error
    if any(cached.rglob("*.incomplete")):
        raise failure(f"{name}: ModelScope cannot be reached, and its copy {cached} is incomplete: {reason}")
    log.warning("%s: ModelScope cannot be reached, reading the copy %s", name, cached)
    return cached


def cached_copy(kind: Kind, repo: str, revision: str | None = None) -> Path | None:
    """Directory of a repository in the cache; None if the cache or the library lacks it. Uses no network."""
    try:
        from modelscope import snapshot_download
        from modelscope.hub.errors import CacheNotFound
    except ImportError:
        return None
    try:
        cached = snapshot_download(repo_id=repo, repo_type=kind, revision=revision, local_files_only=True)
    except CacheNotFound:
        return None
    return Path(cached)


def digest_of(folder: Path) -> str:
    """Digest of the names and contents of all files: ModelScope states no commit of a download."""
    digest = hashlib.sha1(usedforsecurity=False)
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256")
        digest.update(f"{path.relative_to(folder).as_posix()}\0{content.hexdigest()}\n".encode())
    return digest.hexdigest()


def with_local_models(config: RunConfig) -> RunConfig:
    """The config with directories instead of ids of models, if ModelScope is selected. Raises `ModelError`."""
    if not selects_modelscope(config.system_envs):
        return config
    update = {} if config.pretrain is None else {"pretrain": _directory(config.pretrain)}
    return _with_directories(config.model_copy(update=update))


def with_local_files(model: ModelSpec) -> ModelSpec:
    """The model in a worker. A host that lacks the driver's directory downloads its own. Raises `ModelError`."""
    if not model.modelscope_id or os.path.isdir(model.path):
        return model
    return replace(model, path=str(snapshot_of("model", model.modelscope_id)))


def modelscope_id(path: str) -> str:
    """Id of the model that this process downloaded to `path`; empty for any other path."""
    return _ids.get(path, "")


def _directory(source: str) -> str:
    if not is_hub_id(source) or os.path.exists(os.path.expanduser(source)):
        return source
    log.info("model %s is read from ModelScope", source)
    folder = str(snapshot_of("model", source))
    _ids[folder] = source
    return folder


def _with_directories(config: C) -> C:
    update: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, dict) and any(isinstance(block, Config) for block in value.values()):
            update[name] = {
                key: _with_directories(block) if isinstance(block, Config) else block for key, block in value.items()
            }
        elif isinstance(value, Config):
            update[name] = _with_directories(value)
    if isinstance(config, ModelArguments) and config.model_name_or_path is not None:
        update["model_name_or_path"] = _directory(config.model_name_or_path)
    return config.model_copy(update=update)
