"""The tutorial's files and commands work in the order of its pages."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import zipfile
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

from roll_core.runtime.records.tracking import read_metrics
from roll_testing.new import write_package
from shared_tests.docs import code_of, undocumented

SHORT = ["max_steps=2", "eval_steps=0", "track_with=[]"]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tutorial")
    roll_core(folder, "init rlvr first")
    return folder


def roll_core(folder, words, *more, path="", **variables):
    """Run a command of roll-core in a process, as the reader does. Returns its output."""
    command = [sys.executable, "-m", "roll_core", *shlex.split(words), *more]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder, site):
    """The wheel of a package, unpacked into `site`: an installation without a network."""
    for wheel in WheelBuilder(str(folder)).build(directory=str(site.parent / "dist"), versions=["standard"]):
        zipfile.ZipFile(wheel).extractall(site)


@pytest.mark.slow
def test_the_tutorials_reward_data_and_plugin_are_trained_with(here, tmp_path):
    (here / "first" / "rewards.py").write_text(code_of("own-reward.md", "python")[0])
    roll_core(here, "check first/rlvr.yaml")
    roll_core(here, "run first/rlvr.yaml", *SHORT)
    last = read_metrics(here / "first" / "output" / "rlvr" / "001" / "metrics.jsonl")[-1]
    assert {"reward/sorted/exact/mean", "reward/sorted/right/mean"} <= last.keys()
    assert last["score/mean"] >= last["reward/sorted/exact/mean"]

    (rows,), (config,) = code_of("own-data.md", "python"), code_of("own-data.md", "yaml")
    (here / "first" / "make_letters.py").write_text(rows)
    (here / "first" / "letters.yaml").write_text(config)
    subprocess.run([sys.executable, "first/make_letters.py"], cwd=here, check=True)
    roll_core(here, "check first/letters.yaml")
    assert "500" in roll_core(here, "audit first/letters.yaml")
    roll_core(here, "run first/letters.yaml", *SHORT)

    package = tmp_path / "roll-reward-letters"
    write_package("reward", "letters", package)
    files = ("roll_reward_letters/reward.py", "roll_reward_letters/config.py", "tests/test_conformance.py")
    for file, code in zip(files, code_of("own-plugin.md", "python"), strict=True):
        assert (package / file).exists()
        (package / file).write_text(code)
    site = tmp_path / "site"
    build(package, site)
    path = os.pathsep.join((str(site), str(here)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    tested = subprocess.run(
        command, cwd=package, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stdout
    roll_core(here, "plugins --check", path=path, ROLL_PLUGINS="roll-reward-letters")
    reward = ["~rewards.sorted.function", "rewards.sorted.reward=letters"]
    roll_core(here, "run first/letters.yaml", *reward, *SHORT, path=path)


@pytest.mark.slow
def test_the_tutorials_environment_is_played_and_trained_in(here):
    roll_core(here, "init agentic play")
    (here / "play" / "environment.py").write_text(code_of("own-environment.md", "python")[0])
    roll_core(here, "check play/agentic.yaml custom_envs.guess.env_config.discount=0.5")
    roll_core(here, "run play/agentic.yaml", *SHORT)
    last = read_metrics(here / "play" / "output" / "agentic" / "001" / "metrics.jsonl")[-1]
    assert 0 <= last["env/guess/success"] <= 1
    assert undocumented(last) == []


@pytest.mark.slow
def test_the_tutorials_pipeline_replaces_one_stage(here, tmp_path):
    package = tmp_path / "roll-pipeline-signs"
    write_package("pipeline", "signs", package)
    pipeline, plugin, schema = code_of("own-pipeline.md", "python")
    for file, code in (("pipeline", pipeline), ("plugin", plugin)):
        (package / f"roll_pipeline_signs/{file}.py").write_text(code)
    assert len(pipeline.splitlines()) < 30
    assert not re.search(r"\b_[a-z]", pipeline), "a private name"
    site = tmp_path / "site"
    build(package, site)
    firsts = []
    for name in ("signs", "rlvr"):
        roll_core(here, f"run first/rlvr.yaml pipeline={name} exp_name={name}", *SHORT, path=str(site))
        firsts.append(read_metrics(here / "first" / "output" / name / "001" / "metrics.jsonl")[0])
    assert firsts[0]["score/mean"] == firsts[1]["score/mean"]
    assert firsts[0]["actor/grad_norm"] != firsts[1]["actor/grad_norm"]
    names: dict[str, Any] = {}
    exec(schema, names)
    roles = {"actor_train": {}, "actor_infer": {}, "critic": {}}
    with pytest.raises(ValueError, match="uses_values"):
        names["SignConfig"].model_validate({"pipeline": "signs", **roles})
    names["SignConfig"].model_validate({"pipeline": "signs", **roles, "uses_values": True})
