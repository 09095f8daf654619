"""`roll-core checkpoint list | verify`: lists checkpoints, the roles that each one resumes, and damaged files."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from roll_core.errors import CheckpointError, NoCheckpointError
from roll_core.runtime.records.checkpoint_directory import STATE, BestCheckpoint, Checkpoint, CheckpointDirectory
from roll_core.runtime.records.manifest import STEP, read_manifest, verify
from roll_core.runtime.records.run_dir import experiment_runs
from roll_core.runtime.run.run_saver import SavedRun
from roll_tools.open_run import aligned, is_run, open_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from roll_core.runtime.records.manifest import Manifest
    from roll_core.runtime.run.checkpoint_store import RemoteFolder

ROLE = ("strategy", "world_size", "weight_version", "portable")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """One row of the checkpoint listing."""

    path: str
    step: int
    created: float | None
    """Unix time in seconds; None if the manifest cannot be read."""
    size_bytes: int | None
    """None if the manifest cannot be read."""
    pipeline: str | None
    """None if the manifest or the state of the run cannot be read."""
    roles: dict[str, dict[str, Any]]
    """Trained roles by name, with the keys of `ROLE`: what a run needs to resume from the checkpoint."""
    problems: list[str]
    """Damage that was found; empty if there is none."""
    best: dict[str, Any] | None
    """`metric` and `value` if the run's `save_best` makes this its best checkpoint."""
    digests_read: bool
    """True if all files were read and their digests compared; False if only their sizes were."""

    @property
    def state(self) -> str:
        """`damaged: …`, `intact` (digests were compared) or `complete` (only sizes were)."""
        if self.problems:
            return f"damaged: {'; '.join(self.problems)}"
        return "intact" if self.digests_read else "complete"


def list_checkpoints(place: Path | str, *, as_json: bool, digests: bool, store: Mapping[str, Any]) -> int:
    """Print the checkpoints of a run, an experiment, a directory or a URL, oldest first.

    Without `digests` only file sizes are compared. `store` are the `storage_options` of a URL. Returns the exit code: 1
    if a checkpoint is damaged, otherwise 0.
    """
    if isinstance(place, str):
        rows = list(_remote_rows(place, store, digests=digests))
    else:
        directories = checkpoint_directories(place)
        best = _best(directories)
        rows = [
            _row(checkpoint, digests=digests, best=best) for directory in directories for checkpoint in directory.list()
        ]
    if as_json:
        _print_json(rows)
    elif rows:
        sys.stdout.write(_table(rows))
    else:
        sys.stdout.write(f"no checkpoint in {place}\n")
    return 1 if any(row.problems for row in rows) else 0


def verify_checkpoints(places: Sequence[Path | str], *, as_json: bool, store: Mapping[str, Any]) -> int:
    """Read checkpoints back and compare digests.

    Each of `places` is a checkpoint, or a run, directory or URL whose checkpoints are all verified. `store` are the
    `storage_options` of URLs. Returns the exit code: 1 if a checkpoint is damaged, otherwise 0.
    """
    checkpoints = [checkpoint for place in places if not isinstance(place, str) for checkpoint in _named(place)]
    rows = []
    local_rows = (_row(checkpoint, digests=True) for checkpoint in checkpoints)
    for row in chain(
        local_rows, *(_remote_rows(place, store, digests=True) for place in places if isinstance(place, str))
    ):
        rows.append(row)
        if not as_json:
            sys.stdout.write(f"{row.path}: {row.state}\n")
            sys.stdout.flush()
    if as_json:
        _print_json(rows)
    damaged = [row for row in rows if row.problems]
    if damaged and not as_json:
        for line in _intact(checkpoints, damaged):
            sys.stdout.write(f"{line}\n")
        for url in dict.fromkeys(row.path.rpartition("/")[0] for row in damaged if "://" in row.path):
            good = [row.path for row in rows if row.path.startswith(f"{url}/") and not row.problems]
            sys.stdout.write(f"newest intact checkpoint in {url}: {good[-1] if good else 'none'}\n")
    return 1 if damaged else 0


