"""`harbor`: tasks in Harbor's layout or rows with an image and a test, each in a container, graded by the tests.

    reset: start the container      step: run a command, or end      score: stop ──► copy the tests ──► run test.sh

All processes of the policy and of its agent are gone before the tests are copied into the container.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import tomllib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.spec.environment import Environment, Opening, Turn
from roll_core.types import Reward
from roll_environments.tool_calls import ToolCallError, correction, tool_calls, tool_schema, tool_turn
from roll_environments.workspaces import Workspace, WorkspaceError, commands_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.environment import Message, Reply, Task
    from roll_environments.tool_calls import ToolCall

TESTS, RESULTS = "/tests", "/logs/verifier"
VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
TOOL = tool_schema("bash", "Run a command of bash in the container.", {"command": "The command."})
UNSUPPORTED = {
    ("environment", "gpus"): "a number of GPUs",
    ("environment", "tpu"): "a TPU",
    ("environment", "mcp_servers"): "MCP servers",
    ("verifier", "environment"): "a verifier of its own",
    ("verifier", "collect"): "commands before the collection of artifacts",
}
"""Keys of task.toml without an effect here, which change what a task is."""
READ = """\
for f in reward.json reward.txt; do
  if [ -f "$1/$f" ] && [ ! -L "$1/$f" ]; then echo "$f"; head -c 65536 "$1/$f"; exit 0; fi
done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """A directory of a task, or a row."""

    name: str
    where: str
    """The file, or the row, for errors."""
    instruction: str
    image: str
    """Image of the container. Empty if `environment` has files or a Dockerfile for it."""
    workdir: str
    """Working directory. Empty: that of the image."""
    grader_s: float
    tests: Path | Mapping[str, str]
    """Files of `/tests`: a directory, or texts by path."""
    environment: Path | None = None
    """Directory with the files of the working directory, or of the image."""
    build_s: float = 600.0
    grader_env: Mapping[str, str] = field(default_factory=dict)


def read_task(folder: Path) -> HarborTask:
    """Read a directory in Harbor's layout. Raises `ValueError` with what is wrong and where."""
    file = folder / "task.toml"
    if not file.is_file():
        raise ValueError(f"{file} is missing: a task has task.toml, instruction.md and tests/test.sh")
    try:
        config = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: {error}") from error
    for section in ("environment", "verifier"):
        if not isinstance(config.setdefault(section, {}), dict):
            raise ValueError(f"{file}: {section} is {config[section]!r:.60}, expected a table")
    if config.get("steps"):
        raise ValueError(f"{file}: steps: tasks of several steps are not supported")
    for (section, key), what in UNSUPPORTED.items():
        if config[section].get(key):
            raise ValueError(f"{file}: {section}.{key}: {what} is not supported")
    if config["verifier"].get("environment_mode", "shared") != "shared":
        raise ValueError(f"{file}: verifier.environment_mode: only shared is supported")
    if config["environment"].get("os", "linux") != "linux":
        raise ValueError(f"{file}: environment.os is {config['environment']['os']!r}, expected linux")
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing")
    lines = (folder / "instruction.md").read_text(encoding="utf-8").split("\n")
    while lines and (CANARY.match(lines[0].strip()) or not lines[0].strip()):
        del lines[0]
    return HarborTask(
        name=folder.name,
        where=str(file),
        tests=folder / "tests",
        environment=environment if (environment := folder / "environment").is_dir() else None,
        instruction="\n".join(lines).strip(),
        image=_of(file, config, "environment", "docker_image", str, ""),
        workdir=_of(file, config, "environment", "workdir", str, ""),
        grader_s=_of(file, config, "verifier", "timeout_sec", float, 600.0),
        build_s=_of(file, config, "environment", "build_timeout_sec", float, 600.0),
        grader_env={key: str(value) for key, value in _of(file, config, "verifier", "env", dict, {}).items()},
    )


ROW: Mapping[str, Any] = {
    "instruction": "",
    "image": "",
    "test": "",
    "workdir": "",
    "test_files": {},
    "test_timeout_s": 1800.0,
}
"""Columns of a row that is a task, and their defaults. The first three are required."""
ROW_TEST = """\
{workdir}
(
{test}
)
if [ $? = 0 ]; then echo 1; else echo 0; fi > {results}/reward.txt
"""


