"""Rollouts of agents: programs with a loop of their own, which call the policy at the recording endpoint.

    episode ── slot() ──► attempt ── agent() ──► instance ──► run(task, session) ──► reward or reply
                                                                   │
                                  RecordingServer ◄── HTTP calls ──┘
                                         └──► Recorder ──► turns of the rollout

Agents run as environments do: inline, in threads or in processes. The deadline counts only the time outside of calls,
because calls block while the policy trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from roll_core.data.media import with_parts
from roll_core.errors import ContractError, EnvironmentFailure
from roll_core.spec.agent import Agent, Session
from roll_core.spec.environment import Reply, Turn
from roll_core.types import Group, Reward, Rollout
from roll_pipeline_agentic.calls import check_result, seed_of
from roll_pipeline_agentic.environment_process import described
from roll_pipeline_agentic.hosted_agent import HostedAgent
from roll_pipeline_agentic.hosting import EnvironmentHost
from roll_pipeline_agentic.recording import Limits, Recorder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from roll_core.spec.environment import Message, Task
    from roll_core.spec.pipeline import NamedPart
    from roll_core.spec.providers import AgentProvider
    from roll_core.spec.rollout import Prompt, RolloutContext
    from roll_core.types import FinishReason
    from roll_pipeline_agentic.chat_encoder import ChatEncoder
    from roll_pipeline_agentic.config import EpisodeConfig
    from roll_pipeline_agentic.hosting import HostedEnvironment
    from roll_pipeline_agentic.recording_server import RecordingServer

NEVER_S = 1e9
"""Deadline of a call that `AgentHost` ends itself."""
MAX_STDERR = 2000
"""Characters of a command's standard error in its failure."""
KILL_S = 10.0
"""Seconds to wait for the end of a killed process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An attempt of a rollout."""

    rollout: Rollout
    finish_reason: FinishReason = "abort"
    reward: Reward | None = None
    """None if `rewards` score it."""
    failure: EnvironmentFailure | None = None


