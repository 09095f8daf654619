"""How the worker starts the server: without SGLang, whose place a program of a few lines takes."""

from __future__ import annotations

import asyncio

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


def test_nobody_else_gets_the_port_before_the_server_is_ready(tmp_path):
    package = tmp_path / "roll_infer_sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "serve.py").write_text(STAND_IN, encoding="utf-8")

    async def started():
        server = SglangServer("actor_infer rank 0")
        try:
            await server.start({"host": "127.0.0.1"}, {"PYTHONPATH": str(tmp_path)})
            return server.logit_processor, await server.request("/")
        finally:
            await server.stop()

    said, answer = asyncio.run(asyncio.wait_for(started(), 120))
    assert (said, answer) == ("strangers are refused: Address already in use", "here")
