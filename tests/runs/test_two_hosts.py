"""Runs over two hosts, one of which is lost in the middle.

A host is a set of namespaces (network, name, processes, mounts) with a Ray node in it; a pair of virtual interfaces is
the cable:

    driver, head, rank 0 or 1     roll-a 10.77.0.1 ═══════ 10.77.0.2 roll-b     the other rank

Where namespaces are refused these tests are skipped. Two nodes of Ray on one host, of which one is killed, are there
everywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import psutil
import pytest
import yaml

from roll_core.host import hostname

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(2400)]
PROGRESS_S = 600
"""Other tests may use the cores: a run of 20 s took 240 s beside seven busy programs on two cores."""

MAKE_HOST = """
hostname "$1" && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs "$2" && ip link set lo up && echo ready &&
exec sleep infinity
"""
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_AUTH_MODE": "disabled",  # which a token in somebody's home would enable
    # A host that does not answer is given up after half a minute; one whose node is killed is known by its sockets.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "6",
}
NODE = ["--num-cpus=2", "--object-store-memory=100000000"]


class Hosts(Protocol):
    address: str
    """Of Ray."""
    lost: str
    """Name of the host that `lose` takes away."""

    def command(self, words: Sequence[str]) -> list[str]: ...

    def lose(self) -> None: ...


class Host:
    """Everything in it ends with its first process."""

    def __init__(self, name: str, scratch: Path) -> None:
        self.name = name
        spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        make = ["unshare", *spaces, "sh", "-c", MAKE_HOST, "sh", name, str(scratch)]
        self._keeper = subprocess.Popen(make, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._keeper.stdout is not None
        if (said := self._keeper.stdout.readline()) != "ready\n":
            self.close()
            pytest.skip(f"namespaces are refused: {said.strip()}")
        (first,) = psutil.Process(self._keeper.pid).children()
        self.pid = first.pid

    def command(self, *words: str) -> list[str]:
        """To be run outside, runs inside, in the folder in which it is run outside."""
        entered = ["nsenter", "-t", str(self.pid), "-n", "-u", "-m", "-p", "env", f"--chdir={Path.cwd()}"]
        return [*entered, *words]

    def run(self, *words: str) -> None:
        done = subprocess.run(
            self.command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.communicate()


class CabledHosts:
    address = "10.77.0.1:6379"
    lost = "roll-b"

    def __init__(self, scratch: Path) -> None:
        for tool in ("unshare", "nsenter", "ip"):
            if shutil.which(tool) is None:
                pytest.skip(f"there is no {tool} to make hosts with")
        with contextlib.ExitStack() as made:
            self._a, self._b = (
                made.enter_context(contextlib.closing(Host(name, scratch))) for name in ("roll-a", self.lost)
            )
            self._lay_cable()
            self._start_ray(scratch)
            self._hosts = made.pop_all()

    def _lay_cable(self) -> None:
        cable = ["ip", "link", "add", "cable", "netns", str(self._a.pid), "type", "veth", "peer", "name", "cable"]
        laid = subprocess.run(
            [*cable, "netns", str(self._b.pid)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if laid.returncode:
            pytest.skip(f"pairs of virtual interfaces are refused: {laid.stdout.strip()}")
        for at, host in enumerate((self._a, self._b), start=1):
            host.run("ip", "address", "add", f"10.77.0.{at}/24", "dev", "cable")
            host.run("ip", "link", "set", "cable", "up")
            host.run("ip", "route", "add", "default", "dev", "cable")

    def _start_ray(self, scratch: Path) -> None:
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *NODE]
        self._a.run(
            *ray,
            "--head",
            "--port=6379",
            "--node-ip-address=10.77.0.1",
            "--include-dashboard=false",
            f"--temp-dir={scratch}",
        )
        self._b.run(*ray, f"--address={self.address}", "--node-ip-address=10.77.0.2")

    def command(self, words: Sequence[str]) -> list[str]:
        return self._a.command(*words)

    def lose(self) -> None:
        """Pull the cable: nothing on the other host is told."""
        self._b.run("ip", "link", "set", "cable", "down")

    def close(self) -> None:
        self._hosts.close()


class RayNodes:
    """Two nodes of Ray on this host, started by a process of their own.

    Ray reads its variables once per process. Where another test has started a run's own Ray in this process, a cluster
    started here would listen on 127.0.0.1 only, which a driver replaces by the host's address.
    """

    lost = hostname()
    PROGRAM = """
import sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 2, "object_store_memory": 100_000_000}
cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
second = cluster.add_node(**node)
print("address", cluster.address, flush=True)
if sys.stdin.readline():
    cluster.remove_node(second, allow_graceful=False)
    print("lost", flush=True)
    sys.stdin.readline()
