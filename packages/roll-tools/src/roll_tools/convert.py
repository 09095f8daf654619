"""`roll-core checkpoint convert` and `merge`: write a model as a directory that transformers loads.

portable state              ─► master weights in the model that the state describes         needs no strategy
the strategy's own files    ─► its worker in this process, one rank: build, load, export    needs the strategy
an exported adapter         ─► the base model's weights, merged one at a time               merge only
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from roll_core.errors import (
    CheckpointError,
    CheckpointMismatchError,
    MissingRequirementError,
    NoCheckpointError,
    RunDirectoryError,
    UnsupportedError,
    install_command,
)
from roll_core.host import usable_cores
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.run.roles import PORTABLE
from roll_core.runtime.run.run_saver import SavedRun
from roll_core.spec.config import WorkerConfig
from roll_core.spec.model import saved_model
from roll_tools.checkpoint_listing import checkpoint_directories
from roll_tools.settings import parse_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from roll_core.plugins.registry import Registry
    from roll_core.runtime.records.checkpoint_directory import Checkpoint
    from roll_core.runtime.run.run_saver import SavedRole
    from roll_core.spec.model import ModelSpec


def convert_checkpoint(
    place: Path,
    out: Path,
    registry: Registry,
    *,
    role: str | None = None,
    base_model: str | None = None,
    platform: str | None = None,
    trust_remote_code: bool = False,
    settings: Sequence[str] = (),
    merged: bool = False,
) -> int:
    """Write a role's model to `out`, from a checkpoint or from the newest intact checkpoint of a run.

    With `merged`, adapters are merged whatever the run's `lora_export` is, and `place` may be an exported adapter.
    Digests are compared first. `settings` are `key=value` overrides of the strategy's config. Returns the exit code.
    Raises `RunDirectoryError` if `out` exists and is not an empty directory, and `CheckpointError` if there is no
    intact checkpoint or its model is not known.
    """
    out = Path(os.path.expanduser(out)).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunDirectoryError(f"{out} exists and is not an empty directory: give another OUT")
    overrides = parse_settings(settings)
    adapter = Path(os.path.expanduser(place)).absolute()
    exported = merged and (adapter / "adapter_config.json").is_file()
    checkpoint = None if exported else _good(place)
    name = "" if checkpoint is None else _role(checkpoint, role)
    working = out.parent / f".{out.name}.{secrets.token_hex(4)}"
    try:
        working.mkdir(parents=True)
    except OSError as error:
        raise RunDirectoryError(f"{out} cannot be written: {error.strerror}: give another OUT") from error
    try:
        if checkpoint is None:
            _merge(adapter, working, base_model, trust_remote_code=trust_remote_code)
        elif (saved := SavedRun.of(checkpoint).roles[name]).portable:
            _write(checkpoint.path / name / PORTABLE, working, base_model, merged=merged)
        else:
            model = _model_of(checkpoint, saved, base_model, trust_remote_code=trust_remote_code)
            if merged and model.lora is not None:
                model = replace(model, lora=replace(model.lora, export="merged"))
            asyncio.run(_export(checkpoint.path / name, name, saved, model, working, platform, overrides, registry))
        os.replace(working, out)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    source = f"{adapter} merged" if checkpoint is None else f"model of {name} from {checkpoint.path}"
    sys.stdout.write(f"{out}: {source}\n")
    return 0


def _good(place: Path) -> Checkpoint:
    path = Path(os.path.expanduser(place)).absolute()
    if path.is_dir() and CheckpointDirectory.is_checkpoint(path):
        return CheckpointDirectory.open(path)
    if (path / "config.json").is_file():
        raise NoCheckpointError(
            f"{place} is already a model, not a checkpoint. To train from it under any strategy, set"
            f" pretrain: {path}, or model_args.model_name_or_path of a role"
        )
    for directory in reversed(checkpoint_directories(place)):
        if (newest := directory.latest_good()) is not None:
            return newest
    raise NoCheckpointError(f"{place} has no checkpoint")


def _role(checkpoint: Checkpoint, asked: str | None) -> str:
    saved = list(SavedRun.of(checkpoint).roles)
    if asked is None and len(saved) == 1:
        return saved[0]
    if asked not in saved:
        problem = f"no role {asked!r}" if asked else "several roles" if saved else "no role"
        raise CheckpointMismatchError(f"{checkpoint.path} has {problem}: give --role {' or '.join(saved)}")
    return asked


def _model_of(checkpoint: Checkpoint, role: SavedRole, base_model: str | None, *, trust_remote_code: bool) -> ModelSpec:
    """Spec of the role's model, with the given base model and the run's copy of the tokenizer.

    Raises `CheckpointError` if the checkpoint has no model spec, or one that cannot be read.
    """
    if role.model is None:
        raise CheckpointMismatchError(
            f"{checkpoint.path} has no model spec: resume that run with portable_checkpoints=true, and convert its next"
            " checkpoint"
        )
    try:
        model = saved_model(role.model)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint.path}: its model cannot be read: {error!r}") from error
    if base_model is not None:
        model = replace(model, path=base_model, random_init=None)
    tokenizer = checkpoint.run / "tokenizer"
    return replace(
        model,
        trust_remote_code=trust_remote_code,  # a checkpoint must not enable remote code
        tokenizer=str(tokenizer) if tokenizer.is_dir() else model.tokenizer,
    )


async def _export(
    folder: Path,
    name: str,
    role: SavedRole,
    model: ModelSpec,
    out: Path,
    platform_name: str | None,
    settings: Mapping[str, Any],
    registry: Registry,
) -> None:
    """Build the strategy that wrote `folder` with one rank in this process, load its state and export the model."""
    from roll_core.config import strategy_config
    from roll_core.runtime.cluster.executors.base import GroupSpec
    from roll_core.runtime.cluster.executors.local import LocalExecutor
    from roll_core.runtime.cluster.placement import Place
    from roll_core.runtime.cluster.platform import select_platform, values_of
    from roll_core.runtime.run.roles import GroupTrainRole
    from roll_core.runtime.workers.build import COLLECTIVE_TIMEOUT_S, WORKERS
    from roll_core.runtime.workers.train import BatchLimits
    from roll_core.spec.providers import TrainProvider
    from roll_core.spec.train import TrainingSpec

    provider = registry.find(TrainProvider, role.strategy)
    if role.world_size != 1 and not provider.capabilities.any_world_size:
        raise CheckpointMismatchError(
            f"{folder} was written by {role}, and {role.strategy} reads it with that number of ranks only: resume that"
            " run with portable_checkpoints=true, and convert its next checkpoint"
        )
    platform = select_platform(registry, platform_name)
    if provider.platforms and platform.name not in provider.platforms:
        raise UnsupportedError(
            f"{role.strategy} runs on {', '.join(provider.platforms)}, not on {platform.name}: give --platform"
        )
    if why := platform.supports(model.dtype):
        raise UnsupportedError(f"{name}: the model's dtype is {model.dtype}: {why}; give --platform")
    config = {**role.strategy_config, **settings}
    try:
        schema = strategy_config(provider, config, owner=provider.name)
    except ValidationError as error:
        mistakes = "; ".join(f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}" for mistake in error.errors())
        raise CheckpointMismatchError(f"{role.strategy} does not take this strategy_config: {mistakes}") from error
    place = Place(
        rank=0, world_size=1, slots=(0,), local_indices=(0,), device=platform.device(0), num_threads=usable_cores()
    )
    spec = GroupSpec(
        role=name,
        kind="train",
        target=WORKERS["train"],
        places=(place,),
        args={
            "role": name,
            "provider": provider,
            "owner": registry.owner(provider),
            "strategy_config": config,
            "training": TrainingSpec(learning_rate=1.0),
            "model": model,
            "limits": BatchLimits(train_sequences=1, infer_sequences=1),
            "backend": platform.collective_backend,
            "timeout_s": COLLECTIVE_TIMEOUT_S,
            "deterministic": False,
        },
        env=values_of(schema.worker_environment()),
    )
    async with LocalExecutor(platform, 1) as executor:
        groups = await executor.start([spec])
        trained = GroupTrainRole(name, WorkerConfig(), groups[name], trains=True)
        await trained.start()
        await trained.load(folder, role.weight_version)
        await trained.export(out)


def _write(folder: Path, out: Path, base_model: str | None, *, merged: bool) -> None:
    with _needs_modeling():
        from roll_modeling.convert import write_stored_state
        from roll_modeling.portable_files import MODEL, opened_portable_state, read_portable_index
    index = read_portable_index(folder)
    with opened_portable_state(folder) as state:
        write_stored_state(state, index.model, folder / MODEL, out, base_model=base_model, merged=merged)


def _merge(adapter: Path, out: Path, base_model: str | None, *, trust_remote_code: bool) -> None:
    with _needs_modeling():
        from roll_modeling.convert import write_merged_adapter
    write_merged_adapter(adapter, out, base_model=base_model, trust_remote_code=trust_remote_code)


@contextmanager
def _needs_modeling() -> Iterator[None]:
    """Raise `MissingRequirementError` if an import inside this context fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingRequirementError(
            f"roll-core checkpoint: {error.name} is not installed. Run: {install_command('roll-modeling')}"
        ) from error
