"""Episodes as a rollout program: tokens of turns, limits, failures, and episodes that a resumed run repeats."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll_core.data.rollouts import rows
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import DataError, EnvironmentsFailedError
from roll_core.pipelines.experience import Experience
from roll_core.spec.config import DataArguments, TokenizerConfig
from roll_core.spec.environment import Environment, Message, Opening, Turn
from roll_core.spec.rollout import Prompt, RolloutContext
from roll_core.types import Completion, CompletionOutput, Group, Reward, SamplingParams
from roll_pipeline_agentic.agentic import (
    AgenticPipeline,
    EpisodeOrder,
    episode_metrics,
    first_difference,
    with_echo,
)
from roll_pipeline_agentic.chat_encoder import ChatEncoder
from roll_pipeline_agentic.config import AgenticEnvConfig, PricesConfig, ResponseMaskConfig, ValEnvManagerConfig
from roll_pipeline_agentic.environments.guess_number import GuessNumber
from roll_pipeline_agentic.episodes import EpisodeGroup, Episodes
from roll_pipeline_agentic.hosting import EnvironmentHost
from roll_testing.errors import mentions

sys.path.insert(0, str(Path(__file__).parent))
from wrong_environments import Echo

PROMPT = Prompt(id="guess/4", tokens=np.zeros(0, dtype=np.int64), text="", tag="guess")


class Config:
    """The keys of `AgenticConfig` that episodes read."""

    def __init__(self, *, turns: int = 4, reply: int = 8, total: int = 400, retries: int = 1, mask: Any = None) -> None:
        self.seed, self.prompt_length, self.response_length = 1, total // 2, total - total // 2
        self.max_consecutive_failures = 2
        self.max_tokens_per_traj: int | None = None
        self.has_message_loss = False
        self.turns, self.reply = turns, reply
        self.custom_envs = {
            "guess": AgenticEnvConfig(environment="x", max_retries=retries, response_mask=mask or ResponseMaskConfig())
        }

    def max_turns(self, tag: str) -> int:
        return self.turns

    def max_reply_tokens(self, tag: str) -> int:
        return self.reply


class Script(RolloutContext):
    """Replies to each call with the text of its turn. Keeps what it sampled, as the runtime does."""

    def __init__(
        self, tokenizer: Any, replies: list[str], *, n: int = 1, sampled: Any = None, stop_at: int = 10**9
    ) -> None:
        self.tokenizer, self.replies, self.n, self.params = tokenizer, replies, n, SamplingParams(max_new_tokens=99)
        self.sampled: dict[str, CompletionOutput] = dict(sampled or {})
        self.calls: list[tuple[str, list[int], int]] = []
        self.stop_at = stop_at
        self.stopped = asyncio.Event()

    async def generate(
        self, prompt_ids: Any, *, n: int = 1, params: Any = None, media: Any = (), key: str = ""
    ) -> Completion:
        self.calls.append((key, prompt_ids.tolist(), params.max_new_tokens))
        await asyncio.sleep(0)
        if key not in self.sampled:
            if len(self.calls) > self.stop_at:
                self.stopped.set()
                await asyncio.sleep(3600)
            ids = self.tokenizer(self.replies[int(key.split("/")[2])])["input_ids"][: params.max_new_tokens]
            self.sampled[key] = CompletionOutput(
                token_ids=np.array(ids, dtype=np.int64),
                logprobs=np.full(len(ids), -0.5, dtype=np.float32),
                versions=np.zeros(len(ids), dtype=np.int32),
                finish_reason="stop" if ids[-1] == self.tokenizer.eos_token_id else "length",
            )
        return Completion(id=key, outputs=(self.sampled[key],))

    async def score(self, group: Group) -> Group:
        raise AssertionError


def episodes(
    tokenizer: Any,
    create: Any,
    config: Config | None = None,
    isolation: Any = "inline",
    template: str = "plain",
    concurrency: int = 0,
) -> Episodes:
    config = config or Config()
    host = EnvironmentHost(
        "guess", config.custom_envs["guess"], target="", options={}, owner="environment 'x' of acme 1.0",
        isolation=isolation, concurrency=concurrency, create=create,
    )  # fmt: skip
    encoder = ChatEncoder(tokenizer, DataArguments(template=template), where="custom_envs.guess")
    return Episodes(
        config=config,  # type: ignore[arg-type]
        tokenizer=tokenizer,
        encoders={"guess": encoder},
        hosts={"guess": host},
        groups=asyncio.Semaphore(8),
        counts=Counter(),
    )


class Five(GuessNumber):
    """The number is 5."""

    async def reset(self, task: Any, seed: int) -> Opening:
        opening = await super().reset(task, seed)
        self.number = 5
        return opening


RIGHT = ["3<eos>", "8<eos>", "5<eos>"]
FIVE = partial(Five, low=1, high=9, step_penalty=0.25)


def test_an_episode_is_one_row_of_its_own_tokens(tokenizer: Any) -> None:
    async def run() -> tuple[Group, Script]:
        context = Script(tokenizer, RIGHT)
        return await EpisodeGroup(episodes(tokenizer, FIVE)).run(context, PROMPT), context

    group, context = asyncio.run(run())
    (sample,) = group.samples
    assert sample.rollout is not None
    (row,) = rows(sample.rollout)
    opening = "Guess a number from 1 to 9."
    assert tokenizer.decode(row.tokens.tolist()) == f"{opening}3<eos>higher8<eos>lower5<eos>"
    assert tokenizer.decode(row.tokens[row.loss_mask].tolist()) == "3<eos>8<eos>5<eos>"
    assert [turn.reward for turn in sample.rollout.turns] == [-0.25, -0.25, 1.0]
    assert [turn.state for turn in sample.rollout.turns] == ["1-9", "4-9", "4-7"]
    assert sample.reward == Reward(value=0.5)
    assert (sample.id, sample.finish_reason, sample.tag) == ("guess/4/0", "stop", "guess")
    assert [key for key, _, _ in context.calls] == ["0/0/0", "0/0/1", "0/0/2"]


SHORTENS = (
    "{% for m in messages %}{{ m.content[-6:] }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Keeps only the end of each message, so of replies that are longer."""


