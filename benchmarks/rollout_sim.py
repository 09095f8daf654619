"""The rollout scheduler on simulated engines in virtual time: how near each mode comes to what the accelerators can do.

    ./run bench rollout_sim [--accelerators 8,64,512,4096] [--steps N]

Scheduler, dispatcher and router are those of every run; engines are simulated (`roll_core.testing.simulation`):
continuous batching whose steps take longer the more rows there are, prefill that holds them up, answers with a long
tail of lengths. The load grows with the machine. The bound is the work of a step divided by what all accelerators do:

    (tokens / tokens per second of a full engine + prefill + tokens / tokens per second of training) / accelerators

No split of whole accelerators reaches it, nor any run that replaces weights or has an answer that is longer than a
step; what is left of it is the step that is within reach (`within_reach_s`).

Synchronous modes use every accelerator for generation, then for training. Asynchronous ones split them by the work of
either, and train while the others generate; weights are replaced under way, which stalls the engines. The last part
measures what the scheduler itself costs, with the same requests driven through bare engines for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import math
import pstats
import re
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from common import RESULTS, write_result

from roll_core.runtime.rollout.dispatcher import Dispatcher
from roll_core.runtime.rollout.scheduler import RolloutScheduler
from roll_core.spec.pipeline import Prompt, RolloutPlan
from roll_core.testing.simulation import SimulatedEngine, Speed, VirtualTimeLoop
from roll_core.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

UNIT = 16
"""Tokens that are simulated as one: it makes no difference to the scheduler, and 4,096 accelerators fit into memory."""
SPEED = Speed(base_s=0.012 * UNIT, row_s=0.00006 * UNIT, prompt_token_s=0.00002 * UNIT, max_rows=128)
"""About a model of 7 B on one current accelerator, with room for 128 long sequences: 6,500 tokens/s when full."""
TOKENS_PER_S = SPEED.capacity * UNIT
TRAIN_TOKENS_PER_S = 8000.0
"""Of one accelerator, logprobs of the old policy included."""
SYNC_S = 4.0
"""To replace the weights."""
PROMPT_TOKENS = 512
GROUP = 16
PROMPT = np.zeros(PROMPT_TOKENS // UNIT, dtype=np.int64)


@dataclass(frozen=True)
class Load:
    name: str
    groups_per_accelerator: int
    median: float
    longest: int
    sigma: float = 0.9


LOADS = (
    Load("full", groups_per_accelerator=16, median=3000, longest=16_384),
    Load("long tail", groups_per_accelerator=4, median=3500, longest=32_768),
)
"""`full` is 128 prompts × 16 answers a step on 8 accelerators. In `long tail` the longest answer alone takes several
times as long as the accelerators would need for all of them."""


@dataclass(frozen=True)
class Mode:
    name: str
    ahead: float = 0.0
    concurrent: bool = False
    max_running: int | None = SPEED.max_rows
    """As `max_running_requests`; None gives everything to the engines at once, whole groups."""
    first_ready: bool = False
    """As `take_first_ready`."""

    @property
    def warm_up(self) -> int:
        """Steps that are not counted: none where batches do not overlap, as all steps are alike then."""
        return 1 + math.ceil(self.ahead) if self.ahead else 0


MODES = (
    Mode("sync"),
    Mode("sync, 25 % additional prompts", ahead=0.25),
    Mode("sync, 25 % additional prompts, first ready", ahead=0.25, first_ready=True),
    Mode("sync, 100 % additional prompts", ahead=1.0),
    Mode("async, ratio 0.5", ahead=0.5, concurrent=True),
    Mode("async, ratio 0.5, first ready", ahead=0.5, concurrent=True, first_ready=True),
    Mode("async, ratio 1", ahead=1.0, concurrent=True),
    Mode("async, ratio 2", ahead=2.0, concurrent=True),
    Mode("async, ratio 2, engines queue", ahead=2.0, concurrent=True, max_running=None),
    Mode("async, ratio 4", ahead=4.0, concurrent=True),
)
ENOUGH = 130_000
"""Answers over which a step's time is taken: it hardly depends any more on which they are."""
LARGE = 256
"""Above so many accelerators only these modes are simulated:"""
LARGE_MODES = ("sync", "async, ratio 2")
SCALES = (8, 64, 512, 4096)
"""Accelerators."""
LONG_TAIL = 64
"""Those with which the long tail is simulated."""
KEYS = ("load", "accelerators", "mode")


