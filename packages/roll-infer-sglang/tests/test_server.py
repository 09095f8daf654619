"""How the worker starts the server: without SGLang, whose place a program of a few lines takes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from roll_infer_sglang.server import ServerError, SglangServer

STAND_IN = '''
"""Says who may bind the port while it starts, and then serves at it as SGLang does."""

import http.server
import json
import os
import socket
import sys

message = json.loads(sys.stdin.buffer.readline())
place = "127.0.0.1", message["arguments"]["port"]
with socket.socket() as stranger:
    try:
        stranger.bind(place)
        said = "a stranger binds it"
    except OSError as error:
        said = f"strangers are refused: {error.strerror}"


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"here")


server = http.server.HTTPServer(place, Answer)
with os.fdopen(message["ready"], "w") as pipe:
    json.dump({"logit_processor": said}, pipe)
server.serve_forever()
'''


LOADING = """
import os
import sys
import time

sys.stdin.buffer.readline()
open(os.environ["STARTED"], "w").close()
time.sleep(30)
"""


SHARING = """
import mmap
import os
import sys


def share(name):
    with open(f"/dev/shm/{name}", "x+b") as file:
        file.write(bytes(16))
        file.flush()
        return mmap.mmap(file.fileno(), 16)


name = os.environ["SEGMENT"]
kept = share(f"sglang_loads_{name}"), share(f"other_{name}")
"""
"""A program that has shared memory of SGLang's and of others."""


@pytest.fixture
def segment():
    """A name of shared memory that no other test has."""
    name = uuid.uuid4().hex
    yield name
    Path(f"/dev/shm/other_{name}").unlink(missing_ok=True)
    Path(f"/dev/shm/sglang_loads_{name}").unlink(missing_ok=True)


def left_of(name):
    return [path.name.partition(name)[0] for path in Path("/dev/shm").iterdir() if name in path.name]


def package_in(folder, program):
    """The server's program in place of ours, for a server whose PYTHONPATH is the folder."""
    package = folder / "roll_infer_sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "serve.py").write_text(program, encoding="utf-8")


def test_cancelled_start_ends_its_process_at_once(tmp_path):
    """Minutes before the model is loaded, as by Ctrl-C."""
    package_in(tmp_path, LOADING)
    mark = tmp_path / "started"

    async def cancelled():
        server = SglangServer("actor_infer rank 0")
        variables = {"PYTHONPATH": str(tmp_path), "STARTED": str(mark)}
        starting = asyncio.create_task(server.start({"host": "127.0.0.1"}, variables))
        while not mark.exists():
            await asyncio.sleep(0.05)
        (process,) = map(psutil.Process, server.processes())
        starting.cancel()
        await asyncio.wait([starting])
        assert process.is_running()  # the loop was not blocked until it had exited
        await server.stop()
        return process

    assert not asyncio.run(asyncio.wait_for(cancelled(), 60)).is_running()


def test_a_server_that_is_stopped_leaves_no_shared_memory(tmp_path, segment):
    package_in(tmp_path, SHARING + LOADING)
    mark = tmp_path / "started"

    async def stopped():
        server = SglangServer("actor_infer rank 0")
        variables = {"PYTHONPATH": str(tmp_path), "STARTED": str(mark), "SEGMENT": segment}
        starting = asyncio.create_task(server.start({"host": "127.0.0.1"}, variables))
        while not mark.exists():
            await asyncio.sleep(0.05)
        assert len(left_of(segment)) == 2
        await server.stop()
        await asyncio.wait([starting])
        assert isinstance(starting.exception(), ServerError)

    asyncio.run(asyncio.wait_for(stopped(), 60))
    assert left_of(segment) == ["other_"]


def test_server_of_a_killed_worker_leaves_no_shared_memory(segment):
    program = SHARING + "from roll_infer_sglang import serve\nserve._exit_with_worker()\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "SEGMENT": segment},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL
    assert left_of(segment) == ["other_"]


def test_port_is_reserved_until_the_server_is_ready(tmp_path):
    package_in(tmp_path, STAND_IN)

    async def started():
        server = SglangServer("actor_infer rank 0")
        try:
            await server.start({"host": "127.0.0.1"}, {"PYTHONPATH": str(tmp_path)})
            return server.logit_processor, await server.request("/")
        finally:
            await server.stop()

    said, answer = asyncio.run(asyncio.wait_for(started(), 120))
    assert (said, answer) == ("strangers are refused: Address already in use", "here")
