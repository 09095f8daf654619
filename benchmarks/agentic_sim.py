"""Agents in environments with heavy-tailed latencies, in virtual time: asynchronous against synchronous steps.

    ./run bench agentic_sim [--environments 64,512] [--steps N]

Scheduler, request queue, rollout program, chat encoder and the hosts of environments are those of a run of pipeline
`agentic`. Only the engine and the environments are simulated: they take virtual time, without computing.

The engine has room for all episodes and a constant speed. Environments are then the bottleneck, and no step is shorter
than the bound

    sum over the batch's episodes of (environment calls + replies) / number of environments

A step is the time in which the environments do the work of a batch. Their share of the time at work is "of the bound".

A synchronous step starts its batch when the last one is trained on, waits for its longest episode, then trains. An
asynchronous run trains on other devices, while up to `async_generation_ratio` further batches run. Weights are replaced
in the middle of episodes and of turns, which stalls the engines.

A batch has the next episodes in order, whatever they take: otherwise a run trains on short episodes first. Its longest
episode thus has `async_generation_ratio` + 1 steps, and environments without an episode that may start wait for it.
"Queue model" is the step of these rules alone, computed by `queue_model` without our scheduler, engines and weights
that stall them. "Of the model" compares our step with it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import heapq
import json
import math
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from common import RESULTS, write_result

from roll_core.data.tokenizers import make_tokenizer
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.scheduler import RolloutScheduler
from roll_core.spec.config import DataArguments, TokenizerConfig
from roll_core.spec.environment import Environment, Opening, Turn
from roll_core.spec.pipeline import RolloutPlan
from roll_core.types import GenerateRequest, SamplingParams
from roll_pipeline_agentic.agentic import EpisodeOrder
from roll_pipeline_agentic.chat_encoder import ChatEncoder, EncodedChat
from roll_pipeline_agentic.config import AgenticEnvConfig
from roll_pipeline_agentic.episodes import EpisodeGroup, Episodes
from roll_pipeline_agentic.hosting import EnvironmentHost
from roll_pipeline_agentic.tool_calls import ParsedReply
from shared_tests.simulation import SimulatedReplies, Speed, VirtualTimeLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roll_core.types import Group

TAG, GROUP, ENGINES = "sim", 8, 8
SPEED = Speed(base_s=0.02, row_s=0.0, prompt_token_s=0.0, max_rows=1 << 20)
REPLY = 256
"""Maximum tokens of a reply."""
TRAIN_S, SYNC_S = 30.0, 4.0
"""Seconds of a training step, and of a weight update, which stalls the engines."""
RATIOS = (0.0, 2.0, 4.0, 8.0)
PUBLISHED = 2.72
"""Asynchronous over synchronous in ALFWorld: the most that ROLL Flash reports for agents (arXiv:2510.11345)."""


@dataclass(frozen=True)
class Workload:
    """Latencies of environments, in seconds."""

    turns: float = 10.0
    turns_sigma: float = 0.4
    most_turns: int = 20
    call_s: float = 4.0
    call_sigma: float = 0.7
    slow_share: float = 0.1
    slow_factor: float = 4.0
    failing_share: float = 0.01
    timeout_s: float = 60.0
    reply: float = 100.0
    reply_sigma: float = 0.6

    def __str__(self) -> str:
        return (
            f"Turns are log-normal (median {self.turns:g}, σ {self.turns_sigma:g}, at most {self.most_turns}), so are"
            f" calls of the environment (median {self.call_s:g} s, σ {self.call_sigma:g}) and replies (median"
            f" {self.reply:g} tokens, σ {self.reply_sigma:g}, at most {REPLY}). {self.slow_share:.0%} of the"
            f" environments are {self.slow_factor:g} times as slow. {self.failing_share:.0%} of them raise an error or"
            f" hang for {self.timeout_s:g} s, and their episodes start again."
        )


@dataclass
class World:
    """The random numbers of all environments, and the work that they have done."""

    load: Workload
    random: random.Random = field(default_factory=lambda: random.Random(1))
    work_s: float = 0.0
    """Seconds of calls and replies so far, of failed attempts, too."""
    failures: int = 0


class SimulatedEnvironment(Environment):
    """Takes virtual time. An instance is slow or failing as a whole."""

    def __init__(self, world: World) -> None:
        self.world, load, rng = world, world.load, world.random
        self.turns = min(load.most_turns, max(1, round(rng.lognormvariate(math.log(load.turns), load.turns_sigma))))
        self.factor = load.slow_factor if rng.random() < load.slow_share else 1.0
        self.fails_in = rng.randrange(self.turns) if rng.random() < load.failing_share else -1
        self.hangs = rng.random() < 0.5
        self.turn = 0

    async def call(self) -> float:
        """Wait for one latency of this environment."""
        load = self.world.load
        seconds = self.factor * self.world.random.lognormvariate(math.log(load.call_s), load.call_sigma)
        seconds = min(seconds, load.timeout_s - 1)
        await asyncio.sleep(seconds)
        self.world.work_s += seconds
        return seconds

    async def reset(self, task: Any, seed: int) -> Opening:
        self.reset_s = await self.call()
        return Opening(messages=[{"role": "user", "content": "begin"}])

    async def step(self, reply: Any) -> Turn:
        self.world.work_s += (len(reply.text) + 1) * SPEED.base_s
        if self.turn == self.fails_in:
            self.world.failures += 1
            self.world.work_s += self.world.load.timeout_s if self.hangs else 0.0
            if self.hangs:
                await asyncio.sleep(1e9)
            raise RuntimeError("a failing environment")
        seconds = await self.call() + (self.reset_s if not self.turn else 0.0)
        self.turn += 1
        return Turn(
            reward=1.0,
            done=self.turn == self.turns,
            messages=[{"role": "user", "content": "go on"}],
            metrics={"call_s": seconds},
        )


class Config:
    """The keys of `AgenticConfig` that episodes read."""

    seed, prompt_length, response_length = 1, 1 << 20, 1 << 20
    max_consecutive_failures, max_tokens_per_traj, has_message_loss = 100, None, False

    def __init__(self, load: Workload) -> None:
        self.load = load
        timeouts = {f"{stage}_timeout_s": load.timeout_s for stage in ("setup", "step", "score")}
        self.custom_envs = {TAG: AgenticEnvConfig(environment="x", max_retries=20, **timeouts)}

    def max_turns(self, tag: str) -> int:
        return self.load.most_turns

    def max_reply_tokens(self, tag: str) -> int:
        return REPLY


class NoText:
    """Stands for the chat encoder: appends ids without any text, so that only scheduling is measured."""

    new = np.arange(16, dtype=np.int64)
    tool_format, text = "hermes", None

    def check_tools(self, *_: Any) -> None:
        """Accept any tools: no template shows them."""

    def encode(self, messages: Any, tools: Any = ()) -> EncodedChat:
        return EncodedChat(messages=(), text="", ids=self.new)

    def extend(self, chat: EncodedChat, reply_ids: Any, messages: Any) -> EncodedChat:
        return EncodedChat(messages=(), text="", ids=np.concatenate([chat.ids, reply_ids, self.new]))

    def parse(self, ids: Any, chat: EncodedChat) -> ParsedReply:
        return ParsedReply(content="", tool_calls=[], reasoning="")

    def reply(self, ids: Any, chat: EncodedChat) -> dict[str, str]:
        return {}


class NoTokenizer:
    """Stands for the tokenizer of `NoText`."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def decode(self, ids: Sequence[int], **given: Any) -> str:
        return "m" * (len(ids) - 1)