def test_template_that_changes_a_reply_forks_without_repeats(tokenizer: Any) -> None:
    replies = ["I say 3<eos>", "8<eos>", "5<eos>"]

    async def run() -> Group:
        tokenizer.chat_template = SHORTENS
        try:
            shared = episodes(tokenizer, FIVE, Config(reply=20), template="native")
            return await EpisodeGroup(shared).run(Script(tokenizer, replies), PROMPT)
        finally:
            tokenizer.chat_template = None

    (sample,) = asyncio.run(run()).samples
    assert sample.rollout is not None
    assert [turn.parent for turn in sample.rollout.turns] == [None, None, 1]
    found = [tokenizer.decode(row.tokens.tolist()) for row in rows(sample.rollout)]
    assert found == ["1 to 9."[-6:] + "I say 3<eos>", " to 9. say 3<eos>higher8<eos>lower5<eos>"]
    trained = [tokenizer.decode(row.tokens[row.loss_mask].tolist()) for row in rows(sample.rollout)]
    assert trained == ["I say 3<eos>", "8<eos>5<eos>"]
    assert episode_metrics([sample])["rollout/forks"] == 1
    difference = first_difference(sample.rollout, shared_text(tokenizer))
    assert mentions(difference, "turn 2", "turn 1")
    assert "' say 3<eos>higher'" in difference


def shared_text(tokenizer: Any) -> Any:
    return lambda ids: tokenizer.decode(ids.tolist())


def test_rows_that_continue_have_no_difference(tokenizer: Any) -> None:
    (sample,) = asyncio.run(EpisodeGroup(episodes(tokenizer, FIVE)).run(Script(tokenizer, RIGHT), PROMPT)).samples
    assert sample.rollout is not None
    assert first_difference(sample.rollout, shared_text(tokenizer)) == ""


ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles_alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)
"""As Gemma's and Mistral's templates: user, assistant, user, …"""
HINT: Message = {"role": "user", "content": "a hint"}


class Told(Five):
    """Begins with `opening`, and gives a hint as a message of its own after the turn `hint_after`."""

    def __init__(self, *, opening: Sequence[Message] = (), hint_after: int = 0) -> None:
        super().__init__(low=1, high=9)
        self.opening, self.hint_after, self.turns = list(opening), hint_after, 0

    async def reset(self, task: Any, seed: int) -> Opening:
        opening = await super().reset(task, seed)
        return replace(opening, messages=self.opening or opening.messages)

    async def step(self, reply: Any) -> Turn:
        self.turns += 1
        turn = await super().step(reply)
        return replace(turn, messages=[*turn.messages, HINT] if self.turns == self.hint_after else turn.messages)


