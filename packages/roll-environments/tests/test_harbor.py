"""Tasks in Harbor's layout. The containers are directories and namespaces of this host: no Docker runs here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers_environment_runs import metrics, run
from helpers_environments import call, play
from pydantic import ValidationError

from roll_core.cli import main as cli
from roll_core.spec.environment import Reply
from roll_environments.config import HarborConfig
from roll_environments.harbor import Harbor, grader_variables, read_task
from roll_environments.workspaces import Workspace, WorkspaceError, commands_of
from roll_testing import EnvironmentConformance, EnvironmentIntegrity
from roll_testing.integrity import TRICKS

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "agentic" / "harbor"
TEST = """\
if [ "$(cat sum.txt 2>/dev/null)" = 5 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""


def _works() -> str:
    space = Workspace(commands_of("local", {}), image="", workdir="")
    try:
        space.start()
        done = space.run(["true"], timeout_s=60)
        return "" if done.code == 0 else f"exit code {done.code}"
    except WorkspaceError as error:
        return str(error)
    finally:
        space.close()


pytestmark = pytest.mark.skipif(bool(problem := _works()), reason=f"no namespaces on this host: {problem}")


def write(folder: Path, test: str = TEST, config: str = "", **files: str) -> Path:
    """A task. Keys of `files` are paths with `__` as separator."""
    given = {"task.toml": config, "instruction.md": "# canary\n\nWrite 2 + 3 into sum.txt.\n", "tests/test.sh": test}
    for name, text in {**given, **{key.replace("__", "/"): text for key, text in files.items()}}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def harbor(folder: Path, **options: Any) -> Harbor:
    return Harbor(tasks=str(folder), container="local", **options)


def shell(command: str) -> Reply:
    return call("bash", command=command)


def reward(folder: Path, *commands: str) -> tuple[float | None, dict[str, Any]]:
    _, _, score = play(harbor(folder), [*map(shell, commands), "done"])
    assert score is not None
    return score.value, dict(score.detail)


class TestHarbor(EnvironmentConformance):
    varies = False
    seeds = (0, 1)
    timeout_s = 200.0
    folder = Path()

    @pytest.fixture(autouse=True)
    def _task(self, tmp_path: Path) -> None:
        type(self).folder = write(tmp_path / "task")

    def create(self) -> Harbor:
        return harbor(self.folder)

    def create_failing(self) -> Harbor:
        commands = dict(commands_of("local", {}), start=["false"])
        return Harbor(tasks=str(self.folder), container=commands)

    def replies(self, seed: int) -> Sequence[str | Reply]:
        return [shell("echo 5 > sum.txt"), "done"]


class TestTricks(EnvironmentIntegrity):
    """Every trick, alone."""

    pytestmark = pytest.mark.slow
    timeout_s = 280.0
    seeds = (0,)

    @pytest.fixture(autouse=True)
    def _task(self, tmp_path: Path) -> None:
        self.folder = write(tmp_path / "task", config="[verifier]\ntimeout_sec = 10.0\n")

    def create(self) -> Harbor:
        return harbor(self.folder, command_timeout_s=3.0)


def test_tricks_in_one_episode_get_no_reward(tmp_path: Path) -> None:
    folder = write(tmp_path / "task")
    value, _ = reward(folder, "; ".join(f"({trick.sh}\n)" for trick in TRICKS if trick.sh))
    assert value == 0


def test_no_process_of_the_policy_sees_the_tests(tmp_path: Path) -> None:
    """A process that waits for the tests would copy them, and write the result."""
    watcher = "while :; do [ -e /tests/test.sh ] && echo seen > /app/seen; echo 1 > /logs/verifier/reward.txt; done"
    test = "sleep 0.3; [ -e seen ] && echo 9 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    folder = write(tmp_path / "task", test)
    environment = harbor(folder)
    entered = [*environment.reset({}, 0).enter, "sh", "-c", f"setsid sh -c '{watcher}' & sleep 60"]
    with subprocess.Popen(entered, start_new_session=True) as agent:  # as the agent `command` runs its program
        try:
            time.sleep(0.3)
            os.killpg(agent.pid, signal.SIGKILL)
            assert environment.score().value == 0
        finally:
            agent.kill()
            environment.close()


def test_a_broken_grader_is_a_reward_only_by_the_policy(tmp_path: Path) -> None:
    """A grader that hangs on a file of the policy gives 0. One that never gives a reward fails the episode."""
    test = "cat pipe 2>/dev/null; echo 1 > /logs/verifier/reward.txt"
    folder = write(tmp_path / "task", test, "[verifier]\ntimeout_sec = 2")
    assert reward(folder, "true") == (1.0, {"broken_grader": 0.0, "task": "task"})
    assert reward(folder, "mkfifo pipe") == (0.0, {"broken_grader": 1.0, "task": "task"})
    results = "/logs/verifier/reward"
    for test in ("exit 0", f"echo nan > {results}.txt", f"echo '{{\"reward\": 1e300}}' > {results}.json"):
        with pytest.raises(RuntimeError, match="task"):
            reward(write(tmp_path / "task", test))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("reward.txt", "0.25", 0.25),
        ("reward.json", '{"reward": 0.5, "style": 2}', 0.5),
        ("reward.json", '{"accuracy": 0.75}', 0.75),
        ("reward.json", "1", 1.0),
    ],
)
def test_reward_files_are_read_as_harbor_writes_them(tmp_path: Path, name: str, text: str, value: float) -> None:
    assert reward(write(tmp_path / "task", f"echo '{text}' > /logs/verifier/{name}"))[0] == value


