"""Thousands of episodes with injected failures: nothing is lost, counted twice or left behind.

The scheduler, the request queue, the rollout program and the hosts of environments are those of a run. The engine
samples replies of a known length without a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import os
import random
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import psutil
import pytest

from roll_core.data.rollouts import rows
from roll_core.pipelines.experience import Experience
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.scheduler import RolloutScheduler
from roll_core.spec.config import DataArguments
from roll_core.spec.pipeline import RolloutPlan
from roll_core.types import SamplingParams
from roll_pipeline_agentic.agentic import EpisodeOrder
from roll_pipeline_agentic.agents import AgentHost
from roll_pipeline_agentic.calls import seed_of
from roll_pipeline_agentic.chat_encoder import ChatEncoder
from roll_pipeline_agentic.config import AgenticEnvConfig
from roll_pipeline_agentic.episodes import EpisodeGroup, Episodes
from roll_pipeline_agentic.hosting import EnvironmentHost
from roll_pipeline_agentic.recording_server import RecordingServer
from shared_tests.simulation import SimulatedReplies, Speed, VirtualTimeLoop

sys.path.insert(0, str(Path(__file__).parent))
import failing_environments as failing

if TYPE_CHECKING:
    from roll_core.types import Group

SEED, GROUP, REPLY = 5, 4, 16
TAG = "walk"


class Config:
    """The keys of `AgenticConfig` that episodes read."""

    seed, prompt_length, response_length = SEED, 1000, 1000
    max_consecutive_failures, max_tokens_per_traj, has_message_loss = 20, None, False
    rewards: ClassVar[dict[str, Any]] = {}

    def __init__(self, timeout_s: float, retries: int, setup_timeout_s: float | None = None) -> None:
        timeouts = {f"{stage}_timeout_s": timeout_s for stage in ("step", "score")}
        timeouts["setup_timeout_s"] = setup_timeout_s or timeout_s
        self.custom_envs = {TAG: AgenticEnvConfig(environment="x", max_retries=retries, **timeouts)}

    def max_turns(self, tag: str) -> int:
        return failing.MOST_TURNS + 1

    def max_reply_tokens(self, tag: str) -> int:
        return REPLY


class Ledger:
    """A rollout of batches on simulated engines, and what was trained on."""

    def __init__(
        self, tokenizer: Any, host: EnvironmentHost, config: Config, *, groups: int, ahead: float, speed: Speed
    ) -> None:
        self.episodes = Episodes(
            config=config,  # type: ignore[arg-type]
            tokenizer=tokenizer,
            encoders={TAG: ChatEncoder(tokenizer, DataArguments(template="plain"), where=TAG)},
            hosts={TAG: host},
            groups=asyncio.Semaphore(64),
            counts=Counter(),
        )
        order = EpisodeOrder({TAG: groups}, {}, seed=SEED)
        self.plan = RolloutPlan(
            counts={TAG: groups},
            params=SamplingParams(max_new_tokens=REPLY),
            n=GROUP,
            prompt=order.prompt,
            ahead=ahead,
            concurrent=ahead > 0,
            program=partial(EpisodeGroup, self.episodes),
        )
        self.tokenizer, self.speed = tokenizer, speed
        self.trained: list[Group] = []
        self.ages: list[int] = []
        self.open()

    def open(self, state: Any = None) -> None:
        """Begin as a run does, or as a resumed run."""
        (token_id,) = self.tokenizer("m")["input_ids"]
        self.engines = [
            SimulatedReplies(
                str(index), self.speed, reply_length, max_new_tokens=REPLY, token_id=token_id,
                end_id=self.tokenizer.eos_token_id,
            )
            for index in range(2)
        ]  # fmt: skip
        self.queue = RequestQueue(self.engines, max_running=64, progress_s=0.05, survives_all=lambda: True)
        self.scheduler = RolloutScheduler(self.plan, self.queue, None, seed=SEED)
        if state is not None:
            self.scheduler.load_state(state)

    async def batch(self, step: int) -> None:
        groups, facts = await self.scheduler.batch(step)
        self.trained += groups
        self.ages += facts.ages
        for engine in self.engines:
            engine.version = step + 1

    def sampled(self) -> list[Any]:
        return [sample for group in self.trained for sample in group.samples]

    def check(self, num_groups: int) -> None:
        """Every position was trained on once, in order; every episode has the turns of its seed."""
        assert [group.id for group in self.trained] == [f"{TAG}/{position}" for position in range(num_groups)]
        ids = [sample.id for sample in self.sampled()]
        assert len(set(ids)) == len(ids) == num_groups * GROUP
        for sample in self.sampled():
            if sample.reward.failed:
                continue
            expected = failing.num_turns(seed_of(SEED, sample.group_id))
            assert len(sample.rollout.turns) == expected
            assert sample.reward.value == pytest.approx(expected + 0.5)
            # Each sampled token is in one row, and no reply of a failed attempt is.
            lengths = [reply_length(f"train/0/{sample.group_id}:{attempt_key(sample, k)}", 0) for k in range(expected)]
            assert sum(int(row.loss_mask.sum()) for row in rows(sample.rollout)) == sum(lengths)
        kept = Experience.of(self.trained).samples
        assert len(kept) == sum(not sample.reward.failed for sample in self.sampled())


def reply_length(id: str, index: int) -> int:
    """Length of a reply by group, episode and turn; the same in each attempt and each run."""
    place, _, key = id.split("/", 2)[2].partition(":")
    episode, _, turn = key.split("/")
    return 2 + hashlib.blake2b(f"{place}:{episode}/{turn}".encode(), digest_size=1).digest()[0] % 12


def attempt_key(sample: Any, turn: int) -> str:
    return f"{sample.id.rsplit('/', 1)[1]}/0/{turn}"


def host(cls: Any, config: Config, isolation: Any, concurrency: int, **options: Any) -> EnvironmentHost:
    return EnvironmentHost(
        TAG,
        config.custom_envs[TAG],
        target=f"failing_environments:{cls.__name__}",
        options=options,
        owner="environment 'walk' of acme 1.0",
        isolation=isolation,
        concurrency=concurrency,
        create=partial(cls, **options),
    )


def virtually(main: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


@pytest.mark.parametrize("ahead", [0.0, 2.0])
def test_every_episode_is_trained_on_once_whatever_fails(tokenizer: Any, ahead: float) -> None:
    """500 episodes, 10 % of the attempts fail; two engines are lost and the run is resumed on the way."""

    async def run() -> tuple[Ledger, Counter[str]]:
        failing.reset(share=0.1, seed=1)
        config = Config(timeout_s=5.0, retries=8)
        ledger = Ledger(
            tokenizer, host(failing.Walk, config, "inline", 128), config, groups=5, ahead=ahead, speed=Speed()
        )
        for step in range(25):
            if step in (5, 15):
                asyncio.get_running_loop().call_later(0.7, ledger.engines[step % 2].kill)
            await ledger.batch(step)
            if step == 12:  # the run is killed: only the checkpoint remains
                lost = ledger.queue.num_lost_replicas
                state = json.loads(json.dumps(ledger.scheduler.state()))
                await ledger.scheduler.close()
                ledger.open(state)
        await ledger.scheduler.close()
        assert lost == ledger.queue.num_lost_replicas == 1
        assert ledger.queue.num_continued > 0
        return ledger, ledger.episodes.counts

    ledger, counts = virtually(run())
    ledger.check(125)
    assert max(ledger.ages) <= ahead
    assert counts[TAG, "failures"] == 0
    assert counts[TAG, "repeats"] == 0
    assert failing.injected.total() >= counts[TAG, "retries"] >= 30
    assert {kind for kind, number in failing.injected.items() if number} == set(failing.KINDS_INLINE)
    assert failing.open_environments == 0


def test_excluded_episodes_are_no_shorter_than_others(tokenizer: Any) -> None:
    """Without retries, failures at the beginning of an episode exclude long and short ones alike."""

    async def run() -> Ledger:
        failing.reset(share=0.2, seed=2, kinds=("raise at reset", "hang at reset", "raise at score"))
        config = Config(timeout_s=5.0, retries=0)
        ledger = Ledger(
            tokenizer, host(failing.Walk, config, "inline", 128), config, groups=25, ahead=2.0, speed=Speed()
        )
        for step in range(5):
            await ledger.batch(step)
        await ledger.scheduler.close()
        return ledger

    ledger = virtually(run())
    ledger.check(125)
    failed = [sample for sample in ledger.sampled() if sample.reward.failed]
    assert 70 < len(failed) < 130
    lengths = {
        how: np.mean(
            [
                failing.num_turns(seed_of(SEED, sample.group_id))
                for sample in ledger.sampled()
                if sample.reward.failed is how
            ]
        )
        for how in (True, False)
    }
    # The standard error of the difference is 1.7 / sqrt(100) = 0.17 turns.
    assert lengths[True] == pytest.approx(lengths[False], abs=0.5)


def run_in_processes(
    tokenizer: Any, folder: Path, num_groups: int, *, groups: int, share: float, kills: int
) -> tuple[Ledger, list[float]]:
    """Episodes in processes; some attempts fail, and processes are killed from outside.

    Memory in MiB after each batch of `groups`.
    """
    config = Config(timeout_s=1.5, retries=12, setup_timeout_s=5.0)  # a process starts in the setup
    memory: list[float] = []
    rng = random.Random(3)

    async def killer(times: int) -> None:
        for _ in range(times):
            await asyncio.sleep(0.3)
            children = [
                each for each in psutil.Process().children() if "environment_process" in " ".join(each.cmdline())
            ]
            if children:
                os.kill(rng.choice(children).pid, signal.SIGKILL)

    async def run() -> Ledger:
        of = host(failing.WalkInProcess, config, "process", 8, log=str(folder / "log"), share=share)
        speed = Speed(base_s=1e-6, row_s=0.0, prompt_token_s=0.0)
        ledger = Ledger(tokenizer, of, config, groups=groups, ahead=1.0, speed=speed)
        task = asyncio.ensure_future(killer(kills))
        for step in range(num_groups // groups):
            await ledger.batch(step)
            gc.collect()
            memory.append(psutil.Process().memory_info().rss / 2**20)
        await ledger.scheduler.close()
        task.cancel()
        await of.close()
        return ledger

    return asyncio.run(run()), memory


def environment_processes() -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it exited
            if any("environment_process" in argument for argument in each.cmdline()):
                found.append(each)
    return found


def check_processes(ledger: Ledger, folder: Path, num_groups: int) -> Counter[str]:
    ledger.check(num_groups)
    injected = Counter((folder / "log").read_text(encoding="utf-8").split("\n")[:-1])
    counts = ledger.episodes.counts
    assert counts[TAG, "failures"] == 0
    assert counts[TAG, "retries"] > 0
    left = [
        each for each in psutil.Process().children(recursive=True) if "sleep" in each.name() or "env" in each.name()
    ]
    assert not left
    assert not [each for each in psutil.process_iter(["cmdline"]) if failing.MARK in (each.info["cmdline"] or ())]
    return injected


@pytest.mark.slow(ci=True)
def test_processes_that_exit_hang_or_are_killed_lose_no_episode(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    ledger, _ = run_in_processes(tokenizer, tmp_path, 10, groups=10, share=0.3, kills=2)
    check_processes(ledger, tmp_path, 10)


@pytest.mark.slow
def test_many_episodes_in_processes_leave_nothing_behind(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 episodes, 5 % of the attempts fail, and 30 processes are killed from outside."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    ledger, memory = run_in_processes(tokenizer, tmp_path, 500, groups=25, share=0.05, kills=30)
    injected = check_processes(ledger, tmp_path, 500)
    assert set(injected) == set(failing.KINDS)
    assert 60 < injected.total() < 160
    # The trained groups themselves are kept: 2,000 episodes of a few hundred bytes per turn.
    slope = np.polyfit(range(len(memory)), memory, 1)[0]
    assert slope * len(memory) < 20, memory


def run_agents(
    tokenizer: Any, folder: Path, num_groups: int, *, groups: int, share: float
) -> tuple[Ledger, Counter[str], list[float]]:
    """Agents in processes, which call the recording endpoint; some attempts fail.

    Memory in MiB after each batch of `groups`.
    """
    config = Config(timeout_s=60.0, retries=12)
    config.custom_envs[TAG] = AgenticEnvConfig(agent="x", max_retries=12, agent_timeout_s=2.0)
    loaded = SimpleNamespace(
        provider=SimpleNamespace(isolation="process", concurrency=8, target="failing_environments:walk_agent"),
        options={"log": str(folder / "log"), "share": share},
        owner="agent 'walk' of acme 1.0",
    )
    memory: list[float] = []

    async def run() -> tuple[Ledger, Counter[str]]:
        encoder = ChatEncoder(tokenizer, DataArguments(template="plain"), where=TAG)
        server = RecordingServer()
        agents = AgentHost(TAG, config, loaded, encoder, server)  # type: ignore[arg-type]
        speed = Speed(base_s=1e-6, row_s=0.0, prompt_token_s=0.0)
        ledger = Ledger(tokenizer, agents, config, groups=groups, ahead=1.0, speed=speed)
        ledger.episodes.hosts, ledger.episodes.agents = {}, {TAG: agents}
        for step in range(num_groups // groups):
            await ledger.batch(step)
            gc.collect()
            memory.append(psutil.Process().memory_info().rss / 2**20)
        await ledger.scheduler.close()
        await agents.close()
        await server.close()
        return ledger, agents.counts

    ledger, counts = asyncio.run(run())
    return ledger, counts, memory


@pytest.mark.slow(ci=True)
def test_agents_that_fail_lose_no_rollout(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    ledger, _, _ = run_agents(tokenizer, tmp_path, 10, groups=10, share=0.3)
    check_processes(ledger, tmp_path, 10)


@pytest.mark.slow
def test_many_rollouts_of_agents_leave_nothing_behind(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 rollouts through the recording endpoint; 5 % of the attempts fail in one of six ways."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    ledger, counts, memory = run_agents(tokenizer, tmp_path, 500, groups=25, share=0.05)
    injected = check_processes(ledger, tmp_path, 500)
    assert set(injected) == set(failing.KINDS_OF_AGENTS)
    assert 60 < injected.total() < 160
    # Each failure is a retry; attempts that were discarded with their batch at the end are not.
    assert ledger.episodes.counts[TAG, "retries"] >= injected.total() - 25 * GROUP
    assert counts["incomplete"] > 0
    assert not environment_processes()
    slope = np.polyfit(range(len(memory)), memory, 1)[0]
    assert slope * len(memory) < 20, memory
