"""Acme's plugin, built and installed as anyone would."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PLUGIN = Path(__file__).resolve().parent / "roll-acme"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin, built and installed as anyone would, into a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    command = [str(REPOSITORY / "run"), "pip", "install", "--quiet", "--no-deps", "--target", str(folder), str(PLUGIN)]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    return folder
