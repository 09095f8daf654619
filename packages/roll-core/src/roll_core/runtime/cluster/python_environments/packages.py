"""Environments made of a set of packages: installed by uv once, kept under the digest of what they are made from.

    spec -> digest -> lock -> `uv venv`, `uv pip install` -> stamp

The stamp is written last: a folder without one is what an installation left that was cut off, and is made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from roll_core.errors import PythonEnvironmentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.runtime.cluster.python_environments.spec import EnvironmentSpec

log = logging.getLogger(__name__)

CACHE_VARIABLE = "ROLL_ENVIRONMENTS_DIR"
"""Environment variable that names another folder for the environments."""
STAMP = "roll-environment.json"
LAST_LINES = 15
"""Of what uv said, in an error."""
OFFLINE = ("dns error", "failed to lookup address", "connection refused", "network is unreachable", "tcp connect error")
"""What uv says where it reaches no index."""


def build(spec: EnvironmentSpec, role: str) -> Path:
    """The interpreter of the environment, installed if it is not there yet. Raises `PythonEnvironmentError`."""
    folder = cache_folder() / digest_of(spec)
    python = folder / "bin" / "python"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / STAMP).is_file():
                log.info("%s: installing %s into %s, once", role, ", ".join(spec.packages), folder)
                _install(spec, folder, role)
    except OSError as error:
        if isinstance(error, PythonEnvironmentError):
            raise
        raise PythonEnvironmentError(
            f"{role}: its environment cannot be kept in {folder.parent}: {error}; set {CACHE_VARIABLE} to a folder that"
            " can be written"
        ) from error
    return python


def digest_of(spec: EnvironmentSpec) -> str:
    """Of everything that the environment is made from; a local project's dependencies are part of it."""
    parts = [sorted(spec.packages), sorted(spec.exclude), spec.sources, python_of(spec), platform.machine()]
    digest = hashlib.sha256(json.dumps(parts).encode())
    for each in (*spec.packages, *spec.sources):
        project = Path(each) / "pyproject.toml"
        if os.sep in each and project.is_file():
            digest.update(project.read_bytes())
    return digest.hexdigest()[:16]


def python_of(spec: EnvironmentSpec) -> str:
    """What uv makes the environment from: this interpreter's version where nothing else is said."""
    return spec.python or f"{sys.version_info.major}.{sys.version_info.minor}"


def cache_folder() -> Path:
    """Where the environments are kept."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "roll" / "environments"


def _install(spec: EnvironmentSpec, folder: Path, role: str) -> None:
    uv = _find_uv(role)
    shutil.rmtree(folder, ignore_errors=True)
    # Without another choice this very interpreter: uv would look for one of its version, or download it.
    base = spec.python or sys.executable
    try:
        _run([uv, "venv", "--python", base, str(folder)], role)
        with tempfile.NamedTemporaryFile("w", prefix="roll-exclude-", suffix=".txt") as excluded:
            excluded.write("\n".join(spec.exclude))
            excluded.flush()
            left_out = ["--excludes", excluded.name] if spec.exclude else []
            python = str(folder / "bin" / "python")
            command = [uv, "pip", "install", "--python", python, *left_out, *spec.sources, *spec.packages]
            _run(command, role)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / STAMP).write_text(json.dumps({"packages": spec.packages, "exclude": spec.exclude, "python": base}))


def _find_uv(role: str) -> str:
    beside = Path(sys.executable).parent / "uv"
    uv = shutil.which("uv") or (str(beside) if beside.is_file() else None)
    uv = uv or os.environ.get("UV")  # of the uv that started this (`uv run`), wherever it is
    if uv is None:
        raise PythonEnvironmentError(
            f"{role}: environment.packages are installed by uv, which is not on the PATH. Run: pip install uv"
        )
    return uv


def _run(command: Sequence[str], role: str) -> None:
    """In a folder of no project: the settings of one that the run is started in, or that has the cache somewhere below
    it, are not meant."""
    done = subprocess.run(
        command,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        env={name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"},
    )
    if done.returncode == 0:
        return
    said = "\n".join(done.stdout.strip().splitlines()[-LAST_LINES:])
    offline = any(words in said.lower() for words in OFFLINE)
    advice = "; this host reaches no index: see uv's UV_FIND_LINKS, UV_INDEX_URL and UV_OFFLINE" if offline else ""
    raise PythonEnvironmentError(
        f"{role}: its environment cannot be made{advice}. {shlex.join(command)} ended with code {done.returncode}:\n"
        f"{said}"
    )
