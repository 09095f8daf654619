"""Acme's plugins, built and installed as anyone would."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from roll_testing.new import write_package

REPOSITORY = Path(__file__).resolve().parents[2]
PLUGIN = Path(__file__).resolve().parent / "roll-acme"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """roll-acme and the package of `roll-core new transport acme`, built and installed into a folder of their own."""
    folder, transport = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("new") / "roll-transport-acme"
    write_package("transport", "acme", transport)
    command = [str(REPOSITORY / "run"), "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, str(PLUGIN), str(transport)], check=True, cwd=REPOSITORY)
    return folder