def checkpoint_directories(place: str | Path) -> list[CheckpointDirectory]:
    """Checkpoint directories of a run, of all runs of an experiment (oldest first), or of a directory of checkpoints.

    Raises `RunDirectoryError` if `place` is none of these.
    """
    path = Path(os.path.expanduser(place)).absolute()
    if CheckpointDirectory(path).list():
        return [CheckpointDirectory(path)]
    runs = experiment_runs(path)
    if runs and not is_run(path):
        return [CheckpointDirectory(run.checkpoints) for run in runs]
    return [CheckpointDirectory(open_run(path).checkpoints)]


def _named(place: Path) -> list[Checkpoint]:
    path = Path(os.path.expanduser(place)).absolute()
    if path.is_dir() and CheckpointDirectory.is_checkpoint(path):
        return [_unverified(path)]
    checkpoints = [checkpoint for directory in checkpoint_directories(place) for checkpoint in directory.list()]
    if not checkpoints:
        raise NoCheckpointError(f"{place} has no checkpoint")
    return checkpoints


def _unverified(path: Path) -> Checkpoint:
    """The checkpoint at `path`. The step comes from its name, else from its manifest, else it is 0."""
    if match := STEP.fullmatch(path.name):
        return Checkpoint(int(match[1]), path)
    try:
        return Checkpoint(read_manifest(path).step, path)
    except CheckpointError:
        return Checkpoint(0, path)


def _remote_rows(url: str, store: Mapping[str, Any], *, digests: bool) -> Iterator[CheckpointRow]:
    """Rows of the complete checkpoints in a checkpoint store, oldest first. With `digests`, each one is downloaded.

    Raises `NoCheckpointError` if there is none.
    """
    from roll_core.runtime.run.checkpoint_store import RemoteFolder, store_errors

    folder = RemoteFolder(url, store)
    with store_errors(url):
        manifests = folder.manifests(folders=3)  # of a whole store: experiment, run, checkpoint
        if not manifests:
            raise NoCheckpointError(f"{url} has no complete checkpoint")
        best = _remote_best(folder, manifests)
    for name, manifest in reversed(manifests.items()):
        with tempfile.TemporaryDirectory() as temporary, store_errors(url):
            yield _remote_row(folder, name, manifest, Path(temporary), digests=digests, best=best)


def _remote_best(folder: RemoteFolder, manifests: Mapping[str, Manifest]) -> dict[str, dict[str, Any]]:
    """`_best` of the copies of runs; `manifests` begins with the newest."""
    best_by_path: dict[str, dict[str, Any]] = {}
    newest: dict[str, str] = {}
    for name in manifests:
        newest.setdefault(f"{folder.url}/{name}".rstrip("/").rpartition("/")[0], name)
    for run, name in newest.items():
        with suppress(CheckpointError, FileNotFoundError), tempfile.TemporaryDirectory() as temporary:
            (Path(temporary) / STATE).write_bytes(folder.read(name, STATE))
            saved = SavedRun.of(Checkpoint(manifests[name].step, Path(temporary)))
            # Not the path of the run: the disk that it names may be another host's.
            named = dict(saved.best or {})
            best = BestCheckpoint.read(named and named | {"path": f"{run}/step-{named.get('step')}"}, Path(temporary))
            if best is not None:
                best_by_path[best.path] = {"metric": best.metric, "value": best.value}
    return best_by_path


def _remote_row(
    folder: RemoteFolder,
    name: str,
    manifest: Manifest,
    into: Path,
    *,
    digests: bool,
    best: Mapping[str, dict[str, Any]],
) -> CheckpointRow:
    problems: list[str] = []
    saved = None
    try:
        if digests:
            with suppress(CheckpointError):  # `verify` describes the damage
                folder.fetch(name, into)
            (path,) = (into / "checkpoints").iterdir()
            problems = verify(path)
        else:
            path = into
            (path / STATE).write_bytes(folder.read(name, STATE))
        saved = SavedRun.of(Checkpoint(manifest.step, path))
    except (CheckpointError, FileNotFoundError) as error:
        problems = problems or [str(error)]
    path_of = f"{folder.url}/{name}".rstrip("/")
    return _make_row(path_of, manifest.step, manifest, saved, problems, digests=digests, best=best.get(path_of))


