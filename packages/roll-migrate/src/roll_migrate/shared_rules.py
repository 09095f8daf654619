"""Conversions that importers of several frameworks share: names, trackers, Python files, numbers of rows."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import UnsupportedError
from roll_migrate.rules import nested

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_migrate.rules import Convert, Key, KeyRule, Outcome


_READS_AUDIO = re.compile(r"(?<![a-z])(?:omni|audio)(?![a-z])", re.IGNORECASE)
_READS_IMAGES = re.compile(
    r"(?<![a-z])(?:vlm?|vision|omni|pixtral|paligemma|idefics\d*|minicpm-?[vo]|glm-?[\d.]*v|smolvlm\d*"
    r"|(?:qwen|qwen-?\d[.\d]*|intern|kimi|deepseek|ernie|mimo|step)-?vl\d*|llava\w*)(?![a-z])",
    re.IGNORECASE,
)


def reads_images(model: Any) -> bool:
    """True for the name of a model or a template that reads images, video or audio: its last part decides."""
    return isinstance(model, str) and _READS_IMAGES.search(Path(model).name) is not None


def refuse_audio(models: Mapping[str, Any]) -> None:
    """Raise `UnsupportedError` for a model that reads audio; `models` has names by their places."""
    for where, model in models.items():
        if isinstance(model, str) and _READS_AUDIO.search(Path(model).name):
            raise UnsupportedError(
                f"{where}: {model} reads audio, which no pipeline here supports: choose another model"
            )


def experiment(key: Key, fallback: str) -> Outcome:
    """Convert the name of an experiment to `exp_name`, or to `fallback` if no character remains."""
    name = re.sub(r"[^\w.-]+", "-", str(key.value)).strip("-") or fallback
    if name == key.value:
        return key.renamed("exp_name")
    return key.changed({"exp_name": name}, "the name of a directory: letters, digits, `.`, `_` and `-`")


def track_with(key: Key, names: Sequence[Any]) -> Outcome:
    """Convert names of trackers to `track_with`. Missing trackers are unsupported."""
    target = {"track_with": [name for name in names if name in key.trackers]}
    if missing := [str(name) for name in names if name not in key.trackers]:
        return key.lacking(f"no tracker {', '.join(missing)} (installed: {', '.join(key.trackers)})", target)
    return key.changed(target, "console and metrics.jsonl are always written")


def python_function(key: Key, name: str, reward: str, framework: str, file: Any = None) -> Outcome:
    """Convert a Python file with the reward function `name` to `rewards.<reward>`: a `function`."""
    file = str(key.value if file is None else file)
    path = Path(file)
    if not path.name:
        return key.refused(f"found {file!r}, expected a Python file with the reward function")
    parts = path.with_suffix("").parts
    module = path.stem if path.is_absolute() or file.startswith(("~", "$")) or ".." in parts else ".".join(parts)
    note = f"with {framework}'s signature; {path.name} must be importable"
    if module == path.stem and len(parts) > 1:
        note += f": put {path.parent} on PYTHONPATH"
    return key.changed({f"rewards.{reward}.reward": "function", f"rewards.{reward}.function": f"{module}:{name}"}, note)


def names_of_files(target: str) -> KeyRule:
    """Write the names of data files, without `~`."""

    def convert(value: Any, key: Key) -> Outcome:
        names = value if isinstance(value, list) else [value]
        names = [os.path.expanduser(name) if isinstance(name, str) else name for name in names]
        return key.renamed({target: names if isinstance(value, list) else names[0]})

    return nested(convert)


def frequency(target: str) -> Convert:
    """Write a number of steps; a number below 1 is off."""

    def convert(value: Any, key: Key) -> Outcome:
        if value == "after_each_epoch":
            return key.lacking(f"set {target} to the steps of an epoch", {target: "???"})
        off = not isinstance(value, (int, float)) or value < 1
        return key.changed({target: 0 if off else value}, f"{value} is off" if off else "")

    return convert


def max_steps(epochs: Any, rows: int | None, size: Any) -> tuple[int, str] | None:
    """Steps of all epochs with `size` prompts per batch, and the arithmetic; None unless all are positive numbers."""
    if rows is None or not all(isinstance(number, int) and number > 0 for number in (epochs, size)) or rows < size:
        return None
    how = f"{epochs} × ({rows} rows // {size} prompts per batch); less if longer prompts are dropped"
    return epochs * (rows // size), how


def count_rows(files: Any, limit: Any = None) -> int | None:
    """Number of rows of one file or several, at most `limit`.

    None if a file is missing here, or is neither Parquet nor JSON lines.
    """
    total = 0
    for name in files if isinstance(files, list) else [files]:
        path = Path(os.path.expanduser(str(name)))
        try:
            if path.suffix == ".parquet":
                import pyarrow.parquet

                total += pyarrow.parquet.read_metadata(path).num_rows
            elif path.suffix == ".jsonl":
                with path.open("rb") as lines:
                    total += sum(1 for line in lines if line.strip())
            else:
                return None
        except (OSError, ValueError):  # ArrowInvalid
            return None
    return min(total, limit) if isinstance(limit, int) and limit > 0 else total


def first_row(name: Any) -> Mapping[str, Any] | None:
    """Values of the first row of a data file; None if it cannot be read from here."""
    from roll_core.data.rows import read_rows
    from roll_core.errors import RollError
    from roll_core.spec.config import DataArguments

    if not isinstance(name, str) or not Path(name).is_file():
        return None
    try:
        (row, *_) = read_rows(DataArguments(file_name=name, max_samples=1))
    except (RollError, OSError, ValueError, ImportError):
        return None
    return row.values


def lora_dropout(key: Key, *, enabled: bool) -> Outcome:
    """Dropout of adapters, which are `enabled` or not."""
    if not (key.value and enabled):
        return key.unneeded("no dropout")
    return key.lacking(
        "dropout is not supported: logprobs before and during an update must come from the same function"
    )
