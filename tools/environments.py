"""Python environments under the ignored folder `.engines`, for what cannot live in the workspace's own.

An engine pins what the workspace does not, and a peer of the benchmarks must not meet our versions. Both are made with
`./run`, so that wheels in find-links, the exact torch and `exclude-newer` hold for them as for the workspace.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY = Path(__file__).resolve().parent.parent
ENVIRONMENTS = REPOSITORY / ".engines"


def environment(
    name: str,
    requirements: Sequence[str],
    *,
    alone: Sequence[str] = (),
    remove: Sequence[str] = (),
    despite: Sequence[str] = (),
    also: Sequence[Any] = (),
    python: str | None = None,
) -> Path:
    """The interpreter of an environment that holds `requirements`, and `alone` without what these require; without the
    packages `remove`. `despite` are dependencies that the workspace's `override-dependencies` would leave out, as it
    would `alone`. `python` is its version of Python, if not that of this interpreter.

    Made on first use, and made anew when one of these or `also` (plain values) has changed. Requirements are what pip
    takes, `-e FOLDER` included, in a folder relative to the repository.
    """
    folder = ENVIRONMENTS / name
    interpreter = folder / "bin" / "python"
    stamp = folder / "requirements.json"
    wanted = json.dumps([list(requirements), list(alone), list(remove), list(despite), *also, *filter(None, [python])])
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return interpreter
    shutil.rmtree(folder, ignore_errors=True)
    run = str(REPOSITORY / "run")
    quiet: dict[str, Any] = {"check": True, "cwd": REPOSITORY, "stdout": sys.stderr}
    version = (find_python(python) or python) if python else sys.executable
    subprocess.run([run, "venv", "--python", version, str(folder)], **quiet)
    install = [run, "pip", "install", "--python", str(interpreter)]
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):  # otherwise Python keeps what it compiles
        install.append("--compile-bytecode")
    overrides = folder / "overrides.txt"
    for wanted_here, dependencies, options in ((requirements, despite, []), (alone, alone, ["--no-deps"])):
        overrides.write_text("".join(f"{each}\n" for each in dependencies), encoding="utf-8")
        if wanted_here:
            subprocess.run([*install, "--overrides", str(overrides), *options, *wanted_here], **quiet)
    if remove:
        subprocess.run([run, "pip", "uninstall", "--python", str(interpreter), *remove], **quiet)
    stamp.write_text(wanted, encoding="utf-8")
    return interpreter


def find_python(version: str) -> str | None:
    """The interpreter of a Python on this host: on PATH, of pyenv or of uv. None if there is none."""
    # uv stops at a shim of pyenv whose version is not chosen.
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv").glob(f"versions/{version}.*/bin")
    path = os.pathsep.join([*map(str, sorted(pyenv)), os.environ.get("PATH", "")])
    command = [str(REPOSITORY / "run"), "python", "find", "--no-python-downloads", "--no-project", version]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None
