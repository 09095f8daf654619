"""Which way weights travel: the first that both strategies declare and the placement allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_core.errors import UnsupportedError

if TYPE_CHECKING:
    from roll_core.runtime.executors.base import WorkerGroup
    from roll_core.spec.providers import InferCapabilities, TrainCapabilities, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFacts:
    """What decides whether a transport can work."""

    same_process: bool
    same_host: bool
    directory: str = ""
    """Where weights shall travel through files; empty if they need not."""

    @classmethod
    def of(cls, train: WorkerGroup, infer: WorkerGroup, *, shares_memory: bool, directory: str = "") -> PlacementFacts:
        """Facts about two running groups; `shares_memory` is the executor's."""
        hosts = {(member.node, member.host) for group in (train, infer) for member in group.members}
        return cls(same_process=shares_memory, same_host=len(hosts) == 1, directory=directory)

    def obstacle(self, transport: Transport) -> str:
        """Why `transport` cannot work here, empty if it can."""
        if self.directory and transport != "disk":
            return "model_update_dir asks for disk"
        match transport:
            case "shared":
                return "" if self.same_process else "the workers are in different processes"
            case "shm":
                if self.same_process:
                    return "the workers are in one process"
                return "" if self.same_host else "the workers are on different hosts"
            case "disk" if not self.directory:
                return "model_update_dir names no folder"
            case "collective" | "disk":
                return "the workers are in one process" if self.same_process else ""
            case _:
                return "this version of roll-core has no such transport"


def choose_transport(train: TrainCapabilities, infer: InferCapabilities, facts: PlacementFacts) -> Transport:
    """The first transport in the infer strategy's order of preference that the train strategy declares as well and the
    placement allows.

    Raises `UnsupportedError` that says of each declared transport why it is none.
    """
    reasons = []
    for transport in infer.weight_transports:
        if transport not in train.weight_transports:
            reasons.append(f"{transport}: the train strategy does not offer it")
        elif obstacle := facts.obstacle(transport):
            reasons.append(f"{transport}: {obstacle}")
        else:
            return transport
    reasons += [
        f"{transport}: the infer strategy does not offer it"
        for transport in train.weight_transports
        if transport not in infer.weight_transports
    ]
    why = "; ".join(reasons) or "neither declares any"
    raise UnsupportedError(
        f"no weight transport connects the train and the infer strategy here ({why}):"
        " place the roles differently, or choose strategies that share one"
    )
