"""Several players in one episode: their turns, tokens, rewards, baselines and metrics."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roll_core.algorithms.advantages import grpo
from roll_core.data.rollouts import rows
from roll_core.errors import ContractError
from roll_core.pipelines.experience import Experience, sample_metrics
from roll_core.runtime.rollout.recording import group_from, saved_group
from roll_core.spec.algorithms import AdvantageInput
from roll_core.spec.environment import Environment, Opening, Reply, Turn
from roll_core.types import Group, Reward
from roll_pipeline_agentic.agentic import episode_metrics
from roll_pipeline_agentic.environments.nim import OTHER, Nim
from roll_pipeline_agentic.episodes import EpisodeGroup
from roll_testing.errors import raises_error

sys.path.insert(0, str(Path(__file__).parent))
from test_episodes import PROMPT, Config, Script, episodes

if TYPE_CHECKING:
    from conftest import AgenticRuns


SEVEN = partial(Nim, low=7, high=7)


def played(tokenizer: Any, replies: list[str], create: Any = SEVEN, n: int = 1, **given: Any) -> Group:
    """The group of episodes with these replies, turn by turn."""
    shared = episodes(tokenizer, create, Config(**({"turns": 8} | given)))
    return asyncio.run(EpisodeGroup(shared).run(Script(tokenizer, replies, n=n), PROMPT))


def by_player(group: Group) -> dict[str, Any]:
    return {sample.player: sample for sample in group.samples}


def test_players_have_their_own_conversation_and_rollout(tokenizer: Any) -> None:
    """7 stones: 3, 1, 3. The first player takes the last one."""
    group = played(tokenizer, ["3<eos>", "1<eos>", "3<eos>"])
    found = by_player(group)
    assert [sample.id for sample in group.samples] == ["guess/4/0/first", "guess/4/0/second"]
    assert {sample.episode for sample in group.samples} == {"guess/4/0"}
    (row,) = rows(found["first"].rollout)
    text = tokenizer.decode(row.tokens.tolist())
    assert text == "7 left, take 1 to 3.3<eos>3 left, take 1 to 3.3<eos>"
    assert tokenizer.decode(row.tokens[row.loss_mask].tolist()) == "3<eos>3<eos>"
    (row,) = rows(found["second"].rollout)
    assert tokenizer.decode(row.tokens.tolist()) == "4 left, take 1 to 3.1<eos>"
    assert [turn.state for turn in found["first"].rollout.turns] == [7, 3]
    assert [turn.reward for turn in found["first"].rollout.turns] == [0.0, 1.0]
    # The winner's turn costs the other player's last turn its reward.
    assert [turn.reward for turn in found["second"].rollout.turns] == [-1.0]
    assert [found[name].reward.value for name in OTHER] == [1.0, -1.0]
    assert {sample.finish_reason for sample in group.samples} == {"stop"}


def test_a_player_without_a_turn_has_no_sample(tokenizer: Any) -> None:
    group = played(tokenizer, ["3<eos>"], partial(Nim, low=3, high=3))
    assert [(sample.player, sample.reward.value) for sample in group.samples if sample.reward] == [("first", 1.0)]
    assert group.num_episodes == 1
    # A reward before the first turn belongs to that turn.
    (one, two) = played(tokenizer, ["x<eos>", "y<eos>"], Gift).samples
    assert (one.reward, two.reward) == (Reward(value=1.0), Reward(value=5.0))
    assert two.rollout is not None
    assert [turn.reward for turn in two.rollout.turns] == [5.0]


class Gift(Environment):
    """The first player's turn rewards the second, who has had none yet."""

    reward: float | None = 3.0

    async def reset(self, task: Any, seed: int) -> Opening:
        self.turns = 0
        return Opening(messages=[{"role": "user", "content": "?"}], players=("one", "two"))

    async def step(self, reply: Reply) -> Turn:
        self.turns += 1
        message = [{"role": "user", "content": "!"}]
        if self.turns == 1:
            return Turn(reward=1.0, rewards={"two": 2.0}, player="two", messages=message)
        return Turn(reward=self.reward, done=True)


