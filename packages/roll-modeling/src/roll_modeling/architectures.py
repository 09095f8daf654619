"""Architectures supported by the installed packages, read from their source files.

`roll-core check` uses this module, so neither transformers nor an engine is imported. Checks pass if a package is not
installed, or if its list of architectures is not in the expected place.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CAUSAL_LM = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
IMAGE_TEXT = "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"
"""Mapping of models that also take images. They are trained on text."""
CLASSIFIER = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
"""Mapping used for critics and reward models."""
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
TABLE = re.compile(
    r"nn\.Embedding\(\s*(self\.)?config\.(max_position_embeddings|n_positions)|LearnedPositionalEmbedding\("
    r"|create_sinusoidal_positions\(self\.max_pos|positional_encoding\((self\.)?config\.n_positions"
    r"|nn\.Embedding\((self\.)?max_position_embeddings|nn\.Embedding\((self\.)?max_positions"
)
"""Code of transformers that makes a table of positions."""
FLAT_ATTENTION = "roll_flat"
"""Name in transformers of the attention over tokens without padding, see `attention.flat_attention`."""
ATTENTION_LAYERS = frozenset({"attention", "full_attention", "sliding_attention"})
"""Values of `layer_types` of layers that mix tokens by attention alone."""
MIXES_OTHERWISE = {
    r"\bposition_bias=": "a bias on attention by position",
    r"\bcreate_chunked_causal_mask\b": "attention in chunks",
}
"""Code of transformers for attention that `attention.flat_attention` does not compute."""
OTHER_LAYERS = re.compile(r"conv_state|recurrent_state|LightningAttention|RecurrentBlock|Indexer\(")
"""Code of transformers for layers that mix tokens by states, convolutions or selected keys."""
NEVER_FLAT = frozenset(
    {
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "diffllama",
        "doge",
        "dory",
        "jetmoe",
        "marian",
        "mbart",
        "nemotron",
        "pegasus",
        "plbart",
        "stablelm",
        "whisper",
    }
)
"""Types that cannot be computed flat for reasons that no pattern in their code shows."""
CACHE_PARAMETERS = ("cache", "past_key_values")
"""Names of the parameter that takes a key-value cache: since transformers 5.24, and before."""


def check_buildable(keys: Mapping[str, Any], *mappings: str) -> None:
    """Raise `ValueError` if none of `mappings` of the installed transformers can build the `model_type`.

    `keys`: see `StrategyConfig.check_model`. Models with their own code (`auto_map`) pass.
    """
    model_type = keys.get("model_type")
    if not isinstance(model_type, str) or "auto_map" in keys:
        return
    known = {each for mapping in mappings for each in _classes(mapping)}
    if known and model_type not in known:
        close = difflib.get_close_matches(model_type, known, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"the installed transformers has no language model of model_type {model_type}{hint}")


def check_engine(keys: Mapping[str, Any], known: frozenset[str], engine: str) -> str | None:
    """Raise `ValueError` if an engine supports the architecture neither itself nor through transformers' module.

    `known` are the class names that the engine implements; empty if unknown. Returns why nothing was compared if they
    are unknown, else None.
    """
    given = keys.get("architectures") or _classes(CAUSAL_LM).get(str(keys.get("model_type")))
    names = [given] if isinstance(given, str) else given
    if not known:
        return f"{engine} is not installed here, or another package may add architectures to it"
    if not names or "auto_map" in keys:
        return None
    if not any(each in known or _takes_other_attention(each) for each in names):
        raise ValueError(f"the installed {engine} has no architecture {', '.join(map(str, names))}")
    return None


def check_cached(keys: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a causal language model of transformers without a key-value cache."""
    model_type = keys.get("model_type")
    name, folder = _classes(CAUSAL_LM).get(str(model_type)), _folder(model_type)
    for file in folder.glob("modeling_*.py") if folder and "auto_map" not in keys else ():
        body = file.read_text(encoding="utf-8").partition(f"\nclass {name}(")[2].partition("\nclass ")[0]
        signature = re.search(r"\n    def forward\((.*?)\n    \)", body, flags=re.DOTALL)
        if signature and not re.search(rf"\b({'|'.join(CACHE_PARAMETERS)})\b", signature[1]):
            raise ValueError(f"transformers' {name} does not support a key-value cache")