def row_task(row: Mapping[str, Any], name: str) -> HarborTask:
    """The task of a row with the columns `ROW`. Raises `ValueError`, naming the column."""
    values: dict[str, Any] = {key: default if row.get(key) is None else row[key] for key, default in ROW.items()}
    values["test_timeout_s"] = float(values["test_timeout_s"]) if _is_limit(values["test_timeout_s"]) else -1.0
    for key, default in ROW.items():
        value, required = values[key], key in ("instruction", "image", "test")
        valid = isinstance(value, type(default)) and (bool(value) or not required) and value != -1.0
        if not valid:
            raise ValueError(f"column {key} of the task is {row.get(key)!r:.60}, expected {type(default).__name__}")
    for path, text in values["test_files"].items():
        if not isinstance(text, str) or Path(path).is_absolute() or ".." in Path(path).parts:
            raise ValueError(f"column test_files of the task: {path!r} needs a text, and a path below {TESTS}")
    enter = f"cd {shlex.quote(values['workdir'])} || exit 1" if values["workdir"] else ""
    test = ROW_TEST.format(workdir=enter, test=values["test"], results=RESULTS)
    return HarborTask(
        name=name,
        where=name,
        instruction=values["instruction"],
        image=values["image"],
        workdir=values["workdir"],
        grader_s=values["test_timeout_s"],
        tests={**values["test_files"], "test.sh": test},
    )


