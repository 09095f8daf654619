"""`roll-core init` writes first runs that run at once, overwrites nothing and names missing packages."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from roll_core.cli.main import main
from roll_core.plugins.registry import load_registry
from roll_core.plugins.targets import data_file
from roll_core.runtime.records.tracking import read_metrics
from roll_core.spec.providers import PipelineProvider
from shared_tests.docs import undocumented

STARTERS = {
    each.starter.rpartition(":")[2]: each for each in load_registry().providers(PipelineProvider) if each.starter
}
BATCH = "actor_train.training_args.per_device_train_batch_size=8"
SHORT = {
    "sft": ["sft_train.training_args.per_device_train_batch_size=8"],
    "preference": [BATCH],
    "rlvr": [
        *("rollout_batch_size=4", "num_return_sequences_in_group=2", BATCH),
        "actor_train.training_args.gradient_accumulation_steps=1",
    ],
    "agentic": [
        *("rollout_batch_size=8", "train_env_manager.group_size=4", BATCH),
        *("val_env_manager.num_env_groups=8", "val_batch_size=8"),
    ],
    "diffusion": [],
    "distill": [],
}
"""Overrides that make a step small."""


def texts(folder):
    """Files by name, without bytecode of what was imported."""
    files = [each for each in folder.rglob("*") if each.is_file() and each.parent.name != "__pycache__"]
    return {str(each.relative_to(folder)): each.read_text() for each in files}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, in which reward processes and environments find their modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [each for each in sys.modules if each.split(".")[0].startswith("first_")]:
        del sys.modules[name]


def test_every_kind_that_the_readme_names_has_a_starter():
    assert set(STARTERS) == set(SHORT)


def written(kind, folder, capfd):
    """The configs that the printed command runs, after `init` wrote them."""
    assert main(["init", kind, folder]) == 0
    command = next(line.split() for line in capfd.readouterr().out.splitlines() if "roll-core run" in line)
    assert command[:2] == ["roll-core", "run"]
    return command[2:]


@pytest.mark.parametrize("kind", SHORT)
def test_a_written_config_passes_check_and_names_only_its_folder(kind, here, capfd):
    folder = f"first_{kind}"
    configs = written(kind, folder, capfd)
    assert sorted(configs) == sorted(str(each.relative_to(here)) for each in (here / folder).glob("*.yaml"))
    assert not [name for name, text in texts(here / folder).items() if "starter" in text]
    assert main(["check", *configs]) == 0, capfd.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHORT)
def test_a_written_run_runs_at_once(kind, here, capfd):
    folder = f"first_{kind}"
    configs = written(kind, folder, capfd)
    steps = ["max_steps=1", "eval_steps=1", "track_with=[]"]
    assert main(["run", *configs, *steps, *SHORT[kind]]) == 0, capfd.readouterr()
    runs = sorted((here / folder / "output").glob("*/001"))
    assert len(runs) == len(configs)
    for run in runs:
        last = read_metrics(run / "metrics.jsonl")[-1]
        assert last["step"] == 1
        assert undocumented(last) == []
        assert 0 <= last["val/score/mean"] <= 1  # the reward of the new folder scored the validation prompts
        assert list((run / "export").iterdir())


@pytest.mark.parametrize("kind", SHORT)
def test_a_starter_says_what_its_keys_do_and_is_small(kind):
    source = data_file(STARTERS[kind].starter, owner="")
    for config in source.glob("*.yaml"):
        lines = config.read_text().splitlines()
        assert lines[0].startswith("# ")
        assert sum("#" in each for each in lines) > 15
        assert max(map(len, lines)) <= 120
    assert sum(each.stat().st_size for each in source.rglob("*.jsonl")) < 50_000
    for rows in source.rglob("*.jsonl"):
        assert [json.loads(line) for line in rows.read_text().splitlines()]


@pytest.mark.parametrize("folder", ["my-run", "json", "os", "a-b/c", "{tmp}/abs", "../beside"])
def test_folder_that_cannot_be_a_package_is_the_start(folder, here, capsys):
    folder = folder.replace("{tmp}", str(here))
    assert main(["init", "rlvr", folder]) == 0
    out = capsys.readouterr().out.split()
    assert out[-5:] == ["cd", folder, "roll-core", "run", "rlvr.yaml"]
    os.chdir(folder)
    assert main(["check", "rlvr.yaml"]) == 0


def test_an_inner_folder_is_named_in_paths_and_modules(here):
    assert main(["init", "rlvr", "outer/inner"]) == 0
    assert main(["check", "outer/inner/rlvr.yaml"]) == 0
    text = Path("outer/inner/rlvr.yaml").read_text()
    assert "outer/inner/data/train.jsonl" in text
    assert "outer.inner.rewards:score" in text


@pytest.mark.parametrize("name", ["rlvr.yaml", "data/val.jsonl"])
def test_existing_files_are_never_overwritten(name, here, capsys):
    file = here / "first_run" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    assert main(["init", "rlvr", "first_run"]) == 2
    assert f"ROLL-R005 {Path('first_run') / name}" in capsys.readouterr().err
    assert texts(here) == {f"first_run/{name}": "mine"}


def test_starters_share_no_folder_but_other_files_stay(here):
    Path("first_run").mkdir()
    Path("first_run/notes.txt").write_text("mine")
    assert main(["init", "sft", "first_run"]) == 0
    before = texts(here)
    assert before["first_run/notes.txt"] == "mine"
    assert main(["init", "preference", "first_run"]) == 2
    assert texts(here) == before


def test_a_file_as_folder_is_refused(here, capsys):
    Path("taken").write_text("mine")
    assert main(["init", "sft", "taken"]) == 2
    assert "ROLL-R005 taken" in capsys.readouterr().err
    assert texts(here) == {"taken": "mine"}


@pytest.mark.parametrize(
    ("kind", "package"),
    [("preference", "preference"), ("distill", "distill"), ("agentic", "agentic"), ("diffusion", "diffusion")],
)
def test_a_kind_of_a_package_that_is_missing_names_the_package(kind, package, here, capsys):
    assert main(["init", kind, "first_run", "--disable-plugin", f"roll-pipeline-{package}"]) == 2
    said = capsys.readouterr().err
    assert "ROLL-P004" in said
    assert f"pip install roll-pipeline-{package}" in said
    assert texts(here) == {}


def test_packages_that_the_run_needs_are_named(here, capsys):
    assert main(["init", "--disable-plugin", "roll-strategy-hf", "sft", "first_run"]) == 0
    assert "pip install roll-strategy-hf" in capsys.readouterr().out
    assert Path("first_run/sft.yaml").is_file()


@pytest.mark.parametrize("words", [[], ["rlvr"], ["sft", "a", "b"]])
def test_missing_words_are_an_error_without_a_terminal(words, here):
    with pytest.raises(SystemExit) as ended:
        main(["init", *words])
    assert ended.value.code == 2


@pytest.mark.parametrize("kind", ["reward_model", "rlrv"])
def test_a_kind_without_a_starter_is_refused(kind, here, capsys):
    assert main(["init", kind, "first_run"]) == 2
    assert "ROLL-P004" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "typed", "files"), [
    ([], b"sft\nfirst_run\n", {"first_run/sft.yaml"}),
    (["sft"], b"\n", {"my_sft/sft.yaml"}),
    ([], b"\x04", set()),
])  # fmt: skip
def test_a_terminal_is_asked_for_what_is_missing(words, typed, files, here):
    driver, terminal = pty.openpty()
    os.write(driver, typed)
    command = [sys.executable, "-m", "roll_core", "init", *words]
    done = subprocess.run(command, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(terminal)
    os.close(driver)
    assert done.returncode == (0 if files else 130), done.stderr
    assert {str(each.relative_to(here)) for each in here.rglob("*.yaml")} == files
    assert b"Traceback" not in done.stderr
