"""Which way weights travel: the first that both strategies declare and the placement allows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roll_core.errors import UnsupportedError
from roll_core.runtime.placement import HOST_BACKEND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.runtime.executors.base import WorkerGroup
    from roll_core.runtime.weights.plan import DeviceFacts
    from roll_core.spec.providers import InferCapabilities, TrainCapabilities, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFacts:
    """What decides whether a transport can work."""

    same_process: bool
    same_host: bool
    directory: str = ""
    """Where weights shall travel through files; empty if they need not."""
    sources: tuple[int, ...] = ()
    """By receiver, the train rank on its device that has whole tensors; empty unless there is one for each."""
    devices: str = "nothing is known of the workers' devices"
    """Why there are no `sources`, or why memory of their devices is not lent all the same; empty if it is."""

    @classmethod
    def of(
        cls,
        train: WorkerGroup,
        infer: WorkerGroup,
        *,
        shares_memory: bool,
        directory: str = "",
        train_devices: Sequence[DeviceFacts] = (),
        infer_devices: Sequence[DeviceFacts] = (),
    ) -> PlacementFacts:
        """Facts about two running groups, and their workers' own by rank; `shares_memory` is the executor's."""
        hosts = {(member.node, member.host) for group in (train, infer) for member in group.members}
        found = cls(same_process=shares_memory, same_host=len(hosts) == 1, directory=directory)
        if not infer_devices:
            return found
        sources, why = sources_of(train, infer, train_devices, infer_devices)
        return replace(found, sources=sources, devices=why)

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
            case "cuda_ipc":
                if self.same_process:
                    return "the workers are in one process"
                return self.devices
            case "disk" if not self.directory:
                return "model_update_dir names no folder"
            case "collective" | "disk":
                return "the workers are in one process" if self.same_process else ""


def sources_of(
    train: WorkerGroup, infer: WorkerGroup, train_devices: Sequence[DeviceFacts], infer_devices: Sequence[DeviceFacts]
) -> tuple[tuple[int, ...], str]:
    """By receiver, the first train rank on its device that has whole tensors; or nothing, and for which receiver there
    is none. Devices are told apart by host and UUID."""
    leaders: dict[tuple[str, str], int] = {}
    for rank, (member, each) in enumerate(zip(train.members, train_devices, strict=True)):
        if each.uuid and each.leads:
            leaders.setdefault((member.host, each.uuid), rank)
    found = []
    for rank, (member, each) in enumerate(zip(infer.members, infer_devices, strict=True)):
        if not each.uuid:
            return (), f"rank {rank} of {infer.role} computes on {each.device}, whose memory cannot be lent"
        if (member.host, each.uuid) not in leaders:
            return (), f"no rank of {train.role} has whole tensors on the device of rank {rank} of {infer.role}"
        found.append(leaders[member.host, each.uuid])
    return tuple(found), ""


def collective_backend(
    train: WorkerGroup, infer: WorkerGroup, train_devices: Sequence[DeviceFacts], infer_devices: Sequence[DeviceFacts]
) -> tuple[str, str]:
    """Of a group of the sending rank and all receivers, and why it is not that of the sender's platform.

    A platform's own backend carries only what lies on its devices, and wants no two ranks on one device.
    """
    sender = next((rank for rank, each in enumerate(train_devices) if each.leads and each.replica == 0), None)
    if sender is None or train_devices[sender].backend == HOST_BACKEND:
        return HOST_BACKEND, ""
    backend = train_devices[sender].backend
    taken = {train.members[sender].slots[:1]: f"rank {sender} of {train.role}"}
    for rank, each in enumerate(infer_devices):
        who = f"rank {rank} of {infer.role}"
        if each.backend != backend:
            return HOST_BACKEND, f"not {backend}: {who} takes weights on {each.device}"
        slot = infer.members[rank].slots[:1]
        if slot in taken:
            return HOST_BACKEND, f"not {backend}: {who} is on the device of {taken[slot]}"
        taken[slot] = who
    return backend, ""


def choose_transport(train: TrainCapabilities, infer: InferCapabilities, facts: PlacementFacts) -> Transport:
    """The first transport in the infer strategy's order of preference that the train strategy declares as well and the
    placement allows.

    Raises `UnsupportedError` that says of each declared transport why it is none.
    """
    reasons = passed_over(train, infer, facts)
    if len(reasons) < len(infer.weight_transports):
        return infer.weight_transports[len(reasons)]
    reasons += [
        f"{transport}: the infer strategy does not offer it"
        for transport in train.weight_transports
        if transport not in infer.weight_transports
    ]
    why = "; ".join(reasons) or "neither declares any"
    elsewhere = (
        "let them be in processes of their own (executor: ray)" if facts.same_process else "place them differently"
    )
    raise UnsupportedError(
        f"no weight transport connects the train and the infer strategy here ({why}):"
        f" {elsewhere}, or choose strategies that share one"
    )


def passed_over(train: TrainCapabilities, infer: InferCapabilities, facts: PlacementFacts) -> list[str]:
    """Of each transport that the infer strategy would rather have than the first that works, why it does not."""
    reasons = []
    for transport in infer.weight_transports:
        if transport not in train.weight_transports:
            reasons.append(f"{transport}: the train strategy does not offer it")
        elif obstacle := facts.obstacle(transport):
            reasons.append(f"{transport}: {obstacle}")
        else:
            break
    return reasons
