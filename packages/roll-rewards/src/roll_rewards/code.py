"""`reward: code`: runs the response's program against the tests of its row.

The program runs in a box (`sandbox`) and its results are compared here: an expected output never enters the box.
"""

from __future__ import annotations

import sysconfig
import time
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.data.reasoning import answer_of, opens_reasoning
from roll_core.errors import ConfigError, ConfigProblem, DataError, RewardFailure
from roll_core.spec.rollout import RewardFunction
from roll_core.types import Reward
from roll_rewards import guest
from roll_rewards.answers import NO_ANSWER
from roll_rewards.code_tests import CallTest, CodeTest, StdinTest, last_program, read_tests, same_text, same_value
from roll_rewards.config import isolation_problem
from roll_rewards.remote_sandbox import RemoteSandbox
from roll_rewards.sandbox import Limits, ProgramEnded, Sandbox, describe

if TYPE_CHECKING:
    from roll_core.spec.rollout import RewardRequest
    from roll_rewards.code_tests import Test
    from roll_rewards.config import CodeConfig

_TESTED: set[tuple[str | Limits, ...]] = set()
"""Commands and limits with which a program has run in this process."""


class CodeReward(RewardFunction):
    """1 if the program passes every test, or the share of tests that it passes.

    A program that raises, hangs or exceeds a limit fails its test: a value. Only rows without usable tests, and hosts
    that cannot run programs, are failures.
    """

    config: CodeConfig

    @override
    def start(self) -> None:
        """Check that programs are isolated. Raises `ConfigError` if this host cannot isolate them."""
        config = self.config
        for key, message in isolation_problem(config).items():
            raise ConfigError([ConfigProblem("reward code", key, message, "see docs/rewards.md", code="ROLL-C041")])
        limits = Limits(
            cpu_s=config.case_timeout_s,
            memory_mb=config.memory_limit_mb,
            output_kb=config.output_limit_kb,
            scratch_mb=config.scratch_limit_mb,
        )
        self._sandbox: Sandbox | RemoteSandbox
        if config.sandbox_url:
            self._sandbox = RemoteSandbox(config.sandbox_url, limits, processes=config.processes)
        else:
            self._sandbox = Sandbox(
                limits,
                processes=config.processes,
                command=config.sandbox_command,
                accept_missing=config.accept_missing_isolation,
            )
        # Otherwise a container that cannot start would look like a wrong program. Once in a process: each episode of
        # `rewarded_task` starts a reward.
        tested: tuple[str | Limits, ...] = (*config.sandbox_command, config.sandbox_url, limits)
        if tested in _TESTED:
            return
        try:
            outcome = self._sandbox.run("print(input())", "ready\n")
            problem = "" if outcome.stdout.strip() == b"ready" else describe(outcome)
        except RewardFailure as failure:
            problem = str(failure)
        if problem:
            self._sandbox.close()
            is_slow = problem.startswith("exceeded")
            elsewhere = "sandbox_command" if config.sandbox_command else "sandbox_url" if config.sandbox_url else ""
            key = elsewhere or ("case_timeout_s" if is_slow else "memory_limit_mb")
            message = f"a program that prints one word did not run: {problem}"
            raise ConfigError([ConfigProblem("reward code", key, message, "see docs/rewards.md", code="ROLL-C041")])
        _TESTED.add(tested)

    @override
    def score(self, request: RewardRequest) -> Reward:
        config = self.config
        tests = self._tests(request)
        opened = opens_reasoning(request.prompt)
        program = last_program(request.response, require_code_block=config.require_code_block, opened=opened)
        if program is None or not program.strip():
            why = NO_ANSWER if answer_of(request.response, opened=opened) is None else "no program"
            return Reward(value=0.0, detail={"passed": 0.0, "why": why})
        deadline = time.monotonic() + config.timeout_s
        passed, why = 0, ""
        for number, test in enumerate(tests):
            if time.monotonic() >= deadline:
                if not why:
                    raise RewardFailure(
                        f"{number} of {len(tests)} tests took longer than timeout_s {config.timeout_s:g} s, and none"
                        " failed: raise timeout_s"
                    )
                break
            problem = self._problem(program, test)
            if not problem:
                passed += 1
                continue
            why = why or f"test {number + 1} of {len(tests)}: {problem}"
            if config.reward_type == "hard":
                break
        share = passed / len(tests)
        value = share if config.reward_type == "soft" else float(passed == len(tests))
        return Reward(value=value, detail={"passed": share, **({"why": why} if why else {})})

    def _tests(self, request: RewardRequest) -> list[Test]:
        config, row = self.config, request.metadata
        if config.test_cases not in row:
            known = ", ".join(sorted(row)) or "none"
            raise DataError(
                f"sample {request.sample.id}: no column {config.test_cases!r} with tests (the row's columns: {known})"
            )
        try:
            return read_tests(row[config.test_cases], str(row.get(config.fn_name) or ""))
        except ValueError as error:
            raise DataError(f"sample {request.sample.id}: column {config.test_cases!r}: {error}") from error

    def _problem(self, program: str, test: Test) -> str:
        """Why the program does not pass a test; empty if it does."""
        tolerance = self.config.float_tolerance
        if isinstance(test, StdinTest):
            outcome = self._sandbox.run(program, test.stdin)
            if outcome.status or outcome.problem:
                return describe(outcome)
            right = same_text(outcome.stdout.decode("utf-8", "replace"), test.expected, tolerance)
            return "" if right else "another output"
        if isinstance(test, CallTest):
            try:
                value = self._sandbox.call(program, test.function, test.arguments)
            except ProgramEnded as ended:
                return str(ended)
            return "" if _equals(value, test, tolerance) else "another value"
        return self._problem_of_code(program, test)

    def _problem_of_code(self, program: str, test: CodeTest) -> str:
        result = self._sandbox.test(program, test.source, test.entry, [sysconfig.get_paths()["purelib"]])
        if result.get("broken"):
            raise RewardFailure(f"the row's test code cannot be used: {result.get('why')}")
        return "" if result.get("passed") is True else str(result.get("why") or "failed")

    @override
    def close(self) -> None:
        sandbox = getattr(self, "_sandbox", None)
        if sandbox is not None:
            sandbox.close()


def _equals(data: Any, test: CallTest, tolerance: float) -> bool:
    """True if the value that a program sent equals an expected one. Whatever it sent instead of a value does not."""
    try:
        value = guest.decode(data, lambda _: None)
        return any(same_value(value, expected, tolerance) for expected in test.expected)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return False
