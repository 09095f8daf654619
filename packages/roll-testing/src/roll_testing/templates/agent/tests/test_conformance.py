"""The agent against a server that replies with known texts, and the tests of its package."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from roll_agent_acme.agent import CHECK, AcmeAgent

from roll_core.spec.agent import Session
from roll_core.spec.providers import AgentProvider
from roll_testing import PackagingConformance

TASK = {"question": "6 * 7 =", "answer": "42"}


class TestAcmePackage(PackagingConformance, kind=AgentProvider):
    """Its record, its configuration and its imports."""

    name = "acme"


class Policy(BaseHTTPRequestHandler):
    """Replies with the next text; with status 400 when there is none."""

    def do_POST(self):
        """One chat completion."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.headers["Authorization"], body["messages"]))
        replies = self.server.replies
        message = {"role": "assistant", "content": replies.pop(0)} if replies else None
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {"id": "0", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        self.send_response(200 if message else 400)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def policy():
    """A server on this host."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Policy)
    server.replies, server.requests = [], []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def run(policy, **options):
    """One rollout."""

    async def rollout():
        agent = AcmeAgent(**options)
        try:
            return await agent.run(TASK, Session(base_url=base_url, api_key="secret", seed=0))
        finally:
            await agent.close()
            await agent.close()

    base_url = f"http://127.0.0.1:{policy.server_address[1]}/v1"
    return asyncio.run(rollout())


@pytest.mark.parametrize(("replies", "reward"), [(["41", "42"], 1.0), (["42", "41"], 0.0)])
def test_the_last_reply_is_rewarded(replies, reward, policy):
    policy.replies += replies
    assert run(policy) == reward
    assert [[each["content"] for each in messages] for _, messages in policy.requests] == [
        ["6 * 7 ="],
        ["6 * 7 =", replies[0], CHECK],
    ]


def test_every_request_has_the_key_of_the_rollout(policy):
    policy.replies += ["42"]
    assert run(policy, checks=0) == 1.0
    assert [key for key, _ in policy.requests] == ["Bearer secret"]


def test_a_refused_request_is_no_reward(policy):
    with pytest.raises(Exception, match="400"):
        run(policy)
