"""Episodes as a rollout program: `group_size` episodes with the same seed, token by token.

    environment ── messages ──► ChatEncoder ── prompt ids ──► context.generate ── sampled ids ──► reply
         ▲                                                          │                               │
         └───────────────────────────── text ◄──────────────────────┴───────────────────────────────┘
                                                                    └──► TurnRecord

A resumed run repeats the episode: the environment starts again, and `generate` returns the tokens that were sampled
before, by the key of the call. If a prompt differs, these tokens are discarded and the episode starts again.

Players of an episode take turns. Each has a conversation, a rollout and a sample of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.data.reasoning import decode_response
from roll_core.data.rollouts import sample_of_rollout
from roll_core.errors import DataError, EnvironmentFailure, EnvironmentsFailedError
from roll_core.spec.environment import Reply
from roll_core.spec.rollout import RolloutProgram
from roll_core.types import Group, Reward, Rollout
from roll_pipeline_agentic.calls import prompt_digest, seed_of, state_of
from roll_pipeline_agentic.chat_encoder import UnseenImageError
from roll_pipeline_agentic.masks import is_invalid, mask_of_messages, mask_rollout
from roll_pipeline_agentic.recording import record_turn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from roll_core.spec.environment import Message, Opening, State, Turn
    from roll_core.spec.rollout import Prompt, RolloutContext
    from roll_core.types import Bools, CompletionOutput, Sample
    from roll_pipeline_agentic.agents import AgentHost
    from roll_pipeline_agentic.chat_encoder import ChatEncoder, EncodedChat
    from roll_pipeline_agentic.config import EpisodeConfig
    from roll_pipeline_agentic.hosting import EnvironmentHost, HostedEnvironment


@dataclass(eq=False, slots=True)
class Episodes:
    """What the episodes of one run share. Lives on the driver's event loop."""

    config: EpisodeConfig
    tokenizer: PreTrainedTokenizerBase
    encoders: Mapping[str, ChatEncoder]
    """Encoder of each tag, which names it in errors."""
    hosts: Mapping[str, EnvironmentHost]
    groups: asyncio.Semaphore
    """Slots for groups whose episodes run, `num_env_groups`."""
    counts: Counter[tuple[str, str]]
    """`(tag, "retries" | "failures" | "repeats" | "echo_skipped")` since the last metrics."""
    format_penalty: float = 0.0
    """Added to the reward of turns with an invalid action."""
    agents: Mapping[str, AgentHost] = field(default_factory=dict)
    """Agents of the tags that have one."""
    consecutive_failures: int = 0
    """Failed episodes since the last one that succeeded."""

    def observed(self, tag: str, chat: EncodedChat, known: int, number: int) -> Bools | None:
        """Mask of the last `number` messages in the tokens after the first `known`, if there is a loss for them."""
        if not self.config.has_message_loss:
            return None
        mask = mask_of_messages(chat.ids[known:], self.encoders[tag], chat, number)
        self.counts[tag, "echo_skipped"] += mask is None
        return mask

    def count_failure(self, tag: str, failure: EnvironmentFailure) -> None:
        """Count an episode without further attempts. Raises `EnvironmentsFailedError` after too many in a row."""
        self.counts[tag, "failures"] += 1
        self.consecutive_failures += 1
        if self.consecutive_failures > self.config.max_consecutive_failures:
            raise EnvironmentsFailedError(
                f"{self.consecutive_failures} episodes failed in a row, more than max_consecutive_failures"
                f" {self.config.max_consecutive_failures}; the last: {failure}"
            ) from failure


class _PromptChanged(Exception):
    """A repeated episode has another prompt than the one whose reply was sampled."""


