"""`roll-core checkpoint convert`: from the portable state of a checkpoint to a directory that transformers loads."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from roll_core.errors import CheckpointMismatchError, NoCheckpointError, RunDirectoryError
from roll_core.modeling.export import write_model
from roll_core.modeling.model import empty_model, load_model
from roll_core.modeling.portable_state import check_same, stored_buffers
from roll_core.runtime.checkpoints import CheckpointStore
from roll_core.runtime.portable_state import FOLDER, MODEL, opened_portable_state, read_portable_index
from roll_core.runtime.resuming import SavedRun
from roll_core.runtime.run_dir import checkpoint_stores

if TYPE_CHECKING:
    from pathlib import Path

    from roll_core.runtime.checkpoints import Checkpoint
    from roll_core.runtime.portable_state import PortableIndex
    from roll_core.spec.train import PortableState


def convert_checkpoint(place: Path, out: Path, *, role: str | None, base_model: str | None) -> int:
    """Write the model of a role as it was at a checkpoint, or at the newest good one of a run, into `out`, which must
    not hold anything. Digests are compared first. Returns the exit code."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunDirectoryError(f"{out} is there already; name a directory that is not, or an empty one")
    checkpoint = _good(place)
    name = _role(checkpoint, role)
    working = out.absolute().parent / f".{out.name}.{secrets.token_hex(4)}"
    try:
        working.mkdir(parents=True)
        _write(checkpoint.path / name / FOLDER, working, base_model)
        os.replace(working, out)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    sys.stdout.write(f"{name} of {checkpoint.path} is now {out}\n")
    return 0


def _good(place: Path) -> Checkpoint:
    path = place.expanduser().absolute()
    if path.is_dir() and CheckpointStore.is_checkpoint(path):
        return CheckpointStore.open(path)
    if (path / "config.json").is_file():
        raise NoCheckpointError(
            f"{place} is a model, not a checkpoint: there is nothing to convert. A run begins from it, under every"
            f" strategy, by pretrain: {path}, and a role by model_args.model_name_or_path"
        )
    for store in reversed(checkpoint_stores(place)):
        if (newest := store.latest_good()) is not None:
            return newest
    raise NoCheckpointError(f"{place} has no checkpoint")


def _role(checkpoint: Checkpoint, asked: str | None) -> str:
    saved = SavedRun.of(checkpoint).roles
    portable = [name for name, role in saved.items() if role.portable]
    if not portable:
        raise CheckpointMismatchError(
            f"{checkpoint.path} holds no portable state: go on with that run, under its own strategies and with"
            " portable_checkpoints=true, and convert its next checkpoint"
        )
    if asked is None and len(portable) == 1:
        return portable[0]
    if asked not in portable:
        found = f"no role {asked!r} with a portable state" if asked else "several roles"
        raise CheckpointMismatchError(f"{checkpoint.path} holds {found}: give --role {' or '.join(portable)}")
    return asked


def _write(folder: Path, out: Path, base_model: str | None) -> None:
    index = read_portable_index(folder)
    with opened_portable_state(folder) as state:
        if index.model.lora is None:
            _write_whole(index, state, folder / MODEL, out)
        else:
            _write_adapted(index, state, folder / MODEL, out, base_model)


def _write_whole(index: PortableIndex, state: PortableState, description: Path, out: Path) -> None:
    """The masters, rounded to the model's dtype, in the model that the state describes."""
    if not description.is_dir():
        raise CheckpointMismatchError(
            f"{description.parent} does not say what model it is of: it is one that transformers does not make, so"
            " there is no directory for transformers to load"
        )
    spec = replace(index.model, path=str(description), random_init=None, config_overrides={}, tokenizer="")
    model = empty_model(spec)
    parameters = dict(model.named_parameters())
    check_same(state, {name: tuple(each.shape) for name, each in parameters.items()})
    buffers = stored_buffers(model)
    if lacking := buffers.keys() - state.buffers.keys():
        raise CheckpointMismatchError(
            f"{description.parent} lacks {min(lacking)}, which no optimizer steps and the model computes with: go on"
            " with that run, and convert its next checkpoint"
        )
    whole = {name: state.read(name).master.to(each.dtype) for name, each in parameters.items()}
    model.load_state_dict(whole | {name: state.buffers[name] for name in buffers}, strict=False, assign=True)
    model.tie_weights()
    write_model(model, spec, model.state_dict(), out)


def _write_adapted(
    index: PortableIndex, state: PortableState, description: Path, out: Path, base_model: str | None
) -> None:
    """The adapters, alone or merged into the model beneath them, as the run had it in `lora_export`."""
    from roll_core.modeling.expert_adapters import ExpertAdapters
    from roll_core.modeling.lora import add_adapters

    spec, lora = index.model, index.model.lora
    if lora is None:
        raise AssertionError("asked only of models with adapters")
    if description.is_dir():
        spec = replace(spec, tokenizer=str(description))
    if base_model is not None:
        spec = replace(spec, path=base_model, random_init=None)
    model = load_model(spec)
    of_experts = ExpertAdapters(model, state, lora)
    adapters = add_adapters(model, replace(spec, lora=of_experts.beside()))
    trained = adapters.trained()
    shapes = {name: tuple(each.shape) for name, each in trained.items()} | of_experts.shapes
    check_same(state, shapes, adapters=adapters, identity=adapters.identity())
    for name, each in trained.items():
        each.data.copy_(state.read(name).master)
    if adapters.lora.export == "adapter":
        if of_experts.places:
            adapters.also_targets(of_experts.names)
        adapters.export(out, trained | of_experts.apart())
    elif of_experts.places:
        of_experts.write_merged(adapters, spec, out)
    else:
        write_model(model, spec, adapters.state_dict(), out)
