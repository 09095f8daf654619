"""Checkpoints: the tensors of every parameter as full float32 tensors, and a few numbers.

    rank-0/state.json                        numbers, and the names of the parameters
    rank-0/state-00000-of-00002.safetensors  master.<name>, exp_avg.<name>, exp_avg_sq.<name> of every second parameter,
                                             and average.<name> with ema_decay
    rank-N/random.safetensors                each rank's random state

Full tensors do not depend on the number of ranks or the ZeRO stage. They are gathered one after another; each rank
keeps and writes every N-th parameter of N ranks, so that no rank holds all of them. All ranks write into rank 0's
directory, which must be on a shared file system.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from roll_modeling.state_files import (
    STATE,
    check_names,
    check_tensor,
    load_random,
    read_state,
    reading,
    save_random,
    shared_folder,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from roll_strategy_deepspeed.optimizer_state import OptimizerState
    from roll_strategy_deepspeed.ranks import Ranks

FORMAT = 1


def save_state(held: OptimizerState, ranks: Ranks, path: Path, numbers: Mapping[str, Any]) -> None:
    """Save `held` and the JSON-serializable `numbers`, which include `step_count`. Collective."""
    mine: dict[str, Tensor] = {}
    for index, name in enumerate(held.parameters):
        for kind, tensor in held.read(name):
            if index % ranks.size == ranks.rank:
                # Always copy: the tensor may be the parameter itself.
                mine[f"{kind}.{name}"] = tensor.detach().to("cpu", copy=True).contiguous()
    save_random(path)
    path = shared_folder(path, ranks.device)
    path.mkdir(parents=True, exist_ok=True)
    save_file(mine, path / _shard(ranks.rank, ranks.size))
    if ranks.rank == 0:
        state = {"format": FORMAT, "num_shards": ranks.size, **numbers, "parameters": list(held.parameters)}
        write_json(path / STATE, state)
    ranks.wait()


def load_state(
    held: OptimizerState, ranks: Ranks, path: Path, check: Callable[[Mapping[str, Any]], None]
) -> Mapping[str, Any]:
    """Load a checkpoint into `held` and return its `state.json`. Collective.

    `check` validates the content of `state.json` before any tensor is written. Raises `CheckpointError`.
    """
    shared = shared_folder(path, ranks.device)
    with reading(shared), ExitStack() as stack:
        state = read_state(shared, FORMAT)
        check(state)
        check_names(state["parameters"], held.parameters, shared)
        files: dict[str, Any] = {}
        for shard in range(state["num_shards"]):
            file = stack.enter_context(safe_open(shared / _shard(shard, state["num_shards"]), framework="pt"))
            files |= dict.fromkeys(file.keys(), file)
        check_names(files, [f"{kind}.{name}" for kind in held.kinds for name in held.parameters], shared)
        shapes = held.shapes

        def read(name: str) -> Mapping[str, Tensor]:
            return {kind: _read(files, f"{kind}.{name}", shapes[name], shared) for kind in held.kinds}

        held.load(state["step_count"], read)
    load_random(path)
    ranks.wait()
    return state


def _shard(rank: int, size: int) -> str:
    return f"state-{rank:05d}-of-{size:05d}.safetensors"


def _read(files: Mapping[str, Any], key: str, shape: tuple[int, ...], path: Path) -> Tensor:
    tensor: Tensor = files[key].get_tensor(key)
    check_tensor(key, (tensor.dtype, tensor.shape), (torch.float32, shape), path)
    return tensor
