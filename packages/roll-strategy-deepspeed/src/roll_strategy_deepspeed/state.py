"""Checkpoints: master weight and moments of every parameter as full float32 tensors, and a few numbers.

    rank-0/state.json                        numbers, and the names of the parameters
    rank-0/state-00000-of-00002.safetensors  master.<name>, exp_avg.<name>, exp_avg_sq.<name> of every second parameter
    rank-N/random.safetensors                each rank's random state

Full tensors do not depend on the number of ranks or the ZeRO stage. They are gathered one after another; each rank
keeps and writes every N-th parameter of N ranks, so that no rank holds all of them. All ranks write into rank 0's
directory, which must be on a shared file system.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from roll_core.errors import CheckpointError
from roll_modeling.optimizer import MOMENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from roll_strategy_deepspeed.held_state import HeldState
    from roll_strategy_deepspeed.ranks import Ranks

FORMAT = 1
RANDOM = "random.safetensors"
STATE_KEYS = ("num_shards", "step_count", "loss_scale", "parameters")
KINDS = ("master", *MOMENTS)


def save_state(held: HeldState, ranks: Ranks, path: Path, numbers: Mapping[str, Any]) -> None:
    """Save `held` and the JSON-serializable `numbers`, which include `step_count`. Collective."""
    mine: dict[str, Tensor] = {}
    for at, name in enumerate(held.parameters):
        for kind, tensor in held.read(name):
            if at % ranks.size == ranks.rank:
                # Always copy: the tensor may be the parameter itself.
                mine[f"{kind}.{name}"] = tensor.detach().to("cpu", copy=True).contiguous()
    save_file({"torch_cpu": torch.get_rng_state()}, path / RANDOM)
    path = Path(ranks.of_first(str(path)))
    path.mkdir(parents=True, exist_ok=True)
    save_file(mine, path / _shard(ranks.rank, ranks.size))
    if ranks.rank == 0:
        state = {
            "format": FORMAT,
            "num_shards": ranks.size,
            **numbers,
            "parameters": list(held.parameters),
        }
        (path / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    ranks.wait()


@torch.no_grad()
def load_state(
    held: HeldState, ranks: Ranks, path: Path, check: Callable[[Mapping[str, Any]], None]
) -> Mapping[str, Any]:
    """Load a checkpoint into `held` and return its `state.json`. Collective.

    `check` validates the content of `state.json` before any tensor is written. Raises `CheckpointError`.
    """
    own, path = path, Path(ranks.of_first(str(path)))
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
        _check_complete(state, path)
        check(state)
        _check_same(state, held, path)
        with ExitStack() as stack:
            where: dict[str, Any] = {}
            for shard in range(state["num_shards"]):
                file = stack.enter_context(safe_open(path / _shard(shard, state["num_shards"]), framework="pt"))
                where |= dict.fromkeys(file.keys(), file)
            held.begin_writing(state["step_count"])
            for name, parameter in held.parameters.items():
                held.write(name, {kind: _read(where, f"{kind}.{name}", parameter, path) for kind in KINDS})
            held.end_writing()
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if (own / RANDOM).is_file():
        torch.set_rng_state(load_file(own / RANDOM)["torch_cpu"])
    ranks.wait()
    return state


def _shard(rank: int, size: int) -> str:
    return f"state-{rank:05d}-of-{size:05d}.safetensors"


def _check_complete(state: Mapping[str, Any], path: Path) -> None:
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {state.get('format')}; this version reads {FORMAT}")
    missing = [key for key in STATE_KEYS if key not in state]
    if missing:
        raise CheckpointError(f"{path}/state.json: {missing[0]} is missing")


def _check_same(state: Mapping[str, Any], held: HeldState, path: Path) -> None:
    odd = set(state["parameters"]) ^ set(held.parameters)
    if odd:
        raise CheckpointError(f"{path}: tensor {min(odd)} is in only one of the checkpoint and the model")


def _read(where: Mapping[str, Any], key: str, parameter: Tensor, path: Path) -> Tensor:
    if key not in where:
        raise CheckpointError(f"{path}: {key} is missing")
    found: Tensor = where[key].get_tensor(key)
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    if tuple(found.shape) != shape or found.dtype != torch.float32:
        raise CheckpointError(f"{path}: {key} is {found.dtype} {tuple(found.shape)}, the model has float32 {shape}")
    return found
