"""Containers of a Daytona service, by its library: `container: {api: daytona}` of the environment `harbor`.

    python daytona_workspace.py exec URL TOKEN TARGET ID WORKDIR PROGRAM...    runs a program of an agent
    python daytona_workspace.py remove URL TOKEN TARGET NAME                   if the process of the episode was killed

`TOKEN` is the name of the environment variable that has it. A stop and a start of the service end all processes.
"""

from __future__ import annotations

import math
import os
import secrets
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_environments.namespaces import VARIABLES
from roll_environments.workspaces import START_S, Finished, Workspace, WorkspaceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

IDLE_MINUTES = 120
"""Minutes after which the service stops a container without calls. It deletes it as many minutes later."""
AGENT_S = 86400.0
"""Maximum seconds of an agent's program, whose own limit ends it earlier. The service's default is 10."""
SCRIPT = (
    'folder=$1; shift; "$@" < "$folder/in" > "$folder/out" 2>&1; code=$?; head -c {limit} "$folder/out"; exit $code'
)
"""Runs a program. Its output is a file, as a process that it leaves may keep the output open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaytonaService:
    """A Daytona service, and where its token is."""

    url: str = ""
    """Address of the API. Empty: that of the library."""
    token: str = "DAYTONA_API_KEY"
    """Environment variable with the token."""
    target: str = ""
    """Region. Empty: that of the account."""

    def client(self) -> Any:
        """The library's client. Raises `WorkspaceError` if the token is missing."""
        if not (token := os.environ.get(self.token)):
            raise WorkspaceError(f"container.token: the environment variable {self.token} is not set")
        return _client(self.url, token, self.target)

    @property
    def words(self) -> tuple[str, str, str]:
        """Words of this module's commands."""
        return self.url, self.token, self.target


@cache
def _client(url: str, token: str, target: str) -> Any:
    """One client per process: each has a stream of events, which it closes 30 s after its last container."""
    from daytona import Daytona, DaytonaConfig

    return Daytona(DaytonaConfig(api_key=token, api_url=url or None, target=target or None))


class DaytonaWorkspace(Workspace):
    """A container of the service."""

    starts_images, builds = True, False

    def __init__(self, service: DaytonaService, *, image: str, workdir: str) -> None:
        self._service, self._sandbox = service, None
        super().__init__({"remove": [*_program("remove"), *service.words, "{name}"]}, image=image, workdir=workdir)

    @property
    @override
    def enter(self) -> list[str]:
        workdir = self._names["workdir"]
        return [*_program("exec"), *self._service.words, self._open.id, workdir]

    @override
    def build(self, context: Path, timeout_s: float) -> None:
        raise WorkspaceError("container.api: the task needs environment.docker_image: no images are built there")

    @override
    def start(self) -> None:
        from daytona import CreateSandboxFromImageParams

        params = CreateSandboxFromImageParams(
            name=self._names["name"],
            image=self._names["image"],
            auto_stop_interval=IDLE_MINUTES,
            auto_delete_interval=IDLE_MINUTES,
        )
        with _located("start"):
            self._sandbox = self._service.client().create(params, timeout=START_S)
        if workdir := self._names["workdir"]:
            self._names["workdir"] = ""
            made = self.run(["mkdir", "-p", workdir], timeout_s=START_S)
            self._names["workdir"] = workdir
            if made.code != 0:
                raise WorkspaceError(f"{workdir} cannot be made: {made.output.decode(errors='replace')[:500]}")

    @override
    def stop(self) -> None:
        with _located("stop"):
            self._open.stop(timeout=START_S, force=True)
            self._open.start(timeout=START_S)

    @override
    def run(
        self, command: Sequence[str], *, timeout_s: float, stdin: bytes = b"", max_bytes: int = 1 << 16
    ) -> Finished:
        finished = execute(self._open, command, self._names["workdir"], timeout_s, stdin, max_bytes)
        if finished.code is None:
            self.stop()
        return finished

    @override
    def close(self) -> None:
        if self._sandbox is not None:
            with suppress(Exception):  # the remover tries again
                self._sandbox.delete(timeout=START_S, wait=True)
                self._sandbox = None
                self._remover.kill()
        super().close()

    @property
    def _open(self) -> Any:
        if self._sandbox is None:
            raise AssertionError("start has not run")
        return self._sandbox


def execute(
    sandbox: Any,
    command: Sequence[str],
    workdir: str,
    timeout_s: float,
    stdin: bytes = b"",
    max_bytes: int = 1 << 16,
    env: Mapping[str, str] | None = None,
) -> Finished:
    """Run a program in a container. Raises `WorkspaceError`."""
    folder = f"/tmp/roll-{secrets.token_hex(8)}"
    script = f"mkdir -p {folder} && [ -e {folder}/in ] || : > {folder}/in; {SCRIPT.format(limit=max_bytes)}"
    words = ["sh", "-c", script, "sh", folder, *command]
    began = time.monotonic()
    with _located("exec"):
        if stdin:
            sandbox.fs.upload_file(stdin, f"{folder}/in")
        try:
            done = sandbox.process.exec(
                shlex.join(words),
                cwd=workdir or None,
                env=dict(env or {}) or None,
                timeout=math.ceil(timeout_s),
            )
        except Exception:
            if time.monotonic() - began >= timeout_s:
                return Finished(None, b"")
            raise
    code = done.exit_code
    if time.monotonic() - began >= timeout_s:
        code = None
    return Finished(None if code is None else int(code), done.result.encode()[:max_bytes])


class _located:
    """Raises `WorkspaceError` for an error of the library or of the service."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, WorkspaceError):
            raise WorkspaceError(f"container.{self._doing}: daytona: {error}") from error


def _program(action: str) -> list[str]:
    return [sys.executable, "-m", "roll_environments.daytona_workspace", action]


def main(action: str, url: str, token: str, target: str, name: str, *words: str) -> int:
    """Run a program, with this process's standard input and variables of the endpoint, or remove a container."""
    client = DaytonaService(url=url, token=token, target=target).client()
    if action == "remove":
        from daytona import DaytonaNotFoundError

        with suppress(DaytonaNotFoundError):
            client.get(name).delete(timeout=START_S)
        return 0
    workdir, *command = words
    env = {key: os.environ[key] for key in VARIABLES if key in os.environ}
    finished = execute(client.get(name), command, workdir, AGENT_S, sys.stdin.buffer.read(), env=env)
    sys.stdout.buffer.write(finished.output)
    sys.stdout.buffer.flush()
    return 125 if finished.code is None else finished.code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
