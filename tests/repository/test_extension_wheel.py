"""`BUILD_EXT=1`: wheels bring their kernels compiled."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from roll_testing.errors import raises_error

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
USE = """
import torch
from roll_kernels.decode import EXTENSION, DecodeKernels
print(EXTENSION.library())
kernels = DecodeKernels(
    num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0, qk_epsilon=1e-6, dtype=torch.float32, device=torch.device("cpu")
)
kernels.begin(torch.zeros(1, 1, 4, 8), torch.zeros(1, dtype=torch.int64))
gate, up = torch.randn(3, 8), torch.randn(3, 8)
torch.testing.assert_close(kernels.gate(torch.cat([gate, up], 1)), torch.nn.functional.silu(gate) * up)
"""


def build(package: str, folder: Path, **variables: str) -> Path:
    env = {name: value for name, value in os.environ.items() if name != "BUILD_EXT"} | variables
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=PACKAGES / package, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("roll-kernels", "roll_kernels/digests.cpp"),
        ("roll-kernels", "roll_kernels/elementwise.cpp"),
        ("roll-kernels", "roll_kernels/decode.cpp"),
    ],
)
def test_a_wheel_as_it_is_has_sources_alone(package, source, tmp_path):
    wheel = build(package, tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert source in names
    assert [name for name in names if name.endswith(".so")] == []


@pytest.mark.slow
def test_kernels_that_were_compiled_ahead_need_no_compiler(tmp_path):
    wheel = build("roll-kernels", tmp_path, BUILD_EXT="1")
    assert "none-any" not in wheel.name
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    env = os.environ | {
        "PYTHONPATH": str(tmp_path / "installed"),
        "CXX": "no-such-compiler",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "kept"),
    }
    done = subprocess.run(
        [sys.executable, "-c", USE], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "installed" / "roll_kernels")


@pytest.mark.slow
def test_a_build_that_cannot_compile_fails_with_what_is_missing(tmp_path):
    with raises_error(AssertionError, "roll_decode", "no-such-compiler"):
        build("roll-kernels", tmp_path, BUILD_EXT="1", CXX="no-such-compiler")
