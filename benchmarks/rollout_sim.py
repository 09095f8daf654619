"""The rollout scheduler on simulated engines in virtual time: how near each mode comes to what the accelerators can do.

    ./run bench rollout_sim [--workload rlvr|agentic] [--accelerators 8,64,512,4096] [--steps N]

Scheduler, request queue and router are those of every run; engines are simulated (`shared_tests.simulation`):
continuous batching whose steps take longer the more rows there are, prefill that holds them up. What they draw is
either single answers with a long tail of lengths or trajectories of agents (`sim_workloads`). The load grows with the
machine. The bound is the work of a step divided by what all accelerators do:

    (tokens / tokens per second of a full engine + prefill + tokens / tokens per second of training) / accelerators

No split of whole accelerators reaches it, nor any run that replaces weights or has an answer that is longer than a
step; what is left of it is the step that is within reach (`within_reach_s`).

In synchronous training a batch is begun when the one before is trained on, all its answers or trajectories at once and
each at its own pace, and is complete when the last one is; then every accelerator trains. Asynchronous training splits
accelerators by the work of either, and trains while the others generate; weights are replaced under way, which stalls
the engines. The last part measures what the scheduler itself costs, with the same requests driven through bare engines
for comparison.
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
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from common import RESULTS, write_result
from sim_report import report
from sim_workloads import LOADS, PROMPT, SPEED, UNIT, described

from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.scheduler import RolloutScheduler
from roll_core.spec.pipeline import RolloutPlan
from roll_core.spec.rollout import Prompt
from roll_core.types import GenerateRequest, SamplingParams
from shared_tests.simulation import VirtualTimeLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sim_workloads import AgentLoad, Answers, Load, Trajectories, Work

    from shared_tests.simulation import SimulatedEngine

    AnyLoad = Load | AgentLoad

SYNC_S = 4.0
"""To replace the weights."""


@dataclass(frozen=True)
class Mode:
    name: str
    ahead: float = 0.0
    concurrent: bool = False
    bounded: bool = True
    """By the load's `max_running_requests`; otherwise engines are given everything at once, whole groups."""
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
    Mode("async, ratio 2, engines queue", ahead=2.0, concurrent=True, bounded=False),
    Mode("async, ratio 4", ahead=4.0, concurrent=True),
)
AGENT_MODES = (
    "sync",
    "sync, 25 % additional prompts",
    "sync, 25 % additional prompts, first ready",
    "async, ratio 1",
    "async, ratio 2",
    "async, ratio 4",
)
LARGE = 256
"""Above so many accelerators only these modes are simulated:"""
LARGE_MODES = ("sync", "async, ratio 2")
SCALES = (8, 64, 512, 4096)
"""Accelerators."""
LONG_TAIL = 64
"""Those with which the second load is simulated."""
KEYS = ("load", "accelerators", "mode")


def within_reach_s(work: Work, mode: Mode, load: AnyLoad, accelerators: int) -> float:
    """A step can take no less in this mode: with whole accelerators for either work, with engines and trainers that
    wait while weights are replaced, with engines that are as full as environments and the room for trajectories let
    them be, and with the longest answer alone on its engine.

    With k = ceil(ahead), an answer that is trained on k steps after it was begun has the time from when one batch is
    asked for until the batch k steps later is complete: k + 1 steps less one training and one replacing of weights.
    """
    generate, train = split(accelerators, mode, load)
    steps = math.ceil(mode.ahead) + 1
    generate_s = work.generate_s / (generate * rate(generate, accelerators, mode, load))
    train_s = work.train_s / train
    if not mode.concurrent:
        return max(generate_s, work.longest_s / steps) + train_s + SYNC_S
    return max(generate_s + SYNC_S, train_s + SYNC_S, (work.longest_s + train_s + steps * SYNC_S) / steps)