async def under(tokenizer: Any, template: str, creates: Sequence[Any], **options: Any) -> tuple[Group, Script, Any]:
    """A group whose attempts have these environments, in turn."""
    tokenizer.chat_template = template
    try:
        create = iter(creates)
        shared = episodes(tokenizer, lambda: next(create)(), **options, template="native")
        context = Script(tokenizer, RIGHT)
        return await EpisodeGroup(shared).run(context, PROMPT), context, shared
    finally:
        tokenizer.chat_template = None


@pytest.mark.parametrize(
    ("wrong", "method", "num_calls"),
    [
        (partial(Told, opening=[HINT, HINT]), "reset", 0),
        (partial(Told, opening=[{"role": "system", "content": "Guess."}, HINT]), "reset", 0),
        (partial(Told, hint_after=1), "step", 1),
        (partial(Told, hint_after=2), "step", 2),
    ],
)
def test_messages_that_the_template_refuses_fail_their_episode(
    tokenizer: Any, wrong: Any, method: str, num_calls: int
) -> None:
    group, context, shared = asyncio.run(under(tokenizer, ALTERNATES, [wrong, wrong]))
    (sample,) = group.samples
    assert sample.reward is not None
    assert sample.reward.value is None
    assert all(each in sample.reward.failure for each in ("custom_envs.guess", "acme", method, "roles_alternate"))
    assert len(context.calls) == 2 * num_calls
    assert shared.counts == {("guess", "retries"): 1, ("guess", "failures"): 1}
    # Another attempt of the same episode is trained.
    group, _, shared = asyncio.run(under(tokenizer, ALTERNATES, [wrong, Told]))
    assert group.samples[0].reward == Reward(value=1.0)
    assert shared.counts == {("guess", "retries"): 1}


@pytest.mark.parametrize(("text", "fails"), [("higher", False), ("größer", True)])
def test_text_outside_the_tokenizer_fails_its_episode(tmp_path: Path, text: str, fails: bool) -> None:
    class Says(Five):
        async def step(self, reply: Any) -> Turn:
            turn = await super().step(reply)
            return turn if turn.done else replace(turn, messages=[{"role": "user", "content": text}])

    alphabet = "0123456789 Gabcdefghijklmnopqrstuvwxyz."
    tokenizer = make_tokenizer(TokenizerConfig(kind="char", alphabet=alphabet), [], tmp_path)
    shared = episodes(tokenizer, partial(Says, low=1, high=9), Config(retries=0))
    (sample,) = asyncio.run(EpisodeGroup(shared).run(Script(tokenizer, RIGHT), PROMPT)).samples
    assert sample.reward is not None
    assert sample.reward.failed == fails
    assert ("acme" in sample.reward.failure) == fails


def test_tools_that_a_template_cannot_describe_fail_the_config(tokenizer: Any) -> None:
    class WithTools(Five):
        async def reset(self, task: Any, seed: int) -> Opening:
            return replace(await super().reset(task, seed), tools=[{"type": "function", "function": {"name": "add"}}])

    shared = episodes(tokenizer, partial(WithTools, low=1, high=9))
    with pytest.raises(DataError):
        asyncio.run(EpisodeGroup(shared).run(Script(tokenizer, RIGHT), PROMPT))


def test_limits_truncate_an_episode(tokenizer: Any) -> None:
    async def run(config: Config, replies: list[str]) -> Any:
        context = Script(tokenizer, replies)
        group = await EpisodeGroup(episodes(tokenizer, FIVE, config)).run(context, PROMPT)
        return group.samples[0], context

    sample, _ = asyncio.run(run(Config(turns=2), RIGHT))
    assert (sample.finish_reason, len(sample.rollout.turns), sample.reward.value) == ("length", 2, -0.5)
    sample, context = asyncio.run(run(Config(turns=2, reply=1), RIGHT))
    assert [limit for _, _, limit in context.calls] == [1, 1]
    assert [turn.finish_reason for turn in sample.rollout.turns] == ["length", "length"]
    # 27 tokens of the opening, 2 of the first reply, 6 of "higher": a total of 36 leaves one for the second reply.
    config = Config(reply=9)
    config.prompt_length, config.response_length = 27, 9
    sample, context = asyncio.run(run(config, RIGHT))
    assert [limit for _, _, limit in context.calls] == [9, 1]
    assert sample.finish_reason == "length"
    assert len(sample.prompt_ids) + len(sample.response_ids) == 36


