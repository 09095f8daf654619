"""Model directories as transformers loads them, read and written with at most one file's tensors in memory.

Files: model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, model.safetensors.index.json, and the
model's config and tokenizer.
"""

from __future__ import annotations

import json
import logging
import re
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from roll_modeling.export import check_exportable, write_description, write_model
from roll_modeling.lora import base_name
from roll_modeling.portable_state import stored_buffers
from roll_modeling.quantization import quant_states
from roll_modeling.shards import ShardFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import ModelSpec
    from roll_core.spec.module_program import ModelLibrary
    from roll_modeling.lora import Adapters

log = logging.getLogger(__name__)
PIECE_BYTES = 2 * 1024**3
"""Maximum size of a file, and of the tensors in memory. A single larger tensor gets its own file."""
INDEX = "model.safetensors.index.json"


class ModelFiles:
    """Index of a model directory, built without reading a tensor.

    `places` maps tensor names to files. It is empty if the directory has no safetensors files.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX
        if index.is_file():
            named: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self.places = {name: folder / file for name, file in named.items()}
        else:
            file = folder / "model.safetensors"
            self.places = {}
            if file.is_file():
                with safe_open(file, framework="pt") as opened:
                    self.places = dict.fromkeys(opened.keys(), file)


def mtp_tensors(names: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """The stored tensors among `names` that belong to multi-token prediction layers (arXiv:2412.19437, 2.2).

    transformers does not load them. Files have them as layers after the last one, or under `mtp.`. `config` are the
    keys of config.json.
    """
    text = config.get("text_config") or config
    count = text.get("num_nextn_predict_layers") or text.get("num_mtp_layers") or 0
    first = text.get("num_hidden_layers") or 0
    mtp_names: list[str] = []
    for name in names:
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if name.startswith("mtp.") or (layer is not None and first <= int(layer[1]) < first + count):
            mtp_names.append(name)
    return mtp_names


def warn_of_mtp(place: str) -> None:
    """Log that training drops the multi-token prediction layers of a model, if it has any.

    `place` is a directory or a name on the Hub, of which the config and the index are read.
    """
    from transformers.utils import cached_file

    try:
        description, _ = (
            cached_file(place, name, _raise_exceptions_for_missing_entries=False) for name in ("config.json", INDEX)
        )
    except OSError:  # loading the model raises the error that names the place
        return
    if description is None:
        return
    folder, config = Path(description).parent, json.loads(Path(description).read_text(encoding="utf-8"))
    names = mtp_tensors(ModelFiles(folder).places, config)
    if names:
        log.warning(
            "%s: %d tensors of multi-token prediction layers are not loaded (%s, ...). They are not trained, and"
            " exported models lack them: an engine cannot use them for speculative decoding",
            place,
            len(names),
            names[0],
        )


def write_gathered(
    model: PreTrainedModel,
    spec: ModelSpec,
    path: Path,
    *,
    adapters: Adapters | None,
    exported: Iterable[tuple[str, Tensor]],
    gather: Callable[[Tensor], Tensor],
    shape_of: Callable[[Tensor], tuple[int, ...]],
    writes: bool,
    library: ModelLibrary | None = None,
) -> None:
    """Write a model that is sharded over ranks, or only its adapters, as a directory that transformers, peft or the
    model's `library` loads.

    `lora_export: adapter` selects the adapters. `exported` and `gather` yield whole tensors and are collective: all
    ranks call this function, and one of them `writes`. Memory holds at most one piece of the model, unless its
    architecture stores several tensors as one, or a library writes it. Raises `UnsupportedError`.
    """
    if library is None:
        check_exportable(model, spec)
    if adapters is not None and adapters.lora.export == "adapter":
        gathered = ((name, gather(parameter)) for name, parameter in adapters.trained().items())
        state = {name: part.cpu() for name, part in gathered if writes}
        if writes:
            adapters.export(path, state)
    elif library is not None:
        state = {name: tensor.to("cpu", copy=True) for name, tensor in exported if writes}
        if writes:
            library.write(model, spec, state | _buffers(model), path)
    elif (stored := StoredForm(model, _shapes(model, adapters, shape_of))).is_by_tensor:
        writer = PieceWriter(path) if writes else None
        for name, tensor in chain(_buffers(model).items(), exported):
            if writer is not None:
                for stored_name, part in stored.of(name, tensor).items():
                    writer.add(stored_name, part)
        if writer is not None:
            writer.finish(spec)
    else:
        state = {name: tensor.to("cpu", copy=True) for name, tensor in exported if writes}
        if writes:
            write_model(model, spec, state | _tied(model, state) | _buffers(model), path)


class StoredForm:
    """Names and shapes under which transformers stores the tensors of `model`.

    Some architectures merge several stored tensors into one (experts), or use other names.
    """

    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        self._model = model
        held = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        stored: Mapping[str, Tensor] = revert_weight_conversion(model, dict(held))
        self._same = {name for name, tensor in held.items() if stored.get(name) is tensor}
        tied: Mapping[str, str] = model.all_tied_weights_keys
        self.is_by_tensor = (
            not model._keys_to_ignore_on_save
            and not any(name in held and source not in held for name, source in tied.items())
            and self._apart(held) == {name: tuple(tensor.shape) for name, tensor in stored.items()}
        )
        """True if the stored form of each tensor is independent of all other tensors."""

    def of(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        """Stored tensors of one tensor of the model, by name; views of it."""
        from transformers.core_model_loading import revert_weight_conversion

        if name in self._same:
            return {name: tensor}
        reverted: Mapping[str, Tensor] = revert_weight_conversion(self._model, {name: tensor})
        return reverted

    def _apart(self, held: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]] | None:
        """Names and shapes if each tensor is converted separately; None if one cannot be."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor in held.items():
            try:
                parts = self.of(name, tensor)
            except Exception:  # conversions are foreign code and may fail without the other tensors of a group
                return None
            if shapes.keys() & parts.keys():
                return None
            shapes |= {key: tuple(part.shape) for key, part in parts.items()}
        return shapes


