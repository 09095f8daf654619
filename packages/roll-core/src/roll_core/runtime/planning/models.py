"""The size of each role's model, read from the config or from files that are here. Nothing is downloaded or loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.data.templates import control_tokens
from roll_core.errors import ModelError, RollError
from roll_core.weights.sizes import model_size

if TYPE_CHECKING:
    from roll_core.spec.config import RunConfig
    from roll_core.spec.model import LoraSpec, ModelSpec
    from roll_core.spec.plan import ModelSize

SPECIAL_TOKENS = 2
"""Of the tokenizers that are made here (`data.tokenizers`)."""
BYTES = 256


def size_of(spec: ModelSpec, config: RunConfig) -> ModelSize:
    """Raises `ModelError` where it cannot be known."""
    if spec.random_init is not None:
        keys = dict(spec.random_init)
        if "vocab_size" not in keys:
            keys["vocab_size"] = _vocab_size(config)
        return model_size(keys, task=spec.task)
    folder = _folder(spec.path)
    file = folder / "config.json"
    try:
        keys = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    return model_size({**keys, **spec.config_overrides}, task=spec.task, folder=folder)


def vocab_size_of(spec: ModelSpec, config: RunConfig, *, tokens: int) -> int:
    """Ids that a model can sample: those of its embedding, which is often padded beyond the `tokens` of the tokenizer,
    or `tokens` where the model's files are not here."""
    try:
        return max(tokens, size_of(spec, config).vocab_size)
    except RollError:
        return tokens


def _folder(path: str) -> Path:
    """The directory that is named, or where the hub's cache has the model."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.count("/") == 1 and not path.startswith((".", "/", "~")):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, "config.json")
        if isinstance(found, str):
            return Path(found).parent
        raise ModelError(
            f"{path} is neither a directory here nor in the hub's cache, and a plan downloads nothing: fetch its"
            " config.json, or give random_init with the same sizes"
        )
    raise ModelError(f"there is no directory {path}: the run that writes it has to come first")


def _vocab_size(config: RunConfig) -> int:
    """That of the tokenizer which a run would make. Raises `ModelError` where only the data or a model would tell."""
    tokenizer = config.tokenizer
    if tokenizer is None:
        raise ModelError(
            "random_init has no vocab_size, and how many tokens a stored tokenizer has is not read: give it"
        )
    if tokenizer.kind == "bpe":
        return tokenizer.vocab_size
    if tokenizer.kind == "char" and tokenizer.alphabet is None:
        raise ModelError("the alphabet of the tokenizer is that of the data, which a plan does not read: give alphabet")
    templates = {worker.data_args.template for worker in config.roles().values()}
    special = SPECIAL_TOKENS + len({token for each in templates for token in control_tokens(each)})
    return special + (BYTES if tokenizer.kind == "byte" else len(set(tokenizer.alphabet or "")))


def adapter_parameters(size: ModelSize, lora: LoraSpec) -> int:
    """Parameters of the adapters of a model, and of the modules that are trained in full beside them.

    Of each matrix that is a target, `rank × (inputs + outputs)`.
    """
    count = 0
    for index, layer in enumerate(size.layers):
        for linear in layer.linears:
            if _is_target(f"model.layers.{index}.{linear.path}", lora.targets):
                count += lora.rank * (linear.inputs + linear.outputs)
    for name in lora.extra_modules:
        count += {"embed_tokens": size.embedding, "lm_head": size.vocab_size * size.hidden_size}.get(name, 0)
    return count


def _is_target(path: str, targets: Any) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, path) is not None
    return tuple(targets) == ("all-linear",) or any(path == name or path.endswith(f".{name}") for name in targets)