def test_a_prompt_that_is_too_long_is_a_failure(tokenizer: Any) -> None:
    config = Config()
    config.prompt_length = 26
    group = asyncio.run(EpisodeGroup(episodes(tokenizer, FIVE, config)).run(Script(tokenizer, RIGHT), PROMPT))
    assert group.samples[0].reward is not None
    assert group.samples[0].reward.failed


def test_failed_episode_is_retried_with_new_keys_then_excluded(tokenizer: Any) -> None:
    async def run() -> Any:
        shared = episodes(tokenizer, partial(Echo, at="step", how="raise"), Config(retries=2), "thread")
        context = Script(tokenizer, RIGHT)
        return await EpisodeGroup(shared).run(context, PROMPT), context, shared

    group, context, shared = asyncio.run(run())
    (sample,) = group.samples
    assert sample.reward.value is None
    assert "acme" in sample.reward.failure
    assert [key for key, _, _ in context.calls] == ["0/0/0", "0/1/0", "0/2/0"]
    assert shared.counts == {("guess", "retries"): 2, ("guess", "failures"): 1}


def test_a_failed_episode_is_retried_before_others_begin(tokenizer: Any) -> None:
    numbers = itertools.count()

    class FailsOnce(Five):
        async def reset(self, task: Any, seed: int) -> Opening:
            if not next(numbers):
                raise RuntimeError("no such level")
            return await super().reset(task, seed)

    async def run() -> list[str]:
        shared = episodes(tokenizer, partial(FailsOnce, low=1, high=9), concurrency=1)
        context = Script(tokenizer, RIGHT, n=3)
        await EpisodeGroup(shared).run(context, PROMPT)
        return [key.rpartition("/")[0] for key, _, _ in context.calls]

    assert asyncio.run(run()) == ["0/1"] * 3 + ["1/0"] * 3 + ["2/0"] * 3


def test_an_episode_without_any_reward_is_a_failure(tokenizer: Any) -> None:
    async def run() -> Group:
        shared = episodes(tokenizer, partial(Echo, how="no reward"), Config(retries=0), "thread")
        return await EpisodeGroup(shared).run(Script(tokenizer, ["1<eos>"] * 4), PROMPT)

    (sample,) = asyncio.run(run()).samples
    assert sample.reward is not None
    assert sample.reward.failed


def test_too_many_failures_in_a_row_end_the_run(tokenizer: Any) -> None:
    async def run() -> None:
        shared = episodes(tokenizer, partial(Echo, at="reset", how="raise"), Config(retries=0), "thread")
        await EpisodeGroup(shared).run(Script(tokenizer, RIGHT, n=3), PROMPT)

    with pytest.raises(EnvironmentsFailedError):
        asyncio.run(run())


def test_a_successful_episode_ends_a_row_of_failures(tokenizer: Any) -> None:
    """Two of three episodes fail, six in all, but never more than `max_consecutive_failures` = 2 in a row."""
    numbers = itertools.count()

    class Unstable(Five):
        async def reset(self, task: Any, seed: int) -> Opening:
            if next(numbers) % 3:
                raise RuntimeError("no such level")
            return await super().reset(task, seed)

    async def run() -> tuple[list[bool], Any]:
        shared = episodes(tokenizer, partial(Unstable, low=1, high=9), Config(retries=0))
        groups = [await EpisodeGroup(shared).run(Script(tokenizer, RIGHT), PROMPT) for _ in range(9)]
        return [sample.reward.failed for group in groups for sample in group.samples if sample.reward], shared

    failed, shared = asyncio.run(run())
    assert failed == [False, True, True] * 3
    assert shared.counts == {("guess", "failures"): 6}


