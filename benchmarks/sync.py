"""How long it takes to bring 100 M parameters from a trainer to engines, and what the proof costs.

    ./run bench sync [--rounds N] [--receivers N ...] [--only TRANSPORT]

`shared` runs in this process, the others between Ray workers on this host, with the runtime's own sender, receiver and
publisher; `disk` through a folder for temporary files. Publishes whose digests ride on the copies (`fused`), take a
pass of their own (`separate`: where there is no C++ compiler) or are left out (`none`) alternate with what the machine
can do at best (memcpy, a connection to itself, a file), so that a noisy machine is noisy for all of them. Times of the
clock are compared, and the CPU time of all workers, which depends less on who else uses the machine.

The ends are named tensors, which leave nothing but the transport; and last `hf_train` and the embedded engine, which is
what a run waits for: there the engine also lays the weights out for the processor.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common import write_result
from sync_ends import LEAVES, MODEL
from sync_limits import Limits

from roll_core.builtin import plugin as core
from roll_core.builtin.cpu import CpuPlatform
from roll_core.runtime.cluster.executors.base import GroupSpec, Place, WorkerCall
from roll_core.runtime.cluster.executors.local import LocalExecutor
from roll_core.runtime.weights.plan import SyncPlan
from roll_core.runtime.weights.publisher import WeightPublisher
from roll_core.runtime.workers.train import BatchLimits
from roll_core.spec.model import ModelSpec
from roll_core.spec.transport import Route
from roll_executor_ray.executor import RayExecutor
from roll_infer_hf.plugin import roll_infer_strategies
from roll_strategy_hf.plugin import roll_train_strategies
from roll_weight_transports.plugin import roll_weight_transports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from roll_core.runtime.cluster.executors.base import Executor, WorkerGroup

LIMIT = {"shm": "memcpy", "collective": "loopback", "disk": "file"}
"""Of one copy of the weights; `shm` makes two, side by side."""
SHM_TARGET, PROOF_TARGET = 0.5, 0.05
TRANSPORTS = {each.name: each for each in (*core.roll_weight_transports(), *roll_weight_transports())}


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Ends that serve several transports, one after the other."""

    ends: str
    dtype: str
    receivers: int
    transports: tuple[str, ...]

    def specs(self) -> list[GroupSpec]:
        """Both roles."""
        train, infer = {"dtype": self.dtype}, {"dtype": self.dtype}
        if self.ends == "Real":
            train, infer = real_arguments({"F32": "fp32", "BF16": "bf16"}[self.dtype])
        return [
            self._spec("actor_train", "train", "Trainer", 1, train),
            self._spec("actor_infer", "generate", "Engine", self.receivers, infer),
        ]

    def _spec(self, role: str, kind: Any, worker: str, size: int, args: dict[str, Any]) -> GroupSpec:
        places = tuple(Place(rank=rank, world_size=size, num_threads=1) for rank in range(size))
        return GroupSpec(role=role, kind=kind, target=f"sync_ends:{self.ends}{worker}", places=places, args=args)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[WorkerGroup, WorkerGroup]]:
        """Both roles, ready."""
        kind: type[Executor] = LocalExecutor if self.transports == ("shared",) else RayExecutor
        async with kind(CpuPlatform(), 2) as executor:
            groups = await executor.start(self.specs())
            found = groups["actor_train"], groups["actor_infer"]
            for group in found if self.ends == "Real" else ():
                await WorkerCall(group, "start").all()
            yield found


