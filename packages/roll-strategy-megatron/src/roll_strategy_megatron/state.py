"""Checkpoints: master weights and moments as full float32 tensors by Hugging Face names, and a few numbers.

    rank-0/state.json                     numbers, and the names of the tensors
    rank-0/state-00002-00001.safetensors  rank 2's first file: master.<name>, exp_avg.<name>, exp_avg_sq.<name>
    rank-0/written-2.json                 the file of each tensor that rank 2 has written
    rank-N/random.safetensors             each rank's random state

Full tensors do not depend on the parallel sizes: any arrangement of ranks can load them. The ranks of a stage gather
its tensors one after another and distribute the writing. Each writes files of bounded size and keeps at most one file
in memory. All ranks write into rank 0's directory, which must be on a shared file system.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from roll_core.errors import CheckpointError
from roll_core.spec.train import ParameterState, PortableState
from roll_modeling.shards import ShardFiles
from roll_modeling.state_files import (
    STATE,
    check_names,
    check_tensor,
    load_random,
    read_json,
    read_state,
    reading,
    save_random,
    shared_folder,
    write_json,
)
from roll_strategy_megatron.bridge.source import FileSource
from roll_strategy_megatron.optimizer import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from roll_strategy_megatron.bridge.bridge import Bridge
    from roll_strategy_megatron.optimizer import Optimizer

FORMAT = 2
WRITTEN = "written-{}.json"
FILE_BYTES = 1 << 30
"""Maximum size of a file; a larger tensor gets a file of its own."""


def save_state(
    bridge: Bridge, optimizer: Optimizer, path: Path, *, adapters: Mapping[str, Any] | None, later: bool
) -> Callable[[], None] | None:
    """Save the state of `bridge` and `optimizer`. Collective.

    With `later`, copy this rank's tensors to host memory and return a function that writes them. `adapters` is the
    identity of the trained adapters.
    """
    rank = dist.get_rank()
    shared = shared_folder(path, bridge.parallel.device)
    shared.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        state = {
            "format": FORMAT,
            "world_size": dist.get_world_size(),
            "step_count": optimizer.step_count,
            "parameters": list(bridge.shapes),
            "adapters": adapters,
        }
        write_json(shared / STATE, state)
    save_random(path)
    files = ShardFiles(shared, f"state-{rank:05d}-{{:05d}}.safetensors", FILE_BYTES)
    queue: list[tuple[str, Tensor]] = []
    for name, tensor in _of_my_turn(bridge, optimizer):
        if later:
            queue.append((name, tensor.to("cpu", copy=True)))
        else:
            files.add({name: tensor})

    def write() -> None:
        while queue:
            name, tensor = queue.pop(0)
            files.add({name: tensor})
        files.flush()
        write_json(shared / WRITTEN.format(rank), {name: file for file, names in files.files for name in names})

    if later:
        return write
    write()
    bridge.parallel.wait()
    return None


def _of_my_turn(bridge: Bridge, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that this rank writes: each one goes to the rank of the stage with the fewest bytes so far."""
    me, size = bridge.parallel.place_in_stage
    had = [0] * size
    for kind in KINDS:
        for name, tensor in bridge.export_stage(partial(optimizer.whole, kind=kind)):
            turn = had.index(min(had))
            had[turn] += tensor.nbytes
            if turn == me:
                yield f"{kind}.{name}", tensor


def load_state(
    bridge: Bridge, optimizer: Optimizer, path: Path, check: Callable[[Mapping[str, Any] | None, Path], None]
) -> None:
    """Load a state that any arrangement of ranks has saved. Collective.

    `check` rejects adapters of a different role. Raises `CheckpointError`.
    """
    shared = shared_folder(path, bridge.parallel.device)
    with reading(shared):
        state = read_state(shared, FORMAT)
        check(state.get("adapters"), shared)
        check_names(state["parameters"], bridge.shapes, shared)
        places: dict[str, Path] = {}
        for rank in range(state["world_size"]):
            places |= {name: shared / file for name, file in read_json(shared / WRITTEN.format(rank)).items()}
        source = FileSource(places)
        take_over(bridge, optimizer, partial(_read, source, bridge, shared))
        source.close()
        optimizer.restored(int(state["step_count"]))
    load_random(path)
    bridge.parallel.wait()


def take_over(bridge: Bridge, optimizer: Optimizer, read: Callable[[str], ParameterState]) -> None:
    """Overwrite this rank's shards from the full tensors that `read` returns by name.

    At most the tensors of one rule and layer are in memory.
    """
    for held in bridge.by_rule().values():
        states: dict[str, ParameterState] = {}

        def whole(name: str, kind: str, states: dict[str, ParameterState] = states) -> Tensor:
            if name not in states:
                states[name] = read(name)
            tensor: Tensor = getattr(states[name], kind)
            return tensor

        for kind in KINDS:
            for parameter, share in bridge.shares_of(held, partial(whole, kind=kind)):
                optimizer.put(parameter, kind, share.to(bridge.parallel.device))


def portable_state(
    bridge: Bridge, optimizer: Optimizer, adapters: Mapping[str, Any] | None, buffers: Mapping[str, Tensor]
) -> PortableState:
    """Strategy-independent state; `read` gathers the tensors on every rank. Collective.

    Tensors must be read in the order of `shapes`. `buffers` are passed through.
    """
    streams = {kind: bridge.export(partial(optimizer.whole, kind=kind), torch.float32) for kind in KINDS}

    def read(name: str) -> ParameterState:
        tensors: dict[str, Tensor] = {}
        for kind, stream in streams.items():
            exported, tensors[kind] = next(stream)
            if exported != name:
                raise ValueError(f"{name} was read out of order, expected {exported}")
        return ParameterState(**tensors)

    return PortableState(
        step_count=optimizer.step_count, shapes=bridge.shapes, read=read, adapters=adapters, buffers=buffers
    )


def _read(source: FileSource, bridge: Bridge, path: Path, name: str) -> ParameterState:
    tensors: dict[str, Tensor] = {}
    for kind in KINDS:
        key = f"{kind}.{name}"
        if key not in source.names:
            raise CheckpointError(f"{path}: {key} is missing")
        tensors[kind] = tensor = source.get(key)
        check_tensor(key, (tensor.dtype, tensor.shape), (torch.float32, bridge.shapes[name]), path)
    return ParameterState(**tensors)
