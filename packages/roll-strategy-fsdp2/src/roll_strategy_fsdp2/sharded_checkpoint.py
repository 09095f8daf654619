"""Checkpoints of a sharded model: torch's distributed checkpoint in safetensors files, without pickle.

    rank-0/state.json                         step, and the number of ranks
    rank-0/tensors/shard-00001-...safetensors one file per rank, with the offset of each shard in its full tensor
    rank-0/written-N.json                     names and sizes of rank N's files, once they are complete
    rank-N/random.safetensors                 each rank's own random state

Every rank writes into rank 0's directory, so that any number of ranks can load the checkpoint. The ranks plan who
writes which shard collectively during `save_state`. The writing itself needs no communication and can run later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from roll_core.errors import CheckpointError
from roll_modeling.offload import host_copies
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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

FORMAT = 2
"""Version of the checkpoint format."""
TENSORS, WRITTEN = "tensors", "written-{}.json"


def save_state(
    path: Path, tensors: Mapping[str, Tensor], said: Mapping[str, Any], *, later: bool
) -> Callable[[], None] | None:
    """Save this rank's shards of `tensors`, and the JSON-serializable `said`. Collective.

    With `later`, copy the shards to host memory and return a function that writes them.

    Raises `CheckpointError` if some rank does not see rank 0's directory.
    """
    shared, rank = shared_folder(path), dist.get_rank()
    _all_see(shared)
    writer = _LaterWriter(shared / TENSORS, copies=later)
    save(dict(tensors), storage_writer=writer)
    save_random(path)
    if rank == 0:
        write_json(shared / STATE, {"format": FORMAT, "world_size": dist.get_world_size(), **said})

    def write() -> None:
        names = writer.write()
        sizes = {name: (shared / TENSORS / name).stat().st_size for name in names}
        write_json(shared / WRITTEN.format(rank), {"files": sizes})

    if later:
        return write
    write()
    dist.barrier()
    return None


class _LaterWriter(HuggingFaceStorageWriter):
    """Storage writer that takes part in the collective plan but writes only when `write` is called."""

    def __init__(self, folder: Path, *, copies: bool) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._copies = copies
        self._plan: SavePlan
        self._data: dict[MetadataIndex, Any]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Store this rank's tensors instead of writing them. Called by `save`."""
        data: dict[MetadataIndex, Any] = {item.index: planner.resolve_data(item) for item in plan.items}
        self._plan, self._data = plan, host_copies(data) if self._copies else data
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def write(self) -> list[str]:
        """Write the stored tensors. Returns the names of the files; none if this rank holds no data."""
        written = super().write_data(self._plan, _Kept(self._data)).wait()
        return sorted({result.storage_data.relative_path for result in written})


class _Kept(DefaultSavePlanner):
    """Save planner that resolves write items from stored tensors."""

    def __init__(self, data: Mapping[MetadataIndex, Any]) -> None:
        super().__init__()
        self._data = data

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The stored tensor of a write item. Called by the writer."""
        return self._data[write_item.index]


def load_state(
    path: Path, tensors: Mapping[str, Tensor], check: Callable[[Mapping[str, Any]], None]
) -> Mapping[str, Any]:
    """Load the shards of `tensors` in place and return the content of `state.json`. Collective.

    `check` validates that content before any tensor is overwritten. The number of ranks may differ from that of the
    save.

    Raises `CheckpointError`.
    """
    shared = shared_folder(path)
    with reading(shared):
        state = _read(shared)
        check(state)
        reader = HuggingFaceStorageReader(str(shared / TENSORS))
        _check_same(shared, reader, tensors)
        try:
            load(dict(tensors), storage_reader=reader)
        except CheckpointException as error:
            raise CheckpointError(f"{shared}: cannot be read: {error}") from error
    load_random(path)
    return state


def _read(shared: Path) -> dict[str, Any]:
    state = read_state(shared, FORMAT)
    sizes = {file.name: file.stat().st_size for file in (shared / TENSORS).iterdir()}
    for rank in range(state["world_size"]):
        for name, size in read_json(shared / WRITTEN.format(rank))["files"].items():
            if sizes.get(name) != size:
                raise CheckpointError(f"{shared}: {name} has {sizes.get(name, 0)} bytes, {size} were written")
    return state


def _check_same(shared: Path, reader: HuggingFaceStorageReader, tensors: Mapping[str, Tensor]) -> None:
    """Require the same tensors in checkpoint and model: torch ignores tensors that are only in the checkpoint."""
    stored = cast("Mapping[str, TensorStorageMetadata]", reader.read_metadata().state_dict_metadata)
    check_names(stored, tensors, shared)
    for name, tensor in tensors.items():
        metadata = stored[name]
        check_tensor(name, (metadata.properties.dtype, metadata.size), (tensor.dtype, tensor.shape), shared)


def _all_see(shared: Path) -> None:
    seen: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(seen, shared.is_dir())
    if not all(seen):
        raise CheckpointError(
            f"{shared}: rank {seen.index(False)} cannot access this directory of rank 0; set output_dir to a directory"
            " on a file system that all hosts share"
        )