def test_files_and_variables_of_a_task_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "s3cret")
    monkeypatch.setenv("JUDGE", "4")
    config = '[environment]\nworkdir = "/testbed/code"\n[verifier]\nenv = {WANTED = "${JUDGE}"}'
    test = '[ "$(cat n.txt)" = "$WANTED" ] && echo 1 > /logs/verifier/reward.txt'
    folder = write(tmp_path / "task", test, config, environment__Dockerfile="FROM scratch")
    (folder / "environment" / "n.txt").write_text("4")
    _, turns, score = play(harbor(folder), [shell("pwd; ls; env; echo hidden > /usr/x"), "done"])
    shown = turns[0].messages[0]["content"]
    assert "/testbed/code" in shown
    assert "n.txt" in shown
    assert "Dockerfile" not in shown
    assert "s3cret" not in shown
    assert "Read-only" in shown
    assert score is not None
    assert score.value == 1


def test_an_unset_variable_of_a_grader_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE", raising=False)
    folder = write(tmp_path / "task", config='[verifier]\nenv = {WANTED = "${JUDGE}"}')
    environment = harbor(folder)
    with pytest.raises(ValueError, match=r"task\.toml: verifier\.env\.WANTED: .*JUDGE"):
        environment.reset({}, 0)
    write(folder, config='[verifier]\nenv = {A = "${JUDGE:-4}", B = "4 ${JUDGE}", C = "$JUDGE"}')
    assert grader_variables(read_task(folder)) == {"A": "4", "B": "4 ${JUDGE}", "C": "$JUDGE"}
    monkeypatch.setenv("JUDGE", "")
    assert grader_variables(read_task(folder))["A"] == ""


def test_commands_have_limits_of_time_and_output(tmp_path: Path) -> None:
    environment = harbor(write(tmp_path / "task"), command_timeout_s=1.0, max_output=100)
    _, turns, _ = play(environment, [shell("yes"), shell("sleep 60"), shell("exit 125"), call("python"), "done"])
    texts = [turn.messages[0]["content"] for turn in turns[:4]]
    assert [len(text) < 300 for text in texts] == [True] * 4
    assert "[exit code 125]" in texts[2]
    assert [turn.metrics["tool_errors"] for turn in turns[:4]] == [1, 1, 0, 1]


