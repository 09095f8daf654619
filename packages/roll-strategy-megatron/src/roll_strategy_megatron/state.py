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

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from roll_core.errors import CheckpointError
from roll_core.spec.train import ParameterState, PortableState
from roll_core.weights.shards import ShardFiles
from roll_strategy_megatron.bridge.source import FileSource
from roll_strategy_megatron.optimizer import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from roll_strategy_megatron.bridge.bridge import Bridge
    from roll_strategy_megatron.optimizer import Optimizer

FORMAT = 2
STATE, WRITTEN, RANDOM = "state.json", "written-{}.json", "random.safetensors"
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
    shared = _of_rank_0(path, bridge)
    shared.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        state = {
            "format": FORMAT,
            "world_size": dist.get_world_size(),
            "step_count": optimizer.step_count,
            "parameters": list(bridge.shapes),
            "adapters": adapters,
        }
        _write_json(shared / STATE, state)
    save_file({"torch_cpu": torch.get_rng_state()}, path / RANDOM)
    files = ShardFiles(shared, f"state-{rank:05d}-{{:05d}}.safetensors", FILE_BYTES)
    kept: list[tuple[str, Tensor]] = []
    for name, tensor in _of_my_turn(bridge, optimizer):
        if later:
            kept.append((name, tensor.to("cpu", copy=True)))
        else:
            files.add({name: tensor})

    def write() -> None:
        while kept:
            name, tensor = kept.pop(0)
            files.add({name: tensor})
        files.flush()
        _write_json(shared / WRITTEN.format(rank), {name: file for file, names in files.files for name in names})

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
    shared = _of_rank_0(path, bridge)
    try:
        state = json.loads((shared / STATE).read_text(encoding="utf-8"))
        check(state.get("adapters"), shared)
        _check(state, bridge, shared)
        places: dict[str, Path] = {}
        for rank in range(state["world_size"]):
            written: Mapping[str, str] = json.loads((shared / WRITTEN.format(rank)).read_text(encoding="utf-8"))
            places |= {name: shared / file for name, file in written.items()}
        source = FileSource(places)
        take_over(bridge, optimizer, partial(_read, source, bridge, shared))
        source.close()
        optimizer.restored(int(state["step_count"]))
        if (path / RANDOM).is_file():
            torch.set_rng_state(load_file(path / RANDOM)["torch_cpu"])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{shared}: cannot be read: {error}") from error
    bridge.parallel.wait()


def take_over(bridge: Bridge, optimizer: Optimizer, read: Callable[[str], ParameterState]) -> None:
    """Overwrite this rank's shards from the full tensors that `read` returns by name.

    At most the tensors of one rule and layer are in memory.
    """
    for held in bridge.by_rule().values():
        found: dict[str, ParameterState] = {}

        def whole(name: str, kind: str, found: dict[str, ParameterState] = found) -> Tensor:
            if name not in found:
                found[name] = read(name)
            tensor: Tensor = getattr(found[name], kind)
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
        found: dict[str, Tensor] = {}
        for kind, stream in streams.items():
            exported, found[kind] = next(stream)
            if exported != name:
                raise ValueError(f"{name} was read out of order: {exported} comes first")
        return ParameterState(**found)

    return PortableState(
        step_count=optimizer.step_count, shapes=bridge.shapes, read=read, adapters=adapters, buffers=buffers
    )


def _read(source: FileSource, bridge: Bridge, path: Path, name: str) -> ParameterState:
    found: dict[str, Tensor] = {}
    for kind in KINDS:
        key = f"{kind}.{name}"
        if key not in source.names:
            raise CheckpointError(f"{path}: {key} is missing")
        found[kind] = each = source.get(key)
        if tuple(each.shape) != bridge.shapes[name] or each.dtype != torch.float32:
            raise CheckpointError(
                f"{path}: {key} is {each.dtype} {tuple(each.shape)}, the model has float32 {bridge.shapes[name]}"
            )
    return ParameterState(**found)


def _check(state: Mapping[str, Any], bridge: Bridge, path: Path) -> None:
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {state.get('format')}; this version reads {FORMAT}")
    odd = set(state["parameters"]) ^ set(bridge.shapes)
    if odd:
        raise CheckpointError(f"{path}: tensor {min(odd)} is in only one of the checkpoint and the model")


def _write_json(file: Path, what: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(what, indent=2) + "\n", encoding="utf-8")


def _of_rank_0(path: Path, bridge: Bridge) -> Path:
    box = [str(path)]
    dist.broadcast_object_list(box, src=0, device=bridge.parallel.device)
    return Path(box[0])
