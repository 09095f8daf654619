"""The rollout scheduler on simulated engines in virtual time: how near each mode comes to what the accelerators can do.

    ./run bench rollout_sim [--accelerators 8,64,512,4096] [--steps N]

Scheduler, dispatcher and router are those of every run; engines are simulated (`roll_core.testing.simulation`):
continuous batching whose steps take longer the more rows there are, prefill that holds them up, answers with a long
tail of lengths. The load grows with the machine. The bound is the work of a step divided by what all accelerators do:

    (tokens / tokens per second of a full engine + prefill + tokens / tokens per second of training) / accelerators

Synchronous modes use every accelerator for generation, then for training. Asynchronous ones split them by the work of
either, and train while the others generate; weights are replaced under way, which stalls the engines. The last part
measures what the scheduler itself costs, with the same requests driven through bare engines for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import math
import pstats
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from common import write_result

from roll_core.runtime.rollout.dispatcher import Dispatcher
from roll_core.runtime.rollout.scheduler import RolloutScheduler
from roll_core.spec.pipeline import Prompt, RolloutPlan
from roll_core.testing.simulation import SimulatedEngine, Speed, VirtualTimeLoop
from roll_core.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

SPEED = Speed(base_s=0.012, row_s=0.00006, prompt_token_s=0.00002, max_rows=128)
"""About a model of 7 B on one current accelerator, with room for 128 long sequences: 6,500 tokens/s when full."""
TRAIN_TOKENS_PER_S = 8000.0
"""Of one accelerator, logprobs of the old policy included."""
SYNC_S = 4.0
"""To replace the weights."""
PROMPT_TOKENS = 512
GROUP = 16
WARM_UP = 2
"""Steps that are not counted."""
PROMPT = np.zeros(PROMPT_TOKENS, dtype=np.int64)


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


MODES = (
    Mode("sync"),
    Mode("sync, 25 % additional prompts", ahead=0.25),
    Mode("sync, 100 % additional prompts", ahead=1.0),
    Mode("async, ratio 0.5", ahead=0.5, concurrent=True),
    Mode("async, ratio 1", ahead=1.0, concurrent=True),
    Mode("async, ratio 2", ahead=2.0, concurrent=True),
    Mode("async, ratio 4", ahead=4.0, concurrent=True),
)
LARGE = 1024
"""Above so many accelerators only these are simulated:"""
LARGE_MODES = ("sync", "async, ratio 1", "async, ratio 2")


class Lengths:
    """Drawn once for all modes: `length(id, index)` of a prompt's answers."""

    def __init__(self, load: Load, groups: int) -> None:
        rng = np.random.default_rng(0)
        drawn = rng.lognormal(math.log(load.median), load.sigma, size=(groups, GROUP))
        self.table = np.clip(drawn, 16, load.longest).astype(np.int32)

    def __call__(self, id: str, index: int) -> int:
        return int(self.table[int(id.rpartition("/")[2]) % len(self.table), index])


def bound_s(tokens: float, groups: int, accelerators: int) -> float:
    """Of one step."""
    generate = tokens / SPEED.capacity + groups * PROMPT_TOKENS * SPEED.prompt_token_s
    return (generate + tokens / TRAIN_TOKENS_PER_S) / accelerators


def split(accelerators: int, mode: Mode) -> tuple[int, int]:
    """Accelerators that generate and that train."""
    if not mode.concurrent:
        return accelerators, accelerators
    share = (1 / SPEED.capacity) / (1 / SPEED.capacity + 1 / TRAIN_TOKENS_PER_S)
    generate = min(accelerators - 1, max(1, round(share * accelerators)))
    return generate, accelerators - generate


async def simulate(mode: Mode, load: Load, accelerators: int, lengths: Lengths, steps: int) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    groups = load.groups_per_accelerator * accelerators
    generate, train = split(accelerators, mode)
    engines = [
        SimulatedEngine(str(i), SPEED, lengths, prompt_tokens=PROMPT_TOKENS, real=False) for i in range(generate)
    ]
    dispatcher = Dispatcher(engines)
    scheduler = RolloutScheduler(make_plan(mode, groups), dispatcher, None, seed=0)
    times, bounds, ages = [], [], []
    begun = loop.time()
    for step in range(steps):
        batch, facts = await scheduler.batch(step)
        tokens = sum(len(sample.response_ids) for group in batch for sample in group.samples)
        await asyncio.sleep(tokens / (TRAIN_TOKENS_PER_S * train))
        async with dispatcher.paused(in_flight=mode.concurrent):
            for engine in engines:
                engine.stall(SYNC_S)
            await asyncio.sleep(SYNC_S)
        if step >= WARM_UP:
            times.append(loop.time() - begun)
            bounds.append(bound_s(tokens, groups, accelerators))
            ages.append(max(facts.ages))
        begun = loop.time()
    await scheduler.close()
    dispatcher.accounts.check()
    step_s, least_s = float(np.mean(times)), float(np.mean(bounds))
    return {"step_s": step_s, "bound_s": least_s, "of_bound": least_s / step_s, "staleness": max(ages)}


def make_plan(mode: Mode, groups: int) -> RolloutPlan:
    return RolloutPlan(
        counts={"": groups},
        params=SamplingParams(max_new_tokens=1 << 20),
        n=GROUP,
        prompt=lambda tag, position: Prompt(id=str(position), tokens=PROMPT, text=""),
        ahead=mode.ahead,
        concurrent=mode.concurrent,
    )


def virtually(main: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())


# -- what the scheduler costs ------------------------------------------------------------------------------------------


