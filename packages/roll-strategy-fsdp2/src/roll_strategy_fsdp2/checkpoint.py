"""The state of a sharded model on disk: torch's distributed checkpoint in safetensors files, which hold no pickle.

    rank-0/state.json                         step, and what the other files are called and how large they are
    rank-0/tensors/shard-00001-...safetensors one file per rank, with the place of each share in its tensor
    rank-N/random.safetensors                 each rank's own random state

Every rank writes into rank 0's directory, so that any number of ranks can read all of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from roll_core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

FORMAT = 1
"""Of the saved state."""
STATE, TENSORS, RANDOM = "state.json", "tensors", "random.safetensors"


def save_state(path: Path, tensors: Mapping[str, Tensor], said: Mapping[str, Any]) -> None:
    """Write `tensors`, of which each rank holds its share, and what else is to be `said`, as JSON. Collective.

    Raises `CheckpointError` where ranks do not see the same directory.
    """
    from safetensors.torch import save_file

    shared = _of_rank_0(path)
    _all_see(shared)
    writer = HuggingFaceStorageWriter(str(shared / TENSORS), save_distributed=True)
    save(dict(tensors), storage_writer=writer)
    save_file({"torch_cpu": torch.get_rng_state()}, path / RANDOM)
    if dist.get_rank() == 0:
        files = _sizes(shared)
        state = {"format": FORMAT, "world_size": dist.get_world_size(), **said, "files": files}
        (shared / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    dist.barrier()


def load_state(
    path: Path, tensors: Mapping[str, Tensor], check: Callable[[Mapping[str, Any]], None]
) -> Mapping[str, Any]:
    """Overwrite the shares of `tensors` in place; returns what was said, after `check` had a look at it. The number of
    ranks may be another one than when it was saved. Raises `CheckpointError`. Collective."""
    from safetensors.torch import load_file

    shared = _of_rank_0(path)
    state = _read(shared)
    check(state)
    reader = HuggingFaceStorageReader(str(shared / TENSORS))
    _check_same(shared, reader, tensors)
    try:
        load(dict(tensors), storage_reader=reader)
    except (CheckpointException, OSError, ValueError) as error:
        raise CheckpointError(f"{shared}: cannot be read: {error}") from error
    if (path / RANDOM).is_file():
        torch.set_rng_state(load_file(path / RANDOM)["torch_cpu"])
    return state


def _sizes(shared: Path) -> dict[str, int]:
    return {each.name: each.stat().st_size for each in sorted((shared / TENSORS).glob("*.safetensors"))}


def _read(shared: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((shared / STATE).read_text(encoding="utf-8"))
        files: dict[str, int] = state["files"]
        found = _sizes(shared)
    except (OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{shared}: cannot be read: {error}") from error
    if state["format"] != FORMAT:
        raise CheckpointError(f"{shared}: format {state['format']}; this version reads {FORMAT}")
    for name, size in files.items():
        if found.get(name) != size:
            raise CheckpointError(f"{shared}: {name} has {found.get(name, 0)} bytes, {size} were written")
    return state


def _check_same(shared: Path, reader: HuggingFaceStorageReader, tensors: Mapping[str, Tensor]) -> None:
    """The checkpoint and the model have the same tensors: torch itself passes over what is only in the checkpoint."""
    stored = reader.read_metadata().state_dict_metadata
    if stored.keys() != tensors.keys():
        odd = min(stored.keys() ^ tensors.keys())
        raise CheckpointError(f"{shared}: tensor {odd} is in only one of the checkpoint and the model")
    for name, tensor in tensors.items():
        kept = stored[name]
        if not isinstance(kept, TensorStorageMetadata):
            raise CheckpointError(f"{shared}: {name} is no tensor")
        if kept.size != tensor.shape or kept.properties.dtype != tensor.dtype:
            raise CheckpointError(
                f"{shared}: {name} is {kept.properties.dtype} {tuple(kept.size)}, the model has {tensor.dtype}"
                f" {tuple(tensor.shape)}"
            )


def _of_rank_0(path: Path) -> Path:
    box = [str(path)]
    dist.broadcast_object_list(box, src=0)
    return Path(box[0])


def _all_see(shared: Path) -> None:
    seen: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(seen, shared.is_dir())
    if not all(seen):
        raise CheckpointError(
            f"{shared}: rank {seen.index(False)} does not see this directory of rank 0; put output_dir on a file system"
            " that all hosts share"
        )
