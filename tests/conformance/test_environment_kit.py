"""The kit for environments: each wrong environment fails exactly one test, that of what is wrong."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from roll_core.spec.environment import Environment, Opening, Reply, Turn
from roll_core.types import Reward
from roll_testing.environments import USELESS, EnvironmentConformance


def say(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


class Sums(Environment):
    """Right: the sum of two digits, with three attempts."""

    async def reset(self, task: Any, seed: int) -> Opening:
        self.answer, self.attempts = sum(random.Random(seed).choices(range(10), k=2)), 0
        return Opening(messages=say(f"sum of two digits, of seed {seed}"))

    async def step(self, reply: Reply) -> Turn:
        self.attempts += 1
        if reply.text.strip() == str(self.answer):
            return Turn(reward=1.0, done=True)
        return Turn(reward=0.0, messages=say("again"), truncated=self.attempts == 3)


class Unseeded(Sums):
    async def reset(self, task: Any, seed: int) -> Opening:
        await super().reset(task, seed)
        return Opening(messages=say(f"{random.random()}"))


class OneTask(Sums):
    async def reset(self, task: Any, seed: int) -> Opening:
        return await super().reset(task, 0)


class Shared(Sums):
    """Keeps its state in the class."""

    async def reset(self, task: Any, seed: int) -> Opening:
        opening = await super().reset(task, seed)
        Shared.current = self.answer
        return opening

    async def step(self, reply: Reply) -> Turn:
        self.answer = Shared.current
        return await super().step(reply)


class Strict(Sums):
    """Takes every reply for a number."""

    async def step(self, reply: Reply) -> Turn:
        return await super().step(Reply(text=str(int(reply.text or "0"))))


class Assistant(Sums):
    """Speaks for the model."""

    async def reset(self, task: Any, seed: int) -> Opening:
        opening = await super().reset(task, seed)
        return Opening(messages=[*opening.messages, {"role": "assistant", "content": "let me think"}])


class NotFinite(Sums):
    async def step(self, reply: Reply) -> Turn:
        turn = await super().step(reply)
        return Turn(
            messages=turn.messages, reward=turn.reward, done=turn.done, truncated=turn.truncated, metrics={"x": 1e999}
        )


class EndlessScore(Sums):
    async def score(self) -> Reward:
        return Reward(value=float("inf"))


class Silent(Sums):
    async def step(self, reply: Reply) -> Turn:
        turn = await super().step(reply)
        return Turn(messages=turn.messages, done=turn.done, truncated=turn.truncated)


class Worthless(Sums):
    async def step(self, reply: Reply) -> Turn:
        return replace(await super().step(reply), reward=0.0)


class Endless(Sums):
    async def step(self, reply: Reply) -> Turn:
        turn = await super().step(reply)
        return Turn(messages=say("again"), reward=turn.reward)


class OpenOnce(Sums):
    """Cannot be closed before it has begun."""

    def close(self) -> None:
        del self.attempts


class Leaks(Sums):
    async def reset(self, task: Any, seed: int) -> Opening:
        threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
        return await super().reset(task, seed)


class LeaksProcess(Sums):
    async def reset(self, task: Any, seed: int) -> Opening:
        STARTED.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return await super().reset(task, seed)


class LeaksWhileAThreadEnds(LeaksProcess):
    """Leaks processes, and has one thread less than before."""

    async def reset(self, task: Any, seed: int) -> Opening:
        if seed == 0 and not THREADS:
            ended = threading.Event()
            THREADS.append((threading.Thread(target=ended.wait, args=(20,), daemon=True), ended))
            THREADS[0][0].start()
        if seed == 1 and THREADS:
            thread, ended = THREADS.pop()
            ended.set()
            thread.join()
        return await super().reset(task, seed)


THREADS: list[tuple[threading.Thread, threading.Event]] = []
STARTED: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    while STARTED:
        with STARTED.pop() as process:
            process.kill()


class Backed(Sums):
    """Right: raises without its service."""

    gone = False

    async def step(self, reply: Reply) -> Turn:
        if self.gone:
            raise ConnectionError("no service")
        return await super().step(reply)


class HidesFailure(Backed):
    """Reports a failure as 0."""

    async def step(self, reply: Reply) -> Turn:
        try:
            return await super().step(reply)
        except ConnectionError:
            return Turn(reward=0.0, done=True)


class Blocks(Sums):
    async def step(self, reply: Reply) -> Turn:
        time.sleep(0.06)
        return await super().step(reply)


class NoSuchPlayer(Sums):
    """Has no second player, but rewards one."""

    async def step(self, reply: Reply) -> Turn:
        turn = await super().step(reply)
        return replace(turn, rewards={"second": -1.0} if turn.done else {})


class Pair(Sums):
    """Right: two players reply in turns, and the one who finds the sum wins."""

    async def reset(self, task: Any, seed: int) -> Opening:
        self.turn = 0
        return replace(await super().reset(task, seed), players=("a", "b"))

    async def step(self, reply: Reply) -> Turn:
        self.turn += 1
        other = "b" if self.turn % 2 else "a"
        turn = await super().step(reply)
        return replace(turn, player=other, rewards={other: -1.0} if turn.done else {})


class Unbounded(Pair):
    """The loser loses everything."""

    async def step(self, reply: Reply) -> Turn:
        turn = await super().step(reply)
        return replace(turn, rewards=dict.fromkeys(turn.rewards, float("-inf")))


class Unpaid(Pair):
    """Only the winner has a reward."""

    async def step(self, reply: Reply) -> Turn:
        turn = await super().step(reply)
        return replace(turn, reward=1.0 if turn.done else None, rewards={})


RIGHT = (Sums, Backed, Pair)
WRONG = {
    Unseeded: "the_same_seed_and_replies_give_the_same_episode",
    OneTask: "other_seeds_give_other_episodes",
    Shared: "instances_share_nothing",
    Strict: "a_useless_reply_is_no_failure",
    Assistant: "results_are_plain_values",
    NotFinite: "results_are_plain_values",
    EndlessScore: "results_are_plain_values",
    Unbounded: "results_are_plain_values",
    Silent: "an_episode_states_a_reward",
    Unpaid: "an_episode_states_a_reward",
    Endless: "an_oracle_ends_the_episode_with_a_reward",
    Worthless: "an_oracle_ends_the_episode_with_a_reward",
    OpenOnce: "close_may_follow_any_call",
    Leaks: "nothing_is_left_after_close",
    LeaksProcess: "nothing_is_left_after_close",
    LeaksWhileAThreadEnds: "nothing_is_left_after_close",
    HidesFailure: "a_failure_is_no_reward",
    Blocks: "coroutines_do_not_block",
    NoSuchPlayer: "turns_name_players_of_the_opening",
}
TESTS = [name for name in vars(EnvironmentConformance) if name.startswith("test_")]


def failed_tests(kind: type[Environment]) -> set[str]:
    class Suite(EnvironmentConformance):
        blocked_s = 0.05 if kind is Blocks else 10.0

        def create(self) -> Environment:
            return kind()

        def create_failing(self) -> Environment | None:
            environment = kind()
            if not isinstance(environment, Backed):
                return None
            environment.gone = True
            return environment

        def replies(self, seed: int) -> list[str]:
            seed = 0 if kind is OneTask else seed
            right = str(sum(random.Random(seed).choices(range(10), k=2)))
            return ["?", right] if issubclass(kind, Pair) else [right]

    found = set()
    for name in TESTS:
        for arguments in ((each,) for each in USELESS) if "useless" in name else ((),):
            try:
                getattr(Suite(), name)(*arguments)
            except pytest.skip.Exception:
                pass
            except Exception:
                found.add(name.removeprefix("test_"))
    return found


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_a_wrong_environment_fails_exactly_its_test(kind: type[Environment]) -> None:
    assert failed_tests(kind) == {WRONG[kind]}


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_a_right_environment_fails_none(kind: type[Environment]) -> None:
    assert not failed_tests(kind)


def test_every_test_of_the_kit_has_a_wrong_environment() -> None:
    assert {f"test_{name}" for name in WRONG.values()} == set(TESTS)