async def scheduled(in_flight: int, batches: int, lengths: Lengths) -> int:
    """Trajectories drawn while so many are in flight all the time."""
    groups = in_flight // GROUP // 2
    engines = [
        SimulatedEngine(str(i), SPEED, lengths, prompt_tokens=PROMPT_TOKENS, real=False)
        for i in range(in_flight // SPEED.max_rows)
    ]
    mode = Mode("", ahead=1.0, concurrent=True)
    scheduler = RolloutScheduler(make_plan(mode, groups), Dispatcher(engines), None, seed=0)
    for step in range(batches):
        await scheduler.batch(step)
    done = sum(engine.ended for engine in engines)
    await scheduler.close()
    return done


async def bare(in_flight: int, trajectories: int, lengths: Lengths) -> int:
    """The same engines and requests without a scheduler: each engine gets the next group when one is done."""
    engines = [
        SimulatedEngine(str(i), SPEED, lengths, prompt_tokens=PROMPT_TOKENS, real=False)
        for i in range(in_flight // SPEED.max_rows)
    ]
    params = SamplingParams(max_new_tokens=1 << 20)
    over = asyncio.get_running_loop().create_future()
    next_id = 0

    def begin(engine: SimulatedEngine, count: int) -> None:
        nonlocal next_id
        requests = []
        for _ in range(count):
            requests.append(GenerateRequest(id=f"b/{next_id}", prompt_ids=PROMPT, params=params, n=GROUP))
            next_id += 1
        engine.begin(requests, lambda id, outcome: answered(engine))

    def answered(engine: SimulatedEngine) -> None:
        if sum_ended() >= trajectories:
            if not over.done():
                over.set_result(None)
            return
        asyncio.get_running_loop().call_soon(begin, engine, 1)

    ended = 0

    def sum_ended() -> int:
        nonlocal ended
        ended += GROUP
        return ended

    for engine in engines:
        begin(engine, SPEED.max_rows // GROUP)
    await over
    return sum(engine.ended for engine in engines)


def overhead(in_flight: int, batches: int) -> dict[str, float]:
    lengths = Lengths(LOADS[0], 4096)
    begun = time.process_time()
    trajectories = virtually(lambda: scheduled(in_flight, batches, lengths))
    whole_s = time.process_time() - begun
    begun = time.process_time()
    compared = virtually(lambda: bare(in_flight, trajectories, lengths))
    engines_s = time.process_time() - begun
    per_trajectory_us = 1e6 * (whole_s / trajectories - engines_s / compared)
    return {
        "in_flight": in_flight,
        "trajectories": trajectories,
        "cpu_us_per_trajectory": per_trajectory_us,
        "cpu_us_per_trajectory_with_engines": 1e6 * whole_s / trajectories,
        "core_s_per_1000_tokens": per_trajectory_us * 1e-6 / (float(lengths.table.mean()) / 1000),
    }


def profile(in_flight: int) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    virtually(lambda: scheduled(in_flight, 3, Lengths(LOADS[0], 4096)))
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerators", default="8,64,512,4096")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--in-flight", type=int, default=100_000)
    parser.add_argument("--profile", action="store_true", help="show where the scheduler's time goes, and no more")
    args = parser.parse_args()
    if args.profile:
        profile(args.in_flight)
        return
    rows = []
    scales = [int(each) for each in args.accelerators.split(",")]
    for load, accelerators in [*((LOADS[0], each) for each in scales), (LOADS[1], min(64, max(scales)))]:
        lengths = Lengths(load, load.groups_per_accelerator * accelerators * (args.steps + 5))
        for mode in MODES:
            if accelerators <= LARGE or mode.name in LARGE_MODES:
                steps = args.steps if accelerators <= LARGE else min(args.steps, 6)
                main = partial(simulate, mode, load, accelerators, lengths, steps)
                rows.append({"load": load.name, "accelerators": accelerators, "mode": mode.name, **virtually(main)})
                print(rows[-1], flush=True)
    cost = overhead(args.in_flight, 6)
    print(cost)
    write_result("rollout_sim", {"workload": workload(), "rows": rows, "scheduler": cost}, table(rows, cost))


def workload() -> dict[str, Any]:
    return {
        "loads": [asdict(load) for load in LOADS],
        "answers": GROUP,
        "prompt_tokens": PROMPT_TOKENS,
        "engine_tokens_per_s": round(SPEED.capacity),
        "max_rows": SPEED.max_rows,
        "train_tokens_per_s": TRAIN_TOKENS_PER_S,
        "weight_sync_s": SYNC_S,
    }


def table(rows: list[dict[str, Any]], cost: dict[str, float]) -> str:
    lines = [
        "The real scheduler on simulated engines, in virtual time. Step time against the bound, total work ÷ capacity",
        "of all accelerators; staleness is the age in steps of the oldest group that was trained on.",
        "",
        "| load | accelerators | mode | step | bound | of the bound | faster than sync | staleness |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        same = [r for r in rows if (r["load"], r["accelerators"]) == (row["load"], row["accelerators"])]
        sync = next(r for r in same if r["mode"] == "sync")
        lines.append(
            f"| {row['load']} | {row['accelerators']:,} | {row['mode']} | {row['step_s']:.0f} s |"
            f" {row['bound_s']:.0f} s | {row['of_bound']:.1%} | {sync['step_s'] / row['step_s']:.2f} × |"
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
        f"An engine has {SPEED.max_rows} rows and draws {SPEED.capacity:,.0f} tokens/s when full; training takes"
        f" {TRAIN_TOKENS_PER_S:,.0f} tokens/s for each accelerator, new weights {SYNC_S:g} s.",
        "",
        f"The scheduler costs {cost['cpu_us_per_trajectory']:.0f} µs of CPU for each answer with {cost['in_flight']:,}"
        f" in flight: {cost['core_s_per_1000_tokens']:.1e} core-seconds per 1,000 tokens (over {cost['trajectories']:,}"
        " answers, less the time of the simulated engines).",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
