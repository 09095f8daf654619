"""Runs programs by a service that speaks the API `run_code` of SandboxFusion.

One POST runs one program with its standard input. The reply has its output and exit code, which are compared here.
An expected output never leaves this process, so nothing that a program or the service prints is a score.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import RewardFailure
from roll_rewards import guest
from roll_rewards.config import NO_TEST_CODE
from roll_rewards.sandbox import START_S, Limits, Outcome, ProgramEnded, describe
from roll_rewards.services import ReplyTooLargeError, post

if TYPE_CHECKING:
    from collections.abc import Sequence

GUEST = Path(guest.__file__)
KILLED = -9


class RemoteSandbox:
    """Runs programs by a service, with the methods of `Sandbox`."""

    def __init__(self, url: str, limits: Limits, *, processes: int) -> None:
        """At most `processes` requests are in flight."""
        self.limits, self._url = limits, url
        self._slots = threading.BoundedSemaphore(processes)

    def run(self, source: str, stdin: str) -> Outcome:
        """Run a program with this standard input. Raises `RewardFailure` if the service did not run it."""
        limits = self.limits
        most = limits.output_kb << 10
        too_much = f"wrote more than output_limit_kb {limits.output_kb}"
        message = {
            "code": source,
            "stdin": stdin,
            "language": "python",
            "compile_timeout": limits.wall_s,
            "run_timeout": limits.wall_s,
            "memory_limit_MB": limits.memory_mb,
            "files": {},
            "fetch_files": [],
        }
        try:
            with self._slots:
                # JSON writes a byte of output as at most six.
                reply = post(self._url, message, "", START_S + limits.wall_s, max_reply=6 * most + (1 << 16))
        except ReplyTooLargeError:
            return Outcome(stdout=b"", stderr="", status=KILLED, problem=too_much)
        outcome = self._outcome(reply)
        if len(outcome.stdout) + len(outcome.stderr) > most:
            outcome.problem = too_much
        return outcome

    def _outcome(self, reply: Any) -> Outcome:
        """How the program ended. Raises `RewardFailure` unless the reply states that it ran."""
        ran = reply.get("run_result") if isinstance(reply, dict) else None
        if not isinstance(ran, dict) or reply.get("status") not in ("Success", "Failed"):
            raise RewardFailure(f"{self._url}: the program did not run: {json.dumps(reply)[:300]}")
        texts = [ran.get(stream) or "" for stream in ("stdout", "stderr")]
        if not all(isinstance(text, str) for text in texts):
            raise RewardFailure(f"{self._url}: stdout and stderr are {str(texts)[:100]}, expected texts")
        stdout, stderr = texts
        status, problem = ran.get("return_code"), ""
        if ran.get("status") == "TimeLimitExceeded":
            status, problem = KILLED, f"exceeded {self.limits.wall_s:g} s"
        elif ran.get("status") != "Finished" or not isinstance(status, int) or isinstance(status, bool):
            raise RewardFailure(f"{self._url}: the program did not run: {json.dumps(ran)[:300]}")
        elif ran.get("stdout") is None:
            raise RewardFailure(f"{self._url}: the reply lacks the program's stdout: {json.dumps(ran)[:300]}")
        elif status < 0:
            problem = f"killed by signal {-status}"
        data = stdout.encode("utf-8", "surrogatepass")
        return Outcome(stdout=data, stderr=stderr, status=status, problem=problem)

    def call(self, source: str, function: str, arguments: Sequence[Any]) -> Any:
        """Call a function of a program and return its value as `guest.encode` writes it.

        Raises `ProgramEnded` with the reason if it returns none.
        """
        job = {"source": source, "target": function, "action": "call", "arguments": guest.encode(list(arguments), [])}
        wrapped = f"{GUEST.read_text(encoding='utf-8')}\ncall(json.loads({json.dumps(job)!r}))\n"
        outcome = self.run(wrapped, "")
        if outcome.problem or outcome.status:
            raise ProgramEnded(describe(outcome))
        try:
            reply = json.loads(outcome.stdout)
            if "raised" in reply:
                raise ProgramEnded(f"{reply['raised']}: {reply['message']}"[:300])
            return reply["value"]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ProgramEnded("the program wrote an invalid reply") from error

    def test(self, source: str, tests: str, entry: str = "", paths: Sequence[str] = ()) -> dict[str, Any]:
        """Raise `RewardFailure`: one program that contains the tests could forge their result."""
        raise RewardFailure(NO_TEST_CODE)

    def close(self) -> None:
        """Nothing runs on this host."""
