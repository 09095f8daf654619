"""`roll-core run CONFIG --multirun`: combinations, mistakes, failures, resuming, and the page that compares runs."""

import json

import pytest
import yaml

from roll_core.cli import main as cli
from roll_core.cli.sweep import sweep_points
from roll_core.errors import ConfigError
from shared_tests.hf_plugins import HF_PACKAGES
from shared_tests.runs import PipelineRuns

RATE = "sft_train.training_args.learning_rate"


def test_points_are_the_product_of_all_values():
    points = sweep_points(["seed=1", f"{RATE}=1e-6,2e-6", "max_steps=3,4", "+prompt_length=8"])
    assert [point.overrides for point in points] == [
        ("seed=1", "+prompt_length=8", f"{RATE}={rate}", f"max_steps={steps}")
        for rate in ("1e-06", "2e-06")
        for steps in (3, 4)
    ]
    assert points[1].name == "learning_rate-1e-06-max_steps-4"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["a=[1,2],[3,4]"], ["a-_1_2_", "a-_3_4_"]),
        (["a='x,y',z"], ["a-_x_y_", "a-z"]),
        (["a.b=1,2", "c.b=3"], ["b-1", "b-2"]),
        (["a.b=1,2", "c.b=3,4"], ["a.b-1-c.b-3", "a.b-1-c.b-4", "a.b-2-c.b-3", "a.b-2-c.b-4"]),
        (["a=range(1,4)"], ["a-1", "a-2", "a-3"]),
        (["a='/','//'"], ["a-_", "a-_-2"]),
        (["exp_name=x,y"], ["", ""]),
        (["r.device_mapping=range(0,8)", "a=1,2"], ["a-1", "a-2"]),
    ],
)
def test_points_have_different_names(words, names):
    assert [point.name for point in sweep_points(words)] == names


@pytest.mark.parametrize(
    ("words", "code", "key"),
    [
        (["a=1,2", "a=3,4"], "ROLL-C022", "a"),
        (["a=1,2", "a=3"], "ROLL-C022", "a"),
        (["a=3", "a=1,2"], "ROLL-C022", "a"),
        (["a=[1,2]"], "ROLL-C025", ""),
        (["a=interval(0,1)"], "ROLL-C025", "a=interval(0,1)"),
    ],
)
def test_mistakes_of_a_sweep_are_one_error(words, code, key):
    with pytest.raises(ConfigError) as caught:
        sweep_points(words)
    assert (caught.value.problems[0].code, caught.value.problems[0].key) == (code, key)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLL_PLUGINS", f"{HF_PACKAGES},roll-tools")
    runs = PipelineRuns(tmp_path, "local")
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(runs.sft(max_steps=2, save_steps=1, export_model=False)))
    return "sft.yaml"


def outcomes(folder):
    records = sorted((folder / "output").glob("*/*/run.json"))
    return {
        f"{path.parent.parent.name}/{path.parent.name}": json.loads(path.read_text())["outcome"]
        for path in records
        if path.parent.name != "latest"
    }


def test_unknown_key_is_one_error_before_anything_runs(config, tmp_path, capsys):
    assert cli.main(["run", config, "--multirun", "sed=1,2,3"]) == 2
    assert capsys.readouterr().err.count("ROLL-C010") == 1
    assert not (tmp_path / "output").exists()


def test_several_values_need_multirun(config, capsys):
    assert cli.main(["run", config, "seed=1,2"]) == 2
    assert "--multirun" in capsys.readouterr().err


def test_sweep_survives_a_failure_and_skips_finished_runs(config, tmp_path):
    words = ["run", config, "--multirun", f"{RATE}=1e30,1e-2", "resume_from_checkpoint=auto"]
    assert cli.main(words) == 1
    bad, good = "sft-learning_rate-1e_30", "sft-learning_rate-0.01"
    assert outcomes(tmp_path) == {f"{bad}/001": "failed", f"{good}/001": "finished"}
    page = tmp_path / "output" / "sft-sweep.html"
    assert all(name in page.read_text() for name in (bad, good))

    assert cli.main(words) == 1
    assert set(outcomes(tmp_path)) == {f"{bad}/001", f"{bad}/002", f"{good}/001"}
