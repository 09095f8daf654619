"""Size of each role's model, from the config or from local files. Downloads nothing and loads no weights."""

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
"""Number of special tokens of tokenizers that ROLL trains (`data.tokenizers`)."""
BYTES = 256


def size_of(spec: ModelSpec, config: RunConfig) -> ModelSize:
    """Size of a model from `random_init` or from its local or cached `config.json`.

    Raises `ModelError` if the size cannot be determined from these.
    """
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
    """Number of ids that a model can sample: the rows of its embedding, or `tokens` if its size is unknown.

    Embeddings are often padded beyond the `tokens` of the tokenizer.
    """
    try:
        return max(tokens, size_of(spec, config).vocab_size)
    except RollError:
        return tokens


def _folder(path: str) -> Path:
    """The model's directory, or its snapshot in the Hugging Face cache. Raises `ModelError` if neither exists."""
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
    """Vocabulary size of the tokenizer that a run would train. Raises `ModelError` if it depends on data or a model."""
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
    """Number of LoRA parameters, plus those of `extra_modules`, which are trained in full.

    Each target matrix adds `rank × (inputs + outputs)`.
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