class AgentHost(EnvironmentHost):
    """Runs the agents of one entry of `custom_envs`. Owns their threads and processes."""

    def __init__(
        self,
        tag: str,
        config: EpisodeConfig,
        part: NamedPart[AgentProvider],
        encoder: ChatEncoder,
        server: RecordingServer,
    ) -> None:
        """Raises `ContractError` if the agent cannot run inline."""
        entry, provider = config.custom_envs[tag], part.provider
        isolation = entry.host_isolation or provider.isolation
        create = partial(HostedAgent, target=provider.target, options=dict(part.options))
        if isolation == "inline" and not create().is_async:
            raise ContractError(
                f"custom_envs.{tag}: {part.owner}: isolation is inline, but it is no coroutine function and would"
                " block all other rollouts: set isolation: thread or process"
            )
        super().__init__(
            tag,
            entry,
            target="roll_pipeline_agentic.hosted_agent:HostedAgent",
            options={"target": provider.target, "options": dict(part.options)},
            owner=part.owner,
            isolation=isolation,
            concurrency=entry.concurrency or provider.concurrency,
            create=cast("Any", create),
        )
        self.seconds = {"run": []}
        self._run_config, self._encoder, self._server = config, encoder, server
        self.counts: Counter[str] = Counter()
        """Events of the recorders since the last metrics."""
        self.calls: list[int] = []
        """Number of turns of each rollout since the last metrics."""

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[Any]:
        """An agent for one attempt, in a slot. Closes it at the end, also after an error."""
        caller = await self._caller()
        try:
            yield caller
        finally:
            with contextlib.suppress(Exception):  # the rollout is over; a process that failed was killed
                await caller.close()

    async def play(
        self, context: RolloutContext, prompt: Prompt, key: str, environments: EnvironmentHost | None
    ) -> Played:
        """Run one attempt of a rollout. `key` precedes the keys of its calls."""
        config = self._run_config
        limits = Limits(
            calls=config.max_turns(self.tag),
            reply_tokens=config.max_reply_tokens(self.tag),
            tokens=config.prompt_length + config.response_length,
            sampled_tokens=config.max_tokens_per_traj,
        )
        recorder = Recorder(
            context,
            self._encoder,
            limits,
            key=key,
            unrecorded_replies=self.config.unrecorded_replies,
        )
        await self._server.start()
        outcome: Reward | EnvironmentFailure | None
        done = True
        try:
            with self._server.session(recorder) as secret:
                seed = seed_of(config.seed, prompt.id)
                session = Session(base_url=self._server.base_url, api_key=secret, seed=seed)
                async with self.agent() as agent:
                    if environments is None:
                        result = await self._run(agent, recorder, prompt.metadata, session)
                        outcome = self._own_reward(result, recorder)
                    else:
                        async with environments.environment() as environment:
                            outcome, done = await self._converse(agent, environment, recorder, prompt.metadata, session)
        except EnvironmentFailure as failure:
            outcome = failure
        finally:
            rollout = await recorder.finish()
            self.counts.update(recorder.counts)
        if recorder.problem:
            self.counts["incomplete"] += 1
            outcome = self.failure("recording", f"excluded from training: {recorder.problem}")
        elif not rollout.turns and not isinstance(outcome, EnvironmentFailure):
            outcome = self.failure("run", "the agent returned without a call to the policy")
        if isinstance(outcome, EnvironmentFailure):
            return Played(rollout=rollout, failure=outcome)
        self.calls.append(len(rollout.turns))
        return Played(
            rollout=_credited(rollout, outcome),
            finish_reason="stop" if done and not recorder.truncated else "length",
            reward=outcome,
        )

    async def scored(self, context: RolloutContext, group: Group) -> Group:
        """Score the samples without a reward by `rewards`."""
        waiting = [sample for sample in group.samples if sample.reward is None]
        if not waiting:
            return group
        scored = (await context.score(Group(id=group.id, samples=tuple(waiting)))).samples
        by_id = {
            sample.id: replace(sample, rollout=sample.rollout and _credited(sample.rollout, sample.reward))
            for sample in scored
        }
        return Group(id=group.id, samples=tuple(by_id.get(sample.id, sample) for sample in group.samples))

    async def _converse(
        self, agent: Any, environment: HostedEnvironment, recorder: Recorder, task: Task, session: Session
    ) -> tuple[Reward, bool]:
        """Run the agent for each turn of the environment. Returns the sum of the rewards, and True if it is done."""
        opening = await environment.reset(task, session.seed)
        if opening.players:
            raise ContractError(
                f"custom_envs.{self.tag}: the environment has the players {list(opening.players)}, but an agent plays"
                " alone: remove agent, so that the policy plays all of them"
            )
        messages: list[Message] = list(opening.messages)
        values: list[float] = []
        turn = Turn()
        for _ in range(self._run_config.max_turns(self.tag)):  # also if the agent replies without calls
            asked = replace(
                session,
                messages=tuple(with_parts(messages, data=True)),
                tools=tuple(opening.tools),
                enter=tuple(opening.enter),
            )
            try:
                reply = await self._run(agent, recorder, task, asked)
            except EnvironmentFailure:
                if recorder.truncated and values:  # the conversation has no space for a reply
                    break
                raise
            if isinstance(reply, Reward):
                raise self.failure("run", "returned a reward, but the environment scores this rollout: return a text")
            text = recorder.last_reply if reply is None else reply
            turn = await environment.step(Reply(text=text))
            values += [] if turn.reward is None else [turn.reward]
            messages += [{"role": "assistant", "content": text}, *turn.messages]
            recorder.expect(text)
            if turn.done or turn.truncated or recorder.exhausted:
                break
        score = await environment.score()
        values += [] if score is None or score.value is None else [score.value]
        if not values:
            raise self.failure(
                "score", "the rollout has no reward: neither step nor score returned one. Return 0.0 for no success"
            )
        detail = {} if score is None else dict(score.detail)
        return Reward(value=float(sum(values)), detail=detail), turn.done and not turn.truncated

    def _own_reward(self, result: Any, recorder: Recorder) -> Reward | None:
        """The reward that the agent returned; None if `rewards` score the rollout."""
        if self._run_config.rewards:
            if isinstance(result, Reward):
                raise self.failure("run", "returned a reward, but the config has rewards: return a text or None")
            return None
        if isinstance(result, Reward):
            self.check_reward("run", result)
            return result
        if recorder.truncated:
            raise self.failure("run", "returned no reward after a call beyond the limits of turns or tokens")
        raise self.failure(
            "run",
            f"returned {'a text' if isinstance(result, str) else 'None'}, expected a reward: return a number, or"
            " set environment or rewards to score the rollout",
        )

    async def _run(self, agent: Any, recorder: Recorder, task: Task, session: Session) -> Any:
        """Call the agent, until it returns, exceeds its deadline, or the engine fails."""
        begin = time.monotonic()
        running = asyncio.ensure_future(agent.invoke("run", (dict(task), session), NEVER_S))
        failed = asyncio.ensure_future(recorder.failed.wait())
        late = asyncio.ensure_future(self._deadline(recorder))
        try:
            await asyncio.wait({running, failed, late}, return_when=asyncio.FIRST_COMPLETED)
            if recorder.error is not None:
                raise recorder.error
            if not running.done():
                limit = self.config.agent_timeout_s
                raise self.failure("run", f"took longer than {limit:g} s outside of calls and was stopped")
            if running.cancelled():
                raise self.failure("run", "was cancelled by the agent itself")
            result = running.result()
            check_result("run", result)
        except EnvironmentFailure:
            raise
        except Exception as error:  # user code may raise anything; the failure keeps the cause
            if error is recorder.error:
                raise
            after = " after a call beyond the limits of turns or tokens" if recorder.truncated else ""
            raise self.failure("run", f"{described(error)}{after}") from error
        finally:
            for pending in (running, failed, late):
                pending.cancel()
            await asyncio.gather(running, failed, late, return_exceptions=True)
        self.seconds["run"].append(time.monotonic() - begin)
        return result

    async def _deadline(self, recorder: Recorder) -> None:
        """Return once the agent spent `agent_timeout_s` outside of calls."""
        begin = recorder.idle_s()
        while (left := self.config.agent_timeout_s - (recorder.idle_s() - begin)) > 0:
            await asyncio.sleep(min(left, 10.0) if left > 0.05 else 0.05)

    def take_counts(self) -> dict[str, float]:
        """Metrics of the recorders since the last call."""
        metrics = {name: float(number) for name, number in self.counts.items() if number}
        if self.calls:
            metrics["calls/mean"] = sum(self.calls) / len(self.calls)
        self.counts, self.calls = Counter(), []
        return metrics


