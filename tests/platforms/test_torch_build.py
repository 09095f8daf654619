"""What torch was built for is read off its files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from roll_core.spec.platform import TorchBuild, torch_build


@pytest.fixture
def version_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of the torch that comes first on the path."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return package / "version.py"


def test_build_equals_the_installed_torch() -> None:
    import torch

    build = torch_build()
    assert build is not None
    assert (build.version, build.cuda, build.hip) == (
        torch.__version__,
        torch.version.cuda or "",
        torch.version.hip or "",
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "from typing import Optional\n__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\n"
            "hip: Optional[str] = None\n",
            TorchBuild(version="2.13.0+cu128", cuda="12.8"),
        ),
        ("__version__ = '2.6.0'\ncuda = None\nhip = '6.2.41133'\n", TorchBuild(version="2.6.0", hip="6.2.41133")),
        ("cuda = '12.8'\n", None),
        ("__version__ = open('x')\n", None),
        ("__version__ = '2.6", None),
        ("\0", None),
        ("", None),
    ],
)
def test_version_file_is_parsed_without_running_it(version_py: Path, text: str, expected: TorchBuild | None) -> None:
    version_py.write_text(text)
    assert torch_build() == expected


def test_a_torch_without_the_file_is_none(version_py: Path) -> None:
    assert not version_py.exists()
    assert torch_build() is None


def test_bytes_that_are_no_text_are_none(version_py: Path) -> None:
    version_py.write_bytes(b"\xff\xfe__version__")
    assert torch_build() is None


def test_reading_the_build_imports_no_torch() -> None:
    script = "import sys; from roll_core.spec.platform import torch_build; torch_build(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