def _intact(checkpoints: Sequence[Checkpoint], damaged: Sequence[CheckpointRow]) -> Iterable[str]:
    """Yield the newest intact checkpoint of each directory with a damaged one."""
    bad = {row.path for row in damaged}
    for directory in dict.fromkeys(checkpoint.path.parent for checkpoint in checkpoints if str(checkpoint.path) in bad):
        good = [checkpoint.path for checkpoint in CheckpointDirectory(directory).list() if not verify(checkpoint.path)]
        yield f"newest intact checkpoint in {directory}: {good[-1].name if good else 'none'}"


def _best(directories: Iterable[CheckpointDirectory]) -> dict[str, dict[str, Any]]:
    """Metric and value of the best checkpoint of each run, by path, as the run's newest checkpoint states it."""
    best_by_path = {}
    for directory in directories:
        for checkpoint in directory.list()[-1:]:
            with suppress(CheckpointError):
                best = BestCheckpoint.read(SavedRun.of(checkpoint).best, checkpoint.path)
                if best is not None:
                    best_by_path[best.path] = {"metric": best.metric, "value": best.value}
    return best_by_path


def _row(
    checkpoint: Checkpoint, *, digests: bool, best: Mapping[str, dict[str, Any]] = MappingProxyType({})
) -> CheckpointRow:
    problems = verify(checkpoint.path, digests=digests)
    manifest = saved = None
    try:
        manifest = read_manifest(checkpoint.path)
        saved = SavedRun.of(checkpoint)
    except CheckpointError as error:
        problems = problems or [str(error)]
    path = str(checkpoint.path)
    return _make_row(path, checkpoint.step, manifest, saved, problems, digests=digests, best=best.get(path))


def _make_row(
    path: str,
    step: int,
    manifest: Manifest | None,
    saved: SavedRun | None,
    problems: list[str],
    *,
    digests: bool,
    best: dict[str, Any] | None = None,
) -> CheckpointRow:
    return CheckpointRow(
        path=path,
        step=step,
        created=manifest.created if manifest else None,
        size_bytes=manifest.size_bytes if manifest else None,
        pipeline=saved.pipeline if saved else None,
        roles={name: {key: getattr(role, key) for key in ROLE} for name, role in saved.roles.items()} if saved else {},
        problems=problems,
        best=best,
        digests_read=digests,
    )


def _table(rows: Sequence[CheckpointRow]) -> str:
    cells = [["checkpoint", "step", "written", "size", "resumes with", "state"]]
    cells += [
        [
            row.path,
            str(row.step),
            "?" if row.created is None else f"{datetime.fromtimestamp(row.created):%Y-%m-%d %H:%M:%S}",
            "?" if row.size_bytes is None else size_text(row.size_bytes),
            _needs(row),
            row.state + (f", best ({row.best['metric']} {row.best['value']:.4g})" if row.best else ""),
        ]
        for row in rows
    ]
    return aligned(cells)


def _needs(row: CheckpointRow) -> str:
    roles = (
        f"{name} {role['strategy']} × {role['world_size']}{' (portable)' if role['portable'] else ''}"
        for name, role in row.roles.items()
    )
    return f"{row.pipeline}: {', '.join(roles)}" if row.pipeline else "?"


def size_text(num_bytes: float) -> str:
    """Format bytes for people, such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 999.5:  # from there, three digits round to 1e+03
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def _print_json(rows: Sequence[CheckpointRow]) -> None:
    sys.stdout.write(json.dumps([asdict(row) | {"state": row.state} for row in rows], indent=2) + "\n")
