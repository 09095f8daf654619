"""`pip install packages/roll-core` into a plain virtual environment."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plain_environment_gets_a_roll_core_that_works(tmp_path):
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    bin_directory = home / ("Scripts" if sys.platform == "win32" else "bin")
    pip = [str(bin_directory / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = str(REPOSITORY / "constraints.txt")
    subprocess.run([*pip, "-c", constraints, str(REPOSITORY / "packages" / "roll-core")], check=True)

    def roll_core(*arguments: str) -> str:
        command = [str(bin_directory / "roll-core"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "0.1.0" in roll_core("--version")
    assert "hf_train" in roll_core("plugins", "--json")
    # Files that are no modules must be in the wheel, too.
    installed = next(home.rglob("roll_core/py.typed")).parent
    assert (installed / "runtime" / "templates" / "report.html.j2").is_file()