class EpisodeGroup(RolloutProgram):
    """The episodes of one group."""

    def __init__(self, episodes: Episodes) -> None:
        self._episodes = episodes
        self._attempts: dict[int, int] = {}
        """Number of the current attempt of each episode."""
        self._failures: Counter[int] = Counter()
        """Failed attempts of each episode."""
        self._prompts: defaultdict[int, list[str]] = defaultdict(list)
        """Digests of the prompts of each episode's current attempt."""
        self._expected: dict[int, list[str]] = {}
        """Digests of the prompts before this program was saved."""
        self._agent: AgentHost | None = None

    @override
    async def run(self, context: RolloutContext, prompt: Prompt) -> Group:
        self._agent = self._episodes.agents.get(prompt.tag)
        async with self._episodes.groups:
            tasks = [asyncio.ensure_future(self._episode(context, prompt, index)) for index in range(context.n)]
            try:
                results = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)  # until their environments are closed
        group = Group(id=prompt.id, samples=tuple(sample for samples in results for sample in samples))
        return group if self._agent is None else await self._agent.scored(context, group)

    @override
    def snapshot(self) -> Mapping[str, Any] | None:
        if self._agent is not None:
            return None  # an agent's state is its own: a resumed run starts it again
        # A restored episode that has not repeated all its turns yet still expects the later ones.
        prompts = {index: known + self._prompts[index][len(known) :] for index, known in self._expected.items()}
        prompts = dict(self._prompts) | prompts
        return {
            "attempts": {str(index): attempt for index, attempt in self._attempts.items()},
            "failures": {str(index): number for index, number in self._failures.items()},
            "prompts": {str(index): digests for index, digests in prompts.items()},
        }

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self._attempts = {int(index): attempt for index, attempt in state["attempts"].items()}
        self._failures = Counter({int(index): number for index, number in state["failures"].items()})
        self._expected = {int(index): list(digests) for index, digests in state["prompts"].items()}

    async def _episode(self, context: RolloutContext, prompt: Prompt, index: int) -> list[Sample]:
        """Run an episode until an attempt succeeds. After the last attempt, its samples have a failed reward."""
        episodes, tag = self._episodes, prompt.tag
        async with AsyncExitStack() as slots:
            for host in (self._agent, episodes.hosts.get(tag)):
                if host is not None:
                    await slots.enter_async_context(host.slot())
            while True:
                attempt, begin = _Attempt(self, context, prompt, index), time.monotonic()
                try:
                    if self._agent is not None:
                        samples = await attempt.play(self._agent)
                    else:
                        async with episodes.hosts[tag].environment() as environment:
                            samples = await attempt.run(environment)
                    episodes.consecutive_failures = 0
                    host = self._agent or episodes.hosts[tag]
                    host.seconds.setdefault("episode", []).append(time.monotonic() - begin)
                    return samples
                except _PromptChanged:
                    episodes.counts[tag, "repeats"] += 1
                except EnvironmentFailure as failure:
                    self._failures[index] += 1
                    if self._failures[index] > episodes.config.custom_envs[tag].max_retries:
                        episodes.count_failure(tag, failure)
                        return attempt.samples("abort", Reward(value=None, failure=str(failure)))
                    episodes.counts[tag, "retries"] += 1
                self._attempts[index] = self._attempts.get(index, 0) + 1
                self._prompts.pop(index, None)
                self._expected.pop(index, None)

    def attempt(self, index: int) -> int:
        """Number of the current attempt of an episode."""
        return self._attempts.get(index, 0)

    def key(self, index: int, chat: EncodedChat) -> str:
        """Key of an episode's next `generate` call. Raises `_PromptChanged` if it was called with another prompt."""
        digests = self._prompts[index]
        turn, digest = len(digests), prompt_digest(chat.ids, chat.media)
        expected = self._expected.get(index, [])
        if turn < len(expected) and expected[turn] != digest:
            raise _PromptChanged
        digests.append(digest)
        return f"{index}/{self.attempt(index)}/{turn}"


@dataclass(eq=False, slots=True)
class _Conversation:
    """What one player read and replied."""

    chat: EncodedChat
    state: State
    """State in which its next turn begins."""
    observed: Bools | None = None
    parent: int | None = None
    rollout: Rollout = field(default_factory=lambda: Rollout(turns=()))

    def add_to_last(self, reward: float) -> None:
        """Add to the reward of the last turn."""
        *turns, last = self.rollout.turns
        self.rollout = Rollout(turns=(*turns, replace(last, reward=(last.reward or 0.0) + reward)))


