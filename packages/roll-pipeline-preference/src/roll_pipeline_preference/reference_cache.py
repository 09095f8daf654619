"""Reference logprobs of whole data sets, computed once and cached on disk.

`<output_dir>/reference_logprobs/<hash>.npy`: logprobs of all trained tokens, end to end. The hash covers the model, its
dtype, and the tokens and masks of all sequences: thereby also tokenizer, template, truncation and data.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.spec.train import WantedOutputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.spec.pipeline import TrainRole
    from roll_core.types import Floats, TrainSequence
    from roll_pipeline_preference.config import PreferenceConfig

log = logging.getLogger(__name__)

MAX_LOGPROB = 1e-3
"""Largest logprob that is rounding of 0."""


async def cached_logprobs(
    config: PreferenceConfig, model: TrainRole, sequences: Sequence[TrainSequence]
) -> list[Floats]:
    """Logprobs `[L]` of each sequence under the model's current weights, from the cache if it has them.

    They are 0 outside the loss mask.
    """
    folder = Path(config.output_dir) / "reference_logprobs"
    file = folder / f"{_key(config, sequences)}.npy"
    lengths = [int(sequence.loss_mask.sum()) for sequence in sequences]
    flat = _read(file, sum(lengths))
    if flat is None:
        scored = await model.score(sequences, WantedOutputs(logprobs=True, masked_only=True))
        scored_sequences = zip(scored.logprobs or (), sequences, strict=True)
        flat = np.concatenate([logprobs[sequence.loss_mask] for logprobs, sequence in scored_sequences]).astype(
            np.float32
        )
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.npy")
        np.save(partial, flat)
        partial.replace(file)
        log.info("reference logprobs of %d sequences: written to %s", len(sequences), file)
    else:
        log.info("reference logprobs of %d sequences: read from %s", len(sequences), file)
    logprobs = []
    for sequence, part in zip(sequences, np.split(flat, np.cumsum(lengths)[:-1]), strict=True):
        logprobs.append(np.zeros(len(sequence), dtype=np.float32))
        logprobs[-1][sequence.loss_mask] = part
    return logprobs


def _read(file: Path, count: int) -> Floats | None:
    """The `count` logprobs in a file. None if there is none, or if it is damaged, which is logged."""
    if not file.is_file():
        return None
    try:
        flat = np.load(file)
    except (OSError, ValueError, EOFError) as error:
        log.warning("%s is damaged and is written again: %s", file, error)
        return None
    if flat.dtype != np.float32 or flat.shape != (count,) or not (np.isfinite(flat) & (flat <= MAX_LOGPROB)).all():
        log.warning("%s is damaged and is written again: expected %d finite float32 logprobs", file, count)
        return None
    cached: Floats = flat
    return cached


def _key(config: PreferenceConfig, sequences: Sequence[TrainSequence]) -> str:
    digest = hashlib.sha256(json.dumps(_model(config), sort_keys=True).encode())
    for sequence in sequences:
        digest.update(sequence.tokens.astype(np.int64).tobytes())
        digest.update(sequence.loss_mask.tobytes())
    return digest.hexdigest()[:32]


def _model(config: PreferenceConfig) -> list[Any]:
    """Identity of the initial policy: its source, with name, size and time of each file, and how it is computed."""
    args = config.actor_train.model_args
    source = args.model_name_or_path or (None if args.random_init else config.pretrain)
    folder = None if source is None else _folder(source)
    files = [(file.name, file.stat()) for file in sorted(folder.iterdir())] if folder is not None else []
    return [
        source if folder is None else str(folder),
        [[name, stat.st_size, stat.st_mtime_ns] for name, stat in files],
        args.random_init and [args.random_init, config.seed],
        args.model_config_kwargs,
        args.dtype,
        config.tokenizer is not None and config.tokenizer.model_dump(),
    ]


def _folder(source: str) -> Path | None:
    """Directory of the model: the source itself, or the downloaded snapshot of a hub id."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder.resolve()
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(source, "config.json")
    return Path(file).parent if isinstance(file, str) else None
