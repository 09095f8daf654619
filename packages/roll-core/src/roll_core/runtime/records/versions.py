"""Installed versions in this Python environment, for a run's record."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

DISTRIBUTIONS = (
    "roll-core", "roll-modeling", "torch", "transformers", "ray", "datasets", "tokenizers", "numpy", "pydantic",
    "safetensors", "tensorboard", "math-verify",
)  # fmt: skip


def versions(also: Iterable[str] = ()) -> dict[str, str]:
    """Versions of Python, of `DISTRIBUTIONS` and of the distributions in `also`, without importing them.

    Distributions that are not installed are omitted.
    """
    found = {"python": platform.python_version()}
    for name in dict.fromkeys((*DISTRIBUTIONS, *also)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
