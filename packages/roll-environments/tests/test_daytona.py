"""Tasks in containers of Daytona's API: its library against a local server, `./run test-engines daytona`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers_environments import call, play
from pydantic import ValidationError

from roll_core.spec.environment import Reply
from roll_environments.config import HarborConfig
from roll_environments.harbor import Harbor
from roll_environments.workspaces import WorkspaceError
from roll_testing import EnvironmentConformance, EnvironmentIntegrity

pytest.importorskip("daytona")
server_daytona = pytest.importorskip("server_daytona")
# aiohttp's reader of multipart bodies calls its own deprecated function where a chunk ends in a boundary.
pytestmark = pytest.mark.filterwarnings("ignore:unread_data:DeprecationWarning")

CONFIG = '[environment]\ndocker_image = "any"\n[verifier]\ntimeout_sec = 10.0\n'
TEST = '[ "$(cat sum.txt)" = 5 ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt'


def write(folder: Path, test: str = TEST, config: str = CONFIG) -> Path:
    files = {"task.toml": config, "instruction.md": "Write 2 + 3 into sum.txt.", "tests/test.sh": test}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def shell(command: str) -> Reply:
    return call("bash", command=command)


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    with server_daytona.serving_daytona() as served, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SANDBOX_TOKEN", server_daytona.TOKEN)
        yield served
        assert not served.states  # no container is left


def harbor(service: Any, folder: Path, **options: Any) -> Harbor:
    container = {"api": "daytona", "url": f"{service.url}/api", "token": "SANDBOX_TOKEN"}
    return Harbor(tasks=str(folder), container=container, **options)


class TestDaytona(EnvironmentConformance):
    varies = False
    seeds = (0, 1)
    timeout_s = 200.0

    @pytest.fixture(autouse=True)
    def _task(self, tmp_path: Path, service: Any) -> None:
        type(self).folder, type(self).service = write(tmp_path / "task"), service

    def create(self) -> Harbor:
        return harbor(self.service, self.folder)

    def replies(self, seed: int) -> Sequence[str | Reply]:
        return [shell("echo 5 > sum.txt"), "done"]


class TestDaytonaTricks(EnvironmentIntegrity):
    """Every trick, alone."""

    pytestmark = pytest.mark.slow
    timeout_s = 280.0
    seeds = (0,)

    @pytest.fixture(autouse=True)
    def _task(self, tmp_path: Path, service: Any) -> None:
        self.folder, self.service = write(tmp_path / "task"), service

    def create(self) -> Harbor:
        return harbor(self.service, self.folder, command_timeout_s=3.0)


@pytest.mark.parametrize(("number", "value"), [(5, 1.0), (4, 0.0)])
def test_the_tests_grade_the_files_of_the_container(tmp_path: Path, service: Any, number: int, value: float) -> None:
    _, turns, score = play(
        harbor(service, write(tmp_path / "task")), [shell("ls /tests; env"), shell(f"echo {number} > sum.txt"), "done"]
    )
    assert score is not None
    assert (score.value, score.detail["broken_grader"]) == (value, 0.0)
    assert "test.sh" not in turns[0].messages[0]["content"]
    assert server_daytona.TOKEN not in turns[0].messages[0]["content"]


def test_commands_have_limits_of_time_and_output(tmp_path: Path, service: Any) -> None:
    environment = harbor(service, write(tmp_path / "task"), command_timeout_s=2.0, max_output=100)
    words = ["sleep 60 & echo left", "sleep 60", "yes | head -c 99999", "exit 9"]
    _, turns, _ = play(environment, [*map(shell, words), "done"])
    texts = [turn.messages[0]["content"] for turn in turns[:4]]
    assert texts[0] == "left\n"
    assert [turn.metrics["tool_errors"] for turn in turns[:4]] == [0, 1, 0, 0]
    assert len(texts[2]) <= 100
    assert "[exit code 9]" in texts[3]


def test_no_process_of_the_policy_sees_the_tests(tmp_path: Path, service: Any) -> None:
    watcher = "while :; do [ -e /tests/test.sh ] && echo seen > /app/seen; done"
    test = "sleep 0.3; [ -e seen ] && echo 9 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    environment = harbor(service, write(tmp_path / "task", test))
    environment.reset({}, 0)
    environment.step(shell(f"setsid sh -c '{watcher}' > /dev/null 2>&1 &"))
    assert environment.score().value == 0
    environment.close()


def test_an_agents_program_gets_its_input_and_endpoint(tmp_path: Path, service: Any) -> None:
    environment = harbor(service, write(tmp_path / "task", config=f"{CONFIG}[agent]\n"))
    entered = [*environment.reset({}, 0).enter, "sh", "-c", "cat; echo $OPENAI_BASE_URL; echo 5 > sum.txt; exit 3"]
    variables = {**os.environ, "OPENAI_BASE_URL": "http://policy/v1"}
    done = subprocess.run(entered, input=b"hello\n", env=variables, capture_output=True, check=False)
    assert (done.stdout, done.returncode) == (b"hello\nhttp://policy/v1\n", 3)
    assert environment.score().value == 1
    environment.close()


def test_a_killed_environment_leaves_no_container(tmp_path: Path, service: Any) -> None:
    folder = write(tmp_path / "task")
    container = {"api": "daytona", "url": f"{service.url}/api", "token": "SANDBOX_TOKEN"}
    code = "import sys; from roll_environments.harbor import Harbor\n"
    code += f"e = Harbor(tasks={str(folder)!r}, container={container!r})\n"
    code += "e.reset({}, 0); print('started', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        assert service.states
        os.killpg(process.pid, signal.SIGKILL)
    end = time.monotonic() + 60
    while service.states:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_missing_token_is_named(tmp_path: Path, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = harbor(service, write(tmp_path / "task"))
    monkeypatch.setenv("SANDBOX_TOKEN", "wrong")
    with pytest.raises(WorkspaceError, match=r"container\.start: .*Unauthorized"):
        environment.reset({}, 0)
    monkeypatch.delenv("SANDBOX_TOKEN")
    with pytest.raises(WorkspaceError, match=r"container\.token: .*SANDBOX_TOKEN"):
        environment.reset({}, 0)
    environment.close()


def test_tasks_without_an_image_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "task", config="")
    container = {"api": "daytona"}
    with pytest.raises(ValidationError, match=r"task\.toml: environment\.docker_image"):
        HarborConfig.model_validate({"tasks": str(folder), "container": container})
    HarborConfig.model_validate({"tasks": str(write(tmp_path / "other")), "container": container})
