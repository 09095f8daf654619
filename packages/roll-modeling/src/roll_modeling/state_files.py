"""Checkpoints of all strategies: `state.json`, random states, and checks of tensors' names and shapes."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from roll_core.errors import CheckpointError, RollError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

STATE, RANDOM = "state.json", "random.safetensors"


def shared_folder(path: Path, device: torch.device | None = None) -> Path:
    """Rank 0's directory, on every rank. Collective."""
    box = [str(path)]
    dist.broadcast_object_list(box, src=0, device=device)
    return Path(box[0])


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file. Raises `CheckpointError` if it is missing or invalid."""
    with reading(file):
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def read_state(folder: Path, version: int) -> dict[str, Any]:
    """Read `state.json`. Raises `CheckpointError` for another version of the format."""
    state = read_json(folder / STATE)
    if state.get("format") != version:
        raise CheckpointError(f"{folder}: format {state.get('format')}; this version of ROLL reads format {version}")
    return state


def save_random(folder: Path) -> None:
    """Save the random state of this rank."""
    save_file({"torch_cpu": torch.get_rng_state()}, folder / RANDOM)


def load_random(folder: Path) -> None:
    """Restore the random state of this rank, if the checkpoint has one; it may be of another number of ranks."""
    file = folder / RANDOM
    if file.is_file():
        with reading(file):
            state = load_file(file)["torch_cpu"]
        torch.set_rng_state(state)


@contextmanager
def reading(place: Path) -> Iterator[None]:
    """Raise `CheckpointError` for any failure inside the context to read the checkpoint at `place`."""
    try:
        yield
    except RollError:
        raise
    except (OSError, KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{place}: cannot be read: {error}") from error


def check_names(stored: Iterable[str], expected: Iterable[str], place: Path) -> None:
    """Raise `CheckpointError` unless a checkpoint has exactly the expected tensors."""
    if odd := set(stored) ^ set(expected):
        raise CheckpointError(f"{place}: tensor {min(odd)} is in only one of the checkpoint and the model")


def check_tensor(
    name: str, stored: tuple[torch.dtype, Sequence[int]], expected: tuple[torch.dtype, Sequence[int]], place: Path
) -> None:
    """Raise `CheckpointError` unless dtype and shape of a stored tensor are the expected ones."""
    if (stored[0], tuple(stored[1])) != (expected[0], tuple(expected[1])):
        raise CheckpointError(
            f"{place}: {name} is {stored[0]} {tuple(stored[1])}, the model has {expected[0]} {tuple(expected[1])}"
        )
