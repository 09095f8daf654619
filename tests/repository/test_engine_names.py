"""`tools/engine_names.py` finds what a plugin uses and another version of its engine lacks."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PLUGIN = """
from engine.api import Base, call
from engine.api import Gone

class Ours(Base):
    def changed(self, old):
        return call(1, known=2, unknown=3)

    def open(self, a, *rest):
        return None

def both():
    try:
        from engine.new import place
    except ModuleNotFoundError:
        from engine.old import place
    try:
        from engine.nowhere import lost
    except ModuleNotFoundError:
        from engine.nowhere_else import lost
    return place, lost
"""
ENGINE = {
    "__init__.py": "",
    "api.py": "from .parts import *\n\nclass Base:\n    def changed(self, new): ...\n    def open(self, a, b): ...\n",
    "parts.py": "def call(value, *, known=0): ...\n",
    "old.py": "place = 1\n",
}


@pytest.fixture
def repository(tmp_path):
    """A repository with a plugin, and the sources of its engine beside it."""
    source = tmp_path / "packages" / "roll-infer-engine" / "src" / "roll_infer_engine"
    (tmp_path / "tools").mkdir()
    for file in ("engine_names.py", "environments.py"):
        shutil.copy(REPOSITORY / "tools" / file, tmp_path / "tools")
    source.mkdir(parents=True)
    (source / "plugin.py").write_text(PLUGIN, encoding="utf-8")
    (tmp_path / "sources" / "engine").mkdir(parents=True)
    for name, text in ENGINE.items():
        (tmp_path / "sources" / "engine" / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(repository):
    command = [sys.executable, "tools/engine_names.py", "roll-infer-engine", "sources"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def test_missing_names_keywords_and_parameters_are_listed(repository):
    code, lines = run(repository)
    found = [line.partition(": ")[2] for line in lines]
    assert code == 1
    assert found == [
        "engine.api.Gone",
        "engine.nowhere_else.lost, and its alternatives",
        "Ours.changed('new',)",
        "call(unknown=)",
    ]


def test_a_plugin_that_fits_has_exit_code_0(repository):
    (repository / "packages" / "roll-infer-engine" / "src" / "roll_infer_engine" / "plugin.py").write_text(
        "from engine.api import call\n\ncall(1, known=2)\n", encoding="utf-8"
    )
    assert run(repository)[0] == 0