def reply_length(load: Workload, id: str, index: int) -> int:
    """Length of a reply: log-normal by the id of its request."""
    digest = hashlib.blake2b(id.encode(), digest_size=8).digest()
    return min(REPLY, max(2, round(random.Random(digest).lognormvariate(math.log(load.reply), load.reply_sigma))))


class Rollouts:
    """The rollouts of a run with simulated engines and environments."""

    def __init__(self, load: Workload, environments: int, ratio: float, tokenizer: Any, *, text: bool) -> None:
        self.world, config = World(load), Config(load)
        host = EnvironmentHost(
            TAG,
            config.custom_envs[TAG],
            target="",
            options={},
            owner="a simulated environment",
            isolation="inline",
            concurrency=environments,
            create=partial(SimulatedEnvironment, self.world),
        )
        encoder = ChatEncoder(tokenizer, DataArguments(template="plain"), where=TAG) if text else NoText()
        batches = 1 + math.ceil(ratio)
        self.episodes = Episodes(
            config=config,  # type: ignore[arg-type]
            tokenizer=tokenizer if text else NoTokenizer(),  # type: ignore[arg-type]
            encoders={TAG: encoder},  # type: ignore[dict-item]
            hosts={TAG: host},
            groups=asyncio.Semaphore(batches * environments // GROUP),
            counts=Counter(),
        )
        (token_id,) = tokenizer("m")["input_ids"]
        length_of = partial(reply_length, load)
        self.engines = [
            SimulatedReplies(
                str(index), SPEED, length_of, max_new_tokens=REPLY, token_id=token_id, end_id=tokenizer.eos_token_id
            )
            for index in range(ENGINES)
        ]
        self.queue = RequestQueue(self.engines)
        plan = RolloutPlan(
            counts={TAG: environments // GROUP},
            params=SamplingParams(max_new_tokens=REPLY),
            n=GROUP,
            prompt=EpisodeOrder({TAG: environments // GROUP}, {}, seed=1).prompt,
            ahead=ratio,
            concurrent=ratio > 0,
            program=partial(EpisodeGroup, self.episodes),
        )
        self.scheduler = RolloutScheduler(plan, self.queue, None, seed=1)


async def simulate(
    load: Workload, environments: int, ratio: float, steps: int, tokenizer: Any, *, text: bool = True
) -> dict[str, float]:
    """Mean step, its bound, and the staleness of what was trained on, after a warm-up. Texts cost only CPU."""
    loop, rollouts = asyncio.get_running_loop(), Rollouts(load, environments, ratio, tokenizer, text=text)
    warm_up = 2 + math.ceil(ratio) if ratio else 0
    world, ages, turns = rollouts.world, [0], 0
    trained_s, longest_s = [], []
    begun = begun_cpu = work_s = 0.0
    failures = 0
    for step in range(warm_up + steps):
        if step == warm_up:
            begun, begun_cpu, work_s, failures = loop.time(), time.process_time(), world.work_s, world.failures
        groups, facts = await rollouts.scheduler.batch(step)
        await asyncio.sleep(TRAIN_S)
        async with rollouts.queue.paused(in_flight=ratio > 0):
            for engine in rollouts.engines:
                engine.stall(SYNC_S)
                engine.version = step + 1
            await asyncio.sleep(SYNC_S)
        if step >= warm_up:
            seconds = [seconds_of(sample) for group in groups for sample in group.samples]
            trained_s.append(sum(seconds))
            longest_s.append(max(seconds))
            turns += num_turns(groups)
            ages += facts.ages
    passed_s, cpu_s = loop.time() - begun, time.process_time() - begun_cpu
    work_s, failures = world.work_s - work_s, world.failures - failures
    await rollouts.scheduler.close()
    of_bound = work_s / (passed_s * environments)
    bound_s = float(np.mean(trained_s)) / environments
    return {
        "environments": environments,
        "ratio": ratio,
        "steps": steps,
        # In these seconds the environments do the work of a batch, whether or not it is trained on in the meantime.
        "step_s": bound_s / of_bound,
        "bound_s": bound_s,
        "of_bound": of_bound,
        "model_s": queue_model(load, environments, ratio, 100),
        "longest_s": float(np.mean(longest_s)),
        "staleness": max(ages),
        "failed_attempts": failures,
        "cpu_us_per_turn_with_engine": 1e6 * cpu_s / turns,
    }


def seconds_of(sample: Any) -> float:
    """Seconds of an episode alone: its environment's calls and its replies."""
    turns = sample.rollout.turns
    return sum(turn.metrics["call_s"] + len(turn.sampled_ids) * SPEED.base_s for turn in turns)


def num_turns(groups: Sequence[Group]) -> int:
    """Turns of all episodes."""
    return sum(len(sample.rollout.turns) for group in groups for sample in group.samples if sample.rollout)


def queue_model(load: Workload, environments: int, ratio: float, steps: int) -> float:
    """Mean step if episodes start in order, each in the first idle environment, and nothing else takes time.

    The episodes of batch `k` may start when batch `k - ratio - 1` is trained on. Random numbers are other ones than the
    simulation's; the first fifth of the steps is not counted.
    """
    rng, free, ends = random.Random(2), [0.0] * environments, [0.0]
    for batch in range(1, steps + 1):
        before = batch - 1 - math.floor(ratio)
        begin = ends[before] + (TRAIN_S + SYNC_S if before > 0 else 0.0) if before >= 0 else 0.0
        last = ends[-1] + TRAIN_S + SYNC_S if batch > 1 else 0.0  # the batch is requested after the training step
        for _ in range(environments):
            end = max(begin, free[0]) + episode_s(load, rng)
            heapq.heapreplace(free, end)
            last = max(last, end)
        ends.append(last)
    return (ends[-1] - ends[steps // 5]) / (steps - steps // 5)


def episode_s(load: Workload, rng: random.Random) -> float:
    """Seconds of an episode with its failed attempts, drawn as `SimulatedEnvironment` draws them."""
    turns = min(load.most_turns, max(1, round(rng.lognormvariate(math.log(load.turns), load.turns_sigma))))
    factor = load.slow_factor if rng.random() < load.slow_share else 1.0
    fails = rng.random() < load.failing_share
    done = rng.randrange(turns) if fails else turns
    calls = (factor * rng.lognormvariate(math.log(load.call_s), load.call_sigma) for _ in range(1 + done))
    replies = (rng.lognormvariate(math.log(load.reply), load.reply_sigma) for _ in range(done + fails))
    seconds = sum(min(each, load.timeout_s - 1) for each in calls)
    seconds += sum(min(REPLY, max(2, round(each))) * SPEED.base_s for each in replies)
    if not fails:
        return seconds
    return seconds + (load.timeout_s if rng.random() < 0.5 else 0.0) + episode_s(load, rng)


# -- CPU of a turn -----------------------------------------------------------------------------------------------------


async def driven(load: Workload, environments: int, steps: int, tokenizer: Any, *, text: bool) -> int:
    """Number of replies of asynchronous rollouts."""
    rollouts = Rollouts(load, environments, 1.0, tokenizer, text=text)
    for step in range(steps):
        await rollouts.scheduler.batch(step)
    done = sum(engine.ended for engine in rollouts.engines)
    await rollouts.scheduler.close()
    return done


async def bare(load: Workload, environments: int, wanted: int, tokenizer: Any) -> int:
    """As many replies of the same engines, with nothing but a timer between two of them."""
    rollouts, loop = Rollouts(load, environments, 0.0, tokenizer, text=False), asyncio.get_running_loop()
    params, over, next_id = SamplingParams(max_new_tokens=REPLY), loop.create_future(), 0
    rng = random.Random(1)

    def begin(engine: SimulatedReplies) -> None:
        nonlocal next_id
        next_id += 1
        request = GenerateRequest(id=f"b/{next_id}", prompt_ids=NoText.new, params=params)
        engine.submit([request], lambda id, outcome: answered(engine))

    def answered(engine: SimulatedReplies) -> None:
        if next_id < wanted:
            loop.call_later(rng.lognormvariate(math.log(load.call_s), load.call_sigma), begin, engine)
        elif not over.done():
            over.set_result(None)

    for index in range(environments):
        begin(rollouts.engines[index % ENGINES])
    await over
    return sum(engine.ended for engine in rollouts.engines)


def cost(load: Workload, environments: int, steps: int, tokenizer: Any) -> dict[str, float]:
    """CPU of a turn: of scheduler, queue, program and host; and of text."""

    def measure(main: Callable[[], Any]) -> tuple[float, int]:
        begun = time.process_time()
        number = virtually(main)
        return time.process_time() - begun, number

    measure(lambda: driven(load, environments, 1, tokenizer, text=True))
    with_text_s, with_text = measure(lambda: driven(load, environments, steps, tokenizer, text=True))
    without_s, without = measure(lambda: driven(load, environments, steps, tokenizer, text=False))
    bare_s, alone = measure(lambda: bare(load, environments, without, tokenizer))
    return {
        "environments": environments,
        "turns": with_text,
        "scheduling_us_per_turn": 1e6 * (without_s / without - bare_s / alone),
        "text_us_per_turn": 1e6 * (with_text_s / with_text - without_s / without),
        "engine_us_per_turn": 1e6 * bare_s / alone,
    }


def virtually(main: Callable[[], Any]) -> Any:
    """Run a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())


def report(load: Workload, rows: Sequence[Mapping[str, float]], costs: Mapping[str, float]) -> str:
    """The result for readers."""
    lines = [
        "The real scheduler and the real rollout program of pipeline `agentic`, with simulated engines and",
        "environments in virtual time. The bound is the time of all episodes of a batch divided by the number of",
        "environments. A step is the time in which the environments do the work of a batch. A batch has as many",
        f"episodes as there are environments, in groups of {GROUP}. Training takes {TRAIN_S:g} s, new weights",
        f"{SYNC_S:g} s.",
        "",
        str(load),
        "",
        "| environments | async_generation_ratio | step | bound | of the bound | queue model | of the model"
        " | faster than sync | staleness |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    sync = {row["environments"]: row["step_s"] for row in rows if not row["ratio"]}
    for row in rows:
        mode = f"{row['ratio']:g}" if row["ratio"] else "synchronous"
        lines.append(
            f"| {row['environments']} | {mode} | {row['step_s']:.0f} s | {row['bound_s']:.0f} s"
            f" | {row['of_bound']:.1%} | {row['model_s']:.0f} s | {row['model_s'] / row['step_s']:.1%}"
            f" | {sync[row['environments']] / row['step_s']:.2f} × | {row['staleness']} |"
        )
    return "\n".join(
        [
            *lines,
            "",
            "An episode is trained on at most `async_generation_ratio` steps after its group was started, and a batch"
            " has the next groups in order. The longest episode of a batch takes"
            f" {max(row['longest_s'] for row in rows):.0f} s on average with {rows[-1]['environments']} environments,"
            " and has ratio + 1 steps: with a small ratio, environments wait for it. The queue model is the step of a"
            " scheduler that costs nothing: it starts the episodes in order under this limit, each in the first idle"
            " environment, without engines and without weights that stall them. Its random numbers are other ones, and"
            f" it has 100 steps, the simulation {' or '.join(map(str, sorted({row['steps'] for row in rows})))}: it may"
            " be slower.",
            "",
            f"ROLL Flash reports up to {PUBLISHED} × for agents (arXiv:2510.11345), on other hardware and with a load"
            " that is not this one.",
            "",
            f"CPU of the driver with {costs['environments']} environments, per turn:"
            f" {costs['scheduling_us_per_turn']:.0f} µs for scheduler, request queue, rollout program and host of the"
            f" environment; {costs['text_us_per_turn']:.0f} µs to decode a reply and to encode the next prompt"
            f" (over {costs['turns']:,} turns, without the {costs['engine_us_per_turn']:.0f} µs of the simulated"
            " engine).",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", default="64,512")
    parser.add_argument("--ratios", default=",".join(f"{each:g}" for each in RATIOS), help="the others' results stay")
    parser.add_argument("--steps", type=int, default=10, help="that are counted")
    parser.add_argument("--no-cpu", action="store_true", help="leave the CPU of a turn")
    args = parser.parse_args()
    load = Workload()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [], Path(folder))
        path = RESULTS / "agentic_sim.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": [], "cpu": {}}
        rows = {(row["environments"], row["ratio"]): row for row in known["rows"]}
        scales = [int(each) for each in args.environments.split(",")]
        for environments in scales:
            for ratio in map(float, args.ratios.split(",")):
                rows[environments, ratio] = virtually(
                    lambda e=environments, r=ratio: simulate(load, e, r, args.steps, tokenizer)
                )
                print(rows[environments, ratio], flush=True)
        costs = known["cpu"] if args.no_cpu else cost(load, max(scales), 4, tokenizer)
        print(costs, flush=True)
    found = [rows[key] for key in sorted(rows)]
    write_result("agentic_sim", {"workload": vars(load), "rows": found, "cpu": costs}, report(load, found, costs))


if __name__ == "__main__":
    main()
