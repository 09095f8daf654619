"""A local server with the part of Daytona's API that its library calls. Containers are those of `container: local`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from roll_environments.namespaces import VARIABLES
from roll_environments.workspaces import NAMESPACES, commands_of

TOKEN = "dtn-test"
PYTHON = [sys.executable, "-I", "-S", NAMESPACES]


class DaytonaServer:
    """Sandboxes by name. The id of a sandbox is its name."""

    def __init__(self) -> None:
        self.url = ""
        self.states: dict[str, str] = {}
        self.created: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="daytona-")

    def folder(self, name: str) -> Path:
        return Path(self._folder.name, name)

    async def namespaces(self, action: str, name: str) -> None:
        command = [*PYTHON, action, str(self.folder(name))]
        await asyncio.to_thread(subprocess.run, command, check=True)

    @property
    def app(self) -> web.Application:
        @web.middleware
        async def authorised(request: web.Request, handler: Any) -> web.StreamResponse:
            self.calls.append(f"{request.method} {request.path}")
            if request.headers.get("Authorization") != f"Bearer {TOKEN}":
                return web.json_response({"message": "Unauthorized"}, status=401)
            if (name := request.match_info.get("name")) and name not in self.states:
                return web.json_response({"message": f"Sandbox {name} not found"}, status=404)
            response: web.StreamResponse = await handler(request)
            return response

        app = web.Application(middlewares=[authorised], client_max_size=1 << 26)
        app.router.add_post("/api/sandbox", self._create)
        app.router.add_get("/api/sandbox/{name}", self._shown)
        app.router.add_delete("/api/sandbox/{name}", self._delete)
        app.router.add_post("/api/sandbox/{name}/stop", self._stop)
        app.router.add_post("/api/sandbox/{name}/start", self._start)
        app.router.add_post("/toolbox/{name}/process/execute", self._execute)
        app.router.add_post("/toolbox/{name}/files/{kind}", self._upload)
        return app

    async def _create(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.created.append(body)
        name = body["name"]
        self.folder(name).mkdir()
        await self.namespaces("start", name)
        self.states[name] = "started"
        return self._sandbox(name)

    async def _shown(self, request: web.Request) -> web.Response:
        return self._sandbox(request.match_info["name"])

    async def _delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        await self.namespaces("remove", name)
        answer = self._sandbox(name, "destroyed")
        del self.states[name]
        return answer

    async def _stop(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        await self.namespaces("stop", name)
        self.states[name] = "stopped"
        return self._sandbox(name)

    async def _start(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self.states[name] = "started"
        return self._sandbox(name)

    def _sandbox(self, name: str, state: str = "") -> web.Response:
        numbers = dict.fromkeys(("cpu", "gpu", "memory", "disk"), 1)
        flags = dict.fromkeys(("public", "networkBlockAll", "kvm"), False)
        texts = dict.fromkeys(("organizationId", "user", "target"), "x")
        proxy = f"{self.url}/toolbox"
        return web.json_response(
            {"id": name, "name": name, "state": state or self.states[name], "env": {}, "labels": {}}
            | {**numbers, **flags, **texts, "toolboxProxyUrl": proxy}
        )

    async def _execute(self, request: web.Request) -> web.Response:
        name, body = request.match_info["name"], await request.json()
        if self.states[name] != "started":
            return web.json_response({"message": "the sandbox is not started"}, status=400)
        mounts = commands_of("local", {})["exec"][-2]
        workdir = f"--workdir={body.get('cwd') or '/app'}"
        env = {key: value for key, value in (body.get("envs") or {}).items() if key in VARIABLES}
        command = [*PYTHON, "exec", str(self.folder(name)), mounts, workdir, "sh", "-c", body["command"]]
        with tempfile.TemporaryFile() as output:  # of a process that keeps a pipe open, the end would be awaited
            process = await asyncio.create_subprocess_exec(
                *command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={"PATH": "/usr/bin:/bin", **env}
            )
            try:
                code = await asyncio.wait_for(process.wait(), body.get("timeout") or 10)
            except TimeoutError:
                return web.json_response({"message": "command execution timeout"}, status=408)
            output.seek(0)
            return web.json_response({"exitCode": code, "result": output.read().decode(errors="replace")})

    async def _upload(self, request: web.Request) -> web.Response:
        path = ""
        async for part in await request.multipart():
            if part.name.endswith(".path"):
                path = (await part.read()).decode()
            else:
                target = Path(f"{self.folder(request.match_info['name'])}/data{path}")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.parent.chmod(0o777)
                target.write_bytes(await part.read())
        return web.json_response({})


@contextmanager
def serving_daytona() -> Iterator[DaytonaServer]:
    """A service that answers at `url` until the end of the context."""
    service, ready, loop = DaytonaServer(), threading.Event(), asyncio.new_event_loop()
    runners: list[web.AppRunner] = []

    async def serve() -> None:
        runner = web.AppRunner(service.app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        runners.append(runner)
        ready.set()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(serve())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(30)
    try:
        yield service
    finally:
        asyncio.run_coroutine_threadsafe(runners[0].cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