cluster.shutdown()
"""

    def __init__(self) -> None:
        self._keeper = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self._read("address")

    def command(self, words: Sequence[str]) -> list[str]:
        return list(words)

    def lose(self) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.write("lose\n")
        self._keeper.stdin.flush()
        self._read("lost")

    def close(self) -> None:
        self._keeper.communicate(timeout=120)

    def _read(self, word: str) -> str:
        assert self._keeper.stdout is not None
        for line in self._keeper.stdout:
            found, _, rest = line.strip().partition(" ")
            if found == word:
                return rest
        raise AssertionError(f"the process of the nodes ended with {self._keeper.wait()} before it printed {word!r}")


@pytest.fixture
def clean_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.copy():
        if name.startswith("RAY_"):
            monkeypatch.delenv(name)
    for name, value in RAY.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def cabled(clean_ray: None) -> Iterator[CabledHosts]:
    # Sockets lie in it, whose paths must be short.
    scratch = Path(tempfile.mkdtemp(prefix="roll-", dir="/tmp"))
    try:
        with contextlib.closing(CabledHosts(scratch)) as hosts:
            yield hosts
    finally:
        shutil.rmtree(scratch)


@pytest.fixture(
    params=[
        pytest.param("cable pulled", marks=pytest.mark.slow),
        pytest.param("node killed", marks=pytest.mark.slow(ci=True)),
    ]
)
def hosts(request: pytest.FixtureRequest, clean_ray: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    if request.param == "cable pulled":
        yield request.getfixturevalue("cabled")
        return
    monkeypatch.setenv("RAY_health_check_failure_threshold", "10")
    with contextlib.closing(RayNodes()) as nodes:
        yield nodes


def start(runs, hosts: Hosts, config) -> subprocess.Popen:
    path = runs.folder / "run.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    words = [sys.executable, "-m", "roll_core", "run", str(path)]
    env = os.environ | {"RAY_ADDRESS": hosts.address, "PYTHONFAULTHANDLER": "1"}
    return subprocess.Popen(hosts.command(words), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ends(process: subprocess.Popen, code: int, folder: Path) -> str:
    try:
        output, _ = process.communicate(timeout=PROGRESS_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the run has not ended after {PROGRESS_S} s\n{aborted(process, folder)}")
    assert process.returncode == code, output
    assert "Traceback" not in output
    return output


def aborted(process: subprocess.Popen, folder: Path) -> str:
    """Innermost frames of the threads of the worker that aborted first, then the output of the run."""
    output = output_of_aborted(process)
    # The logs have the Python stacks of workers that crashed.
    logs = [log.read_text(encoding="utf-8") for log in sorted(folder.glob("output/*/*/log.txt"))]
    threads = [thread for log in logs for thread in re.split(r"\n.*[Tt]hread 0x\w+", log)[1:]]
    innermost = ["\n".join(re.findall(r'File ".*?([^/]+/[^/]+", line .*)', thread)[:4]) for thread in threads]
    return "\n\n".join([*innermost, output])


def output_of_aborted(process: subprocess.Popen) -> str:
    workers = [each for each in psutil.Process().children(recursive=True) if each.name().startswith("ray::RayHost")]
    for worker in workers:  # whose stack is then part of the driver's error
        with contextlib.suppress(psutil.Error):
            worker.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=60 if workers else 0)[0]
    for driver in (psutil.Process(process.pid), *psutil.Process(process.pid).children()):  # below nsenter or itself
        if "roll_core" in driver.cmdline():
            driver.send_signal(signal.SIGABRT)
    return process.communicate(timeout=60)[0]


def test_run_that_loses_a_host_names_it_and_continues(local_runs, hosts):
    runs = local_runs
    config = runs.sft(executor="ray", num_gpus_per_node=1, save_steps=1, max_steps=10_000)
    # Each of the two nodes counts all cores of this host as its own.
    config["system_envs"] = {"OMP_NUM_THREADS": "1"}
    config["sft_train"] |= {"device_mapping": [0, 1]}
    config["sft_train"]["training_args"] |= {"lr_scheduler_type": "constant"}
    process = start(runs, hosts, config)
    checkpoints = runs.folder / "output" / "sft" / "001" / "checkpoints"
    deadline = time.monotonic() + PROGRESS_S
    while not list(checkpoints.glob("step-[2-9]*")):
        assert process.poll() is None, process.communicate()[0]
        if time.monotonic() > deadline:
            pytest.fail(f"no second checkpoint after {PROGRESS_S} s\n{aborted(process, runs.folder)}")
        time.sleep(0.1)
    hosts.lose()
    said = " ".join(ends(process, 1, runs.folder).split())
    ended = r"exited (during \w+|between two calls): Ray reports that its host is lost"
    gone = rf"sft_train rank [01] on {hosts.lost} {ended}"
    assert re.search(gone, said), said
    record = json.loads((checkpoints.parent / "run.json").read_text(encoding="utf-8"))
    assert record["outcome"] == "failed"
    assert re.search(gone, record["error"]["message"])

    done = max(int(path.name.partition("-")[2]) for path in checkpoints.glob("step-*"))
    config["sft_train"] |= {"device_mapping": [0]}
    config["sft_train"]["training_args"] |= {"gradient_accumulation_steps": 2}
    ends(start(runs, hosts, config | {"max_steps": done + 2, "resume_from_checkpoint": "auto"}), 0, runs.folder)
    resumed = json.loads((runs.folder / "output/sft/002/run.json").read_text(encoding="utf-8"))
    assert resumed["resumed_step"] == done
    whole = runs.ok(config | {"max_steps": done + 2, "exp_name": "whole", "executor": "local"})
    losses = [
        [line["train/loss"] for line in read(folder)[-2:]]
        for folder in (runs.folder / "output/sft/002", whole.run_dir.path)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def read(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_trainer_and_engine_sit_on_different_hosts(local_runs, cabled):
    runs = local_runs
    config = runs.rlvr(executor="ray", num_gpus_per_node=1, max_steps=2)
    config["actor_train"] |= {"device_mapping": [0]}
    config["actor_infer"] |= {"device_mapping": [1]}
    ends(start(runs, cabled, config), 0, runs.folder)
    record = json.loads((runs.folder / "output/rlvr/001/run.json").read_text(encoding="utf-8"))
    assert set(record["weight_transports"].values()) == {"collective"}
    assert len(read(runs.folder / "output/rlvr/001")) == 2
