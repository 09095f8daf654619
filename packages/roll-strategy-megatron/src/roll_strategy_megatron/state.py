"""What is needed to continue: masters and moments as whole float32 tensors by Hugging Face's names, and a few numbers.

    rank-0/state.json                        numbers, and the names of the tensors
    rank-0/state-00000-of-00002.safetensors  master.<name>, exp_avg.<name>, exp_avg_sq.<name>: every second name
    rank-N/random.safetensors                each rank's random state

Whole tensors, because other numbers of ranks cut them otherwise: what one arrangement wrote any other reads. They are
gathered one after another, and each rank keeps and writes those of its turn: none holds them all. All write into rank
0's folder, which all see.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from roll_core.errors import CheckpointError
from roll_strategy_megatron.optimizer import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from roll_strategy_megatron.bridge.bridge import Bridge
    from roll_strategy_megatron.optimizer import Optimizer

FORMAT = 1
STATE, RANDOM = "state.json", "random.safetensors"


def save_state(bridge: Bridge, optimizer: Optimizer, path: Path) -> None:
    """Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine: dict[str, Tensor] = {}
    for kind in KINDS:
        every = bridge.export(partial(optimizer.whole, kind=kind), torch.float32)
        for at, (name, tensor) in enumerate(every):
            if at % size == rank:
                mine[f"{kind}.{name}"] = tensor.cpu()
    save_file({"torch_cpu": torch.get_rng_state()}, path / RANDOM)
    shared = _of_rank_0(path, bridge)
    shared.mkdir(parents=True, exist_ok=True)
    save_file(mine, shared / _shard(rank, size))
    if rank == 0:
        state = {
            "format": FORMAT,
            "num_shards": size,
            "step_count": optimizer.step_count,
            "parameters": list(bridge.shapes),
        }
        (shared / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    bridge.parallel.wait()


def load_state(bridge: Bridge, optimizer: Optimizer, path: Path) -> None:
    """Whatever the arrangement was that saved. Collective. Raises `CheckpointError`."""
    shared = _of_rank_0(path, bridge)
    try:
        state = json.loads((shared / STATE).read_text(encoding="utf-8"))
        _check(state, bridge, shared)
        with ExitStack() as stack:
            where: dict[str, Any] = {}
            for shard in range(state["num_shards"]):
                file = stack.enter_context(safe_open(shared / _shard(shard, state["num_shards"]), framework="pt"))
                where |= dict.fromkeys(file.keys(), file)
            for held in bridge.held:
                for kind in KINDS:
                    value = bridge.share_of(held, partial(_read, where, kind, bridge, shared))
                    optimizer.put(held.parameter, kind, value.to(bridge.parallel.device))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{shared}: cannot be read: {error}") from error
    optimizer.restored(int(state["step_count"]))
    if (path / RANDOM).is_file():
        torch.set_rng_state(load_file(path / RANDOM)["torch_cpu"])
    bridge.parallel.wait()


def _read(where: Mapping[str, Any], kind: str, bridge: Bridge, path: Path, name: str) -> Tensor:
    key = f"{kind}.{name}"
    if key not in where:
        raise CheckpointError(f"{path}: {key} is missing")
    found: Tensor = where[key].get_tensor(key)
    if tuple(found.shape) != bridge.shapes[name] or found.dtype != torch.float32:
        raise CheckpointError(
            f"{path}: {key} is {found.dtype} {tuple(found.shape)}, the model has float32 {bridge.shapes[name]}"
        )
    return found


def _check(state: Mapping[str, Any], bridge: Bridge, path: Path) -> None:
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {state.get('format')}; this version reads {FORMAT}")
    odd = set(state["parameters"]) ^ set(bridge.shapes)
    if odd:
        raise CheckpointError(f"{path}: tensor {min(odd)} is in only one of the checkpoint and the model")


def _shard(rank: int, size: int) -> str:
    return f"state-{rank:05d}-of-{size:05d}.safetensors"


def _of_rank_0(path: Path, bridge: Bridge) -> Path:
    box = [str(path)]
    dist.broadcast_object_list(box, src=0, device=bridge.parallel.device)
    return Path(box[0])
