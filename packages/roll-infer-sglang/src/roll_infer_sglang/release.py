"""What differs between the supported SGLang releases; no other module of this package depends on the release.

Server arguments differ too: `arguments` has those of all releases, and a server start names one that its release lacks.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from packaging.version import Version

VERSIONS = ">=0.5.20,<0.5.24"
"""Supported SGLang releases. The tests run with the first and the last."""
SESSIONS = Version("0.5.21")
"""First release that takes tensors only between `/begin_weight_update` and `/end_weight_update`."""
WIDE_HASHES = Version("0.5.23")
"""First release whose prefix cache distinguishes images by 62 bits of their hashes. Earlier ones use 30."""


def has_update_sessions() -> bool:
    """True if the installed SGLang takes tensors only in a weight update session."""
    return _installed() >= SESSIONS


def distinguishes_images() -> bool:
    """True if the prefix cache of the installed SGLang never mixes up images, without a key of the request."""
    return _installed() >= WIDE_HASHES


def _installed() -> Version:
    return Version(importlib.metadata.version("sglang"))


def num_shards(module: Any) -> int:
    """Number of ranks over which a linear layer or an embedding of SGLang is sharded.

    0.5.23 stores the group of these ranks in linear layers (None if each rank has the whole), earlier ones the number.
    """
    if hasattr(module, "tp_size"):
        return int(module.tp_size)
    group = getattr(module, "tp_group", None)
    return 1 if group is None else int(group.world_size)
