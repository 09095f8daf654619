"""`roll-core plan CONFIG`: shows the placement, the memory of each role and phase, and changes that make it fit."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from roll_core.runtime.cluster.placement import slots_of
from roll_tools.planning import GIB, plan
from roll_tools.suggestion import explained

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from roll_core.plugins.registry import Registry
    from roll_core.runtime.cluster.placement import Place
    from roll_tools.role_memory import RoleMemory
    from roll_tools.run_plan import Load, Plan
    from roll_tools.suggestion import Proposal


def show_plan(
    config: Path,
    overrides: Sequence[str],
    registry: Registry,
    *,
    nodes: int | None,
    slot_gib: float | None,
    host_gib: float | None,
    as_json: bool,
    verbose: bool,
) -> int:
    """Print the plan. Returns the exit code: 1 if the run would not start or not fit in memory, otherwise 0.

    `slot_gib` and `host_gib` replace the free memory measured here, in GiB. Raises `ConfigError` (exit code 2) if the
    config is invalid.
    """
    planned = plan(
        config,
        overrides,
        nodes=nodes,
        slot_memory_gib=slot_gib,
        host_memory_gib=host_gib,
        disabled_plugins=[plugin.entry_point for plugin in registry.plugins if plugin.state == "disabled"],
    )
    if as_json:
        sys.stdout.write(json.dumps(_plain(planned.plan, planned.proposal), indent=2) + "\n")
    else:
        _show(planned.plan, planned.proposal, planned.loaded.config.pipeline, verbose=verbose)
    return 0 if planned.fits else 1


# -- for people --------------------------------------------------------------------------------------------------------


def _show(run_plan: Plan, proposal: Proposal | None, pipeline: str, *, verbose: bool) -> None:
    from roll_tools.output import open_console

    console = open_console()
    placement = run_plan.placement
    nodes = len(placement.nodes)
    console.print(
        f"{pipeline} on platform {placement.platform.name}, executor {placement.executor.name}:"
        f" {nodes} node{'' if nodes == 1 else 's'} of {placement.per_node} slot{'' if placement.per_node == 1 else 's'}"
    )
    _show_places(console, run_plan)
    _show_memory(console, run_plan, verbose=verbose)
    _show_phases(console, run_plan)
    for line in _result(run_plan, proposal):
        console.print(line)


def _table(
    console: Console, titles: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()
) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim", padding=(0, 3, 0, 0))
    for index, title in enumerate(titles):
        table.add_column(title, justify="right" if index in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)


def _show_places(console: Console, run_plan: Plan) -> None:
    """Print the ranks on each slot; neighbouring slots with the same roles share a line."""
    placement = run_plan.placement
    roles = [name for name, workers in placement.places.items() if any(worker.slots for worker in workers)]
    rows = [
        [
            f"{slots[0] // placement.per_node} · {_range(slots)}",
            *(_ranks(placement.places[role], slots) for role in roles),
        ]
        for slots in _runs(placement.places, placement.per_node)
    ]
    if rows:
        _table(console, ["node · slots", *roles], rows)
    for name, workers in placement.places.items():
        if not any(worker.slots for worker in workers):
            count = f"{len(workers)} worker{'' if len(workers) == 1 else 's'}"
            console.print(f"{name}: {count} without slots, on the hosts")


def _runs(places: Mapping[str, tuple[Place, ...]], per_node: int) -> Iterator[list[int]]:
    """Yield runs of neighbouring slots on one node that hold the same roles."""
    holders: dict[int, tuple[str, ...]] = {}
    for role, workers in places.items():
        for worker in workers:
            for slot in slots_of([worker]):
                holders[slot] = (*holders.get(slot, ()), role)
    run: list[int] = []
    for slot in sorted(holders):
        if run and (
            slot != run[-1] + 1 or slot // per_node != run[-1] // per_node or holders[slot] != holders[run[-1]]
        ):
            yield run
            run = []
        run.append(slot)
    if run:
        yield run


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"


def _ranks(workers: tuple[Place, ...], slots: Sequence[int]) -> str:
    here = [worker for worker in workers if not slots_of([worker]).isdisjoint(slots)]
    if not here:
        return ""
    ranks = sorted(worker.rank for worker in here)
    together = ranks == list(range(ranks[0], ranks[-1] + 1))
    shown = _range(ranks) if together else ", ".join(map(str, ranks))
    num_slots = len(slots_of(here[:1]))
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}" + (f", {num_slots} slots each" if num_slots > 1 else "")


def _show_memory(console: Console, run_plan: Plan, *, verbose: bool) -> None:
    shared = run_plan.placement.platform.slots_share_cores
    unit = _unit(role.num_bytes(act) for role in run_plan.memory for act in role.acts)
    amounts_of = [unit.name] if shared else [f"device, {unit.name}", f"host, {unit.name}"]
    titles = ["one worker of", "strategy", "activity", *amounts_of, "allocations"]
    rows: list[list[str]] = []
    for role in run_plan.memory:
        if role.unknown:
            rows.append([role.role, role.strategy, "", *([""] if shared else ["", ""]), f"unknown: {role.unknown}"])
            continue
        for act in role.acts:
            amounts = [role.num_bytes(act)] if shared else [role.num_bytes(act, "device"), role.num_bytes(act, "host")]
            first = act == role.acts[0]
            label = f"{role.role} ({role.parameters / 1e6:.1f} M)" if first else ""
            parts = _parts(role, act, unit, verbose=verbose)
            rows.append([label, role.strategy if first else "", act, *map(unit.text, amounts), parts])
    if rows:
        _table(console, titles, rows, numbers=(3,) if shared else (3, 4))


def _parts(role: RoleMemory, act: Any, unit: _Unit, *, verbose: bool) -> str:
    taken = sorted(role.taken(act), key=lambda use: -use.num_bytes)
    if verbose:
        return "\n".join(f"{use.what} {unit.text(use.num_bytes)} = {use.formula}" for use in taken)
    total: dict[str, int] = {}
    for use in taken:
        total[use.what] = total.get(use.what, 0) + use.num_bytes
    return ", ".join(
        f"{what} {unit.text(count)}" for what, count in sorted(total.items(), key=lambda item: -item[1]) if count
    )


def _show_phases(console: Console, run_plan: Plan) -> None:
    """Print the phases in order, each with its fullest memory of each kind (slot, node)."""
    rows: dict[str, dict[str, Load]] = {}
    for load in run_plan.loads:
        kind = "slot" if "slot" in load.where else "node"
        row = rows.setdefault(load.phase, {})
        if kind not in row or load.num_bytes > row[kind].num_bytes:
            row[kind] = load
    acts = {phase.name: phase.acts for phase in run_plan.placement.pipeline.phases}
    kinds = ["node"] if run_plan.placement.platform.slots_share_cores else ["slot", "node"]
    unit = _unit(load.num_bytes for row in rows.values() for load in row.values())
    shown = [
        [
            name,
            ", ".join(f"{role}: {act}" for role, act in acts.get(name, {}).items()),
            *(unit.text(row[kind].num_bytes) if kind in row else "" for kind in kinds),
        ]
        for name, row in rows.items()
    ]
    titles = {"slot": f"fullest slot, {unit.name}", "node": f"fullest host, {unit.name}"}
    if shown:
        _table(console, ["phase", "roles", *(titles[kind] for kind in kinds)], shown, numbers=(2, 3))


@dataclass(frozen=True, slots=True)
class _Unit:
    """Unit of the amounts in a table."""

    name: str
    num_bytes: int
    format: str

    def text(self, count: int) -> str:
        return format(count / self.num_bytes, self.format)


def _unit(counts: Iterable[int]) -> _Unit:
    """Unit that suits the largest amount: GiB, or MiB below 1 GiB (small models)."""
    return _Unit("GiB", GIB, ".2f") if max(counts, default=0) >= GIB else _Unit("MiB", 2**20, ".1f")


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}"


# -- the result --------------------------------------------------------------------------------------------------------


def _result(run_plan: Plan, proposal: Proposal | None) -> Iterator[str]:
    yield ""
    for problem in run_plan.placement.problems:
        yield f"✗ the run would not start: {problem}"
    for note in run_plan.placement.notes:
        yield f"· {note}"
    for (source, target), choice in run_plan.placement.weights.items():
        why = f" ({'; '.join(choice.passed_over)})" if choice.passed_over else ""
        yield f"· weights of {source} reach {target} by {choice.provider.name}{why}"
    unknown = [role.role for role in run_plan.memory if role.unknown]
    if unknown:
        yield f"· the memory of {' and '.join(unknown)} is unknown (see above) and not counted below"
    for load in run_plan.fullest:
        yield _sentence(load, all_known=not unknown)
    if not run_plan.over:
        return
    if proposal is None:
        yield "  no setting reduces it: use a smaller model, more slots, or slots with more memory"
        return
    outcome = "it fits with" if not proposal.over else f"closest, {_gib(proposal.over)} GiB above the limit"
    yield f"  {outcome}: {' '.join(proposal.overrides)}"
    for costs in explained(proposal.changes):
        yield f"    cost: {costs}"


def _sentence(load: Load, *, all_known: bool) -> str:
    """Describe the fullest memory on one line. `all_known`: the memory use of every role is known."""
    amount = f"{_gib(load.num_bytes)} GiB in {load.phase!r} ({load.where})"
    if load.free is None:
        return f"· needs {amount}; free memory is unknown: give --slot-memory and --host-memory"
    if load.over:
        return f"✗ does not fit by {_gib(load.over)} GiB: needs {amount}, {_gib(load.free)} GiB are free"
    if not all_known:
        return f"· the other roles need at most {amount}, {_gib(load.free)} GiB are free"
    return f"✓ fits: at most {amount}, {_gib(load.free)} GiB are free"


# -- for programs ------------------------------------------------------------------------------------------------------


def _plain(run_plan: Plan, proposal: Proposal | None) -> dict[str, Any]:
    placement = run_plan.placement
    return {
        "starts": run_plan.starts,
        "fits": not run_plan.over and run_plan.known,
        "known": run_plan.known,
        "over_bytes": run_plan.over,
        "platform": placement.platform.name,
        "executor": placement.executor.name,
        "slots_per_node": placement.per_node,
        "problems": list(placement.problems),
        "notes": list(placement.notes),
        "weights": [
            {
                "source": source,
                "target": target,
                "transport": choice.provider.name,
                "passed_over": list(choice.passed_over),
            }
            for (source, target), choice in placement.weights.items()
        ],
        "places": {role: [asdict(place) for place in workers] for role, workers in placement.places.items()},
        "memory": [
            {
                "role": role.role,
                "strategy": role.strategy,
                "workers": role.workers,
                "parameters": role.parameters,
                "unknown": role.unknown,
                "uses": [asdict(use) for use in role.uses],
                "acts": {act: {on: role.num_bytes(act, on) for on in ("device", "host")} for act in role.acts},
            }
            for role in run_plan.memory
        ],
        "loads": [asdict(load) | {"over": load.over} for load in run_plan.loads],
        "proposal": None
        if proposal is None
        else {"overrides": proposal.overrides, "over_bytes": proposal.over, "costs": explained(proposal.changes)},
    }
