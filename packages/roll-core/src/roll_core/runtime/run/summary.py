"""The closing lines of a run: error, remedy, results, and the command that resumes the run."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any

from roll_core.errors import ConfigError, DataError, RollError
from roll_core.plugins.attribution import raised_by
from roll_core.runtime.records.checkpoints import CheckpointStore
from roll_core.runtime.records.known_errors import advise
from roll_core.runtime.records.record import read_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.config import LoadedConfig
    from roll_core.config.secrets import Redactor
    from roll_core.plugins.registry import Registry
    from roll_core.runtime.records.run_dir import RunDir


def advice(error: Exception, registry: Registry, run_dir: RunDir) -> str:
    """Name the code that raised `error` and the remedy of the matching known error. Empty if neither is known.

    The code is omitted for wrong rows and configs: their message names file and row, or the key.
    """
    source = "" if isinstance(error, ConfigError | DataError) else raised_by(error, registry.plugins)
    lines = [f"raised by {source}; the traceback is in {relative(run_dir.log)}"] if source else []
    if (known := advise(error, registry)) is not None:
        lines.append(known.told(beside=str(error)))
    return "\n".join(lines)


def described(error: BaseException) -> str:
    """`code message` of a `RollError`; `Type: message` of any other exception."""
    if isinstance(error, RollError):
        return error.described().rstrip()
    name, message = type(error).__name__, str(error)
    return f"{name}: {message}" if message else name


def how_to_resume(
    loaded: LoadedConfig, argv: Sequence[str], run_dir: RunDir, redactor: Redactor
) -> list[tuple[str, str]]:
    """The command that resumes an unfinished run, or the reason why there is none. Empty for a finished run."""
    record = read_record(run_dir.record)
    if record.get("outcome") == "finished":
        return []
    saved = CheckpointStore(run_dir.checkpoints).list()
    step = saved[-1].step if saved else record.get("resumed_step", 0)
    if not step:
        return [("resume", f"no checkpoint was saved (save_steps: {loaded.config.save_steps})")]
    source = "true" if saved else record["resumed_from"]  # `true` does not search other experiments and URLs
    overrides = [each for each in argv[1:] if "=" in each and not each.startswith(("-", "resume_from_checkpoint="))]
    config = loaded.sources[0] if loaded.sources else relative(run_dir.config)
    command = ["roll-core", "run", str(config), *overrides, f"resume_from_checkpoint={source}"]
    return [("resume", f"{redactor.text(shlex.join(command))}   (step {step} is saved)")]


def results(run_dir: RunDir, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Closing lines with the last held-out metrics, the best checkpoint and the path of the exported model."""
    lines = []
    if "val/score/mean" in metrics:
        lines.append(("held-out score", f"{metrics['val/score/mean']:.3f}  (val/score/mean)"))
    if "val/loss" in metrics:
        lines.append(("held-out loss", f"{metrics['val/loss']:.4f}  (val/loss)"))
    if "val/token_accuracy" in metrics:
        lines.append(("token accuracy", f"{metrics['val/token_accuracy']:.1%}  (val/token_accuracy)"))
    if "val/rewards/accuracies" in metrics:
        lines.append(("reward accuracy", f"{metrics['val/rewards/accuracies']:.1%}  (val/rewards/accuracies)"))
    record = read_record(run_dir.record)
    best = record.get("best_checkpoint")
    if best is not None:
        path = best["path"] if "://" in best["path"] else relative(best["path"])
        lines.append(("best checkpoint", f"{path}  ({best['metric']} {best['value']:.4g})"))
    if record.get("checkpoint_store"):
        lines.append(("checkpoint copies", record["checkpoint_store"]))
    if run_dir.profile.is_dir():
        lines.append(("profile", relative(run_dir.profile)))
    if run_dir.export.is_dir():
        lines.append(("model", relative(run_dir.export)))
    return lines


def relative(path: Any) -> str:
    """`path` relative to the working directory if it is below it; unchanged otherwise."""
    try:
        relative = os.path.relpath(path)
    except OSError:  # the working directory is gone
        return str(path)
    return str(path) if relative.startswith(os.pardir) else relative
