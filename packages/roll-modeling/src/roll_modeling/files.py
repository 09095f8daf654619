"""The safetensors files of a stored model, and the file of each tensor."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class ModelFiles:
    """Index of a model directory, built without reading a tensor.

    `places` maps tensor names to files. It is empty if the directory has no safetensors files.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            named: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self.places = {name: folder / file for name, file in named.items()}
        else:
            file = folder / "model.safetensors"
            self.places = dict.fromkeys(_names(file), file) if file.is_file() else {}


def _names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())