def check_flat(keys: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a model of transformers that cannot be computed without padding, with the reason.

    `Backbone` decides by running the model; this decides by its code. Models of unknown code pass.
    """
    text = keys.get("text_config")
    keys = {**keys, **text} if isinstance(text, dict) else keys
    model_type = str(keys.get("model_type"))
    code = "" if "auto_map" in keys else _code(model_type)
    mixing = [reason for pattern, reason in MIXES_OTHERWISE.items() if re.search(pattern, code)]
    if "attention_chunk_size" in keys and not keys["attention_chunk_size"] and "attention in chunks" in mixing:
        mixing.remove("attention in chunks")
    layers = next((keys[name] for name in ("layer_types", "layers_block_type") if name in keys), None)
    if OTHER_LAYERS.search(code) and not (isinstance(layers, list) and ATTENTION_LAYERS.issuperset(layers)):
        mixing.append("layers other than attention (layer_types)")
    # The layers of a model that builds its text model by `AutoModel` are in the directory of another type.
    elsewhere = not code or "AutoModel" in code
    if model_type in NEVER_FLAT or not (elsewhere or "ALL_ATTENTION_FUNCTIONS" in code):
        mixing.append("code of its own around attention")
    if mixing:
        raise ValueError(f"a model of type {model_type} requires padding: it has {mixing[0]}")


def key_problems(model_type: str, given: Mapping[str, Any]) -> dict[str, str]:
    """Mistakes in config keys of a `model_type`, by key; none for a type whose fields are not known here."""
    fields = _fields(model_type)
    problems: dict[str, str] = {}
    for key, value in given.items() if fields else ():
        if key not in fields:
            close = difflib.get_close_matches(key, fields, 1)
            problems[key] = f"unknown key of a {model_type}" + (f"; did you mean {close[0]}?" if close else "")
        elif fields[key] and not any(isinstance(value, kind) for kind in fields[key]):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in fields[key])
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
    model_type = keys.get("model_type")
    folder = _folder(model_type) if "auto_map" not in keys else None
    if folder is None or not any(map(_has_table, folder.glob("modeling_*.py"))):
        return None
    known = [keys[name] for name in POSITIONS if name in keys] or [_config_default(model_type, *POSITIONS)]
    return known[0] if isinstance(known[0], int) else None


@lru_cache
def _has_table(file: Path) -> bool:
    return TABLE.search(file.read_text(encoding="utf-8")) is not None


def has_experts(keys: Mapping[str, Any]) -> bool:
    """True for a mixture of experts, also if the number of experts is the default of its `model_type`."""
    return num_experts(keys) > 0


def num_experts(keys: Mapping[str, Any]) -> int:
    """Number of routed experts per layer, which may be the default of the `model_type`; 0 for other models."""
    text = keys.get("text_config")
    keys = {**keys, **text} if isinstance(text, dict) else keys
    given = [keys[name] for name in NUMBER_OF_EXPERTS if name in keys]
    found = next(filter(None, given), 0) if given else _config_default(keys.get("model_type"), *NUMBER_OF_EXPERTS)
    return int(found or 0)


def package_folder(name: str) -> Path | None:
    """Installation directory of a top-level package, found without importing it; None if it is not installed."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    folders = found.submodule_search_locations if found is not None else None
    return Path(folders[0]) if folders else None


def assigned(file: Path) -> Iterator[tuple[str, ast.expr]]:
    """Names and values of a module's top-level assignments; none if the file cannot be read."""
    for each in _module(file).body:
        if isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None:
            target = each.target if isinstance(each, ast.AnnAssign) else each.targets[0]
            if isinstance(target, ast.Name):
                yield target.id, each.value


@lru_cache
def _module(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def pairs(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Pairs of strings in two-element tuples and dictionaries. A tuple as second element counts as its first string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            found: list[tuple[ast.expr | None, ast.expr]] = list(zip(node.keys, node.values, strict=True))
        elif isinstance(node, ast.Tuple) and len(node.elts) == 2:
            found = [(node.elts[0], node.elts[1])]
        else:
            continue
        for key, value in found:
            name = value.elts[0] if isinstance(value, ast.Tuple) and value.elts else value
            if isinstance(key, ast.Constant) and isinstance(name, ast.Constant):
                yield str(key.value), str(name.value)


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

# -- transformers ------------------------------------------------------------------------------------------------------


@lru_cache
def _folder(model_type: object) -> Path | None:
    """Directory of a `model_type` in transformers; None if there is none."""
    found, name = package_folder("transformers"), str(model_type)
    if found is None:
        return None
    for file in ("auto_mappings.py", "configuration_auto.py"):
        for listed, tree in assigned(found / "models" / "auto" / file):
            if listed == "SPECIAL_MODEL_TYPE_TO_MODULE_NAME":
                name = dict(pairs(tree)).get(name, name)
    folder = found / "models" / name.replace("-", "_")
    return folder if folder.is_dir() else None


@lru_cache
def _configs() -> Mapping[str, str]:
    """Config class name of each `model_type`."""
    folder, found = package_folder("transformers"), dict[str, str]()
    if folder is None:
        return found
    for name in ("auto_mappings.py", "configuration_auto.py"):  # transformers 4 has one of the two
        tree = _module(folder / "models" / "auto" / name)
        found |= {key: value for key, value in pairs(tree) if value.endswith("Config")}
    return found


@lru_cache
def _classes(mapping: str) -> Mapping[str, str]:
    """Class that an auto class builds for each `model_type`. Types that share a config class share it."""
    folder, configs = package_folder("transformers"), _configs()
    if folder is None:
        return {}
    values = assigned(folder / "models" / "auto" / "modeling_auto.py")
    named = {key: value for name, tree in values if name == mapping for key, value in pairs(tree)}
    by_config = {configs[key]: value for key, value in named.items() if key in configs}
    return {key: by_config[config] for key, config in configs.items() if config in by_config}


@lru_cache
def _code(model_type: str) -> str:
    """Code of the classes that make up a language model of transformers; empty if it is not in the type's directory."""
    folder, name = _folder(model_type), _classes(CAUSAL_LM).get(model_type) or _classes(IMAGE_TEXT).get(model_type)
    classes: dict[str, str] = {}
    for file in folder.glob("modeling_*.py") if folder else ():
        text = file.read_text(encoding="utf-8")
        found = re.finditer(r"^class (\w+).*?(?=^\S|\Z)", text, flags=re.MULTILINE | re.DOTALL)
        classes |= {match[1]: match[0] for match in found}
    used, names = dict[str, str](), [str(name)]
    while names:
        name = names.pop()
        if name in classes and name not in used:
            used[name] = classes[name]
            names += re.findall(r"\b[A-Z]\w+", classes[name])
    return "\n".join(used.values())


def _takes_other_attention(architecture: str) -> bool:
    """True if engines can run the architecture through transformers, with their own attention in place.

    False for a class whose attention cannot be replaced, and for a class that transformers does not have. Names that
    begin with `Transformers` (the engines' own wrappers) count as supported.
    """
    folder = package_folder("transformers")
    for file in folder.glob("models/*/modeling_*.py") if folder else ():
        text = file.read_text(encoding="utf-8")
        if f"\nclass {architecture}(" in text:
            own = re.search(r"^class \w*Attention\w*\(nn\.Module\)", text, flags=re.MULTILINE)
            return own is None or "_supports_attention_backend" in text or "ALL_ATTENTION_FUNCTIONS" in text
    return architecture.startswith("Transformers")


@lru_cache
def _config_default(model_type: object, *names: str) -> Any:
    """Default of the first of these config keys that the `model_type` has and that is not 0; None if it has none."""
    folder, config = _folder(model_type), _configs().get(str(model_type))
    for file in folder.glob("configuration_*.py") if folder else ():
        for node in ast.walk(_module(file)):
            if isinstance(node, ast.ClassDef) and node.name == config:
                return next((value for name, value in _defaults(node) if name in names and value), None)
    return None


@lru_cache
def _fields(model_type: str) -> Mapping[str, tuple[type, ...]]:
    """Keys of a `model_type`'s config, each with the types of its values; () if any. Empty if they are not known."""
    transformers, folder, config = package_folder("transformers"), _folder(model_type), _configs().get(model_type)
    found: dict[str, tuple[type, ...]] = dict.fromkeys(LEGACY_KEYS, ())
    if transformers is None or folder is None:
        return {}
    for name in ("configuration_utils.py", "modeling_rope_utils.py"):
        for node in _module(transformers / name).body:
            if isinstance(node, ast.ClassDef):
                found |= dict.fromkeys(_declared(node), ())
    for file in folder.glob("configuration_*.py"):
        for node in _module(file).body:
            if isinstance(node, ast.ClassDef) and node.name == config:
                own = {ast.unparse(each) for each in node.bases} <= {"PreTrainedConfig", "PretrainedConfig"}
                return found | _declared(node) if own else {}
    return {}


def _declared(config: ast.ClassDef) -> dict[str, tuple[type, ...]]:
    """Fields, parameters and other names of fields that a config class declares, each with its types; () if any."""
    found: dict[str, tuple[type, ...]] = {}
    for node in config.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [part.partition("[")[0].strip() for part in _outer(ast.unparse(node.annotation))]
            kinds = [kind for name in names for kind in TYPES.get(name, (object,))]
            found[node.target.id] = () if object in kinds else tuple(dict.fromkeys(kinds))
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            every = (*node.args.args, *node.args.kwonlyargs)
            found |= {each.arg: () for each in every if each.arg not in ("self", "kwargs") and each.arg not in found}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "attribute_map":
            found |= {key: () for key, _ in pairs(node.value)}
    return found


def _outer(annotation: str) -> list[str]:
    """Members of a union, without splitting the arguments of its generic types."""
    return re.sub(r"\[[^\[\]]*(\[[^\[\]]*\][^\[\]]*)*\]", "", annotation).split("|")


def _defaults(config: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """Default values of config fields (transformers 5) and of parameters (transformers 4)."""
    for node in ast.walk(config):
        if isinstance(node, ast.arguments):
            names = [each.arg for each in node.args]
            found = list(zip(names[len(names) - len(node.defaults) :], node.defaults, strict=True))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found = [(node.target.id, node.value)] if node.value is not None else []
        else:
            continue
        yield from ((name, value.value) for name, value in found if isinstance(value, ast.Constant))