def _credited(rollout: Rollout, reward: Reward | None) -> Rollout:
    """The rollout with its reward at the last turn."""
    if reward is None or reward.value is None:
        return rollout
    return Rollout(turns=(*rollout.turns[:-1], replace(rollout.turns[-1], reward=reward.value)))


# -- the agent `command` -----------------------------------------------------------------------------------------------


class CommandAgent(Agent):
    """Runs a program for each rollout, where the environment's episode takes place. Kills its process group."""

    def __init__(self, *, command: Sequence[str], directory: str | None = None, env: Mapping[str, str]) -> None:
        self.command, self.directory, self.env = list(command), directory, dict(env)

    @override
    async def run(self, task: Task, session: Session) -> str:
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *session.enter,
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=self.directory,
                env={**os.environ, **variables(session), **self.env},
                start_new_session=True,  # so that a kill also ends what the program started
            )
        )
        inputs = {"task": dict(task), "seed": session.seed, "messages": list(session.messages)}
        try:
            process = await asyncio.shield(starting)  # a cancelled start would leave what the program has started
            output, errors = await process.communicate(json.dumps(inputs | {"tools": list(session.tools)}).encode())
        finally:
            await ended(asyncio.ensure_future(killed(starting)))
        if process.returncode:
            tail = errors.decode(errors="replace").strip()[-MAX_STDERR:]
            raise RuntimeError(f"{self.command[0]} exited with code {process.returncode}: {tail}")
        return output.decode(errors="replace").strip()


async def killed(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    """Kill the process group of a program, also of one that is being started, and wait for the program's end."""
    await asyncio.wait({starting})
    if starting.exception() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # already exited
            os.killpg(starting.result().pid, signal.SIGKILL)
        await starting.result().wait()


async def ended(ended: asyncio.Future[None]) -> None:
    """Wait for a killed process at most `KILL_S`, also if the caller is cancelled again: then its pipes are closed."""
    loop = asyncio.get_running_loop()
    deadline, cancelled = loop.time() + KILL_S, False
    while not ended.done() and loop.time() < deadline:
        try:
            await asyncio.wait({ended}, timeout=deadline - loop.time())
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


def variables(session: Session) -> dict[str, str]:
    """Environment variables by which clients find the endpoint."""
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "OPENAI_MODEL": session.model,
        "ANTHROPIC_BASE_URL": session.anthropic_base_url,
        "ANTHROPIC_API_KEY": session.api_key,
        "ANTHROPIC_MODEL": session.model,
    }