def test_the_score_of_an_episode_belongs_to_its_last_turn(tokenizer: Any) -> None:
    class Scored(Five):
        async def score(self) -> Reward:
            return Reward(value=2.0, detail={"style": 2.0})

    create = partial(Scored, low=1, high=9, step_penalty=0.25)
    group = asyncio.run(EpisodeGroup(episodes(tokenizer, create)).run(Script(tokenizer, RIGHT), PROMPT))
    (sample,) = group.samples
    assert sample.reward == Reward(value=2.5, detail={"style": 2.0})
    assert sample.rollout is not None
    assert [turn.reward for turn in sample.rollout.turns] == [-0.25, -0.25, 3.0]


# -- masks and penalties -----------------------------------------------------------------------------------------------


def trained_text(tokenizer: Any, sample: Any) -> list[str]:
    return [tokenizer.decode(row.tokens[row.loss_mask].tolist()) for row in rows(sample.rollout)]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ({"turns": "last"}, ["5<eos>"]),
        ({"turns": "valid"}, ["3<eos>5<eos>"]),
        ({"pattern": r"\d"}, ["35"]),
        ({"pattern": r"\w+(?=<)"}, ["3dunno5"]),
        ({"pattern": r"5.*", "turns": "last"}, ["5<eos>"]),
    ],
)
def test_a_response_mask_selects_turns_and_tokens(tokenizer: Any, mask: Any, expected: list[str]) -> None:
    config = Config(mask=ResponseMaskConfig(**mask))
    context = Script(tokenizer, ["3<eos>", "dunno<eos>", "5<eos>"])
    (sample,) = asyncio.run(EpisodeGroup(episodes(tokenizer, FIVE, config)).run(context, PROMPT)).samples
    assert trained_text(tokenizer, sample) == expected
    # What is not trained on was sampled all the same.
    assert int((sample.versions >= 0).sum()) == 2 + 6 + 2
    trained = sum(len(tokenizer(text)["input_ids"]) for text in expected)
    assert episode_metrics([sample])["env/guess/trained_share"] == pytest.approx(trained / 10)


def test_success_is_0_if_no_episode_has_it(tokenizer: Any) -> None:
    context = Script(tokenizer, ["3<eos>"] * 8)
    (sample,) = asyncio.run(EpisodeGroup(episodes(tokenizer, FIVE)).run(context, PROMPT)).samples
    assert "env/guess/success" not in episode_metrics([sample])
    assert episode_metrics([sample], ["guess"])["env/guess/success"] == 0.0


@pytest.mark.parametrize(
    ("reported", "success"),
    [([0.0, 0.0, 1.0], 1.0), ([1.0, 1.0, 0.0], 0.0), ([0.0, 1.0, None], 1.0), ([None] * 3, 0.0)],
)
def test_success_is_that_of_the_last_turn(tokenizer: Any, reported: list[float | None], success: float) -> None:
    class Reports(Five):
        number = 0

        async def step(self, reply: Any) -> Turn:
            turn = await super().step(reply)
            value, Reports.number = reported[Reports.number], Reports.number + 1
            return replace(turn, metrics={} if value is None else {"success": value})

    shared = episodes(tokenizer, partial(Reports, low=1, high=9))
    (sample,) = asyncio.run(EpisodeGroup(shared).run(Script(tokenizer, RIGHT), PROMPT)).samples
    assert episode_metrics([sample], ["guess"])["env/guess/success"] == success


def test_an_episode_without_a_trained_token_keeps_its_reward(tokenizer: Any) -> None:
    config = Config(mask=ResponseMaskConfig(pattern="<tool_call>.*?</tool_call>"))
    (sample,) = asyncio.run(
        EpisodeGroup(episodes(tokenizer, FIVE, config)).run(Script(tokenizer, RIGHT), PROMPT)
    ).samples
    assert sample.reward == Reward(value=0.5)
    assert trained_text(tokenizer, sample) == [""]


