"""What a run can be reproduced from besides its config: installed versions, the state of git, facts of the host."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import platform
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.host import hostname, usable_cores

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger(__name__)

_GIT_TIMEOUT_S = 10.0
DISTRIBUTIONS = (
    "roll-core", "roll-modeling", "torch", "transformers", "pyarrow", "tokenizers", "numpy", "pydantic", "safetensors",
    "tensorboard", "math-verify",
)  # fmt: skip


def versions(also: Iterable[str] = ()) -> dict[str, str]:
    """Versions of Python, of `DISTRIBUTIONS` and, sorted, of the distributions in `also`, without importing them.

    Distributions that are not installed are omitted.
    """
    names = dict.fromkeys((*DISTRIBUTIONS, *sorted(also)))
    by_name = {name: version for name in names if (version := _metadata(name)[0])}
    return {"python": platform.python_version(), **by_name}


def requirements(package: str) -> tuple[str, ...]:
    """Names of the distributions that an installed distribution requires; none if it is not installed."""
    return _metadata(package)[1]


def _metadata(name: str) -> tuple[str, tuple[str, ...]]:
    """Version of a distribution and the names that it requires; empty if it is not installed."""
    try:
        folder = importlib.metadata.distribution(name).locate_file("")
    except importlib.metadata.PackageNotFoundError:
        return "", ()
    return _read(name, str(folder))


@cache
def _read(name: str, folder: str) -> tuple[str, tuple[str, ...]]:
    """Read them, once per process for each `folder` with this distribution: parsing takes longer than finding it.

    Of requirements that cannot be parsed the name counts, too.
    """
    metadata = importlib.metadata.metadata(name)
    required = metadata.get_all("Requires-Dist") or ()
    return metadata["Version"], tuple(
        match[0] for requirement in required if (match := re.match(r"[\w.-]+", requirement))
    )


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit and branch of `directory`, and whether tracked files have changes; None outside a repository."""
    try:
        done = subprocess.run(
            ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"],
            cwd=directory,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("the state of git is not recorded: %s", error)
        return None
    lines = done.stdout.splitlines()
    headers = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# "))
    changed = any(not line.startswith("#") for line in lines)
    return {"commit": headers.get("branch.oid"), "branch": headers.get("branch.head"), "dirty": changed}


def host_facts() -> dict[str, Any]:
    """Name, operating system, CPU, memory in bytes and Python executable of this host."""
    import psutil

    return {
        "name": hostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "executable": sys.executable,
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model"):
                return value.strip()
    return platform.processor() or platform.machine()
