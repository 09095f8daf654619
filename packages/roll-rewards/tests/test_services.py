"""Rewards of services, against a real server on this host."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import ValidationError

from roll_core.errors import RewardFailure
from roll_rewards.config import HttpConfig, JudgeConfig
from roll_rewards.judges import JudgeReward, majority
from roll_rewards.services import HttpReward, post


@pytest.fixture
def server():
    """`server(reply, …)`: the URL, and what the server received. Each request gets the next reply: JSON or a status."""
    running = []

    def start(*replies):
        received, left = [], list(replies)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                received.append((self.path, self.headers.get("Authorization"), body))
                reply = left.pop(0) if len(left) > 1 else left[0]
                self.send_response(reply if isinstance(reply, int) else 200)
                if reply == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()
                if not isinstance(reply, int):
                    self.wfile.write(reply if isinstance(reply, bytes) else json.dumps(reply).encode())

            def log_message(self, *_):
                pass

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        running.append(http)
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{http.server_address[1]}", received

    yield start
    for http in running:
        http.shutdown()
        http.server_close()


def chat(content, **choice):
    return {"choices": [{"message": {"role": "assistant", "content": content}} | choice]}


def test_a_reply_that_is_not_http_is_a_failure(reward, requesting):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"SSH-2.0-OpenSSH" * 9 + b"\r\n")

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(RewardFailure):
            reward(HttpReward, HttpConfig, "http", url=url).score(requesting("answer", "prompt"))


def test_an_endpoint_receives_the_sample_and_returns_a_value(server, reward, requesting):
    url, received = server({"value": 0.5, "detail": {"style": 1, "why": "close"}})
    found = reward(HttpReward, HttpConfig, "http", url=f"{url}/score", api_key="k").score(
        requesting("answer \ud800", "prompt", level=3)
    )
    assert (found.value, dict(found.detail)) == (0.5, {"style": 1.0, "why": "close"})
    ((path, key, body),) = received
    assert (path, key) == ("/score", "Bearer k")
    assert body == {
        "id": "g/0",
        "prompt": "prompt",
        "response": "answer \ud800",
        "messages": [],
        "metadata": {"level": 3},
    }


@pytest.mark.parametrize(
    "reply",
    [
        500,
        302,
        b"",
        b"not json",
        b"[" * 100_000,
        b'{"value": NaN}',
        {"value": None},
        {"value": "1"},
        {"value": True},
        {"value": 1, "detail": {"x": None}},
        {"value": 1, "detail": []},
        {"failure": "offline"},
        {"failure": {"why": "offline"}, "value": 0},
        {"failure": True, "value": 0},
        {"failure": "offline", "value": 1.0},
        [1],
        7,
    ],
)
def test_every_other_reply_is_a_failure(server, reward, requesting, reply):
    url, _ = server(reply if reply != 7 else b"7")
    with pytest.raises(RewardFailure):
        reward(HttpReward, HttpConfig, "http", url=url).score(requesting("x"))


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n{",
        b"HTTP/1.1 302 Found\r\n",
    ],
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_reply_that_arrives_byte_by_byte_is_a_failure(start, scheme):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                with contextlib.suppress(OSError):  # the client has closed
                    connection.sendall(start)
                    for _ in range(40):
                        time.sleep(0.1)
                        connection.sendall(b"x")

        threading.Thread(target=answer, daemon=True).start()
        begun = time.monotonic()
        with pytest.raises(RewardFailure):
            post(f"{scheme}://127.0.0.1:{listening.getsockname()[1]}", {}, "", 0.5)
        assert time.monotonic() - begun < 2.5


def test_unreachable_endpoint_and_wrong_json_are_failures(server, reward, requesting):
    with pytest.raises(RewardFailure):
        reward(HttpReward, HttpConfig, "http", url="http://127.0.0.1:1/").score(requesting("x"))
    url, received = server({"value": 1})
    with pytest.raises(RewardFailure):
        reward(HttpReward, HttpConfig, "http", url=url).score(requesting("x", column=object()))
    assert received == []


def judge(reward, url, **options):
    options = {"judge_api_url": f"{url}/v1", "judge_model_name": "m"} | options
    return reward(JudgeReward, JudgeConfig, "judge", **options)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [("It is not so: no, wait: YES", 1.0), ("yes? NO.", 0.0), ("<think>no</think>Yes", 1.0)],
)
def test_the_last_word_yes_or_no_counts(server, reward, requesting, reply, expected):
    url, received = server(chat(reply))
    found = judge(reward, url).score(requesting("4", "2 + 2?", ground_truth="4"))
    assert found.value == expected
    path, key, body = received[0]
    assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", None, "m", 0.0)
    assert "[Task]\n2 + 2?\n" in body["messages"][0]["content"]


def test_a_response_cannot_fill_placeholders(server, reward, requesting):
    url, received = server(chat("yes"))
    made = judge(reward, url, judge_prompt="{response}|{ground_truth}")
    made.score(requesting("{ground_truth} {0.__class__}", ground_truth="secret"))
    assert received[0][2]["messages"][0]["content"] == "{ground_truth} {0.__class__}|secret"


def test_scores_are_scaled_and_the_majority_counts(server, reward, requesting):
    # Of the votes 8, 3, 8, one outside of the range and one without a score, the most frequent is 8: 0.8.
    url, received = server(
        *(chat(each) for each in ("Score: 8", "score = 3", "Score: 1, no: Score: 8", "Score: 99", "?"))
    )
    options = {"judge_scale": "score", "num_votes": 5, "temperature": 1.0}
    found = judge(reward, url, **options).score(requesting("x", ground_truth=""))
    assert found.value == pytest.approx(0.8)
    assert len(received) == 5
    assert majority([0.0, 1.0]) == 0.0
    assert majority([0.2, 0.9, 0.9]) == 0.9


def test_scores_are_relative_to_their_range(server, reward, requesting):
    url, _ = server(chat("Score: 4"))
    found = judge(reward, url, judge_scale="score", score_range=[1, 5]).score(requesting("x", ground_truth=""))
    assert found.value == 0.75  # (4 - 1) / (5 - 1)


@pytest.mark.parametrize(
    ("reply", "expected"),  # (score + 10) / 20
    [("Score: -5", 0.25), ("Score (0-10): 8", 0.9), ("Score (out of 10): 8", 0.9), ("Score (8/10), 3 flaws", 0.9)],
)
def test_the_score_is_neither_its_range_nor_without_its_sign(server, reward, requesting, reply, expected):
    url, _ = server(chat(reply))
    found = judge(reward, url, judge_scale="score", score_range=[-10, 10]).score(requesting("x", ground_truth=""))
    assert found.value == expected


CUT = "Is it right? The answer says yes, but"


@pytest.mark.parametrize(
    "reply",
    [
        *(chat(CUT, finish_reason=each) for each in ("length", "content_filter", "abort", "error", "tool_calls")),
        chat(None, finish_reason="length"),  # a server that separates the reasoning, which was cut
        chat(f"<think>{CUT}"),
        chat(f"<think>{CUT}", finish_reason="stop"),
        chat("perhaps"),
        chat(None),
        {},
        {"choices": []},
        {"choices": "yes"},
    ],
)
def test_replies_without_a_score_are_failures(server, reward, requesting, reply):
    url, _ = server(reply)
    with pytest.raises(RewardFailure):
        judge(reward, url).score(requesting("x", ground_truth="y"))


@pytest.mark.parametrize("reason", [None, "stop", "eos_token", "stop_sequence"])
def test_replies_that_are_complete_count(server, reward, requesting, reason):
    url, _ = server(chat(CUT, finish_reason=reason))
    assert judge(reward, url).score(requesting("x", ground_truth="y")).value == 1.0


@pytest.mark.parametrize("cut", [chat("no", finish_reason="length"), chat(None, finish_reason="length")])
def test_a_vote_that_is_cut_does_not_count(server, reward, requesting, cut):
    url, _ = server(chat("yes"), cut, chat("yes"))
    found = judge(reward, url, num_votes=3, temperature=1.0).score(requesting("x", ground_truth="y"))
    assert (found.value, found.detail["votes"]) == (1.0, 2.0)


def test_a_row_without_the_column_of_the_prompt_is_a_failure(server, reward, requesting):
    url, received = server(chat("yes"))
    with pytest.raises(RewardFailure):
        judge(reward, url).score(requesting("x"))
    assert received == []


@pytest.mark.parametrize(
    "options",
    [
        {"judge_api_url": "file:///etc/passwd"},
        {"judge_prompt": "no placeholder"},
        {"num_votes": 3},
        {"score_range": [1, 1]},
        {"score_range": [1]},
        {"score_pattern": "no group"},
        {"score_pattern": "("},
    ],
)
def test_options_that_cannot_work_are_errors(options):
    given = {"reward": "judge", "judge_api_url": "http://x", "judge_model_name": "m"} | options
    with pytest.raises(ValidationError):
        JudgeConfig.model_validate(given)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("Yes. No issues found.", None),
        ("No, although a teacher would say yes.", None),
        ("Yes or no", None),
        ("I found no error.\n\n**YES**", 1.0),
        ("There is no error. YES", 1.0),
        ("Verdict: no\nI would not say yes.", 0.0),
        ("Yes\nNo", None),
        ("YES or NO", None),
        ("It says no, but YES.", 1.0),
        ("YES, there is no error in it", None),
        ("Yes, it is.", 1.0),
        ("analysisNo?assistantfinalYes", 1.0),
        ("[THINK]No?[/THINK]Yes", 1.0),
        ("[THINK]Yes", None),
    ],
)
def test_a_reply_with_yes_and_no_is_no_vote(server, reward, requesting, reply, expected):
    url, _ = server(chat(reply))
    made, given = judge(reward, url), requesting("x", ground_truth="y")
    if expected is None:
        with pytest.raises(RewardFailure):
            made.score(given)
    else:
        assert made.score(given).value == expected