def test_a_killed_environment_leaves_no_container(tmp_path: Path) -> None:
    folder = write(tmp_path / "task")
    code = "import sys; from roll_environments.harbor import Harbor\n"
    code += f"e = Harbor(tasks={str(folder)!r}, container='local')\n"
    code += "e.reset({}, 0); print(e.workspace._names['folder'], flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        container = Path(process.stdout.readline().strip())
        assert (container / "data").is_dir()
        os.killpg(process.pid, signal.SIGKILL)
    end = time.monotonic() + 60
    while container.exists():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"task.toml": None}, "task.toml"),
        ({"task.toml": "[verifier\n"}, "task.toml"),
        ({"task.toml": "verifier = 3"}, "verifier"),
        ({"task.toml": '[verifier]\ntimeout_sec = "long"'}, "verifier.timeout_sec"),
        ({"task.toml": '[[steps]]\nname = "one"'}, "steps"),
        ({"task.toml": '[verifier]\nenvironment_mode = "separate"'}, "verifier.environment_mode"),
        ({"task.toml": "[environment]\ngpus = 1"}, "environment.gpus"),
        ({"task.toml": '[environment]\nos = "windows"'}, "environment.os"),
        ({"instruction.md": None}, "instruction.md"),
        ({"tests/test.sh": None}, "tests/test.sh"),
    ],
    ids=lambda value: value if isinstance(value, str) else "in",
)
def test_mistakes_in_a_task_are_located(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str | None], found: str
) -> None:
    folder = write(tmp_path / "tasks" / "one")
    for name, text in change.items():
        (folder / name).unlink()
        if text is not None:
            (folder / name).write_text(text)
    assert cli.main(["envs", "play", "harbor", f"tasks={folder.parent}", "container=local"]) == 2
    shown = "".join(capsys.readouterr().err.split())  # paths are wrapped
    assert "ROLL-C014" in shown
    assert str(folder) in shown
    assert found in shown


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"tasks": "/no/such/tasks"}, "/no/such/tasks"),
        ({"container": {key: ["no-such-docker"] for key in ("start", "exec", "stop", "remove")}}, "container.start"),
        ({"mounts": {"/no/such/host": "/agent"}}, "/no/such/host"),
        ({"mounts": {"/tmp": "agent"}}, "agent"),
        ({"mounts": {"/tmp": "/agent"}, "container": "docker"}, "mounts"),
    ],
)
def test_mistakes_in_the_options_are_located(tmp_path: Path, options: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        HarborConfig.model_validate({"tasks": str(write(tmp_path / "task")), "container": "local"} | options)


def test_a_container_that_does_not_start_is_named(tmp_path: Path) -> None:
    commands = dict(commands_of("local", {}), start=["sh", "-c", "echo no daemon; exit 7"])
    environment = Harbor(tasks=str(write(tmp_path / "task")), container=commands)
    with pytest.raises(WorkspaceError, match=r"container\.start"):
        environment.reset({}, 0)
    environment.close()


def test_other_container_commands_get_names_and_image(tmp_path: Path) -> None:
    """A wrapper that logs its words and runs programs in a directory: the words that Docker would get."""
    log, wrapper = tmp_path / "log", tmp_path / "container"
    wrapper.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\nif [ "$1" = exec ]; then shift 3; cd {tmp_path}/task && exec "$@"; fi\n'
    )
    wrapper.chmod(0o755)
    program = str(wrapper)
    commands = {
        "build": [program, "build", "{image}", "{context}"],
        "start": [program, "run", "{name}", "{image}"],
        "exec": [program, "exec", "{name}", "--workdir={workdir}"],
        "stop": [program, "restart", "{name}"],
        "remove": [program, "rm", "{name}"],
    }
    folder = write(tmp_path / "task", config='[environment]\nworkdir = "/x"', environment__Dockerfile="FROM scratch")
    environment = Harbor(tasks=str(folder), container=commands)
    environment.reset({}, 0)
    turn = environment.step(shell("echo hello"))
    environment.close()
    assert turn.messages[0]["content"] == "hello\n"
    build, start, entered, remove = log.read_text().splitlines()
    _, image, context = build.split()
    assert Path(context) == folder / "environment"
    name = start.split()[1]
    assert start.split() == ["run", name, image]
    assert entered.startswith(f"exec {name} --workdir=/x bash -c")
    assert remove == f"rm {name}"
    words = commands_of("docker", {})
    assert words["exec"][:3] == ["docker", "exec", "-i"]
    assert words["stop"] == ["docker", "restart", "-t", "0", "{name}"]


def test_the_solutions_of_the_example_solve_it() -> None:
    for number, name in enumerate(("nine", "seven")):
        solution = (EXAMPLES / "tasks" / name / "solution" / "solve.sh").read_text()
        environment = harbor(EXAMPLES / "tasks")
        environment.reset({"task": name}, 1 - number)
        environment.step(shell(solution))
        assert environment.score().value == 1
        environment.close()
        assert read_task(EXAMPLES / "tasks" / name).image


