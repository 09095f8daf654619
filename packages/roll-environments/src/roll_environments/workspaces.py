"""Workspaces: the container of an episode, by the commands that start, enter, stop and remove it.

    start ──► run, run, … (tools, or an agent's program) ──► stop: no process is left ──► run (the grader) ──► remove

`remove` is run by a child process once this process closes its pipe or is killed: no container outlives its episode.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_environments.namespaces import VARIABLES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAMESPACES = str(Path(__file__).with_name("namespaces.py"))
START_S = 120.0
"""Maximum seconds to start, stop or remove a container."""
REPEAT_S = 15.0
"""Seconds after which `remove` is repeated if this process was killed."""
EXITED_S = 0.2
"""Seconds to read the output of a program that has exited: a process that it left may keep the output open."""


def commands_of(container: str | Mapping[str, Sequence[str]], mounts: Mapping[str, str]) -> Mapping[str, Sequence[str]]:
    """The commands of a container: `docker`, `podman`, `local`, or commands of one's own."""
    if not isinstance(container, str):
        return container
    return _local(mounts) if container == "local" else _docker_like(container)


def _docker_like(program: str) -> dict[str, list[str]]:
    """Commands of docker and of programs with its command line."""
    passed = [word for name in VARIABLES for word in ("-e", name)]
    return {
        "build": [program, "build", "-t", "{image}", "{context}"],
        "start": [program, "run", "-d", "--init", "--name", "{name}", "--entrypoint", "sleep", "{image}", "infinity"],
        "exec": [program, "exec", "-i", *passed, "--workdir={workdir}", "{name}"],
        "stop": [program, "restart", "-t", "0", "{name}"],
        "remove": [program, "rm", "-f", "{name}"],
    }


def _local(mounts: Mapping[str, str]) -> dict[str, list[str]]:
    """Commands of the directories and namespaces of `namespaces.py`."""
    python = [sys.executable, "-I", "-S", NAMESPACES]
    seen = {prefix: prefix for prefix in (sys.prefix, sys.base_prefix)}
    seen |= {os.path.abspath(os.path.expanduser(source)): target for source, target in mounts.items()}
    return {
        "build": [],
        "start": [*python, "start", "{folder}"],
        "exec": [*python, "exec", "{folder}", json.dumps(seen), "--workdir={workdir}"],
        "stop": [*python, "stop", "{folder}"],
        "remove": [*python, "remove", "{folder}"],
    }


class WorkspaceError(RuntimeError):
    """A container that could not be started, written to or stopped."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program in a workspace ended."""

    code: int | None
    """Exit code. None if it took too long and was stopped."""
    output: bytes
    """The beginning of standard output and error."""