def rate(generate: int, accelerators: int, mode: Mode, load: AnyLoad) -> float:
    """Of what so many full engines draw, the share that they can draw with what may be in flight."""
    in_flight = (1 + math.ceil(mode.ahead)) * load.groups_per_accelerator * load.group * accelerators / generate
    return load.rate(min(load.max_running, in_flight))


def split(accelerators: int, mode: Mode, load: AnyLoad) -> tuple[int, int]:
    """Accelerators that generate and that train."""
    if not mode.concurrent:
        return accelerators, accelerators
    generate_s, train_s = load.typical

    def slower_s(generate: int) -> float:
        drawn_s = generate_s / generate / rate(generate, accelerators, mode, load)
        return max(drawn_s, train_s / (accelerators - generate))

    generate = min(range(1, accelerators), key=slower_s)
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


async def simulate(
    mode: Mode, load: AnyLoad, accelerators: int, drawn: Answers | Trajectories, steps: int
) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    groups = load.groups_per_accelerator * accelerators
    generate, train = split(accelerators, mode, load)
    engines = drawn.engines(generate)
    queue = RequestQueue(engines, max_running=load.max_running if mode.bounded else None)
    scheduler = RolloutScheduler(make_plan(mode, groups, load.group), queue, None, seed=0)
    times, bounds, reaches, ages = [], [], [], []
    begun = loop.time()
    for step in range(mode.warm_up + steps):
        batch, facts = await scheduler.batch(step)
        work = drawn.work(batch)
        await asyncio.sleep(work.train_s / train)
        async with queue.paused(in_flight=mode.concurrent):
            for engine in engines:
                engine.stall(SYNC_S)
            await asyncio.sleep(SYNC_S)
        if step >= mode.warm_up:
            times.append(loop.time() - begun)
            bounds.append(work.bound_s(accelerators))
            reaches.append(within_reach_s(work, mode, load, accelerators))
            ages.append(max(facts.ages))
        begun = loop.time()
    await scheduler.close()
    step_s, bound_s, reach_s = (float(np.mean(each)) for each in (times, bounds, reaches))
    return {
        "step_s": step_s,
        "bound_s": bound_s,
        "of_bound": bound_s / step_s,
        "within_reach_s": reach_s,
        "of_reach": reach_s / step_s,
        "staleness": max(ages),
    }


def make_plan(mode: Mode, groups: int, group: int) -> RolloutPlan:
    return RolloutPlan(
        counts={"": groups},
        params=SamplingParams(max_new_tokens=1 << 20),
        n=group,
        prompt=lambda tag, position: Prompt(id=str(position), tokens=PROMPT, text=""),
        ahead=mode.ahead,
        concurrent=mode.concurrent,
        first_ready=mode.first_ready,
    )


def virtually(main: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())


# -- what the scheduler costs ------------------------------------------------------------------------------------------


