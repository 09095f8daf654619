"""Conformance kit for environments.

    class TestMine(EnvironmentConformance):
        name = "my_environment"

        def replies(self, seed):
            return ["up", "up", "left"]

Each test runs whole episodes in this process, in a thread that fails the test if it hangs.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import threading
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from roll_core.plugins.targets import load_class, schema_of
from roll_core.spec.config import Config
from roll_core.spec.environment import Environment, Opening, Reply, Turn
from roll_core.spec.providers import EnvironmentProvider
from roll_core.types import Reward
from roll_testing.kit import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROLES = ("user", "system", "tool")
USELESS = ("", "\x00", "\ufffd" * 3, "x" * 20_000, '[[{"', "<|im_end|><|im_start|>user\n")
"""Replies that a model can produce and no task expects."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What an environment returned."""

    opening: Opening
    turns: tuple[Turn, ...]
    score: Reward | None

    @property
    def rewards(self) -> dict[str, list[float]]:
        """Rewards of turns, by player. Each player with a turn has a key."""
        by_player: dict[str, list[float]] = {}
        player = self.opening.player or next(iter(self.opening.players), "")
        for turn in self.turns:
            by_player.setdefault(player, []).extend([] if turn.reward is None else [turn.reward])
            for name, reward in turn.rewards.items():
                by_player.setdefault(name, []).append(reward)
            player = turn.player or player
        return by_player

    @property
    def totals(self) -> list[float]:
        """Sum of the rewards of each player who has one."""
        score = [] if self.score is None or self.score.value is None else [self.score.value]
        return [sum(stated) for rewards in self.rewards.values() if (stated := [*rewards, *score])]

    @property
    def text(self) -> str:
        """Everything but `enter`, which names another container each time, as JSON. Fails if a value is not plain."""
        score = None if self.score is None else asdict(self.score)
        return json.dumps([asdict(replace(self.opening, enter=())), [asdict(turn) for turn in self.turns], score])


class EnvironmentKit:
    """What authors state about an environment for its tests."""

    name: ClassVar[str] = ""
    """Name of the environment as in configs. Not needed by a class that overrides `create`."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """`env_config`."""
    seeds: ClassVar[Sequence[int]] = (0, 1, 2**31 - 1)
    task: ClassVar[Mapping[str, Any]] = {}
    """Passed to `reset`."""
    max_turns: ClassVar[int] = 50
    """Turns after which an episode is left."""
    timeout_s: ClassVar[float] = 30.0
    """Maximum seconds of a test's episodes."""

    def create(self) -> Environment:
        """A new environment. Default: the installed one called `name`, with `settings`."""
        record = registry().find(EnvironmentProvider, self.name)
        schema = schema_of(record, Config, owner=self.name)
        cls = load_class(record.target, Environment, owner=self.name)  # type: ignore[type-abstract]
        return cls(**schema.model_validate(dict(self.settings)).model_dump())

    async def _episode(
        self, seed: int, replies: Sequence[str | Reply], finish_reason: Any, environment: Environment | None = None
    ) -> Episode:
        environment = environment or self.create()
        try:
            opening = await self._call(environment, "reset", dict(self.task), seed)
            turns: list[Turn] = []
            for reply in replies[: self.max_turns]:
                turns.append(await self._call(environment, "step", _reply(reply, finish_reason)))
                if _ended(turns[-1]):
                    break
            score = await self._call(environment, "score")
        finally:
            await self._call(environment, "close")
        return Episode(opening, tuple(turns), score)

    async def _call(self, environment: Environment, method: str, *arguments: Any) -> Any:
        result = getattr(environment, method)(*arguments)
        result = await result if inspect.isawaitable(result) else result
        expected = {"reset": Opening, "step": Turn, "score": Reward | None, "close": type(None)}[method]
        assert isinstance(result, expected), f"{method} returned {type(result).__name__}, expected {expected}"
        return result