def test_an_agent_runs_in_the_container_of_the_task(tmp_path: Path) -> None:
    """The agent asks the policy in the container, and its file there is graded."""
    options = {"tasks": str(EXAMPLES / "tasks"), "container": "local", "mounts": {str(EXAMPLES): "/agent"}}
    command = [sys.executable, "/agent/agent.py"]
    environment = {"environment": "harbor", "env_config": options, "agent": "command"}
    environment |= {"agent_config": {"command": command}, "isolation": "thread", "max_retries": 0}
    line = metrics(run(tmp_path, environment, max_actions_per_traj=1, max_tokens_per_step=1))
    assert line["env/env/turns/max"] == 1
    assert line["agent/env/calls/mean"] == 1
    assert 0 <= line["env/env/score/mean"] <= 1


SUM = {
    "instruction": "Write 2 + 3 into sum.txt.",
    "image": "any",
    "test": '[ "$(cat sum.txt)" = "$(cat /tests/five)" ]',
}


@pytest.mark.parametrize(("number", "value"), [(5, 1.0), (4, 0.0)])
def test_a_row_is_a_task(number: int, value: float) -> None:
    environment = Harbor(container="local")
    row = SUM | {"id": "sums/1", "test_files": {"five": "5\n"}, "workdir": None}
    opening = environment.reset(row, 0)
    assert opening.messages[0]["content"] == SUM["instruction"]
    environment.step(shell(f"echo {number} > sum.txt; exit 0"))
    score = environment.score()
    environment.close()
    assert (score.value, score.detail["task"], score.detail["broken_grader"]) == (value, "sums-1", 0.0)


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({"test": None}, "test"),
        ({"image": 3}, "image"),
        ({"test_timeout_s": "long"}, "test_timeout_s"),
        ({"test_files": {"../x": ""}}, "test_files"),
    ],
)
def test_mistakes_in_a_row_name_the_column(change: dict[str, Any], column: str) -> None:
    with pytest.raises(ValueError, match=f"column {column} "):
        Harbor(container="local").reset(SUM | change, 0)


def test_a_policy_that_breaks_its_container_gets_no_reward(tmp_path: Path) -> None:
    """A container that cannot be stopped, as one whose entry point was removed, and a command that is too long."""
    local = commands_of("local", {})
    stop = ["sh", "-c", 'test ! -e "$1"/data/app/broken && shift && exec "$@"', "sh", "{folder}", *local["stop"]]
    environment = Harbor(tasks=str(write(tmp_path / "task", "echo 1 > /logs/verifier/reward.txt")), container={
        **local, "stop": stop
    })  # fmt: skip
    environment.reset({}, 0)
    turn = environment.step(shell("true " + "x" * 300_000))
    assert turn.metrics["tool_errors"] == 1
    environment.step(shell("touch broken"))
    score = environment.score()
    environment.close()
    assert (score.value, score.detail["broken_grader"]) == (0.0, 1.0)


def test_files_of_an_image_are_not_replaced(tmp_path: Path) -> None:
    folder = write(tmp_path / "task", config='[environment]\ndocker_image = "own"', environment__Dockerfile="FROM own")
    commands = {key: ["sh", "-c", f"echo {key} >> {tmp_path}/log", "sh"] for key in ("start", "exec", "stop", "remove")}
    for image, words in (("{image}", ["start"]), ("", ["start", "exec"])):
        commands["start"] = ["sh", "-c", f"echo start >> {tmp_path}/log", image]
        environment = Harbor(tasks=str(folder), container=commands)
        environment.reset({}, 0)
        assert (tmp_path / "log").read_text().split() == words
        environment.close()
        (tmp_path / "log").unlink()


def test_a_process_that_keeps_the_output_delays_no_command(tmp_path: Path) -> None:
    commands = {**commands_of("local", {}), "exec": ["sh", "-c", 'shift; exec "$@"', "sh", "{folder}"]}
    space = Workspace(commands, image="", workdir="")
    done = space.run(["sh", "-c", "sleep 60 & echo hello"], timeout_s=50.0)
    space.close()
    assert (done.code, done.output) == (0, b"hello\n")
