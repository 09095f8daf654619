"""What `rollout_sim` found, for readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim_workloads import LOADS, PLACES, PUBLISHED, SPEED, TOKENS_PER_S, TRAIN_TOKENS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def report(found: Mapping[str, Sequence[Mapping[str, Any]]], costs: Sequence[Mapping[str, Any]], sync_s: float) -> str:
    lines = [
        "The real scheduler on simulated engines, in virtual time. Step time against the bound, total work ÷ capacity",
        "of all accelerators, and against what of it is within reach of the mode: with whole accelerators for either",
        "work, pauses for new weights, engines as full as what may be in flight lets them be, and the longest answer",
        "alone on its engine. Staleness is the age in steps of the oldest group that was trained on.",
        "",
        f"An engine has {SPEED.max_rows} rows and draws {TOKENS_PER_S:,.0f} tokens/s when full; training takes"
        f" {TRAIN_TOKENS_PER_S:,.0f} tokens/s for each accelerator, new weights {sync_s:g} s.",
    ]
    for workload, rows in found.items():
        if rows:
            lines += [
                "",
                f"## {workload}",
                "",
                *table(rows),
                "",
                *[f"* {load.name}: {load}" for load in LOADS[workload]],
            ]
            lines += ["", *NOTES.get(workload, ()), compared(workload, rows)]
    lines += ["", "## What the scheduler costs"]
    for cost in costs:
        how = "answers are asked one by one" if cost["one_by_one"] else "groups are asked as wholes"
        lines += [
            "",
            f"Where {how} the scheduler costs {cost['cpu_us_per_trajectory']:.0f} µs of CPU for each answer with"
            f" {cost['in_flight']:,} in flight: {cost['core_s_per_1000_tokens']:.1e} core-seconds per 1,000 tokens"
            f" (over {cost['trajectories']:,} answers, less that of the simulated engines, beside others).",
        ]
    return "\n".join(lines)


NOTES = {
    "agentic": (
        "The scheduler is asked for one answer per trajectory; turns and environments are inside the simulated engine,",
        "see agentic_sim for the pipeline's program. A trajectory whose environment works draws nothing and keeps keys",
        f"and values; an engine has room for {PLACES} trajectories. Synchronous training begins all trajectories of a",
        "batch at once, each at its own pace, and waits for all of them.",
        "",
    )
}


def compared(workload: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The largest ratio with a staleness of at most 2, and of at most 4, beside the published one."""
    found = []
    for staleness in (2, 4):
        ratios = [row for row in rows if row["mode"].startswith("async") and row["staleness"] <= staleness]
        if ratios:
            row = max(ratios, key=lambda each: speedup(each, rows))
            where = f"{row['load']}, {row['accelerators']:,} accelerators, {row['mode']}"
            found.append(f"up to {speedup(row, rows):.2f} × with a staleness of at most {staleness} ({where})")
    if not found:
        return ""
    return (
        f"Asynchronous over synchronous: {', '.join(found)}. ROLL Flash reports up to {PUBLISHED[workload]} ×"
        " (arXiv:2510.11345), on other hardware and with a load that is not this one."
    )


def speedup(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float:
    """Over synchronous training on the same load and as many accelerators."""
    same = [each for each in rows if (each["load"], each["accelerators"]) == (row["load"], row["accelerators"])]
    sync = next(each for each in same if each["mode"] == "sync")
    return float(sync["step_s"] / row["step_s"])


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| load | accelerators | mode | step | bound | of the bound | of what is within reach | faster than sync |"
        " staleness |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    return lines + [
        f"| {row['load']} | {row['accelerators']:,} | {row['mode']} | {row['step_s']:.0f} s | {row['bound_s']:.0f} s |"
        f" {row['of_bound']:.1%} | {row['of_reach']:.1%} | {speedup(row, rows):.2f} × | {row['staleness']} |"
        for row in rows
    ]
