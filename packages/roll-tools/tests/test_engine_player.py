"""`roll-core envs play --engine`: a local server with OpenAI's API plays."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

import pytest

from roll_core.cli.main import main
from roll_testing.errors import mentions

Play: TypeAlias = Callable[..., Any]


class Server(ThreadingHTTPServer):
    """Answers with what `replies` returns for a path and a body: JSON, bytes, a status, or None to hang."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, replies: Play) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies, self.ended = replies, threading.Event()
        self.received: list[tuple[str, str | None, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def conversations(self) -> list[list[dict[str, Any]]]:
        return [body["messages"] for _, _, body in self.received if body is not None]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"]))) if self.command == "POST" else None
        self.server.received.append((self.path, self.headers["Authorization"], body))
        found = self.server.replies(self.path, body)
        if found is None:
            self.server.ended.wait(60)
            return
        if isinstance(found, bytes) and found.startswith(b"raw "):
            self.wfile.write(found)
            return
        self.send_response(found if isinstance(found, int) else 200)
        if found == 302:
            self.send_header("Location", "/v1/other")
        self.end_headers()
        if not isinstance(found, int):
            self.wfile.write(found if isinstance(found, bytes) else json.dumps(found).encode())

    do_POST = do_GET

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Play], Server]]:
    started: list[Server] = []
    for name in ("http_proxy", "HTTP_PROXY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def start(replies: Play) -> Server:
        started.append(Server(replies))
        threading.Thread(target=started[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return started[-1]

    yield start
    for each in started:
        each.ended.set()
        each.shutdown()
        each.server_close()


def completion(content: str | None, *, finish: str = "stop", **message: Any) -> Mapping[str, Any]:
    message = {"role": "assistant", "content": content, **message}
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


def bisection(path: str, body: Any) -> Any:
    """Lists two models, and guesses the middle of what a conversation leaves."""
    if path == "/v1/models":
        return {"object": "list", "data": [{"id": "first", "object": "model"}, {"id": "second", "object": "model"}]}
    low, high = 1, 100
    for guess, answer in zip(body["messages"][1::2], body["messages"][2::2], strict=True):
        number = int(guess["content"])
        low, high = (number + 1, high) if answer["content"] == "higher" else (low, number - 1)
    return completion(str((low + high) // 2), reasoning_content="between")


def test_a_model_plays_an_episode(serve, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    server = serve(bisection)
    assert main(["envs", "play", "guess_number", "--seed", "3", "--engine", server.url + "/"]) == 0
    shown = capsys.readouterr().out
    assert mentions(shown, "[reasoning]", "[reply] 50", "[end]")
    assert shown.endswith("done, total reward 1\n")
    assert server.received[0] == ("/v1/models", "Bearer key", None)
    path, key, body = server.received[1]
    assert (path, key, set(body)) == ("/v1/chat/completions", "Bearer key", {"model", "messages"})
    assert all(body["model"] == "first" for _, _, body in server.received[1:])
    assert shown.count("[turn]") == len(server.received) - 1 <= 7


def test_a_model_is_named_and_turns_are_limited(serve, capsys):
    server = serve(lambda path, body: completion("no idea", finish="length"))
    words = ["envs", "play", "guess_number", "--engine", server.url, "--model", "mine", "--max-turns", "2"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.count("[turn]") == 2
    assert "[end] truncated" in shown
    assert [(path, body["model"]) for path, _, body in server.received] == [("/v1/chat/completions", "mine")] * 2


def test_a_model_calls_tools(serve, capsys):
    call = {"id": "call_1", "type": "function", "function": {"name": "python", "arguments": '{"expression": "2 + 3"}'}}

    def replies(path: str, body: Any) -> Any:
        called = len(body["messages"]) > 1
        return completion("5") if called else completion(None, finish="tool_calls", tool_calls=[call])

    server = serve(replies)
    assert main(["envs", "play", "math_with_python", "--engine", server.url, "--model", "m"]) == 0
    assert mentions(capsys.readouterr().out, "[call]", "[tool] 5", "[reply] 5", "[end]")
    assert [each["function"]["name"] for each in server.received[0][2]["tools"]] == ["python"]
    _, reply, result = server.conversations[1]
    assert reply == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "call_1", "5")


def test_players_have_their_own_conversation(serve, capsys):
    server = serve(lambda path, body: completion("1"))
    words = ["envs", "play", "nim", "low=4", "high=4", "--engine", server.url, "--model", "m"]
    assert main(words) == 0
    assert "[end] done" in capsys.readouterr().out
    first, second, third, fourth = server.conversations
    assert third[: len(first)] == first
    assert fourth[: len(second)] == second
    assert [[each["role"] for each in those] for those in (first, second)] == [["user"]] * 2
    assert [[each["role"] for each in those] for those in (third, fourth)] == [["user", "assistant", "user"]] * 2
    assert first != second


@pytest.mark.parametrize(
    "reply",
    [
        500,
        302,
        b"garbage",
        b"",
        b"raw no HTTP\n",
        b"[" * 100_000,
        b"\xff\xfe",
        {},
        [],
        {"choices": []},
        completion([{"type": "text"}]),  # type: ignore[arg-type]
        completion(None, tool_calls=[{"id": "x", "type": "function", "function": {"name": "python"}}]),
        completion(None, tool_calls=[{"id": "x", "type": "function", "function": {"name": "p", "arguments": {}}}]),
        completion(None, tool_calls=["python"]),
    ],
    ids=range(14),
)
def test_a_broken_server_is_one_error(serve, capsys, reply):
    server = serve(lambda path, body: reply)
    assert main(["envs", "play", "guess_number", "--engine", server.url, "--model", "m"]) == 1
    shown = capsys.readouterr().err
    assert mentions(shown, "ROLL-X001", "--engine", f"{server.url}/chat/completions")
    assert len(shown) < 1000
    assert len(server.received) == 1


def test_hanging_absent_or_modelless_server_is_one_error(serve, capsys, monkeypatch):
    monkeypatch.setattr("roll_tools.engine_player.TIMEOUT_S", 0.3)
    server = serve(lambda path, body: None)
    assert main(["envs", "play", "guess_number", "--engine", server.url]) == 1
    assert mentions(capsys.readouterr().err, "ROLL-X001", "--engine", f"{server.url}/models", "0.3 s")
    server = serve(lambda path, body: {"object": "list", "data": []})
    assert main(["envs", "play", "guess_number", "--engine", server.url]) == 1
    assert mentions(capsys.readouterr().err, "ROLL-X001", f"{server.url}/models")
    assert main(["envs", "play", "guess_number", "--engine", "http://127.0.0.1:9/v1"]) == 1
    assert mentions(capsys.readouterr().err, "ROLL-X001", "http://127.0.0.1:9/v1/models")


@pytest.mark.parametrize(
    "words",
    [
        ["--engine", "localhost:8000"],
        ["--engine", "file:///etc/passwd"],
        ["--engine", "http://"],
        ["--model", "m"],
        ["--max-turns", "0"],
    ],
)
def test_mistakes_of_the_command_are_errors_of_use(capsys, words):
    with pytest.raises(SystemExit) as ended:
        main(["envs", "play", "guess_number", *words])
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_a_mistake_in_the_name_needs_no_server(capsys):
    assert main(["envs", "play", "gues_number", "--engine", "http://127.0.0.1:9/v1"]) == 2
    assert "'guess_number'" in capsys.readouterr().err
