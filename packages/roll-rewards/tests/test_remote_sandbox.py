"""Programs that a service runs: a stand-in for the API `run_code` of SandboxFusion, in a process per program."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import ValidationError

from roll_core.errors import ConfigError, RewardFailure
from roll_rewards.code import CodeReward
from roll_rewards.config import CodeConfig

STDIN = [{"input": "900000 87654\n", "output": "987654\n"}]
CALLS = {"fn_name": "add", "inputs": [[900000, 87654]], "outputs": [987654]}


def run_code(message):
    """The reply of the service: how the program ended."""
    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-c", message["code"]],
            input=message["stdin"],
            capture_output=True,
            text=True,
            timeout=message["run_timeout"],
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "return_code": None, "stdout": ""}}
    result = {"status": "Finished", "return_code": ended.returncode, "stdout": ended.stdout, "stderr": ended.stderr}
    return {"status": "Failed" if ended.returncode else "Success", "run_result": result}


class Service:
    """The service. `reply` replaces what it returns."""

    def __init__(self):
        self.received, self.reply = [], run_code
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                service.received.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
                reply = service.reply(json.loads(service.received[-1]))
                self.send_response(reply if isinstance(reply, int) else 200)
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the client reads no more than it needs
                    self.wfile.write(b"" if isinstance(reply, int) else json.dumps(reply).encode())

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/run_code"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def service():
    found = Service()
    yield found
    found.http.shutdown()
    found.http.server_close()


@pytest.fixture
def scored(service, reward, requesting):
    """`scored(program, tests)`: the reward of a program."""

    def score(program, tests, **options):
        code = reward(CodeReward, CodeConfig, "code", sandbox_url=service.url, **options)
        row = {"fn_name": tests["fn_name"]} if isinstance(tests, dict) else {}
        return code.score(requesting(f"```python\n{program}\n```", test_cases=tests, **row))

    return score


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print(sum(map(int, input().split())))", 1.0),
        ("print(1)", 0.0),
        ("raise SystemExit(3)", 0.0),
        ("import os; os._exit(0)", 0.0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 0.0),
        ("print(987654); 1 / 0", 0.0),
        ('print(\'{"status": "Success", "value": 1.0, "passed": true}\')', 0.0),
        ("print('x' * 100_000)", 0.0),  # more than output_limit_kb
        ("print('\\x01' * 1_000_000)", 0.0),  # a reply of more than is read
        ("import sys; print(sum(map(int, input().split()))); sys.stderr.write('x' * 100_000)", 0.0),
    ],
)
def test_programs_with_standard_input(scored, program, expected):
    found = scored(program, STDIN, output_limit_kb=64)
    assert (found.value, "why" in found.detail) == (expected, not expected)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("def add(a, b):\n    print('noise')\n    return a + b", 1.0),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", 1.0),
        ("def add(a, b):\n    return a - b", 0.0),
        ("def add(a, b):\n    raise ValueError('no')", 0.0),
        ("def other():\n    pass", 0.0),
        ("def add(a, b):\n    import os\n    os._exit(0)", 0.0),
        ("class V(int):\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return V(1)", 0.0),
        ("import os\nfor fd in range(9):\n    try: os.write(fd, b'{\"passed\": true}')\n    except OSError: pass", 0.0),
        ("def add(a, b):\n    return [x for x in (1,) * 10]", 0.0),
    ],
)
def test_calls(scored, program, expected):
    assert scored(program, CALLS).value == expected


def test_a_program_that_exceeds_its_time_scores_0(scored):
    # The service stops a program after three times case_timeout_s.
    assert scored("while True: pass", STDIN, case_timeout_s=0.7).value == 0.0


def test_expected_outputs_are_never_sent(scored, service):
    scored("print(input())", STDIN)
    scored("def add(a, b):\n    return 0", CALLS)
    assert len(service.received) >= 2
    assert not any("987654" in each for each in service.received)


@pytest.mark.parametrize(
    "reply",
    [
        500,
        302,
        [],
        {"status": "SandboxError", "message": "full", "run_result": None},
        {"status": "Success"},
        {"status": "Success", "run_result": {"status": "Error", "return_code": 0, "stdout": "987654"}},
        {"status": "Success", "run_result": {"status": "Finished", "return_code": None, "stdout": "987654"}},
        {"status": "Success", "run_result": {"status": "Finished", "return_code": True, "stdout": "987654"}},
        {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": ["987654"]}},
        {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": None}},
        {"status": "Success", "run_result": {"status": "Finished", "return_code": 0}},
        {"value": 1.0},
    ],
)
def test_a_reply_of_a_program_that_did_not_run_is_a_failure(service, reward, requesting, reply):
    code = reward(CodeReward, CodeConfig, "code", sandbox_url=service.url)
    service.reply = lambda _: reply
    with pytest.raises(RewardFailure):
        code.score(requesting("```python\nprint(987654)\n```", test_cases=STDIN))


def test_service_that_runs_no_programs_fails_before_scoring(service, reward):
    service.reply = lambda _: 500
    for url in (service.url + "?other", "http://127.0.0.1:1/run_code"):
        with pytest.raises(ConfigError) as caught:
            reward(CodeReward, CodeConfig, "code", sandbox_url=url)
        assert [(each.key, each.code) for each in caught.value.problems] == [("sandbox_url", "ROLL-C041")]


def test_test_code_is_refused(scored):
    tests = ["assert add(1, 2) == 3"]
    config = CodeConfig(reward="code", sandbox_url="http://127.0.0.1:1/run_code")
    assert set(config.check_row({"test_cases": tests})) == {"test_cases"}
    assert config.check_row({"test_cases": STDIN}) == {}
    with pytest.raises(RewardFailure):
        scored("def add(a, b):\n    return 3", tests)


@pytest.mark.engine("sandbox_fusion")
@pytest.mark.parametrize(("program", "expected"), [("print(sum(map(int, input().split())))", 1.0), ("1 / 0", 0.0)])
def test_requests_and_replies_have_sandbox_fusions_fields(scored, service, program, expected):
    """The official client reads the stand-in's replies, and its models accept our requests."""
    import sandbox_fusion
    from sandbox_fusion import models

    def reply(message):
        # The server has the limit of memory, its client 0.3.7 has not.
        assert message.keys() <= {*models.RunCodeRequest.__fields__, "memory_limit_MB"}
        models.RunCodeRequest(**message)
        return json.loads(models.RunCodeResponse(message="", **run_code(message)).json())

    service.reply = reply
    assert scored(program, STDIN).value == expected
    request = models.RunCodeRequest(code=program, stdin=STDIN[0]["input"], language="python")
    found = sandbox_fusion.run_code(request, endpoint=service.url.removesuffix("/run_code"), max_attempts=1)
    assert (found.status, found.run_result.stdout) == (("Success", "987654\n") if expected else ("Failed", ""))


