"""What is known about model types before anything is loaded: facts of transformers, and what was tried with a strategy.

Both are in the files `models.json` of the installed packages, which `tests/models` writes from what ran. `roll-core
check` reads them and imports neither transformers nor an engine. A file has the versions with which it was made: with
newer ones, what did not work is a warning.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

CAUSAL_LM = "text"
IMAGE_TEXT = "image"
"""Models that also take images. They are trained on text."""
CLASSIFIER = "classifier"
"""Models with a classifier, for critics and reward models."""
NUMBER_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Config keys of transformers that give the number of experts."""
LEGACY_KEYS = frozenset(
    {"rope_theta", "rope_scaling", "num_labels", "partial_rotary_factor", "per_layer_config", "head_dim"}
)
"""Config keys that transformers reads although not every config class declares them as fields."""
SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
"""Config keys whose values are at least 1."""
POSITIONS = ("max_position_embeddings", "n_positions")
"""Config keys of transformers that give the number of positions."""
FLAT_ATTENTION = "roll_flat"
"""Name in transformers of the attention over tokens without padding, see `attention.flat_attention`."""
ATTENTION_LAYERS = frozenset({"attention", "full_attention", "sliding_attention"})
"""Values of `layer_types` of layers that mix tokens by attention alone."""
CACHE_PARAMETERS = ("cache", "past_key_values")
"""Names of the parameter that takes a key-value cache: since transformers 5.24, and before."""
ROUNDING = 1e-4
"""Largest difference of fp32 logprobs, in nats, that rounding explains."""
ON_A_CPU = "on a CPU: "
"""Beginning of the reason why an engine could not run here, which says nothing about accelerators."""
TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
    "dict": (dict,),
    "list": (list, tuple),
    "tuple": (list, tuple),
    "None": (type(None),),
}
"""Types of the values that a config file can have for a name in an annotation."""


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """The `models.json` of a package."""

    made_with: Mapping[str, str]
    """Versions of distributions."""
    models: Mapping[str, Mapping[str, Any]]
    """Row of each model type. A number is the largest error of what worked, a text the reason why it did not."""
    types: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Only of `roll_modeling`: what transformers' classes say about each model type."""
    every: str = ""
    """Only of `roll_modeling`: config keys of every model type."""

    def doubt(self) -> str:
        """Why another result is possible here: a distribution is not installed, or is newer. Empty if there is none."""
        for name, then in self.made_with.items():
            now = _installed(name) or _installed(f"{name}-cpu")
            if not now:
                return f"{name} is not installed here"
            from packaging.version import Version

            if Version(Version(now).public) > Version(then):
                return f"{name} {now} is installed"
        return ""

    def versions(self) -> str:
        """The versions with which the file was made."""
        return ", ".join(f"{name} {release}" for name, release in self.made_with.items())


@cache
def model_table(package: str) -> ModelTable | None:
    """The table that a top-level package brings; None if it has none. Does not import the package."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(folder, "models.json")
        if file.is_file():
            return ModelTable(**json.loads(file.read_text(encoding="utf-8")))
    return None


def _installed(distribution: str) -> str:
    """The installed version; empty if there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _facts() -> ModelTable:
    return model_table(__name__.partition(".")[0]) or ModelTable(made_with={}, models={})