def _is_limit(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _of(file: Path, config: Mapping[str, Any], section: str, key: str, kind: type, default: Any) -> Any:
    value = config[section].get(key, default)
    if not (_is_limit(value) if kind is float else isinstance(value, kind)):
        raise ValueError(f"{file}: {section}.{key} is {value!r:.60}, expected {kind.__name__}")
    return value


@lru_cache(maxsize=8)
def read_tasks(folder: str) -> tuple[HarborTask, ...]:
    """All tasks of a directory, by name. Raises `ValueError`."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory")
    if (path / "task.toml").is_file():
        return (read_task(path),)
    folders = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    if not folders:
        raise ValueError(f"{path} has no directories of tasks")
    return tuple(read_task(child) for child in folders)


def grader_variables(task: HarborTask) -> dict[str, str]:
    """`verifier.env` of a task. `${NAME}` and `${NAME:-default}` are variables of this process, as in Harbor.

    Raises `ValueError` if a variable is not set and has no default.
    """
    variables = {}
    for key, text in task.grader_env.items():
        reference = VARIABLE.fullmatch(text)
        value = text if reference is None else os.environ.get(reference[1], reference[2])
        if value is None:
            raise ValueError(f"{task.where}: verifier.env.{key}: the variable {reference and reference[1]} is not set")
        variables[key] = value
    return variables


class Harbor(Environment):
    """One task in one container. The seed chooses the task, or the column `task` names it, or the row is one."""

    def __init__(
        self,
        *,
        tasks: str = "",
        container: str | Mapping[str, Any] = "docker",
        mounts: Mapping[str, str] = MappingProxyType({}),
        command_timeout_s: float = 30.0,
        max_output: int = 10_000,
    ) -> None:
        self.tasks, self.container, self.mounts = tasks, container, mounts
        self.command_timeout_s, self.max_output = command_timeout_s, max_output
        self.workspace: Workspace | None = None

    @override
    def reset(self, task: Task, seed: int) -> Opening:
        self.close()
        self.task = self._task(task, seed)
        self.grader_env = grader_variables(self.task)
        self.workspace = self._started()
        messages = [{"role": "user", "content": self.task.instruction}]
        return Opening(messages=messages, tools=[TOOL], enter=self.workspace.enter)

    def _task(self, task: Task, seed: int) -> HarborTask:
        """The task of a row, of its column `task`, or of the seed. Raises `ValueError`."""
        if not self.tasks or "test" in task:
            return row_task(task, str(task.get("id", "row")).replace("/", "-"))
        tasks = read_tasks(self.tasks)
        if "task" in task:
            by_name = {known.name: known for known in tasks}
            if task["task"] not in by_name:
                raise ValueError(f"there is no task {task['task']!r} in {self.tasks}")
            return by_name[task["task"]]
        return tasks[seed % len(tasks)]

    @override
    def step(self, reply: Reply) -> Turn:
        if calls := list(tool_calls(reply)):
            return tool_turn(reply, [self._run(call) for call in calls], reward=0.0)
        return correction(reply, reward=0.0) or Turn(done=True)

    @override
    def score(self) -> Reward:
        workspace = self._open
        value, why = self._graded(workspace)
        if value is None:
            # Either the policy broke the grader, or it does not work at all: then no episode has a reward.
            untouched = self._started()
            try:
                works, why = self._graded(untouched)
                if works is None:
                    raise RuntimeError(f"{self.task.name}: its tests give no reward to an untouched task: {why}")
            finally:
                untouched.close()
        return Reward(value=value or 0.0, detail={"broken_grader": float(value is None), "task": self.task.name})

    @override
    def close(self) -> None:
        workspace, self.workspace = self.workspace, None
        if workspace is not None:
            workspace.close()

    @property
    def _open(self) -> Workspace:
        if self.workspace is None:
            raise AssertionError("reset has not run")
        return self.workspace

    def _started(self) -> Workspace:
        """A new container with the files of the task."""
        task, files = self.task, self.task.environment
        image = task.image or (f"roll-{_digest(files)}" if files else "")
        workspace = _workspace(self.container, self.mounts, image=image, workdir=task.workdir)
        try:
            if files and not task.image:
                workspace.build(files, task.build_s)
            workspace.start()
            if files and not workspace.builds and not (task.image and workspace.starts_images):
                workspace.put(files, task.workdir or "/app", skip=("Dockerfile", "docker-compose.yaml"))
        except BaseException:
            workspace.close()
            raise
        return workspace

    def _run(self, call: ToolCall) -> tuple[Message, float]:
        """The result of a call, and 1 if it failed."""
        try:
            if call.name != "bash":
                raise ToolCallError(f"there is no tool {call.name}; the tool is bash")
            command = call.arguments.get("command")
            if not isinstance(command, str) or "\x00" in command:
                raise ToolCallError("the argument command is missing, or no text")
        except ToolCallError as error:
            return call.error(error), 1.0
        program = ["bash", "-c", command.encode("utf-8", "replace").decode()]
        try:
            finished = self._open.run(program, timeout_s=self.command_timeout_s, max_bytes=self.max_output)
        except WorkspaceError as error:  # also of a command that is too long, or of a container that the policy broke
            return call.error(str(error)), 1.0
        text = finished.output.decode(errors="replace")
        if finished.code is None:
            return call.error(f"took longer than {self.command_timeout_s:g} s and was stopped\n{text}"), 1.0
        return call.result(f"{text}\n[exit code {finished.code}]" if finished.code else text), 0.0

    def _graded(self, workspace: Workspace) -> tuple[float | None, str]:
        """The reward that the tests state in a workspace; otherwise None and why there is none."""
        task = self.task
        variables = [f"{key}={value}" for key, value in self.grader_env.items()]
        clean = 'mkdir -p "$1" && chmod 777 "$1" && cd "$1" && find . -mindepth 1 -delete'
        try:
            workspace.stop()
            workspace.put(task.tests, TESTS)
            if workspace.run(["sh", "-c", clean, "sh", RESULTS], timeout_s=30.0).code != 0:
                return None, f"{RESULTS} cannot be emptied"
            tested = workspace.run(["env", *variables, "bash", f"{TESTS}/test.sh"], timeout_s=task.grader_s)
            if tested.code is None:
                return None, f"took longer than {task.grader_s:g} s"
            read = workspace.run(["sh", "-c", READ, "sh", RESULTS], timeout_s=30.0)
        except WorkspaceError as error:  # the policy may have removed programs, also that of the container's start
            return None, str(error)
        name, _, text = read.output.decode(errors="replace").partition("\n")
        try:
            return _reward(json.loads(text) if name == "reward.json" else float(text)), ""
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            tail = tested.output.decode(errors="replace")[-300:]
            return None, f"exit code {tested.code}, {name or 'no reward file'}: {error}: {tail}"


def _workspace(container: str | Mapping[str, Any], mounts: Mapping[str, str], *, image: str, workdir: str) -> Workspace:
    if isinstance(container, str) or "api" not in container:
        return Workspace(commands_of(container, mounts), image=image, workdir=workdir)
    from roll_environments.daytona_workspace import DaytonaService, DaytonaWorkspace

    service = DaytonaService(**{key: value for key, value in container.items() if key != "api"})
    return DaytonaWorkspace(service, image=image, workdir=workdir)


def _reward(value: Any) -> float:
    """The number of a reward file. Of several rewards, `reward`, or the only one. Raises `ValueError`."""
    if isinstance(value, dict):
        value = value["reward"] if "reward" in value or len(value) != 1 else next(iter(value.values()))
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_REWARD:
        raise ValueError(f"the reward is {value!r:.60}, expected a number of at most {MAX_REWARD:g}")
    return float(value)


MAX_REWARD = 1e6


def _digest(folder: Path) -> str:
    """Digest of the files of a directory."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