class _Attempt:
    """One attempt of one episode."""

    def __init__(self, group: EpisodeGroup, context: RolloutContext, prompt: Prompt, index: int) -> None:
        self._group, self._context, self._prompt, self._index = group, context, prompt, index
        self._episodes = group._episodes
        self._rollouts: dict[str, Rollout] = {}
        """Turns so far, by player."""

    def samples(self, finish_reason: Any, rewards: Reward | Mapping[str, Reward] | None) -> list[Sample]:
        """The samples of the turns so far: one, or one of each player with a turn. `rewards` of all or by player."""
        prompt, episodes = self._prompt, self._episodes
        mask = episodes.config.custom_envs[prompt.tag].response_mask
        return [
            sample_of_rollout(
                mask_rollout(rollout, mask, episodes.encoders[prompt.tag]),
                id=f"{prompt.id}/{self._index}{'/' if player else ''}{player}",
                group_id=prompt.id,
                finish_reason=finish_reason,
                reward=rewards if isinstance(rewards, Reward | None) else rewards[player],
                tag=prompt.tag,
                metadata=prompt.metadata,
                player=player,
            )
            for player, rollout in (self._rollouts or {"": Rollout(turns=())}).items()
        ]

    async def play(self, agent: AgentHost) -> list[Sample]:
        """Run an agent to its end."""
        key = f"{self._index}/{self._group.attempt(self._index)}"
        played = await agent.play(self._context, self._prompt, key, self._episodes.hosts.get(self._prompt.tag))
        self._rollouts = {"": played.rollout}
        if played.failure is not None:
            raise played.failure
        return self.samples(played.finish_reason, played.reward)

    async def run(self, environment: HostedEnvironment) -> list[Sample]:
        """Run the episode to its end and score it."""
        episodes, tag, context = self._episodes, self._prompt.tag, self._context
        config, encoder, host = episodes.config, episodes.encoders[tag], episodes.hosts[tag]
        opening = await environment.reset(self._prompt.metadata, seed_of(config.seed, self._prompt.id))
        encoder.check_tools(opening.messages, opening.tools)
        conversations: dict[str, _Conversation] = {}
        owed: defaultdict[str, float] = defaultdict(float)  # to players, until they have a turn to credit
        player = opening.player or next(iter(opening.players), "")
        result: Opening | Turn = opening
        done, num_sampled = False, 0
        for _ in range(config.max_turns(tag)):
            if player in conversations:
                self._extend(conversations[player], result)
            else:
                method = "reset" if result is opening else "step"
                chat = self._encoded(method, result.messages, opening.tools)
                if len(chat.ids) > config.prompt_length:
                    reason = f"{len(chat.ids)} tokens, more than prompt_length {config.prompt_length}"
                    raise host.failure(method, reason)
                conversations[player] = _Conversation(chat, state_of(result.state, result.messages))
            conversation = conversations[player]
            budget = min(
                config.max_reply_tokens(tag), config.prompt_length + config.response_length - len(conversation.chat.ids)
            )
            if config.max_tokens_per_traj is not None:
                budget = min(budget, config.max_tokens_per_traj - num_sampled)
            if budget <= 0:
                break
            completion = await context.generate(
                conversation.chat.ids,
                params=replace(context.params, max_new_tokens=budget),
                media=conversation.chat.media,
                key=self._group.key(self._index, conversation.chat),
            )
            (output,) = completion.outputs
            result = turn = await environment.step(_reply(episodes, encoder, conversation.chat, output))
            record = record_turn(
                output,
                conversation.chat.ids,
                conversation.rollout,
                conversation.parent,
                media=conversation.chat.media,
                reward=turn.reward,
                state=conversation.state,
                metrics=dict(turn.metrics),
                observation_mask=conversation.observed,
            )
            num_sampled += len(output.token_ids)
            conversation.rollout = Rollout(turns=(*conversation.rollout.turns, record))
            for name, reward in turn.rewards.items():
                owed[name] += reward
            for name, rewarded in conversations.items():
                if name in owed:
                    rewarded.add_to_last(owed.pop(name))
            self._rollouts = {name: conversation.rollout for name, conversation in conversations.items()}
            done = turn.done and not turn.truncated
            if turn.done or turn.truncated:
                break
            player = turn.player or player
        return self.samples("stop" if done else "length", self._rewards(host, await environment.score()))

    def _extend(self, conversation: _Conversation, turn: Opening | Turn) -> None:
        """Continue a conversation with the messages after its last turn."""
        tag = self._prompt.tag
        encoder, chat, last = (
            self._episodes.encoders[tag],
            conversation.chat,
            conversation.rollout.turns[-1].sampled_ids,
        )
        extended = encoder.extend(chat, last, turn.messages)
        conversation.parent = None if extended is None else len(conversation.rollout.turns) - 1
        known = 0 if extended is None else len(chat.ids) + len(last)
        history = (*chat.messages, encoder.reply(last, chat), *turn.messages)
        conversation.chat = extended or self._encoded("step", history, chat.tools)
        conversation.observed = self._episodes.observed(tag, conversation.chat, known, len(turn.messages))
        conversation.state = state_of(turn.state, turn.messages)

    def _encoded(self, method: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> EncodedChat:
        """Encode a conversation. Messages that cannot be encoded are a failure of `method`, whose messages are last.

        Images that the model cannot see end the run.
        """
        tag = self._prompt.tag
        host = self._episodes.hosts[tag]
        try:
            return self._episodes.encoders[tag].encode(messages, tools)
        except UnseenImageError as error:
            raise DataError(f"{host.owner}: {method}: {error}") from error
        except DataError as error:
            raise host.failure(method, f"its messages cannot be encoded: {error}") from error

    def _rewards(self, host: EnvironmentHost, score: Reward | None) -> dict[str, Reward]:
        """Sum of the rewards of each player. The score of the episode is credited to the last turns."""
        if not self._rollouts:
            raise host.failure(
                "reset", "there is no turn: prompt_length and response_length leave no token for a reply"
            )
        credited = {player: self._reward(host, player, score) for player in self._rollouts}
        self._rollouts = {player: rollout for player, (rollout, _) in credited.items()}
        return {player: reward for player, (_, reward) in credited.items()}

    def _reward(self, host: EnvironmentHost, player: str, score: Reward | None) -> tuple[Rollout, Reward]:
        """Rollout of a player with all its rewards, and their sum."""
        turns = self._rollouts[player].turns
        if score is not None and score.value is not None:
            turns = (*turns[:-1], replace(turns[-1], reward=(turns[-1].reward or 0.0) + score.value))
        rewards = [turn.reward for turn in turns if turn.reward is not None]
        if not rewards:
            raise host.failure(
                "score",
                f"the episode has no reward{' of ' if player else ''}{player}: neither step nor score returned one."
                " Return 0.0 for no success",
            )
        detail = {} if score is None else dict(score.detail)
        if penalty := self._episodes.format_penalty:
            num_invalid = sum(is_invalid(turn.metrics) for turn in turns)
            rewards.append(penalty * num_invalid if num_invalid else 0.0)  # not -0.0
            detail["format_penalty"] = rewards[-1]
            turns = tuple(
                replace(turn, reward=(turn.reward or 0.0) + penalty) if is_invalid(turn.metrics) else turn
                for turn in turns
            )
        return Rollout(turns=turns), Reward(value=float(sum(rewards)), detail=detail)


def _reply(episodes: Episodes, encoder: ChatEncoder, chat: EncodedChat, output: CompletionOutput) -> Reply:
    """The reply as the environment gets it."""
    parsed = encoder.parse(output.token_ids, chat)
    text = parsed.content
    if not parsed.tool_calls and not parsed.reasoning and encoder.tool_format != "harmony":
        text = decode_response(episodes.tokenizer, output.token_ids.tolist())
    return Reply(
        text=text,
        finish_reason=output.finish_reason,
        tool_calls=tuple(parsed.tool_calls),
        reasoning=parsed.reasoning,
        parse_error=parsed.error,
    )