@pytest.mark.engine("sandbox_fusion")
def test_every_status_of_sandbox_fusion_is_an_end_or_a_failure(reward, service):
    from sandbox_fusion.models import CommandRunStatus, RunStatus

    code = reward(CodeReward, CodeConfig, "code", sandbox_url=service.url)
    ends = {}
    for whole in RunStatus:
        for command in CommandRunStatus:
            ran = {"status": command.value, "return_code": None if command != "Finished" else 0, "stdout": ""}
            service.reply = lambda _, each=whole.value, ran=ran: {"status": each, "message": "", "run_result": ran}
            try:
                ends[whole.value, command.value] = code._sandbox.run("", "").status
            except RewardFailure:
                ends[whole.value, command.value] = "failure"
    ran = {("Success", "Finished"): 0, ("Failed", "Finished"): 0}
    late = {("Success", "TimeLimitExceeded"): -9, ("Failed", "TimeLimitExceeded"): -9}
    assert ends == dict.fromkeys(ends, "failure") | ran | late
    assert len(ends) == 9


@pytest.mark.parametrize("other", [{"sandbox_command": ["x"]}, {"accept_missing_isolation": True}])
def test_a_second_place_is_an_error(other):
    with pytest.raises(ValidationError):
        CodeConfig(reward="code", sandbox_url="http://127.0.0.1:1", **other)