class Lengths:
    """Drawn once for all modes: `length(id, index)` of a prompt's answers."""

    def __init__(self, load: Load, groups: int) -> None:
        rng = np.random.default_rng(0)
        drawn = rng.lognormal(math.log(load.median), load.sigma, size=(groups, GROUP))
        self.table = np.clip(drawn / UNIT, 1, load.longest // UNIT).astype(np.int32)

    def __call__(self, id: str, index: int) -> int:
        return int(self.table[int(id.rpartition("/")[2]) % len(self.table), index])


@dataclass(frozen=True)
class Work:
    """Of a step, in seconds of one accelerator."""

    generate_s: float
    train_s: float

    @classmethod
    def of(cls, tokens: float, groups: int) -> Work:
        prefill_s = groups * len(PROMPT) * SPEED.prompt_token_s
        return cls(tokens / TOKENS_PER_S + prefill_s, tokens / TRAIN_TOKENS_PER_S)

    def bound_s(self, accelerators: int) -> float:
        """Of a step on which every accelerator works all the time."""
        return (self.generate_s + self.train_s) / accelerators


def within_reach_s(work: Work, mode: Mode, load: Load, accelerators: int) -> float:
    """A step can take no less in this mode: with whole accelerators for either work, with engines and trainers that
    wait while weights are replaced, and with the longest answer alone on its engine.

    With k = ceil(ahead), an answer that is trained on k steps after it was begun has the time from when one batch is
    asked for until the batch k steps later is complete: k + 1 steps less one training and one replacing of weights.
    """
    generate, train = split(accelerators, mode)
    steps = math.ceil(mode.ahead) + 1
    longest_s = load.longest / UNIT / SPEED.tokens_per_s(1)
    generate_s, train_s = work.generate_s / generate, work.train_s / train
    if not mode.concurrent:
        return max(generate_s, longest_s / steps) + train_s + SYNC_S
    return max(generate_s + SYNC_S, train_s + SYNC_S, (longest_s + train_s + steps * SYNC_S) / steps)


def split(accelerators: int, mode: Mode) -> tuple[int, int]:
    """Accelerators that generate and that train."""
    if not mode.concurrent:
        return accelerators, accelerators
    generate = min(
        range(1, accelerators), key=lambda n: max(1 / n / TOKENS_PER_S, 1 / (accelerators - n) / TRAIN_TOKENS_PER_S)
    )
    return generate, accelerators - generate


@contextmanager
def without_looking_for_cycles() -> Iterator[None]:
    """There are none, and to look at millions of answers again and again takes as long as to simulate them."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


async def simulate(mode: Mode, load: Load, accelerators: int, lengths: Lengths, steps: int) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    groups = load.groups_per_accelerator * accelerators
    generate, train = split(accelerators, mode)
    engines = [SimulatedEngine(str(i), SPEED, lengths, prompt_tokens=len(PROMPT), real=False) for i in range(generate)]
    dispatcher = Dispatcher(engines, max_running=mode.max_running)
    scheduler = RolloutScheduler(make_plan(mode, groups), dispatcher, None, seed=0)
    times, bounds, reaches, ages = [], [], [], []
    begun = loop.time()
    for step in range(mode.warm_up + steps):
        batch, facts = await scheduler.batch(step)
        tokens = UNIT * sum(len(sample.response_ids) for group in batch for sample in group.samples)
        await asyncio.sleep(tokens / (TRAIN_TOKENS_PER_S * train))
        async with dispatcher.paused(in_flight=mode.concurrent):
            for engine in engines:
                engine.stall(SYNC_S)
            await asyncio.sleep(SYNC_S)
        if step >= mode.warm_up:
            work = Work.of(tokens, groups)
            times.append(loop.time() - begun)
            bounds.append(work.bound_s(accelerators))
            reaches.append(within_reach_s(work, mode, load, accelerators))
            ages.append(max(facts.ages))
        begun = loop.time()
    await scheduler.close()
    dispatcher.accounts.check()
    step_s, bound_s, reach_s = (float(np.mean(each)) for each in (times, bounds, reaches))
    return {
        "step_s": step_s,
        "bound_s": bound_s,
        "of_bound": bound_s / step_s,
        "within_reach_s": reach_s,
        "of_reach": reach_s / step_s,
        "staleness": max(ages),
    }


def make_plan(mode: Mode, groups: int) -> RolloutPlan:
    return RolloutPlan(
        counts={"": groups},
        params=SamplingParams(max_new_tokens=1 << 20),
        n=GROUP,
        prompt=lambda tag, position: Prompt(id=str(position), tokens=PROMPT, text=""),
        ahead=mode.ahead,
        concurrent=mode.concurrent,
        first_ready=mode.first_ready,
    )


def virtually(main: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())


# -- what the scheduler costs ------------------------------------------------------------------------------------------


async def scheduled(in_flight: int, batches: int, lengths: Lengths, *, one_by_one: bool) -> int:
    """Trajectories drawn while so many are in flight all the time."""
    groups = in_flight // GROUP // 2
    engines = [
        SimulatedEngine(str(i), SPEED, lengths, prompt_tokens=len(PROMPT), real=False)
        for i in range(in_flight // SPEED.max_rows)
    ]
    mode = Mode("", ahead=1.0, concurrent=True, max_running=SPEED.max_rows if one_by_one else None)
    dispatcher = Dispatcher(engines, max_running=mode.max_running)
    scheduler = RolloutScheduler(make_plan(mode, groups), dispatcher, None, seed=0)
    for step in range(batches):
        await scheduler.batch(step)
    done = sum(engine.ended for engine in engines)
    await scheduler.close()
    return done


async def bare(in_flight: int, trajectories: int, lengths: Lengths, *, one_by_one: bool) -> int:
    """The same engines and as many answers without a scheduler: an engine gets the next request when one is done."""
    engines = [
        SimulatedEngine(str(i), SPEED, lengths, prompt_tokens=len(PROMPT), real=False)
        for i in range(in_flight // SPEED.max_rows)
    ]
    params = SamplingParams(max_new_tokens=1 << 20)
    over = asyncio.get_running_loop().create_future()
    answers = 1 if one_by_one else GROUP
    next_id = ended = 0

    def begin(engine: SimulatedEngine, count: int) -> None:
        nonlocal next_id
        requests = []
        for _ in range(count):
            requests.append(GenerateRequest(id=f"b/{next_id}", prompt_ids=PROMPT, params=params, n=answers))
            next_id += 1
        engine.begin(requests, lambda id, outcome: answered(engine))

    def answered(engine: SimulatedEngine) -> None:
        nonlocal ended
        ended += answers
        if ended < trajectories:
            asyncio.get_running_loop().call_soon(begin, engine, 1)
        elif not over.done():
            over.set_result(None)

    for engine in engines:
        begin(engine, SPEED.max_rows // answers)
    await over
    return sum(engine.ended for engine in engines)


def overhead(in_flight: int, batches: int, *, one_by_one: bool) -> dict[str, Any]:
    lengths = Lengths(LOADS[0], 4096)
    begun = time.process_time()
    trajectories = virtually(lambda: scheduled(in_flight, batches, lengths, one_by_one=one_by_one))
    whole_s = time.process_time() - begun
    begun = time.process_time()
    compared = virtually(lambda: bare(in_flight, trajectories, lengths, one_by_one=one_by_one))
    engines_s = time.process_time() - begun
    per_trajectory_us = 1e6 * (whole_s / trajectories - engines_s / compared)
    return {
        "one_by_one": one_by_one,
        "in_flight": in_flight,
        "trajectories": trajectories,
        "cpu_us_per_trajectory": per_trajectory_us,
        "cpu_us_per_trajectory_with_engines": 1e6 * whole_s / trajectories,
        "core_s_per_1000_tokens": per_trajectory_us * 1e-6 / (UNIT * float(lengths.table.mean()) / 1000),
    }


def profile(in_flight: int) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    virtually(lambda: scheduled(in_flight, 3, Lengths(LOADS[0], 4096), one_by_one=True))
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerators", default=",".join(map(str, SCALES)), help="the others' results stay")
    parser.add_argument("--steps", type=int, default=12, help="that are counted, at most")
    parser.add_argument("--modes", default="", help="a regular expression: of these modes alone")
    parser.add_argument("--in-flight", type=int, default=100_000, help="0 leaves what scheduling costs")
    parser.add_argument("--profile", action="store_true", help="show where the scheduler's time goes, and no more")
    args = parser.parse_args()
    if args.profile:
        profile(args.in_flight)
        return
    path = RESULTS / "rollout_sim.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    rows = {tuple(row[key] for key in KEYS): row for row in known.get("rows", ())}
    costs = known.get("scheduler", [])
    if args.in_flight:
        costs = [overhead(args.in_flight, 4, one_by_one=each) for each in (False, True)]
        print(costs, flush=True)
    for load, accelerators in fleets([int(each) for each in args.accelerators.split(",") if each]):
        groups = load.groups_per_accelerator * accelerators
        steps = max(1, min(args.steps, ENOUGH // (groups * GROUP)))
        lengths = Lengths(load, groups * (max(mode.warm_up for mode in MODES) + steps))
        for mode in [mode for mode in modes_of(accelerators) if re.search(args.modes, mode.name)]:
            with without_looking_for_cycles():
                found = virtually(partial(simulate, mode, load, accelerators, lengths, steps))
            key = load.name, accelerators, mode.name
            rows[key] = {**dict(zip(KEYS, key, strict=True)), **found}
            print(rows[key], flush=True)
            store(rows, costs)
    store(rows, costs)


def fleets(scales: Sequence[int]) -> list[tuple[Load, int]]:
    """What is simulated, the largest last."""
    full, long_tail = LOADS
    found = [(full, each) for each in scales]
    return sorted(found + [(long_tail, each) for each in scales if each == LONG_TAIL], key=lambda fleet: fleet[1])


def modes_of(accelerators: int) -> list[Mode]:
    """Which are simulated there."""
    return [mode for mode in MODES if accelerators <= LARGE or mode.name in LARGE_MODES]


def store(rows: Mapping[Any, Mapping[str, Any]], costs: Sequence[Mapping[str, Any]]) -> None:
    """What was simulated, now or before, in its order."""
    wanted = [(load.name, each, mode.name) for load in LOADS for each in SCALES for mode in modes_of(each)]
    found = [rows[key] for key in wanted if key in rows]
    write_result("rollout_sim", {"workload": workload(), "rows": found, "scheduler": list(costs)}, table(found, costs))


def workload() -> dict[str, Any]:
    return {
        "loads": [asdict(load) for load in LOADS],
        "answers": GROUP,
        "prompt_tokens": PROMPT_TOKENS,
        "engine_tokens_per_s": round(TOKENS_PER_S),
        "max_rows": SPEED.max_rows,
        "train_tokens_per_s": TRAIN_TOKENS_PER_S,
        "weight_sync_s": SYNC_S,
    }


def table(rows: Sequence[Mapping[str, Any]], costs: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "The real scheduler on simulated engines, in virtual time. Step time against the bound, total work ÷ capacity",
        "of all accelerators, and against what of it is within reach of the mode: with whole accelerators for either",
        "work, pauses for new weights, and the longest answer alone on its engine. Staleness is the age in steps of",
        "the oldest group that was trained on.",
        "",
        "| load | accelerators | mode | step | bound | of the bound | of what is within reach | faster than sync |"
        " staleness |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        same = [r for r in rows if (r["load"], r["accelerators"]) == (row["load"], row["accelerators"])]
        sync = next(r for r in same if r["mode"] == "sync")
        lines.append(
            f"| {row['load']} | {row['accelerators']:,} | {row['mode']} | {row['step_s']:.0f} s |"
            f" {row['bound_s']:.0f} s | {row['of_bound']:.1%} | {row['of_reach']:.1%} |"
            f" {sync['step_s'] / row['step_s']:.2f} × |"
            f" {row['staleness']} |"
        )
    lines.append("")
    for load in LOADS:
        lines.append(
            f"* {load.name}: {load.groups_per_accelerator} groups of {GROUP} answers a step for each accelerator,"
            f" log-normal lengths with a median of {load.median} tokens and σ {load.sigma}, cut at {load.longest:,}."
        )
    lines += [
        "",
        f"An engine has {SPEED.max_rows} rows and draws {TOKENS_PER_S:,.0f} tokens/s when full; training takes"
        f" {TRAIN_TOKENS_PER_S:,.0f} tokens/s for each accelerator, new weights {SYNC_S:g} s.",
    ]
    for cost in costs:
        how = "answers are asked one by one" if cost["one_by_one"] else "groups are asked as wholes"
        lines += [
            "",
            f"Where {how} the scheduler costs {cost['cpu_us_per_trajectory']:.0f} µs of CPU for each answer with"
            f" {cost['in_flight']:,} in flight: {cost['core_s_per_1000_tokens']:.1e} core-seconds per 1,000 tokens"
            f" (over {cost['trajectories']:,} answers, less that of the simulated engines, beside others).",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