class PieceWriter:
    """Writer of one model directory, in pieces; deletes the directory's old weight files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(parents=True, exist_ok=True)
        for old in (*path.glob("model*.safetensors"), path / INDEX):
            old.unlink(missing_ok=True)
        self.pieces = ShardFiles(path, "model.{}.safetensors.part", PIECE_BYTES, {"format": "pt"})

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; it is copied or written before this returns."""
        self.pieces.add({name: tensor})

    def finish(self, spec: ModelSpec) -> None:
        """Write the last piece, the index, config and tokenizer, and give the files their final names."""
        self.pieces.flush()
        parts = self.pieces.files
        files = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
        if len(parts) == 1:
            files = ["model.safetensors"]
        for file, (part, _) in zip(files, parts, strict=True):
            (self._path / part).rename(self._path / file)
        if len(parts) > 1:
            weight_map = {name: file for file, (_, names) in zip(files, parts, strict=True) for name in names}
            index = {"metadata": {"total_size": self.pieces.num_bytes}, "weight_map": weight_map}
            (self._path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        write_description(spec, self._path)


def _shapes(
    model: PreTrainedModel, adapters: Adapters | None, shape_of: Callable[[Tensor], tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Shapes of all exported tensors, by name."""
    added, states = adapters.trained() if adapters is not None else {}, quant_states(model)
    return {
        base_name(name): tuple(states[name].shape) if name in states else shape_of(parameter)
        for name, parameter in model.named_parameters()
        if name not in added
    }


def _tied(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Further names of tied tensors, with the exported tensor."""
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(id(parameter), name) for name, parameter in every}
    return {name: state[other] for name, other in names.items() if name != other and other in state}


def _buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Buffers that transformers stores, on the host."""
    return {name: buffer.cpu() for name, buffer in stored_buffers(model).items()}
