"""Sharded loading: each rank reads only its shards from a checkpoint's files.

meta-device model -> shard -> allocate the local shards -> read each tensor's local rows from its file
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from roll_core.errors import ModelError, UnsupportedError
from roll_modeling.model import DTYPES, empty_model
from roll_modeling.pieces import ModelFiles
from roll_strategy_fsdp2.optimizer import local, shard_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import ModelSpec
    from roll_strategy_fsdp2.sharding import Root

log = logging.getLogger(__name__)


def open_empty(spec: ModelSpec) -> tuple[PreTrainedModel, ModelFiles] | None:
    """The model on the meta device and its checkpoint files, or None if sharded loading is not possible.

    None if the spec has a library, random initialization or LoRA, or its path is not a local directory. Also None, with
    a log message, if the architecture is unsupported, a parameter is missing in the files, or some parameters must stay
    in float32.
    """
    if spec.library or spec.random_init is not None or spec.lora is not None or not Path(spec.path).is_dir():
        return None
    try:
        files, model = ModelFiles(Path(spec.path)), empty_model(spec)
    except UnsupportedError as error:
        log.info("%s; every rank loads the whole model", error)
        return None
    lacking = [name for name, _ in model.named_parameters() if name not in files.places]
    if lacking or getattr(model, "_keep_in_fp32_modules_strict", None):
        why = f"its files have no {lacking[0]}" if lacking else "parts of it stay in float32"
        log.info("%s: %s; every rank loads the whole model", spec.path, why)
        return None
    return model, files


@torch.no_grad()
def fill(root: Root, files: ModelFiles, spec: ModelSpec, *, device: str) -> None:
    """Allocate the local shards on `device` and read them from `files`.

    Raises `ModelError` if a stored tensor's shape differs from the model's.
    """
    from safetensors import safe_open

    buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}
    root.to_empty(device=device)
    for name, buffer in root.named_buffers():
        buffer.copy_(buffers[name])
    tensors: dict[str, Tensor] = dict(root.model.named_parameters())
    persistent = root.model.state_dict().keys()
    tensors |= {n: buffer for n, buffer in root.model.named_buffers() if n in persistent and n in files.places}
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, tensor in tensors.items():
            file = files.places[name]
            if file not in opened:
                opened[file] = stack.enter_context(safe_open(file, framework="pt"))
            stored = opened[file].get_slice(name)
            if list(stored.get_shape()) != list(tensor.shape):
                raise ModelError(
                    f"{file}: {name} is {tuple(stored.get_shape())}, the model that config.json describes has"
                    f" {tuple(tensor.shape)}"
                )
            _read(stored, tensor, DTYPES[spec.dtype])


def _read(stored: Any, tensor: Tensor, dtype: torch.dtype) -> None:
    """Copy this rank's shard of `stored` into `tensor`.

    A shard is rounded to the model's dtype first, even if `tensor` is float32, as in unsharded loading.
    """
    if not isinstance(tensor, DTensor):
        tensor.copy_(stored[...])
        return
    share = local(tensor)
    if not share.numel():
        return
    share.copy_(stored[shard_of(tensor)].to(dtype))