def test_an_invalid_action_costs_its_turn_the_penalty(tokenizer: Any) -> None:
    """Rewards -0.25, -0.25 and 1, and the penalty of -0.5 for the second turn: 0.5 - 0.5 = 0."""
    shared = episodes(tokenizer, FIVE)
    shared.format_penalty = -0.5
    context = Script(tokenizer, ["3<eos>", "dunno<eos>", "5<eos>"])
    (sample,) = asyncio.run(EpisodeGroup(shared).run(context, PROMPT)).samples
    assert sample.reward == Reward(value=0.0, detail={"format_penalty": -0.5})
    assert [turn.reward for turn in sample.rollout.turns] == [-0.25, -0.75, 1.0]
    metrics = episode_metrics([sample])
    assert [metrics[f"env/guess/turn_{k}/reward"] for k in (1, 2, 3)] == [-0.25, -0.75, 1.0]
    assert [metrics[f"env/guess/turn_{k}/tokens"] for k in (1, 2, 3)] == [2, 6, 2]


def test_an_episode_costs_what_its_turns_read_and_sampled(tokenizer: Any) -> None:
    """A hosted model counts the whole prompt of each turn: the earlier prompts and replies again."""
    context = Script(tokenizer, ["3<eos>", "dunno<eos>", "5<eos>"])
    (sample,) = asyncio.run(EpisodeGroup(episodes(tokenizer, FIVE)).run(context, PROMPT)).samples
    read = sum(len(prompt) for _, prompt, _ in context.calls)
    metrics = episode_metrics([sample, sample], prices={"guess": PricesConfig(read=2, sampled=30)})
    assert metrics["env/guess/read_tokens/mean"] == read
    assert metrics["env/guess/sampled_tokens/mean"] == 10
    assert metrics["env/guess/cost/mean"] == pytest.approx((2 * read + 300) / 1e6)
    assert metrics["env/guess/cost/sum"] == pytest.approx(2 * metrics["env/guess/cost/mean"])


def test_an_episode_has_a_maximum_number_of_sampled_tokens(tokenizer: Any) -> None:
    config = Config()
    config.max_tokens_per_traj = 3
    context = Script(tokenizer, RIGHT)
    (sample,) = asyncio.run(EpisodeGroup(episodes(tokenizer, FIVE, config)).run(context, PROMPT)).samples
    assert [limit for _, _, limit in context.calls] == [3, 1]
    assert sample.finish_reason == "length"
    assert int(sample.loss_mask.sum()) == 3


def test_echo_weighs_the_messages_of_the_environment(tokenizer: Any) -> None:
    config = Config()
    config.has_message_loss = True
    group = asyncio.run(EpisodeGroup(episodes(tokenizer, FIVE, config)).run(Script(tokenizer, RIGHT, n=2), PROMPT))
    for row in with_echo(Experience.of([group])).sequences:
        assert tokenizer.decode(row.tokens[row.streams["echo"] == 1].tolist()) == "higherlower"
        assert not (row.streams["echo"][row.loss_mask]).any()


def test_echo_weighs_each_message_of_a_forked_episode_once(tokenizer: Any) -> None:
    async def run() -> Group:
        tokenizer.chat_template = SHORTENS
        try:
            config = Config(reply=20)
            config.has_message_loss = True
            shared = episodes(tokenizer, FIVE, config, template="native")
            return await EpisodeGroup(shared).run(Script(tokenizer, ["I say 3<eos>", "8<eos>", "5<eos>"]), PROMPT)
        finally:
            tokenizer.chat_template = None

    found = with_echo(Experience.of([asyncio.run(run())])).sequences
    assert [tokenizer.decode(row.tokens[row.streams["echo"] == 1].tolist()) for row in found] == ["", "higherlower"]


# -- resume ------------------------------------------------------------------------------------------------------------


async def interrupted(tokenizer: Any, create: Any, stop_at: int, n: int = 2) -> tuple[dict[str, Any], Any]:
    """State and sampled tokens of a group that is interrupted at a call of `generate`."""
    context = Script(tokenizer, RIGHT, n=n, stop_at=stop_at)
    program = EpisodeGroup(episodes(tokenizer, create))
    task = asyncio.ensure_future(program.run(context, PROMPT))
    await context.stopped.wait()
    state = json.loads(json.dumps(program.snapshot()))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return state, context.sampled