class Stranger(Gift):
    async def step(self, reply: Reply) -> Turn:
        return replace(await super().step(reply), player="three")


class Twins(Gift):
    async def reset(self, task: Any, seed: int) -> Opening:
        return replace(await super().reset(task, seed), players=("one", "one"))


class Unpaid(Gift):
    reward = None

    async def step(self, reply: Reply) -> Turn:
        return replace(await super().step(reply), rewards={})


@pytest.mark.parametrize("create", [Stranger, Twins, Unpaid])
def test_a_failure_is_never_a_reward(tokenizer: Any, create: Any) -> None:
    """An unknown player, equal names, and a player with turns and without a reward."""
    group = played(tokenizer, ["x<eos>", "y<eos>"], create, retries=0)
    assert group.num_episodes == 1
    assert all(sample.reward is not None and sample.reward.failed for sample in group.samples)
    assert not Experience.of([group]).samples
    assert episode_metrics(group.samples) == {}


def test_limits_hold_for_the_episode(tokenizer: Any) -> None:
    """Eight turns of one stone do not end a game of 21. Both players have the rewards of their turns."""
    group = played(tokenizer, ["1<eos>"] * 8, partial(Nim, low=21, high=21))
    found = by_player(group)
    assert [len(found[name].rollout.turns) for name in OTHER] == [4, 4]
    assert {sample.finish_reason for sample in group.samples} == {"length"}
    assert {sample.reward.value for sample in group.samples if sample.reward} == {0.0}


class Scripted(Script):
    """Replies to each episode with replies of its own."""

    def __init__(self, tokenizer: Any, plans: list[list[str]]) -> None:
        super().__init__(tokenizer, [], n=len(plans))
        self.scripts = [Script(tokenizer, plan) for plan in plans]

    async def generate(self, prompt_ids: Any, *, n: int = 1, params: Any = None, media: Any = (), key: str = "") -> Any:
        return await self.scripts[int(key.split("/")[0])].generate(prompt_ids, n=n, params=params, key=key)


PLANS = [
    ["3<eos>", "1<eos>", "3<eos>"],  # 7, 4, 3: the first player wins
    ["1<eos>", "3<eos>", "3<eos>"],  # 7, 6, 3: the first player wins
    ["1<eos>", "2<eos>", "1<eos>", "3<eos>"],  # 7, 6, 4, 3: the second player wins
    ["?<eos>"],  # the first player loses, and the second one has no turn
]


@pytest.fixture
def group(tokenizer: Any) -> Group:
    shared = episodes(tokenizer, SEVEN, Config(turns=8))
    return asyncio.run(EpisodeGroup(shared).run(Scripted(tokenizer, PLANS), PROMPT))


def test_players_have_their_own_baseline(group: Group) -> None:
    """Rewards of the first player: 1, 1, -1, -1, with the mean 0. Of the second: -1, -1, 1, with the mean -1/3."""
    experience = Experience.of([group, replace(group, id="other")])
    assert [(sample.player, sample.reward.value) for sample in experience.samples if sample.reward][:7] == [
        *(("first", reward) for reward in (1, 1, -1, -1)),
        *(("second", reward) for reward in (-1, -1, 1)),
    ]
    assert experience.groups_S.tolist() == [0] * 4 + [1] * 3 + [2] * 4 + [3] * 3
    batch = AdvantageInput(
        scores_S=experience.scores_S.float(),
        mask_T=experience.mask_T,
        segments_T=experience.segments_T,
        groups_S=experience.groups_S,
    )
    found_T = grpo(batch).advantages_T
    found = [found_T[experience.mask_T & (experience.segments_T == index)].unique() for index in range(7)]
    # Both players' rewards have the unbiased deviation sqrt(4/3).
    expected = [3**0.5 / 2] * 2 + [-(3**0.5) / 2] * 2 + [-1 / 3**0.5] * 2 + [2 / 3**0.5]
    assert torch.cat(found).tolist() == pytest.approx(expected, abs=1e-5)
    assert sample_metrics([group])["groups/mixed_share"] == 1


