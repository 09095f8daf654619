"""Keys of a model's transformers config that are known without loading the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def is_hub_id(source: str) -> bool:
    """True if `source`, given that no such directory exists, can be an id of the Hugging Face Hub."""
    return source.count("/") == 1 and not source.startswith((".", "/", "~"))


def model_keys(model_args: object, pretrain: object) -> Mapping[str, Any]:
    """Config keys for raw `model_args` and the pipeline's `pretrain`. Empty for a model that is not named or not
    local."""
    given = model_args if isinstance(model_args, dict) else {}
    overrides = given.get("model_config_kwargs")
    keys = given.get("random_init")
    if not isinstance(keys, dict):
        keys = _stored(given.get("model_name_or_path") or pretrain)
    return {**keys, **overrides} if keys and isinstance(overrides, dict) else keys


def _stored(path: object) -> dict[str, Any]:
    if not isinstance(path, str):
        return {}
    try:
        found = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # reported when the model is built
        return {}
    return found if isinstance(found, dict) else {}