async def scheduled(in_flight: int, batches: int, answers: Answers, *, one_by_one: bool) -> int:
    """Answers drawn while so many are in flight all the time."""
    group = answers.load.group
    engines = answers.engines(in_flight // SPEED.max_rows)
    queue = RequestQueue(engines, max_running=SPEED.max_rows if one_by_one else None)
    plan = make_plan(Mode("", ahead=1.0, concurrent=True), in_flight // group // 2, group)
    scheduler = RolloutScheduler(plan, queue, None, seed=0)
    for step in range(batches):
        await scheduler.batch(step)
    done = sum(engine.ended for engine in engines)
    await scheduler.close()
    return done


async def bare(in_flight: int, wanted: int, answers: Answers, *, one_by_one: bool) -> int:
    """The same engines and as many answers without a scheduler: an engine gets the next request when one is done."""
    engines = answers.engines(in_flight // SPEED.max_rows)
    params = SamplingParams(max_new_tokens=1 << 20)
    over = asyncio.get_running_loop().create_future()
    n = 1 if one_by_one else answers.load.group
    next_id = ended = 0

    def begin(engine: SimulatedEngine, count: int) -> None:
        nonlocal next_id
        requests = []
        for _ in range(count):
            requests.append(GenerateRequest(id=f"b/{next_id}", prompt_ids=PROMPT, params=params, n=n))
            next_id += 1
        engine.submit(requests, lambda id, outcome: answered(engine))

    def answered(engine: SimulatedEngine) -> None:
        nonlocal ended
        ended += n
        if ended < wanted:
            asyncio.get_running_loop().call_soon(begin, engine, 1)
        elif not over.done():
            over.set_result(None)

    for engine in engines:
        begin(engine, SPEED.max_rows // n)
    await over
    return sum(engine.ended for engine in engines)


def overhead(in_flight: int, batches: int, *, one_by_one: bool) -> dict[str, Any]:
    answers = LOADS["rlvr"][0].draw(4096)
    begun = time.process_time()
    trajectories = virtually(lambda: scheduled(in_flight, batches, answers, one_by_one=one_by_one))
    whole_s = time.process_time() - begun
    begun = time.process_time()
    compared = virtually(lambda: bare(in_flight, trajectories, answers, one_by_one=one_by_one))
    engines_s = time.process_time() - begun
    per_trajectory_us = 1e6 * (whole_s / trajectories - engines_s / compared)
    return {
        "one_by_one": one_by_one,
        "in_flight": in_flight,
        "trajectories": trajectories,
        "cpu_us_per_trajectory": per_trajectory_us,
        "cpu_us_per_trajectory_with_engines": 1e6 * whole_s / trajectories,
        "core_s_per_1000_tokens": per_trajectory_us * 1e-6 / (UNIT * float(answers.table.mean()) / 1000),
    }


def profile(in_flight: int) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    virtually(lambda: scheduled(in_flight, 3, LOADS["rlvr"][0].draw(4096), one_by_one=True))
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(LOADS), default="rlvr", help="the other's results stay")
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
    for load, accelerators in fleets(args.workload, [int(each) for each in args.accelerators.split(",") if each]):
        groups = load.groups_per_accelerator * accelerators
        steps = max(1, min(args.steps, load.enough // (groups * load.group)))
        modes = modes_of(args.workload, accelerators)
        drawn = load.draw(groups * (max(mode.warm_up for mode in modes) + steps))
        for mode in [mode for mode in modes if re.search(args.modes, mode.name)]:
            with without_looking_for_cycles():
                found = virtually(partial(simulate, mode, load, accelerators, drawn, steps))
            key = load.name, accelerators, mode.name
            rows[key] = {**dict(zip(KEYS, key, strict=True)), **found}
            print(rows[key], flush=True)
            store(rows, costs)
    store(rows, costs)


def fleets(workload: str, scales: Sequence[int]) -> list[tuple[AnyLoad, int]]:
    """What is simulated, the largest last."""
    first, second = LOADS[workload]
    found = [(first, each) for each in scales]
    return sorted(found + [(second, each) for each in scales if each == LONG_TAIL], key=lambda fleet: fleet[1])


def modes_of(workload: str, accelerators: int) -> list[Mode]:
    """Which are simulated there."""
    modes = [mode for mode in MODES if workload == "rlvr" or mode.name in AGENT_MODES]
    return [mode for mode in modes if accelerators <= LARGE or mode.name in LARGE_MODES]


def store(rows: Mapping[Any, Mapping[str, Any]], costs: Sequence[Mapping[str, Any]]) -> None:
    """What was simulated, now or before, in its order."""
    found = {}
    for workload, loads in LOADS.items():
        wanted = [
            (load.name, each, mode.name) for load in loads for each in SCALES for mode in modes_of(workload, each)
        ]
        found[workload] = [rows[key] for key in wanted if key in rows]
    result = {
        "workloads": {name: described(name) | {"weight_sync_s": SYNC_S} for name in LOADS},
        "rows": [row for each in found.values() for row in each],
        "scheduler": list(costs),
    }
    write_result("rollout_sim", result, report(found, costs, SYNC_S))


if __name__ == "__main__":
    main()
