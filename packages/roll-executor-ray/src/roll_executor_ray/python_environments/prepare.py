"""Finds or builds the interpreter of a role's environment on this host, and checks that a worker can start there."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import PythonEnvironmentError, install_command
from roll_executor_ray.python_environments.packages import build

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_executor_ray.python_environments.spec import EnvironmentSpec

OLDEST_PYTHON = (3, 11)
PROBE_S = 60.0
"""Seconds that an interpreter has to list its installed packages: file systems of clusters are slow."""
PROBE = """
import json, sys
sys.path = [entry for entry in sys.path if entry]
found = {"python": list(sys.version_info[:3]), "installed": {}}
try:
    from importlib.metadata import version
    for name in sys.argv[1:]:
        try:
            found["installed"][name] = version(name)
        except Exception:
            pass
except ImportError:
    pass
print(json.dumps(found))
"""
"""Program that reports the Python version and package versions.

Old interpreters can run it too, to report their version.
"""


def prepare(spec: EnvironmentSpec, role: str) -> Path:
    """Interpreter of a role's environment. `role` names the role in error messages.

    May install packages first, which takes minutes, or wait for another process that installs them. Raises
    `PythonEnvironmentError` with the role, the problem, and the command that fixes it.
    """
    python = build(spec, role) if spec.packages else _find_interpreter(spec, role)
    where = f"{role}: environment {spec.name}: {python}"
    _check(_probe(python, spec, where), python, spec, where)
    return python


def _find_interpreter(spec: EnvironmentSpec, role: str) -> Path:
    """Interpreter of a virtual environment, at a path, or of a name on the PATH."""
    if os.sep not in spec.python:
        interpreter = shutil.which(spec.python)
        if interpreter is None:
            raise PythonEnvironmentError(
                f"{role}: environment {spec.python}: there is no program of that name on the PATH"
            )
        return Path(interpreter)
    python = Path(spec.python)
    is_folder = python.is_dir() or not python.name.startswith("python")
    if is_folder and not python.is_file():
        python = python / "bin" / "python"
    if not python.is_file():
        folder = python.parent.parent
        raise PythonEnvironmentError(
            f"{role}: environment {spec.python}: there is no interpreter {python}. Run: uv venv"
            f" {shlex.quote(str(folder))} && {install_command(*spec.sources, python=str(python))}"
        )
    return python


def environment_of(python: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a process of this interpreter: `variables`, without those of another interpreter."""
    env = {name: value for name, value in variables.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    env["PATH"] = os.pathsep.join([str(python.parent), *filter(None, [variables.get("PATH")])])
    if (python.parent.parent / "pyvenv.cfg").is_file():
        env["VIRTUAL_ENV"] = str(python.parent.parent)
    return env


def _probe(python: Path, spec: EnvironmentSpec, where: str) -> dict[str, Any]:
    """Python version and installed packages of an interpreter."""
    try:
        done = subprocess.run(
            [str(python), "-c", PROBE, *spec.distributions],
            env=environment_of(python, os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PythonEnvironmentError(f"{where} did not list its packages within {PROBE_S:g} s") from error
    except OSError as error:
        raise PythonEnvironmentError(f"{where} cannot be started: {error.strerror or error}") from error
    try:
        report: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except ValueError as error:
        output = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        raise PythonEnvironmentError(f"{where} is not a working Python: it printed {output!r}") from error
    return report


def _check(report: Mapping[str, Any], python: Path, spec: EnvironmentSpec, where: str) -> None:
    version = ".".join(map(str, report["python"]))
    if tuple(report["python"][:2]) < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        raise PythonEnvironmentError(f"{where} is Python {version}, but roll-core needs {oldest} or later")
    installed = report["installed"]
    wrong = [
        f"{name} {f'{installed[name]} is' if name in installed else 'is not'} installed, expected {expected}"
        for name, expected in spec.distributions.items()
        if installed.get(name) != expected
    ]
    if wrong:
        raise PythonEnvironmentError(
            f"{where}: {'; '.join(wrong)}. Run: {install_command(*spec.sources, python=str(python))}"
        )