def real_arguments(dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of workers around the real strategies. The trainer has no optimizer, which has no part in a sync."""
    both = {
        "strategy_config": {},
        "owner": "benchmarks",
        "model": ModelSpec(random_init=MODEL, dtype=dtype),
        "backend": "gloo",
        "timeout_s": 600.0,
    }
    trainer = next(each for each in roll_train_strategies() if each.forward_only)
    limits = BatchLimits(train_sequences=1, infer_sequences=1)
    train = {"role": "actor_train", "provider": trainer, "training": None, "limits": limits, "deterministic": False}
    return both | train, both | {"role": "actor_infer", "provider": next(roll_infer_strategies())}


async def measure(arrangement: Arrangement, rounds: int, limits: Limits, directory: str) -> list[dict[str, Any]]:
    """Every transport of the arrangement."""
    async with arrangement.running() as (train, infer):
        measure_one = measure_shared if arrangement.transports == ("shared",) else measure_copying
        found = []
        for transport in arrangement.transports:
            route = Route(options={"directory": directory})
            publisher = WeightPublisher(train, infer, SyncPlan(transport=TRANSPORTS[transport], route=route))
            of_transport = await measure_one(arrangement, publisher, rounds, limits)
            found.append(
                {
                    "ends": arrangement.ends,
                    "transport": transport,
                    "dtype": arrangement.dtype,
                    "receivers": arrangement.receivers,
                    **of_transport,
                }
            )
            print(row(found[-1]), flush=True)
        return found


async def measure_shared(
    arrangement: Arrangement, publisher: WeightPublisher, rounds: int, limits: Limits
) -> dict[str, Any]:
    """Nothing is copied; the proof is known by itself."""
    train, infer = publisher._train, publisher._infer
    cold = await publisher.publish(0)
    reports = []
    for number in range(rounds):
        if arrangement.ends == "NamedTensors":
            await WorkerCall(train, "step").all()
        reports.append(await publisher.publish(number + 1 if arrangement.ends == "NamedTensors" else 0))
    same = True
    if arrangement.ends == "NamedTensors":
        (live,) = await WorkerCall(train, "pointers").all()
        same = all(held == live for held in await WorkerCall(infer, "pointers").all())
    share = [report.proof_s / report.seconds for report in reports]
    return {
        "weight_bytes": cold.weight_bytes,
        "first_s": cold.seconds,
        "same_memory": same,
        "seconds": {"fused": _middle([report.seconds for report in reports])},
        "proof_s": _middle([report.proof_s for report in reports]),
        "proof": {"fused": {"median": statistics.median(share), "best": min(share)}},
    }


async def measure_copying(
    arrangement: Arrangement, publisher: WeightPublisher, rounds: int, limits: Limits
) -> dict[str, Any]:
    """Publishes of the three kinds in turn. A version that is published again is no claim that something changed:
    without digests nothing seems to."""
    train, infer = publisher._train, publisher._infer
    limit = LIMIT[publisher.plan.transport.name]
    modes = list(LEAVES)
    cold = await publisher.publish(0)
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    cpu: dict[str, list[float]] = {mode: [] for mode in modes}
    for number in range(rounds):
        limits.measure(*{"memcpy", limit})
        for mode in modes[number % 3 :] + modes[: number % 3]:
            await asyncio.gather(WorkerCall(train, "digests").all(mode), WorkerCall(infer, "digests").all(mode))
            begun = await _cpu_s(train, infer)
            report = await publisher.publish(0)
            cpu[mode].append(await _cpu_s(train, infer) - begun)
            seconds[mode].append(report.seconds)
    await WorkerCall(train, "digests").all("fused")
    await WorkerCall(infer, "digests").all("fused")
    reached = limits.take()
    of_clock = {mode: _middle(each) for mode, each in seconds.items()}
    bandwidth = {which: report.weight_bytes / each for which, each in of_clock["fused"].items()}
    least = {mode: min(each) for mode, each in cpu.items()}
    return {
        "weight_bytes": report.weight_bytes,
        "first_s": cold.seconds,
        "seconds": of_clock,
        "cpu_s": least,
        "limit": limit,
        "limits_bytes_per_s": reached,
        "bytes_per_s": bandwidth,
        "of_limit": {which: bandwidth[which] / reached[limit][which] for which in bandwidth},
        "proof": {
            mode: {which: 1 - of_clock["none"][which] / each for which, each in of_clock[mode].items()}
            | {"cpu": 1 - least["none"] / least[mode]}
            for mode in ("fused", "separate")
        },
    }


async def _cpu_s(*groups: WorkerGroup) -> float:
    return sum([each for group in groups for each in await WorkerCall(group, "cpu_s").all()])


def _middle(found: list[float]) -> dict[str, float]:
    return {"median": statistics.median(found), "best": min(found)}


HEAD = (
    "| ends | transport | dtype | engines | weights | sync | first | of the limit | delivered to all | proof, fused"
    " | proof, separate |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def row(each: dict[str, Any]) -> str:
    """One line of the table."""
    ends = {"NamedTensors": "named tensors", "Real": "`hf_train`, `hf_infer`"}[each["ends"]]
    sync = each["seconds"]["fused"]
    cells = [ends, each["transport"], each["dtype"], str(each["receivers"]), f"{each['weight_bytes'] / 1e6:.0f} MB"]
    cells += [f"{sync['median'] * 1e3:.1f}, {sync['best'] * 1e3:.1f} ms", f"{each['first_s'] * 1e3:.0f} ms"]
    if each["transport"] == "shared":
        proof = each["proof_s"]
        same = "no copy" if each["same_memory"] else "COPIED"
        cells += [same, "–", f"{proof['median'] * 1e3:.1f}, {proof['best'] * 1e3:.1f} ms", "–"]
        return f"| {' | '.join(cells)} |"
    share = each["of_limit"]
    cells += [f"{share['median']:.0%}, {share['best']:.0%} of {each['limit']}"]
    cells += [f"{each['receivers'] * each['bytes_per_s']['median'] / 1e9:.2f} GB/s"]
    for mode in ("fused", "separate"):
        proof = each["proof"][mode]
        cells.append(f"{proof['median']:.1%}, {proof['best']:.1%}; CPU {proof['cpu']:.1%}")
    return f"| {' | '.join(cells)} |"


def notes(results: list[dict[str, Any]], load: float) -> str:
    """What the targets were, and whether they are reached."""
    lines = [f"Load of the machine over the last minute, before the benchmark: {load:.1f}."]
    for each in results:
        if each["receivers"] > 1 or each["transport"] in ("shared", "disk"):
            continue
        what = f"{each['transport']} {each['dtype']}, {'named tensors' if each['ends'] != 'Real' else 'whole'}"
        if each["transport"] == "shm" and each["ends"] == "NamedTensors":
            best = each["of_limit"]["best"]
            lines.append(f"{_verdict(best >= SHM_TARGET)} {what}: at least 50% of memcpy's bandwidth: {best:.0%}.")
        proof = each["proof"]["fused"]
        lines.append(
            f"{_verdict(proof['median'] < PROOF_TARGET)} {what}: proof under 5% of a sync: {proof['median']:.1%}"
            f" (median), {proof['best']:.1%} (best) by the clock, {proof['cpu']:.1%} of its CPU time."
        )
    if any(each["receivers"] > 1 for each in results):
        lines.append(
            "Several engines share this host's cores and memory with the trainer: where their number passes that of the"
            " cores, the times say how they take turns, and not what as many hosts would do."
        )
    lines.append(
        "By the clock `shm` needs a free core for each end: on a busy machine the ends take turns on one, and the times"
        " are the sum of both instead of the larger. memcpy moves a byte once, on one core; `shm` moves it twice, into"
        " the shared memory and out of it, on two cores that share the way to memory."
    )
    return "\n\n".join(lines)


def _verdict(reached: bool) -> str:
    return "Reached," if reached else "Missed,"


def arrangements(receivers: list[int]) -> list[Arrangement]:
    """Many engines get half the bytes, which keeps memory below 6 GiB."""
    between = ("shm", "collective", "disk")
    found = [
        Arrangement(ends="NamedTensors", dtype=dtype, receivers=1, transports=transports)
        for transports in (("shared",), between)
        for dtype in ("F32", "BF16")
    ]
    found += [
        Arrangement(ends="NamedTensors", dtype="BF16", receivers=number, transports=between)
        for number in receivers
        if number > 1
    ]
    found += [
        Arrangement(ends="Real", dtype="F32", receivers=1, transports=transports)
        for transports in (("shared",), between[:2])
    ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="with one engine; with more, fewer")
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of engines")
    parser.add_argument("--only", choices=["shared", *LIMIT])
    # Ray gives its workers a lower priority than the process that measures memcpy; on a busy machine they would starve.
    os.environ.setdefault("RAY_worker_niceness", "0")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    results = []
    print(HEAD)
    with tempfile.TemporaryDirectory() as directory:
        limits = Limits(directory)
        for each in arrangements(arguments.receivers):
            wanted = tuple(name for name in each.transports if arguments.only in (None, name))
            rounds = max(3, arguments.rounds // each.receivers)
            if wanted:
                chosen = Arrangement(ends=each.ends, dtype=each.dtype, receivers=each.receivers, transports=wanted)
                results += asyncio.run(measure(chosen, rounds, limits, directory))
    said = notes(results, load)
    print(f"\n{said}")
    if arguments.only is None:
        table = "Milliseconds and ratios as median, best.\n\n" + "\n".join([HEAD, *map(row, results)])
        write_result("sync", {"load_average": load, "results": results}, f"{table}\n\n{said}")


if __name__ == "__main__":
    main()
