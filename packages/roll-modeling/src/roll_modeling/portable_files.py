"""Files of the portable state, which every strategy that supports it can load: `<role>/portable/` of a checkpoint.

    index.json                  step count, shapes, model spec, and the file of each parameter
    state-00001.safetensors …   master.<name>, exp_avg.<name>, exp_avg_sq.<name>, float32
    buffers.safetensors         buffers that transformers stores beside parameters, if the model has any
    model/                      config.json and tokenizer, if transformers supports the model

Parameters are written in export order, with a new file whenever one is full. The writer therefore keeps only about one
file's size of them in memory.
"""

from __future__ import annotations

import json
import logging
import re
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from roll_core.errors import CheckpointError, ModelError, UnsupportedError
from roll_core.spec.model import ModelSpec, saved_model
from roll_core.spec.train import ParameterState, PortableState
from roll_modeling.export import write_description
from roll_modeling.shards import ShardFiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

log = logging.getLogger(__name__)

INDEX, MODEL, BUFFERS = "index.json", "model", "buffers.safetensors"
FILE = re.compile(r"state-\d+\.safetensors")
FORMAT = 1
FILE_BYTES = 1 << 30
"""Maximum bytes per file. Parameters are not split; a larger one gets a file of its own."""
KINDS = tuple(field.name for field in fields(ParameterState))


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableIndex:
    """Contents of `index.json`."""

    step_count: int
    adapters: dict[str, Any] | None
    model: ModelSpec
    """Model spec of the role that wrote the state. Its paths are those of that run."""
    shapes: dict[str, tuple[int, ...]]
    files: dict[str, str]
    """File name, by parameter."""
    buffers: tuple[str, ...]
    """Names of the tensors in the file `BUFFERS`. The file exists only if there are any."""


def write_portable_state(
    state: PortableState, model: ModelSpec, folder: Path, *, leads: bool, file_bytes: int = FILE_BYTES
) -> None:
    """Read `state` on all ranks, which is a collective operation, and write it on the rank that `leads`.

    Raises `CheckpointError` if a tensor has another dtype or shape than declared.
    """
    from safetensors.torch import save_file

    pieces = ShardFiles(folder, "state-{:05d}.safetensors", file_bytes)
    files: dict[str, str] = {}
    for name, shape in state.shapes.items():
        held = state.read(name)
        if leads:
            kinds = {kind: _checked(getattr(held, kind), f"{kind} of {name}", shape) for kind in KINDS}
            files[name] = pieces.add({f"{kind}.{name}": tensor for kind, tensor in kinds.items()})
    if leads:
        pieces.flush()
        if state.buffers:
            save_file({name: buffer.cpu().contiguous() for name, buffer in state.buffers.items()}, folder / BUFFERS)
        _describe(model, folder / MODEL)
        index = {
            "format": FORMAT,
            "step_count": state.step_count,
            "adapters": dict(state.adapters) if state.adapters is not None else None,
            "model": asdict(model),
            "parameters": {name: {"shape": list(state.shapes[name]), "file": file} for name, file in files.items()},
            "buffers": list(state.buffers),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def read_portable_index(folder: Path) -> PortableIndex:
    """Read and validate `index.json`. Raises `CheckpointError`."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise CheckpointError(f"{folder}: format {index['format']}; this version reads {FORMAT}")
        parameters: Mapping[str, Any] = index["parameters"]
        if foreign := [parameter["file"] for parameter in parameters.values() if not FILE.fullmatch(parameter["file"])]:
            raise CheckpointError(f"{folder}: the file {foreign[0]!r:.100} is not one of a portable state")
        return PortableIndex(
            step_count=int(index["step_count"]),
            adapters=index["adapters"],
            model=saved_model(index["model"]),
            shapes={name: tuple(parameter["shape"]) for name, parameter in parameters.items()},
            files={name: parameter["file"] for name, parameter in parameters.items()},
            buffers=tuple(index.get("buffers", ())),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: cannot be read: {error!r}") from error


@contextmanager
def opened_portable_state(folder: Path) -> Iterator[PortableState]:
    """Open the files of `write_portable_state` and read one parameter at a time.

    Raises `CheckpointError`, also from `PortableState.read`.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    index = read_portable_index(folder)
    with ExitStack() as stack:
        try:
            opened = {
                file: stack.enter_context(safe_open(folder / file, framework="pt"))
                for file in dict.fromkeys(index.files.values())
            }
            buffers = load_file(folder / BUFFERS) if index.buffers else {}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: cannot be read: {error}") from error

        def read(name: str) -> ParameterState:
            file = index.files[name]
            try:
                held = {kind: opened[file].get_tensor(f"{kind}.{name}") for kind in KINDS}
            except SafetensorError as error:
                raise CheckpointError(f"{folder / file}: cannot be read: {error}") from error
            return ParameterState(
                **{kind: _checked(tensor, f"{kind} of {name}", index.shapes[name]) for kind, tensor in held.items()}
            )

        yield PortableState(
            step_count=index.step_count, shapes=index.shapes, read=read, adapters=index.adapters, buffers=buffers
        )


def _checked(tensor: Tensor, what: str, shape: tuple[int, ...]) -> Tensor:
    """Return `tensor` if it is float32 and has the expected shape. Raises `CheckpointError` otherwise."""
    import torch

    if tensor.dtype != torch.float32 or tuple(tensor.shape) != tuple(shape):
        raise CheckpointError(
            f"portable state: {what} is {tensor.dtype} {tuple(tensor.shape)}, expected float32 {tuple(shape)}"
        )
    return tensor


def _describe(model: ModelSpec, folder: Path) -> None:
    """Write config and tokenizer of the model, if possible. A strategy's own model may be unknown to transformers."""
    if model.library:
        return
    try:
        write_description(model, folder)
    except (ModelError, UnsupportedError) as error:
        log.info("the portable state has no config and tokenizer of the model: %s", error)
