"""Writes a model's directory while its tensors come, so that nobody ever holds more than a piece of it.

model-00001-of-00002.safetensors  model-00002-of-00002.safetensors  model.safetensors.index.json  + description
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from roll_core.modeling.export import write_description

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import ModelSpec

PIECE_BYTES = 2 * 1024**3
"""A file's size, and what is held of a model at most; one tensor may be larger."""
INDEX = "model.safetensors.index.json"


def stores_as_held(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether transformers stores tensors by the names and in the form in which `model` holds them. Some architectures
    hold several stored ones as one (experts), which takes the whole model to undo."""
    from transformers.core_model_loading import revert_weight_conversion

    if model._keys_to_ignore_on_save:
        return False
    held = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    tied: Mapping[str, str] = model.all_tied_weights_keys
    if any(name in held and source not in held for name, source in tied.items()):
        return False
    stored = revert_weight_conversion(model, dict(held))
    return stored.keys() == held.keys() and all(stored[name] is each for name, each in held.items())


class PieceWriter:
    """One directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._piece: dict[str, Tensor] = {}
        self._pieces: list[list[str]] = []
        self._num_bytes = 0
        for old in (*path.glob("model*.safetensors"), path / INDEX):
            old.unlink(missing_ok=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Copied, or written before this returns."""
        if self._piece and sum(each.nbytes for each in self._piece.values()) + tensor.nbytes > PIECE_BYTES:
            self._write()
        self._piece[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def finish(self, spec: ModelSpec) -> None:
        """The last piece, which file has which tensor, and all that is not weights."""
        self._write()
        count = len(self._pieces)
        files = [f"model-{at:05d}-of-{count:05d}.safetensors" for at in range(1, count + 1)]
        if count == 1:
            files = ["model.safetensors"]
        for at, file in enumerate(files):
            self._part(at).rename(self._path / file)
        if count > 1:
            weight_map = {name: file for names, file in zip(self._pieces, files, strict=True) for name in names}
            index = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
            (self._path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        write_description(spec, self._path)

    def _write(self) -> None:
        from safetensors.torch import save_file

        save_file(self._piece, self._part(len(self._pieces)), metadata={"format": "pt"})
        self._pieces.append(list(self._piece))
        self._num_bytes += sum(each.nbytes for each in self._piece.values())
        self._piece = {}

    def _part(self, at: int) -> Path:
        return self._path / f"model.{at}.safetensors.part"
