"""Virtual environments of tests, made in a moment: they show what is installed here, or some of it, elsewhere."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

HERE = Path(sysconfig.get_path("purelib"))
WITHOUT_TORCH = (
    "annotated-types", "filelock", "msgpack", "numpy", "packaging", "pluggy", "psutil", "pydantic", "pydantic-core",
    "roll-core", "typing-extensions", "typing-inspection", "xxhash",
)  # fmt: skip
"""What judges need of roll-core."""


def environment_that_shows_all(folder: Path) -> Path:
    """Has all that is installed here, and another prefix. Returns its interpreter."""
    return _make(folder, f"import site; site.addsitedir({str(HERE)!r})")


def environment_with(folder: Path, names: Iterable[str]) -> Path:
    """Has these distributions only. Returns its interpreter."""
    shown = folder / "shown"
    shown.mkdir(parents=True)
    for name in names:
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top != ".." and not (shown / top).exists():
                (shown / top).symlink_to(HERE / top)
    return _make(folder, f"import site; site.addsitedir({str(shown)!r})")


def other_minor_version() -> str | None:
    """Interpreter of a later minor version of Python, on the PATH or of pyenv; None if this host has none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for minor in range(sys.version_info.minor + 1, 15):
        name = f"python3.{minor}"
        for python in (shutil.which(name), *pyenv.glob(f"versions/3.{minor}.*/bin/{name}")):
            if python and subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0:
                return str(python)
    return None


def _make(folder: Path, line: str) -> Path:
    venv.create(folder, symlinks=True)
    own = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (own / "shown.pth").write_text(line + "\n")
    return folder / "bin" / "python"
