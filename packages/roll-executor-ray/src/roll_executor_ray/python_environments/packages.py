"""Environments from a set of packages: installed once with uv, cached under the digest of their inputs.

    spec -> digest -> lock -> `uv venv`, `uv pip install` -> stamp

The stamp is written last. A folder without a stamp is an interrupted installation, and is rebuilt.
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

from roll_core.errors import PythonEnvironmentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_executor_ray.python_environments.spec import EnvironmentSpec

log = logging.getLogger(__name__)

CACHE_VARIABLE = "ROLL_ENVIRONMENTS_DIR"
"""Environment variable for the folder of the environments."""
STAMP = "roll-environment.json"
LAST_LINES = 15
"""Number of uv's last output lines that an error quotes."""
OFFLINE = ("dns error", "failed to lookup address", "connection refused", "network is unreachable", "tcp connect error")
"""Phrases of uv's output that mean that no package index is reachable."""


def build(spec: EnvironmentSpec, role: str) -> Path:
    """Interpreter of the environment, which is installed first if needed. Raises `PythonEnvironmentError`."""
    from filelock import FileLock

    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    environments = Path(os.environ.get(CACHE_VARIABLE) or Path(cache) / "roll" / "environments").absolute()
    folder = environments / digest_of(spec)
    try:
        environments.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / STAMP).is_file():
                log.info("%s: installing %s into %s, once", role, ", ".join(spec.packages), folder)
                _install(spec, folder, role)
    except OSError as error:
        if isinstance(error, PythonEnvironmentError):
            raise
        raise PythonEnvironmentError(
            f"{role}: its Python environment cannot be written to {environments}: {error}; set {CACHE_VARIABLE} to a"
            " writable folder"
        ) from error
    return folder / "bin" / "python"


def digest_of(spec: EnvironmentSpec) -> str:
    """Digest of all inputs of the environment, including the `pyproject.toml` of local projects."""
    python = spec.python or f"{sys.version_info.major}.{sys.version_info.minor}"
    parts = [sorted(spec.packages), sorted(spec.exclude), spec.sources, python, platform.machine()]
    digest = hashlib.sha256(json.dumps(parts).encode())
    for source in (*spec.packages, *spec.sources):
        project = Path(source) / "pyproject.toml"
        if os.sep in source and project.is_file():
            digest.update(project.read_bytes())
    return digest.hexdigest()[:16]


def _install(spec: EnvironmentSpec, folder: Path, role: str) -> None:
    uv = _find_uv(role)
    shutil.rmtree(folder, ignore_errors=True)
    # Default: this very interpreter. uv would search for one of its version, or download it.
    base = spec.python or sys.executable
    try:
        _run([uv, "venv", "--python", base, str(folder)], role)
        with tempfile.NamedTemporaryFile("w", prefix="roll-exclude-", suffix=".txt") as excluded:
            excluded.write("\n".join(spec.exclude))
            excluded.flush()
            exclude = ["--excludes", excluded.name] if spec.exclude else []
            python = str(folder / "bin" / "python")
            _run([uv, "pip", "install", "--python", python, *exclude, *spec.sources, *spec.packages], role)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / STAMP).write_text(json.dumps({"packages": spec.packages, "exclude": spec.exclude, "python": base}))


def _find_uv(role: str) -> str:
    beside = Path(sys.executable).parent / "uv"
    uv = shutil.which("uv") or (str(beside) if beside.is_file() else None)
    uv = uv or os.environ.get("UV")  # set by the uv that started this process (`uv run`)
    if uv is None:
        raise PythonEnvironmentError(
            f"{role}: environment.packages needs uv, which is not on the PATH. Run: pip install uv"
        )
    return uv


def _run(command: Sequence[str], role: str) -> None:
    """Run uv in `/`, outside of any project.

    The settings of a project around the working directory or the cache do not apply to the environment.
    """
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
    output = "\n".join(done.stdout.strip().splitlines()[-LAST_LINES:])
    offline = any(words in output.lower() for words in OFFLINE)
    advice = "; this host reaches no index: see uv's UV_FIND_LINKS, UV_INDEX_URL and UV_OFFLINE" if offline else ""
    raise PythonEnvironmentError(
        f"{role}: installing its Python environment failed{advice}. {shlex.join(command)} exited with code"
        f" {done.returncode}:\n{output}"
    )
