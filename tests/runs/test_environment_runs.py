"""Runs whose roles live in Python environments of their own, and whose weights travel through a folder."""

import json
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from roll_core.errors import ConfigError
from roll_testing.errors import raises_error


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of another environment, in which everything is that is here."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    own = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (own / "shown.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return folder / "bin" / "python"


def test_roles_in_other_environments_compute_equal_numbers(ray_runs, python, tmp_path):
    runs = ray_runs
    config = runs.rlvr(executor="auto", max_steps=2, model_update_dir=str(tmp_path / "weights"))
    for role in (config["actor_train"], config["actor_infer"], *config["rewards"].values()):
        role["environment"] = str(python)
    result = runs.ok(config)
    record = json.loads(result.run_dir.record.read_text(encoding="utf-8"))
    assert record["executor"] == "ray"
    assert record["weight_transports"] == {"actor_train -> actor_infer": "disk"}
    assert list((tmp_path / "weights").iterdir()) == []
    roles = {"actor_train", "actor_infer", *(f"rewards.{name}" for name in config["rewards"])}
    assert record["environments"].keys() == roles
    for found in record["environments"].values():
        assert found.pop("executable") == str(python)
        assert found == {name: record["versions"][name] for name in found}
        assert {"python", "roll-core", "torch"} <= found.keys()
    local = runs.ok(runs.rlvr(executor="local", max_steps=2))
    for here, there in zip(runs.timeless(local), runs.timeless(result), strict=True):
        for name in ("score/mean", "actor/loss", "actor/grad_norm", "response_length/mean"):
            assert there[name] == pytest.approx(here[name], rel=1e-3, abs=1e-5), name


def test_local_executor_refuses_a_second_environment(runs, python):
    config = runs.rlvr(executor="local")
    config["actor_infer"]["environment"] = str(python)
    with raises_error(ConfigError, "actor_infer"):
        runs.run(config)


def test_check_reports_a_missing_environment(runs, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = runs.rlvr(executor="auto")
    config["actor_infer"]["environment"] = {"python": "/nowhere/env"}
    with pytest.raises(ConfigError) as caught:
        runs.run(config)
    found = [(problem.key, problem.message) for problem in caught.value.problems]
    assert found == [("actor_infer.environment.python", "there is no /nowhere/env")]


@pytest.mark.parametrize(
    ("environment", "facts"),
    [
        ({"packages": []}, ("python", "packages")),
        ({"python": "python3", "exclude": ["x"]}, ("exclude",)),
        ({"pakages": ["x"], "python": "python3"}, ("packages",)),
    ],
)
def test_environment_with_invalid_output_is_refused(runs, environment, facts):
    config = runs.rlvr(executor="auto")
    config["actor_infer"]["environment"] = environment
    with raises_error(ConfigError, *facts):
        runs.run(config)