class Workspace:
    """The container of one episode."""

    def __init__(self, commands: Mapping[str, Sequence[str]], *, image: str, workdir: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="roll-workspace-")
        self._names = {
            "name": f"roll-{secrets.token_hex(8)}",
            "image": image,
            "workdir": workdir,
            "folder": os.path.join(self._folder.name, "container"),
        }
        self._commands = commands
        os.mkdir(self._names["folder"])
        self._remover = self._start_remover()

    @property
    def starts_images(self) -> bool:
        """True if the container has the files of the image."""
        return any("{image}" in word for word in self._commands["start"])

    @property
    def builds(self) -> bool:
        """True if images are built from a directory with a Dockerfile."""
        return bool(self._commands.get("build"))

    @property
    def enter(self) -> list[str]:
        """Command that runs a program in the workspace; the program and its arguments follow."""
        return self._filled("exec")

    def build(self, context: Path, timeout_s: float) -> None:
        """Build the image from a directory with a Dockerfile, unless the commands have no `build`."""
        if self.builds:
            self._names["context"] = str(context)
            self._required("build", timeout_s)

    def start(self) -> None:
        """Start the container. Raises `WorkspaceError`."""
        self._required("start", START_S)

    def stop(self) -> None:
        """Kill all processes of the workspace and wait for their end. Its files remain. Raises `WorkspaceError`."""
        self._required("stop", START_S)

    def run(
        self, command: Sequence[str], *, timeout_s: float, stdin: bytes = b"", max_bytes: int = 1 << 16
    ) -> Finished:
        """Run a program in the workspace. One that takes too long is stopped, with all others there.

        Raises `WorkspaceError` if the command of the container cannot be run. A container that cannot be entered gives
        an exit code, which a program of the policy may give as well.
        """
        finished = _run([*self.enter, *command], timeout_s, stdin, max_bytes)
        if finished.code is None:
            self.stop()
        return finished

    def put(self, source: Path | Mapping[str, str], target: str, skip: Sequence[str] = ()) -> None:
        """Replace a directory of the workspace by one of the host, or by texts by path. Raises `WorkspaceError`."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            if isinstance(source, Path):
                for path in sorted(source.iterdir()):
                    if path.name not in skip:
                        archive.add(path, path.name)
            else:
                for name, text in source.items():
                    data = text.encode("utf-8", "surrogateescape")
                    member = tarfile.TarInfo(name)
                    member.size, member.mode = len(data), 0o755
                    archive.addfile(member, io.BytesIO(data))
        # The directory itself may be a mount, which cannot be removed.
        script = 'mkdir -p "$1" && cd "$1" && find . -mindepth 1 -delete && tar -xf - --no-same-owner'
        finished = self.run(["sh", "-c", script, "sh", target], timeout_s=START_S, stdin=buffer.getvalue())
        if finished.code != 0:
            raise WorkspaceError(f"{target} cannot be written: {finished.output.decode(errors='replace')[:500]}")

    def close(self) -> None:
        """Remove the container, and wait for that."""
        if self._remover.stdin is not None:
            with suppress(BrokenPipeError):
                self._remover.stdin.write(b"closed")
                self._remover.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._remover.wait(timeout=START_S)
        self._folder.cleanup()

    def _filled(self, key: str) -> list[str]:
        words = []
        for word in self._commands[key]:
            if "{workdir}" in word and not self._names["workdir"]:
                continue  # that of the image
            for name, value in self._names.items():
                word = word.replace(f"{{{name}}}", value)
            words.append(word)
        return words

    def _required(self, key: str, timeout_s: float) -> None:
        command = self._filled(key)
        finished = _run(command, timeout_s, b"", 1 << 14)
        if finished.code != 0:
            how = f"took longer than {timeout_s:g} s" if finished.code is None else f"exit code {finished.code}"
            text = finished.output.decode(errors="replace").strip()[-500:]
            raise WorkspaceError(f"container.{key}: {' '.join(command)[:300]}: {how}: {text}")

    def _start_remover(self) -> subprocess.Popen[bytes]:
        # If this process is killed, the command that starts the container may still run, and be done after `remove`.
        code = (
            "import subprocess, sys, time; closed = sys.stdin.read(); subprocess.run(sys.argv[2:], check=False)\n"
            "if not closed: time.sleep(float(sys.argv[1])); subprocess.run(sys.argv[2:], check=False)"
        )
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, str(REPEAT_S), *self._filled("remove")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that it survives the kill of this process's group
        )


def _run(command: Sequence[str], timeout_s: float, stdin: bytes, max_bytes: int) -> Finished:
    """Run a command. Keeps the beginning of its output and discards the rest."""
    deadline, output = time.monotonic() + timeout_s, bytearray()
    with tempfile.TemporaryFile() as source:
        source.write(stdin)
        source.seek(0)
        try:
            process: subprocess.Popen[Any] = subprocess.Popen(
                command, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise WorkspaceError(f"{command[0]}: {error.strerror}") from error
    if process.stdout is None:
        raise AssertionError("the output is a pipe")
    try:
        ready = select.poll()  # not `select`, which reads no descriptor above 1023
        ready.register(process.stdout)
        while (left := deadline - time.monotonic()) > 0:
            exited = process.poll() is not None
            if not ready.poll(1000 * min(left, EXITED_S)):
                if exited:
                    return Finished(process.returncode, bytes(output))
                continue
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                return Finished(process.wait(timeout=max(0.1, deadline - time.monotonic())), bytes(output))
            output += part[: max_bytes - len(output)]
    except subprocess.TimeoutExpired:
        return Finished(None, bytes(output))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()
    return Finished(None, bytes(output))