def test_metrics_name_the_players(group: Group) -> None:
    found = episode_metrics(group.samples)
    assert found["env/guess/player_first/score/mean"] == 0
    assert found["env/guess/player_second/score/mean"] == pytest.approx(-1 / 3)
    assert found["env/guess/player_first/share"] == 1
    assert found["env/guess/player_second/share"] == 0.75
    # First players: the first turns 3 (of 7, optimal), 1, 1 and ?; then 3 of 3, 3 of 3, 1 of 4 (no winning turn).
    # Second players: 1 of 4, 3 of 6, 2 of 6 (optimal), then 3 of 3.
    assert found["env/guess/valid"] == pytest.approx(6 / 7)
    assert found["env/guess/optimal"] == pytest.approx((1 + 0.5 + 0 + 0 + 1) / 5)


def test_recorded_groups_keep_their_players(group: Group) -> None:
    saved = json.loads(json.dumps(saved_group(group)))
    again = group_from(saved, PROMPT)
    assert [(each.id, each.player) for each in again.samples] == [(each.id, each.player) for each in group.samples]
    assert again.num_episodes == 4


@cache
def wins(stones: int) -> bool:
    """Whether the player to move wins: some turn leaves a position that loses. An independent answer to the oracle."""
    return any(not wins(stones - taken) for taken in range(1, min(3, stones) + 1))


def test_the_oracle_of_nim_wins_every_game_that_can_be_won() -> None:
    async def play(seed: int) -> tuple[bool, str]:
        environment = Nim()
        await environment.reset({}, seed)
        expected = wins(environment.stones)
        while True:
            player = environment.player
            turn = await environment.step(Reply(text=environment.oracle()[0]))
            if turn.done:
                assert turn.rewards == {OTHER[player]: -1.0}
                assert turn.reward == 1.0
                return expected, player

    found = Counter(asyncio.run(play(seed)) for seed in range(100))
    assert set(found) == {(True, "first"), (False, "second")}


@pytest.mark.parametrize("reply", ["", "?", "0", "4", "-1", "99999999999"])
def test_an_invalid_reply_loses_the_game(reply: str) -> None:
    async def run() -> Turn:
        environment = SEVEN()
        await environment.reset({}, 0)
        return await environment.step(Reply(text=reply))

    turn = asyncio.run(run())
    assert (turn.done, turn.reward, turn.rewards) == (True, -1.0, {"second": 0.0})


def config(runs: AgenticRuns, **given: Any) -> dict[str, Any]:
    entry = {"environment": "nim", "env_config": {"low": 2, "high": 6}}
    return runs.config(
        custom_envs={"nim": entry},
        tokenizer={"kind": "char", "alphabet": "123456 aefklot,."},
        max_actions_per_traj=6,
        max_tokens_per_step=2,
        response_length=192,
        **given,
    )


def test_a_model_plays_against_itself(runs: AgenticRuns) -> None:
    given = {"rollout_batch_size": 64, "train_env_manager": {"group_size": 16}, "max_steps": 2}
    result = runs.ok(config(runs, record_rollouts=True, **given))
    for line in runs.metrics(result):
        assert line["actor/grad_norm"] > 0
        assert line["env/nim/player_first/share"] == 1
        assert -1 <= line["env/nim/player_first/score/mean"] <= 1
    samples = runs.samples(result)
    assert {sample["player"] for sample in samples} == {"first", "second"}
    for sample in samples:
        assert sample["id"].endswith(f"/{sample['player']}")
        assert sample["turns"][0]["context"] == sample["prompt"]
    replayed = config(runs, exp_name="again", replay_rollouts=str(result.run_dir.path), **given)
    losses = [[line["actor/loss"] for line in runs.metrics(each)] for each in (result, runs.ok(replayed))]
    assert losses[0] == pytest.approx(losses[1])


def test_an_agent_cannot_play_a_game_of_several(runs: AgenticRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    (runs.folder / "my_alone_agent.py").write_text("async def reply(task, session):\n    return '1'\n")
    monkeypatch.chdir(runs.folder)
    entry = {"environment": "nim", "agent": "my_alone_agent:reply"}
    with raises_error(ContractError, "custom_envs.nim"):
        runs.ok(runs.config(custom_envs={"nim": entry}, max_steps=1))
