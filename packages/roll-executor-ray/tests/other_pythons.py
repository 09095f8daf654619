"""Virtual environments of tests, made in a moment: they show what is installed here, or some of it, elsewhere."""

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


def _make(folder: Path, line: str) -> Path:
    venv.create(folder, symlinks=True)
    own = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (own / "shown.pth").write_text(line + "\n")
    return folder / "bin" / "python"