def check_buildable(keys: Mapping[str, Any], *kinds: str) -> str | None:
    """Raise `ValueError` if transformers cannot build the `model_type` as one of `kinds`.

    `keys`: see `StrategyConfig.check_model`. Models with their own code (`auto_map`) pass. Unless the
    installed transformers is known to be at most as new as the table, return a warning instead.
    """
    model_type, facts = _known_type(keys), _facts()
    if not model_type or not facts.types:
        return None
    known = [name for name, facts_of_type in facts.types.items() if set(kinds) & set(facts_of_type["builds"].split())]
    if model_type in known:
        return None
    close = difflib.get_close_matches(model_type, known, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    what = "sequence classifier" if kinds == (CLASSIFIER,) else "language model"
    problem = f"{facts.versions()} has no {what} of model_type {model_type}"
    if doubt := facts.doubt():
        return f"{problem}, but {doubt}{hint}"
    raise ValueError(problem + hint)


def check_tried(keys: Mapping[str, Any], package: str, *columns: str) -> str | None:
    """Raise `ValueError` if one of `columns` of the package's table says that the model's type did not work.

    Returns a warning for one whose logprobs differ, and instead of the error unless the installed versions are known to
    be at most as new as the table. A type that was never tried is a warning too, if `start` is among the columns. None
    without a table.
    """
    model_type, table = _known_type(keys), model_table(package)
    if not model_type or table is None:
        return None
    row = table.models.get(model_type)
    if row is None:
        if "start" not in columns:
            return None
        return f"was never tried with a model of type {model_type}: docs/models.md has the types that were"
    warnings = []
    for column in columns:
        value = row.get(column, 0.0)
        if isinstance(value, str):
            problem = f"a model of type {model_type} did not work with {table.versions()} ({column}): {value}"
            if value.startswith(ON_A_CPU):
                warnings.append(problem)
            elif doubt := table.doubt():
                warnings.append(f"{problem}; {doubt}")
            else:
                raise ValueError(problem)
        elif value > ROUNDING:
            warnings.append(
                f"logprobs of a model of type {model_type} differ from the trainer's by up to {value:g}: transformers'"
                f" own decoding differs from its pass over whole sequences by {row['transformers']:g}"
            )
    return joined(*warnings)


def check_lora(keys: Mapping[str, Any], package: str, targets: object) -> str | None:
    """`check_tried` of the column `lora`, which was made with `lora_target: all-linear`.

    An error is a warning for other targets.
    """
    try:
        return check_tried(keys, package, "lora")
    except ValueError as error:
        if targets == "all-linear":
            raise
        return f"{error} (with lora_target: all-linear)"


def joined(*warnings: str | None) -> str | None:
    """The warnings as one; None if there are none."""
    return "; ".join(dict.fromkeys(warning for warning in warnings if warning)) or None


def untrained(keys: Mapping[str, Any]) -> str | None:
    """A warning if parameters of the model's type get no gradient from transformers' code."""
    names = _facts().models.get(_known_type(keys), {}).get("untrained", ())
    if not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"training does not change {names[0]}{more}: transformers computes no gradient of them"


def check_flat(keys: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a model of transformers that cannot be computed without padding, with the reason.

    `Backbone` decides by running the model; this decides by what ran. A type with layers of several kinds passes if
    `layer_types` or `attention_chunk_size` make all of them plain attention.
    """
    text = keys.get("text_config")
    merged = {**keys, **text} if isinstance(text, dict) else keys
    rows = _facts().models
    reason = (rows.get(_known_type(keys)) or rows.get(_known_type(merged), {})).get("padded")
    layers = next((merged[name] for name in ("layer_types", "layers_block_type") if name in merged), None)
    only_attention = isinstance(layers, list) and ATTENTION_LAYERS.issuperset(layers)
    if reason and not only_attention and not ("attention_chunk_size" in merged and not merged["attention_chunk_size"]):
        raise ValueError(f"a model of type {keys['model_type']} requires padding: {reason}")


def key_problems(model_type: str, overrides: Mapping[str, Any]) -> dict[str, str]:
    """Mistakes in config keys of a `model_type`, by key; none for a type whose fields are not known here."""
    fields, doubt = _fields(model_type), _facts().doubt()
    problems: dict[str, str] = {}
    for key, value in overrides.items() if fields else ():
        kinds = fields.get(key)
        if kinds is None:
            close = difflib.get_close_matches(key, fields, 1)
            if close or not doubt:
                problems[key] = f"unknown key of a {model_type}" + (f"; did you mean {close[0]}?" if close else "")
        elif kinds and not any(isinstance(value, kind) for kind in kinds):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            problems[key] = f"found {value!r}, expected {names}"
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            problems[key] = f"found {value}, expected a number of at most 64 bits"
        elif key in SIZES and isinstance(value, int) and value < 1:
            problems[key] = f"found {value}, expected at least 1"
    return problems


def check_positions(keys: Mapping[str, Any], prompt: int, response: int) -> None:
    """Raise `ValueError` if prompt and response together exceed the table in which the model looks positions up."""
    num_positions = position_table(keys)
    if num_positions is not None and num_positions < prompt + response:
        raise ValueError(
            f"prompt_length {prompt} + response_length {response} = {prompt + response} tokens, but a model of type"
            f" {keys['model_type']} has {num_positions} positions, one for each row of a table: lower them"
        )


def position_table(keys: Mapping[str, Any]) -> int | None:
    """Number of rows of the table of a model that looks its positions up (GPT-2, OPT); None for other models.

    A later position has no row, so the pass fails. Rotary embeddings compute every position.
    """
    default = _facts().models.get(_known_type(keys), {}).get("positions")
    known = [keys[name] for name in POSITIONS if name in keys] or [default]
    return known[0] if default and isinstance(known[0], int) else None


def has_experts(keys: Mapping[str, Any]) -> bool:
    """True for a mixture of experts, also if the number of experts is the default of its `model_type`."""
    return num_experts(keys) > 0


def num_experts(keys: Mapping[str, Any]) -> int:
    """Number of routed experts per layer, which may be the default of the `model_type`; 0 for other models."""
    text = keys.get("text_config")
    keys = {**keys, **text} if isinstance(text, dict) else keys
    counts = [keys[name] for name in NUMBER_OF_EXPERTS if name in keys]
    default = _facts().types.get(str(keys.get("model_type")), {}).get("experts", 0)
    return int((next(filter(None, counts), 0) if counts else default) or 0)


def sliding_window(keys: Mapping[str, Any]) -> int | None:
    """`sliding_window` of the config, or the default of its `model_type`; None without a window."""
    window = keys.get("sliding_window", _facts().types.get(_known_type(keys), {}).get("window"))
    return window if isinstance(window, int) else None


def _known_type(keys: Mapping[str, Any]) -> str:
    """The `model_type`; empty if it is not given, or if the model brings its own code."""
    model_type = keys.get("model_type")
    return model_type if isinstance(model_type, str) and "auto_map" not in keys else ""


@cache
def _fields(model_type: str) -> Mapping[str, tuple[type, ...]]:
    """Keys of a `model_type`'s config, each with the types of its values; () if any. Empty if they are not known."""
    facts = _facts()
    if model_type not in facts.types:
        return {}
    fields: dict[str, tuple[type, ...]] = dict.fromkeys((*LEGACY_KEYS, *facts.every.split()), ())
    for kinds, names in facts.types[model_type]["fields"].items():
        types = tuple(kind for name in kinds.split("|") if name for kind in TYPES[name])
        fields |= dict.fromkeys(names.split(), types)
    return fields