class EnvironmentConformance(EnvironmentKit):
    """Tests that every environment must pass."""

    varies: ClassVar[bool] = True
    """True if seeds differ in their episodes."""
    blocked_s: ClassVar[float] = 0.5
    """Maximum seconds for which a coroutine may block the event loop."""

    def create_failing(self) -> Environment | None:
        """An environment that cannot work, for example without its service. Default: None, it cannot fail."""
        return None

    def replies(self, seed: int) -> Sequence[str | Reply]:
        """Replies that end the episode of a seed with its highest reward: texts, or replies with tool calls."""
        raise NotImplementedError

    # -- tests ---------------------------------------------------------------------------------------------------------

    def test_an_oracle_ends_the_episode_with_a_reward(self) -> None:
        """The replies of the oracle must end each episode by `done`. Of the rewards stated, a player's must be > 0."""
        for seed in self.seeds:
            episode = self._run(seed, self.replies(seed))
            assert episode.turns[-1].done, f"seed {seed}: the oracle's replies do not end the episode"
            totals = episode.totals
            assert not totals or max(totals) > 0, f"seed {seed}: the oracle's episode has reward {max(totals)}"

    def test_the_same_seed_and_replies_give_the_same_episode(self) -> None:
        """Two instances must return the same. A resumed run repeats episodes and uses their sampled tokens."""
        seed = self._unrepeatable_seed()
        assert seed is None, f"seed {seed}: two episodes differ although seed and replies are equal"

    def test_other_seeds_give_other_episodes(self) -> None:
        """At least two seeds must differ in their opening or in what the same replies lead to."""
        if not self.varies:
            pytest.skip("varies is False")
        texts = {self._run(seed, ["", *self.replies(self.seeds[0])]).text for seed in self.seeds}
        assert len(texts) > 1, f"the seeds {self.seeds} all give the same episode"

    def test_instances_share_nothing(self) -> None:
        """Two episodes that take turns must return what each returns alone."""
        seeds = self.seeds[:2]
        plans = [list(self.replies(seed)) for seed in seeds]
        alone = [self._run(seed, plan).text for seed, plan in zip(seeds, plans, strict=True)]

        async def together() -> list[str]:
            environments = [self.create() for _ in seeds]
            openings = [
                await self._call(environment, "reset", dict(self.task), seed)
                for environment, seed in zip(environments, seeds, strict=True)
            ]
            turns: list[list[Turn]] = [[] for _ in seeds]
            for number in range(max(map(len, plans))):
                for index, plan in enumerate(plans):
                    if number < len(plan) and not (turns[index] and _ended(turns[index][-1])):
                        turns[index].append(await self._call(environments[index], "step", _reply(plan[number])))
            scores = [await self._call(environment, "score") for environment in environments]
            for environment in environments:
                await self._call(environment, "close")
            return [Episode(*parts).text for parts in zip(openings, map(tuple, turns), scores, strict=True)]

        shared = self._within(together) != alone
        if shared and self._unrepeatable_seed() is not None:
            pytest.skip("not even alone are two episodes equal")
        assert not shared, "two episodes that take turns differ from the same episodes alone"

    @pytest.mark.parametrize("reply", USELESS)
    def test_a_useless_reply_is_no_failure(self, reply: str) -> None:
        """Whatever the model says, `step` must return a turn. An exception is a failure of the environment."""
        episode = self._run(self.seeds[0], [reply, reply], finish_reason="length")
        assert episode.turns, "the episode has no turn"

    def test_results_are_plain_values(self) -> None:
        """Messages need a role and a text; rewards and metrics must be finite; everything must be JSON."""
        episode = self._run(self.seeds[0], ["", *self.replies(self.seeds[0])])
        assert isinstance(episode.text, str)
        assert episode.opening.messages, "the opening has no message"
        for message in (
            *episode.opening.messages,
            *(turn_message for turn in episode.turns for turn_message in turn.messages),
        ):
            assert message.get("role") in ROLES, f"{message} has none of the roles {', '.join(ROLES)}"
            assert isinstance(message.get("content"), str), f"{message} has no text as content"
        for turn in episode.turns:
            assert turn.messages or _ended(turn), "a turn that does not end the episode has no message"
            for name, value in (("reward", turn.reward), *turn.rewards.items(), *turn.metrics.items()):
                assert value is None or math.isfinite(value), f"{name} is {value}"
        score = None if episode.score is None else episode.score.value
        assert score is None or math.isfinite(score), f"the score is {score}"

    def test_an_episode_states_a_reward(self) -> None:
        """A turn or the score must have a reward: otherwise every episode fails."""
        for seed in self.seeds:
            episode = self._run(seed, self.replies(seed))
            for player, rewards in episode.rewards.items():
                whose = f" of {player}" if player else ""
                assert rewards or episode.score is not None, f"neither a turn{whose} nor the score has a reward"

    def test_a_failure_is_no_reward(self) -> None:
        """`create_failing` must raise in an episode, or score it as failed. A reward of 0 would be trained on."""
        environment = self.create_failing()
        if environment is None:
            pytest.skip("create_failing returns None")
        main = partial(self._episode, self.seeds[0], self.replies(self.seeds[0]), "stop", environment)
        try:
            episode = self._within(main)
        except AssertionError:
            raise
        except Exception:
            return
        assert episode.score is not None, "a failing environment ends its episode without an error"
        assert episode.score.failed, f"a failing environment scores {episode.score.value}"

    def test_turns_name_players_of_the_opening(self) -> None:
        """The player of each turn and of each reward must be one of `Opening.players`."""
        episode = self._run(self.seeds[0], ["", *self.replies(self.seeds[0])])
        players = ("", *episode.opening.players)
        assert len(set(players)) == len(players), f"players {players[1:]} need different names"
        named_players = [(episode.opening.player,), *((turn.player, *turn.rewards) for turn in episode.turns)]
        for named in named_players:
            assert set(named) <= set(players), f"{named} are not all among the players {players[1:]}"

    def test_close_may_follow_any_call(self) -> None:
        """`close` must return before and after `reset`, in an episode, and twice."""

        first = _reply(self.replies(self.seeds[0])[0])

        async def close() -> None:
            for calls in range(3):
                environment = self.create()
                if calls:
                    await self._call(environment, "reset", dict(self.task), self.seeds[0])
                if calls > 1:
                    await self._call(environment, "step", first)
                await self._call(environment, "close")
                await self._call(environment, "close")

        self._within(close)

    def test_nothing_is_left_after_close(self) -> None:
        """No thread and no child process may remain."""
        import psutil

        def living() -> tuple[int, int]:
            return threading.active_count(), len(psutil.Process().children(recursive=True))

        self._run(self.seeds[0], self.replies(self.seeds[0]))
        before = living()
        for seed in self.seeds:
            self._run(seed, self.replies(seed))
        after = living()
        assert all(now <= then for now, then in zip(after, before, strict=True)), (
            f"threads and child processes were {before}, and are {after} after {len(self.seeds)} episodes"
        )

    def test_coroutines_do_not_block(self) -> None:
        """A coroutine function that blocks stops all other episodes. Blocking code belongs into plain functions."""
        environment, replies = self.create(), self.replies(self.seeds[0])
        if not all(inspect.iscoroutinefunction(getattr(environment, name)) for name in ("reset", "step")):
            pytest.skip("its methods are plain functions, which may block")

        async def longest_gap() -> float:
            loop, gaps, ended = asyncio.get_running_loop(), [0.0], asyncio.Event()

            async def beat() -> None:
                while not ended.is_set():
                    begin = loop.time()
                    await asyncio.sleep(0.01)
                    gaps.append(loop.time() - begin)

            task = asyncio.ensure_future(beat())
            await asyncio.sleep(0)
            await self._episode(self.seeds[0], replies, "stop")
            ended.set()
            await task
            return max(gaps)

        gap = self._within(longest_gap)
        assert gap < self.blocked_s, f"the event loop was blocked for {gap:.2f} s"

    # -- episodes ------------------------------------------------------------------------------------------------------

    def _run(self, seed: int, replies: Sequence[str | Reply], *, finish_reason: Any = "stop") -> Episode:
        episode: Episode = self._within(lambda: self._episode(seed, replies, finish_reason))
        return episode

    def _unrepeatable_seed(self) -> int | None:
        """The first seed of which two episodes with the same replies differ."""
        for seed in self.seeds:
            first, second = (self._run(seed, self.replies(seed)).text for _ in range(2))
            if first != second:
                return seed
        return None

    def _within(self, main: Callable[[], Any]) -> Any:
        """Run a coroutine function on a new event loop in a thread, and return its result within `timeout_s`."""
        outcomes: list[Any] = []

        def run() -> None:
            try:
                outcomes.append((asyncio.run(main()), None))
            except BaseException as error:  # of the environment; raised below
                outcomes.append((None, error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        assert outcomes, f"the episodes took longer than {self.timeout_s:g} s"
        result, error = outcomes[0]
        if error is not None:
            raise error
        return result


def _ended(turn: Turn) -> bool:
    return turn.done or turn.truncated


def _reply(reply: str | Reply, finish_reason: Any = "stop") -> Reply:
    return reply if isinstance(reply, Reply) else Reply(text=reply, finish_reason=finish_reason)
