"""Conversions that importers of several frameworks share: names, trackers, Python files, numbers of rows."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import UnsupportedError
from roll_migrate.rules import Outcome, dotted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_migrate.rules import Key


_READS_IMAGES = re.compile(
    r"(?<![a-z])(?:vlm?|vision|omni|pixtral|paligemma|idefics\d*|minicpm-?[vo]|glm-?[\d.]*v|smolvlm\d*"
    r"|(?:qwen|qwen-?\d[.\d]*|intern|kimi|deepseek|ernie|mimo|step)-?vl\d*|llava\w*)(?![a-z])",
    re.IGNORECASE,
)


def reads_images(model: Any) -> bool:
    """True for the name of a model or a template that reads images, video or audio: its last part decides."""
    return isinstance(model, str) and _READS_IMAGES.search(Path(model).name) is not None


def refuse_images(models: Mapping[str, Any]) -> None:
    """Raise `UnsupportedError` for a model that reads images; `models` has names by their places."""
    for where, model in models.items():
        if reads_images(model):
            raise UnsupportedError(
                f"{where}: {model} reads images, video or audio, which no pipeline here supports: choose a text model"
            )


def experiment(value: Any, fallback: str) -> Outcome:
    """Convert the name of an experiment to `exp_name`, or to `fallback` if no character remains."""
    name = re.sub(r"[^\w.-]+", "-", str(value)).strip("-") or fallback
    note = "" if name == value else "the name of a directory: letters, digits, `.`, `_` and `-`"
    return Outcome("changed" if note else "renamed", ((("exp_name",), name),), note)


def track_with(names: Sequence[Any], key: Key) -> Outcome:
    """Convert names of trackers to `track_with`. Missing trackers are unsupported."""
    found = [name for name in names if name in key.trackers]
    if missing := [str(name) for name in names if name not in key.trackers]:
        installed = ", ".join(key.trackers)
        return Outcome(
            "unsupported", ((("track_with",), found),), f"no tracker {', '.join(missing)} (installed: {installed})"
        )
    return Outcome("changed", ((("track_with",), found),), "console and metrics.jsonl are always written")


def python_function(value: Any, name: str, reward: str, framework: str) -> Outcome:
    """Convert a Python file with the reward function `name` to `rewards.<reward>`: a `function`."""
    path = Path(str(value))
    parts = path.with_suffix("").parts
    module = path.stem if path.is_absolute() or str(value).startswith(("~", "$")) or ".." in parts else ".".join(parts)
    note = f"with {framework}'s signature; {path.name} must be importable"
    if module == path.stem and len(parts) > 1:
        note += f": put {path.parent} on PYTHONPATH"
    target = f"rewards.{reward}"
    writes = ((dotted(f"{target}.reward"), "function"), (dotted(f"{target}.function"), f"{module}:{name}"))
    return Outcome("changed", writes, note)


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


def lora_dropout(value: Any, *, enabled: bool) -> Outcome:
    """Dropout of adapters, which are `enabled` or not."""
    if not (value and enabled):
        return Outcome("not needed", (), "no dropout")
    why = "dropout is not supported: logprobs before and during an update must come from the same function"
    return Outcome("unsupported", (), why)