@pytest.mark.parametrize("stop_at", range(6))
def test_a_restored_group_is_the_uninterrupted_one(tokenizer: Any, stop_at: int) -> None:
    async def run() -> tuple[Group, Group, Script, Any]:
        whole = await EpisodeGroup(episodes(tokenizer, FIVE)).run(Script(tokenizer, RIGHT, n=2), PROMPT)
        state, sampled = await interrupted(tokenizer, FIVE, stop_at)
        context = Script(tokenizer, RIGHT, n=2, sampled=sampled)
        program = EpisodeGroup(episodes(tokenizer, FIVE))
        program.restore(state)
        return whole, await program.run(context, PROMPT), context, sampled

    whole, restored, context, sampled = asyncio.run(run())
    for mine, theirs in zip(restored.samples, whole.samples, strict=True):
        assert mine.response_ids.tolist() == theirs.response_ids.tolist()
        assert mine.reward == theirs.reward
    assert {key.split("/")[1] for key, _, _ in context.calls} == {"0"}
    assert all(context.sampled[key] is output for key, output in sampled.items())


def test_tokens_of_another_prompt_are_not_used(tokenizer: Any) -> None:
    """The environment of the resumed run differs: its episodes start again, with other keys."""
    other = partial(Five, low=0, high=9, step_penalty=0.25)

    async def run() -> tuple[Group, Script, Episodes]:
        state, sampled = await interrupted(tokenizer, FIVE, 3)
        context = Script(tokenizer, RIGHT, n=2, sampled=sampled)
        shared = episodes(tokenizer, other)
        program = EpisodeGroup(shared)
        program.restore(state)
        return await program.run(context, PROMPT), context, shared

    group, context, shared = asyncio.run(run())
    assert {key.split("/")[1] for key, _, _ in context.calls} == {"1"}
    assert shared.counts == {("guess", "repeats"): 2}
    for sample in group.samples:
        assert tokenizer.decode(sample.prompt_ids.tolist()) == "Guess a number from 0 to 9."


def test_group_restored_and_saved_again_expects_its_prompts(tokenizer: Any) -> None:
    async def run() -> None:
        state, _ = await interrupted(tokenizer, FIVE, 4)
        program = EpisodeGroup(episodes(tokenizer, FIVE))
        program.restore(state)
        assert json.loads(json.dumps(program.snapshot()))["prompts"] == state["prompts"]

    asyncio.run(run())


class Changing(Environment):
    """Not seeded: every instance has another opening."""

    number = 0

    async def reset(self, task: Any, seed: int) -> Opening:
        Changing.number += 1
        return Opening(messages=[{"role": "user", "content": str(Changing.number)}])

    async def step(self, reply: Any) -> Turn:
        return Turn(reward=1.0, done=True)


def test_an_environment_that_ignores_its_seed_loses_no_episode(tokenizer: Any) -> None:
    async def run() -> tuple[Group, Episodes]:
        state, sampled = await interrupted(tokenizer, Changing, 1)
        shared = episodes(tokenizer, Changing)
        program = EpisodeGroup(shared)
        program.restore(state)
        return await program.run(Script(tokenizer, RIGHT, n=2, sampled=sampled), PROMPT), shared

    group, shared = asyncio.run(run())
    assert [sample.reward for sample in group.samples] == [Reward(value=1.0)] * 2
    assert shared.counts["guess", "repeats"] == 2


def test_an_evaluation_keeps_the_counts_of_training_episodes(tokenizer: Any) -> None:
    """With asynchronous rollouts, episodes are retried between two batches, also before an evaluation."""
    pipeline = object.__new__(AgenticPipeline)
    pipeline.config = Config()  # type: ignore[assignment]
    pipeline.config.val_env_manager = ValEnvManagerConfig()
    pipeline.with_success, pipeline.agents, pipeline.prices = set(), {}, {}
    pipeline.episodes = episodes(tokenizer, FIVE)
    pipeline.hosts, pipeline.encoders = dict(pipeline.episodes.hosts), dict(pipeline.episodes.encoders)
    pipeline.hosts["guess"].seconds["step"].append(3.0)
    pipeline.validation_order = EpisodeOrder({"guess": 1}, {}, seed=1, split="val/")
    pipeline.episodes.counts["guess", "retries"] = 2

    async def nothing(*given: Any, **options: Any) -> list[Any]:
        return []

    run: Any = SimpleNamespace(
        publish_weights=nothing, rollout=nothing, tokenizer=tokenizer, log_samples=lambda *given, **options: None
    )
    asyncio.run(pipeline.evaluate(run))
    assert pipeline.episodes.counts == {("guess", "retries"): 2}
    assert pipeline.hosts["guess"].seconds["step"] == []
