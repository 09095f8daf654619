"""The launchers start commands that exist with configs that pass `check`; the SLURM script runs with a stand-in."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import roll_core as roll
from roll_core.cli.main import main
from roll_core.runtime.records.record import read_record
from roll_testing.runs import Runs

REPOSITORY = Path(__file__).parents[2]
LAUNCHERS = REPOSITORY / "launchers"
SCRIPTS = sorted(LAUNCHERS.glob("*.sh"))


def load(name):
    return yaml.safe_load((LAUNCHERS / name).read_text())


def started(name):
    """Words of the `roll-core` commands of a launcher, with the variables that it sets or documents."""
    if name == "compose.yaml":
        words = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", each) for each in load(name)["services"]["run"]["command"]]
        return [words]
    text = {"kuberay.yaml": lambda: load(name)["spec"]["entrypoint"], "skypilot.yaml": lambda: load(name)["run"]}
    lines = text[name]() if name in text else (LAUNCHERS / name).read_text().replace("\\\n", "")
    config = re.search(r"recipes/\S+\.yaml", (LAUNCHERS / name).read_text())[0]
    values = {"$config": config, "$CONFIG": config, "$STORE": "memory://roll"}
    commands = []
    for line in lines.splitlines():
        if "roll-core run" in line and not line.startswith("#"):
            words = shlex.split(line.removesuffix(" &"))[shlex.split(line).index("roll-core") + 1 :]
            words = [re.sub(r"\$\w+", lambda found: values[found[0]], each) for each in words if each != "$@"]
            commands.append(words)
    return commands


@pytest.mark.parametrize("name", ["slurm.sh", "ray_job.sh", "kuberay.yaml", "skypilot.yaml", "compose.yaml"])
def test_launcher_runs_a_checked_config_and_resumes_it(name, monkeypatch, capfd):
    monkeypatch.chdir(REPOSITORY)
    ((command, *words),) = started(name)
    assert command == "run"
    assert main(["check", "--no-files", *words]) == 0, capfd.readouterr()
    (config, *overrides) = words
    checked = roll.check(config, overrides, files=False).config
    assert checked.resume_from_checkpoint == "auto"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda each: each.name)
def test_a_script_is_valid_bash_and_explains_its_arguments(script):
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False, env={})
    assert done.returncode == 1
    assert "usage:" in done.stderr


def test_the_nodes_of_a_launcher_have_the_devices_of_its_config():
    config = yaml.safe_load((REPOSITORY / "recipes/moe_30b_a3b/gspo.yaml").read_text())
    slurm = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", (LAUNCHERS / "slurm.sh").read_text(), re.MULTILINE))
    (group,) = load("kuberay.yaml")["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    per_node = config["num_gpus_per_node"]
    assert slurm["gpus-per-node"] == str(per_node) == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert slurm["nodes"] == str(group["replicas"])
    assert config["actor_infer"]["device_mapping"] == f"list(range(16,{group['replicas'] * per_node}))"


def test_launcher_images_and_ray_version_match_the_repository():
    built = re.findall(r"^FROM (\S+)", (LAUNCHERS / "ray.Dockerfile").read_text(), re.MULTILINE)
    assert built == ["${IMAGE}"]
    (ray,) = re.findall(r'"ray\[default\]==([\d.]+)"', (LAUNCHERS / "ray.Dockerfile").read_text())
    assert f"\nray=={ray}\n" in (REPOSITORY / "docker/requirements/cuda-vllm.txt").read_text()
    assert load("kuberay.yaml")["spec"]["rayClusterSpec"]["rayVersion"] == ray


def test_hadolint_passes():
    hadolint = Path(sys.executable).with_name("hadolint")
    words = [hadolint, "--config", REPOSITORY / "docker" / "hadolint.yaml", LAUNCHERS / "ray.Dockerfile"]
    done = subprocess.run([str(each) for each in words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# -- SLURM -------------------------------------------------------------------------------------------------------------

COMMANDS = {
    "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
    "scontrol": '[ "$1" = show ] && echo here || echo "$@" >> scontrol.txt',
    "hostname": "echo 127.0.0.1 10.9.9.9",
}
"""Stand-ins for SLURM's commands, for a job on one host."""


@pytest.fixture
def job(tmp_path):
    """Start the script in a job of one host; call it with overrides. Returns the process."""
    runs = Runs(tmp_path, "ray")
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(runs.sft(max_steps=2, output_dir=str(tmp_path / "output"))))
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, text in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    home = Path(sys.prefix)
    activate = tmp_path / "bin" / "activate"
    activate.parent.mkdir()
    activate.write_text(f'export PATH="{commands}:{home}/bin:$PATH"\n')
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env |= {"ROLL_ENV": str(tmp_path), "ROLL_RAY_PORT": port, "SLURM_JOB_NODELIST": "here", "SLURM_JOB_ID": "7"}
    processes = []

    def start(*overrides):
        words = ["bash", str(LAUNCHERS / "slurm.sh"), "sft.yaml", *overrides]
        with (tmp_path / "log.txt").open("a") as log:
            process = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=log, stderr=log, start_new_session=True)
        processes.append(process)
        return process

    yield start
    for each in processes:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.ray
def test_slurm_script_saves_requeues_and_resumes_at_sigterm(job, tmp_path):
    first = job("max_steps=4000")
    metrics = tmp_path / "output" / "sft" / "001" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        assert first.poll() is None, (tmp_path / "log.txt").read_text()
        time.sleep(0.2)
    first.send_signal(signal.SIGTERM)  # as SLURM does: to the script alone
    assert first.wait(120) == 75, (tmp_path / "log.txt").read_text()
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 7\n"
    saved = read_record(metrics.parent / "run.json")
    assert saved["outcome"] == "preempted"
    steps = saved["steps_done"] + 2
    assert job(f"max_steps={steps}").wait(180) == 0, (tmp_path / "log.txt").read_text()
    resumed = read_record(tmp_path / "output" / "sft" / "002" / "run.json")
    assert (resumed["outcome"], resumed["steps_done"]) == ("finished", steps)
    assert resumed["resumed_step"] == saved["steps_done"]
