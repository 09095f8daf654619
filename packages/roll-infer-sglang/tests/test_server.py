"""How the worker starts the server: without SGLang, whose place a program of a few lines takes."""

from __future__ import annotations

import asyncio

import psutil

from roll_infer_sglang.server import SglangServer

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


def package_in(folder, program):
    """The server's program in place of ours, for a server whose PYTHONPATH is the folder."""
    package = folder / "roll_infer_sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "serve.py").write_text(program, encoding="utf-8")


def test_a_start_that_is_cancelled_ends_at_once_and_with_it_the_process(tmp_path):
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


def test_nobody_else_gets_the_port_before_the_server_is_ready(tmp_path):
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
