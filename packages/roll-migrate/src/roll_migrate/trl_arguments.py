"""Reads the arguments of a run of TRL: of a Python script, a YAML file, or a command line.

Whatever the file, arguments have the names of TRL's configs and of its command line. `reward_funcs` has the keys of
roll-core that replace the functions, and `train_dataset` the name of a file or of a data set of the hub.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from roll_core.config.source import read_source
from roll_core.errors import ConfigError, ConfigProblem, UnsupportedError
from roll_migrate import trl_keys as trl
from roll_migrate.python_reader import Call, Computed, Named, PythonReader, computed_in
from roll_migrate.scripts import read_script

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_migrate.shell_reader import Word

TRAINERS = {f"{name}Trainer": name.lower() for name in ("GRPO", "RLOO", "SFT", "DPO", "KTO", "Reward")}
POSITIONAL = {
    trl.GRPO: ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    trl.RLOO: ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    trl.DPO: ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset"),
    trl.KTO: ("model", "ref_model", "args", "train_dataset", "eval_dataset"),
    trl.SFT: ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
    trl.REWARD: ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
}
"""Order of each trainer's parameters."""
MARKS = {
    trl.GRPO: {"num_generations", "max_completion_length", "reward_funcs", "importance_sampling_level"},
    trl.KTO: {"desirable_weight", "undesirable_weight"},
    trl.REWARD: {"center_rewards_coefficient"},
    trl.SFT: {"packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field"},
    trl.DPO: {"precompute_ref_log_probs", "f_divergence_type", "label_smoothing", "ld_alpha"},
}
"""Arguments by which a YAML file is that of a trainer."""
LISTS = frozenset(
    {"lora_target_modules", "lora_modules_to_save", "lora_target_parameters", "report_to", "loss_type"}
    | {"loss_weights", "reward_funcs", "reward_weights", "reward_clip_range"}
)
"""Flags with several values."""
ACCELERATE_CONFIGS: dict[str, dict[str, Any]] = {
    "single_gpu": {"num_processes": 1},
    "multi_gpu": {"distributed_type": "MULTI_GPU", "num_processes": 8},
    **{f"fsdp{version}": {"distributed_type": "FSDP", "num_processes": 8} for version in (1, 2)},
    **{
        f"zero{stage}": {
            "distributed_type": "DEEPSPEED",
            "num_processes": 8,
            "deepspeed_config": {"zero_stage": stage},
        }
        for stage in (1, 2, 3)
    },
}
"""Configs of accelerate that TRL contains: those of `--accelerate_config NAME`."""
_SCRIPT = re.compile(r"(?:.*/)?(grpo|rloo|sft|dpo|kto|reward|reward_modeling)(?:_\w+)?\.py")
_MODULE = re.compile(r"trl\.scripts\.(grpo|rloo|sft|dpo|kto|reward)")
_FLAG = re.compile(r"--([A-Za-z_][\w-]*)(?:=(.*))?", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")


@dataclass(slots=True)
class Arguments:
    """Arguments of a run, with their places."""

    trainer: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def set(self, name: str, value: Any, where: str) -> None:
        """Set an argument; null counts as missing."""
        if value is not None:
            self.values[name], self.places[name] = value, where


# -- Python ------------------------------------------------------------------------------------------------------------


def read_python(path: Path) -> Arguments:
    """Arguments of the one trainer of a Python script.

    Raises `UnsupportedError` without one, or if its config is not in the script.
    """
    reader = PythonReader(path)
    calls = [call for call in reader.calls if call.name in TRAINERS]
    others = [call for call in reader.calls if re.fullmatch(r"\w+Trainer", call.name) and call.name not in TRAINERS]
    if not calls or any(call.name != calls[0].name for call in calls) or len({call.where for call in calls}) > 1:
        names = ", ".join(dict.fromkeys(f"{call.name} ({call.where})" for call in (calls or others)))
        raise UnsupportedError(f"{path}: expected one of {', '.join(TRAINERS)}, found {names or 'none'}")
    trainer = calls[-1]
    run = Arguments(TRAINERS[trainer.name])
    arguments = dict(zip(POSITIONAL[run.trainer], trainer.args, strict=False)) | trainer.kwargs
    places = {name: trainer.places.get(name, trainer.where) for name in arguments}
    config = arguments.pop("args", None)
    if isinstance(config, Call) and config.name.endswith("Config"):
        for name, value in config.kwargs.items():
            run.set(name, value, config.places.get(name, config.where))
        if config.args:
            run.set("output_dir", config.args[0], config.where)
    elif config is not None:
        unknown = next(computed_in(config), Computed("it is no call of a config", places["args"]))
        raise UnsupportedError(
            f"{unknown.where}: the trainer's arguments are not in the script ({unknown.why}): import the shell script"
            " or the YAML file that starts it"
        )
    for name in ("train_dataset", "eval_dataset"):
        if arguments.get(name) is not None:
            _dataset(run, name, arguments.pop(name), places[name])
    _model(run, arguments.pop("model", None), places.get("model", trainer.where))
    if isinstance(adapter := arguments.pop("peft_config", None), Call) and adapter.name == "LoraConfig":
        run.set("peft_config.r", adapter.kwargs.get("r", 8), adapter.places.get("r", adapter.where))
        for name, value in adapter.kwargs.items():
            run.set(f"peft_config.{name}", value, adapter.places.get(name, adapter.where))
    elif adapter is not None:
        run.set("peft_config", adapter, places["peft_config"])
    if arguments.get("reward_funcs"):
        _rewards(run, arguments.pop("reward_funcs"), places["reward_funcs"], guarded=trainer.guarded)
    for name, value in arguments.items():
        run.set(name, value, places[name])
    run.values = {name: _plain(value) for name, value in run.values.items()}
    return run


def _plain(value: Any) -> Any:
    """Values of YAML: a class or function by its last name, such as `torch.bfloat16`."""
    if isinstance(value, Named):
        return value.name
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, dict) else value


def _model(run: Arguments, model: Any, where: str) -> None:
    if isinstance(model, Call) and model.name == "from_pretrained":
        name = model.args[0] if model.args else model.kwargs.get("pretrained_model_name_or_path")
        options = {key: value for key, value in model.kwargs.items() if key != "pretrained_model_name_or_path"}
        if options:
            run.set("model_init_kwargs", options, model.where)
        model = name
    run.set("model_name_or_path", model, where)


def _dataset(run: Arguments, name: str, data: Any, where: str) -> None:
    """The source of a data set, and what the script does with it."""
    steps: list[str] = []
    split: str | None = None
    while isinstance(data, Call):
        if data.name in ("load_dataset", "from_json", "from_csv", "from_parquet"):
            source, where = _loaded(data, split), data.where
            if name == "train_dataset" and data.kwargs.get("streaming") is True:
                run.set("dataset_streaming", True, where)
            break
        if data.name == "[]" and isinstance(data.of, Call) and data.of.name == "load_dataset":
            split = data.args[0] if isinstance(data.args[0], str) else None
        elif data.name == "[]":
            steps.append(f"[{data.args[0]!r}]")
        elif data.name != "shuffle":
            steps.append(f"{data.name}(…)")
        data = data.of
    else:
        source, steps = Computed("it is made by the script: save it with dataset.to_json", where), []
    run.set(name, source, where)
    if steps:
        run.set(f"{name}.steps", ", then ".join(reversed(steps)), where)


FILES = ("json", "parquet", "csv", "arrow")


def _loaded(call: Call, split: str | None) -> Any:
    """Files or the hub's data set of `load_dataset`."""
    names = ("path", "name", "data_dir", "data_files", "split")
    arguments = dict(zip(names, call.args, strict=False)) | call.kwargs
    path = arguments.get("path", arguments.get("path_or_paths"))
    if call.name != "load_dataset":
        return path
    if path in FILES:
        files = arguments.get("data_files")
        split_name = arguments.get("split") or split or "train"
        return files.get(split_name) if isinstance(files, dict) else files
    return hub_name(path, arguments.get("name"), arguments.get("split") or split, arguments.get("revision"), call.where)


def hub_name(path: Any, subset: Any, split: Any, revision: Any, where: str) -> Any:
    """`hf://OWNER/NAME/SUBSET?split=…` of a data set of the hub."""
    if unknown := next(computed_in([path, subset, split, revision]), None):
        return unknown
    if not isinstance(path, str) or path.count("/") != 1:
        return Computed(f"{path!r} is no OWNER/NAME of a data set of the hub", where)
    query = [
        f"{name}={quote(str(value), safe='[]:+')}"
        for name, value in (("split", split), ("revision", revision))
        if value
    ]
    return f"hf://{path}" + (f"/{subset}" if subset else "") + (f"?{'&'.join(query)}" if query else "")


# -- rewards -----------------------------------------------------------------------------------------------------------


def _rewards(run: Arguments, functions: Any, where: str, *, guarded: bool = True) -> None:
    """Reward functions stay where they are; several are the components of one sum."""
    listed = functions if isinstance(functions, list) else [functions]
    if any(isinstance(function, dict) for function in listed):
        raise _wrong(where, "reward_funcs", "found a mapping, expected a function or a list of functions")
    weights = run.values.get("reward_weights") or [1.0] * len(listed)
    components: dict[str, dict[str, Any]] = {}
    penalty: dict[str, Any] = {}
    rest: list[Any] = []
    if not isinstance(weights, list) or len(weights) != len(listed):
        listed, weights, rest = [], [], listed  # TRL refuses them, too
    for function, weight in zip(listed, weights, strict=False):
        if isinstance(function, str) and "/" not in function:
            module, _, name = function.rpartition(".")
            function = Named(module or "trl.rewards", name)
        if isinstance(function, Named) and function.name == "get_soft_overlong_punishment":
            function = Call(function.name, None, [], {"max_completion_len": 1280, "soft_punish_cache": 256}, where)
        if isinstance(function, Named):
            starts_training = function.local and not guarded
            setting = {"reward": "function", "function": "???" if starts_training else function.target}
            components[function.name] = setting | ({"weight": weight} if weight != 1 else {})
            if starts_training:
                run.notes["reward_funcs"] = (
                    f"importing {function.module} would start its training: put the trainer below if __name__, or the"
                    " function into a module of its own, and set module:function"
                )
        elif isinstance(function, Call) and function.name == "get_soft_overlong_punishment" and weight == 1:
            names = (
                dict(zip(("max_completion_len", "soft_punish_cache"), function.args, strict=False)) | function.kwargs
            )
            penalty = {"l_max": names.get("max_completion_len"), "l_cache": names.get("soft_punish_cache")}
        elif isinstance(function, str) and len(listed) == 1:
            components["model"] = {
                "reward": "model",
                "model_args": {"model_name_or_path": function},
                "strategy_args": {"strategy_name": "hf_infer"},
            }
        else:
            rest.append(function)
    written: dict[str, Any] = {"soft_overlong_penalty": penalty} if penalty else {}
    if len(components) == 1:
        written["rewards"] = components
    elif components:
        written["rewards"] = {"trl": {"reward": "composite", "components": components}}
    run.set("reward_funcs", rest or written, where)


# -- YAML and command lines --------------------------------------------------------------------------------------------


def read_yaml(path: Path, trainer: str = "") -> Arguments:
    """Arguments of `trl TRAINER --config FILE`."""
    source = read_source(path, str(path))
    data = dict(source.data)
    if trainer and trainer not in trl.TRAINERS:
        raise _wrong("command line", "trainer", f"found {trainer}, expected {', '.join(trl.TRAINERS)}")
    marked = [name for name, marks in MARKS.items() if marks & data.keys()]
    named = [name for name in trl.TRAINERS if name in path.stem.lower()]
    chosen = trainer or next(iter([*marked, *named]), "")
    if not chosen:
        hint = f"add --set trainer=NAME: {', '.join(trl.TRAINERS)}"
        raise ConfigError([ConfigProblem(str(path), "", "names no trainer of TRL", hint, "ROLL-C020")])
    run = Arguments(chosen)
    _flat(run, data, {name: source.locate((name,), key=True) for name in data})
    return run


def _flat(run: Arguments, values: Mapping[str, Any], places: Mapping[str, str]) -> None:
    """Arguments of TRL's command line, whose rewards and data sets have other names."""
    data = dict(values)
    data.pop("env", None)
    reward_key = next((key for key in ("reward_funcs", "reward_model_name_or_path") if data.get(key)), "")
    rewards = data.pop(reward_key, None)
    name, subset = data.pop("dataset_name", None), data.pop("dataset_config", None)
    splits = {"train": data.pop("dataset_train_split", None), "eval": data.pop("dataset_test_split", None)}
    for key, value in data.items():
        run.set(key, value, places[key])
    if rewards:
        _rewards(run, rewards, places[reward_key])
    where = places.get("dataset_name", "")
    for part, split in splits.items() if name else ():
        if part == "train" or data.get("eval_strategy", "no") != "no":
            default = "test" if part == "eval" else None
            files = Path(str(name)).suffix in (".jsonl", ".json", ".parquet", ".csv")
            run.set(f"{part}_dataset", name if files else hub_name(name, subset, split or default, None, where), where)


def read_shell(path: Path, variables: Mapping[str, str]) -> Arguments:
    """Arguments of the one command of TRL that a shell script starts, with its YAML file and that of accelerate."""
    script = read_script(path, variables)
    launches = []
    for launch in script.launches():
        texts = launch.texts
        if match := _MODULE.fullmatch(launch.program) or _SCRIPT.fullmatch(launch.program):
            launches.append((launch, match[1].partition("_")[0], launch.words, launch.options()))
        elif not launch.program and Path(texts[0]).name == "trl" and len(texts) > 1 and texts[1] in trl.TRAINERS:
            launches.append((launch, texts[1], launch.words[2:], ()))
    started = script.one([launch for launch, *_ in launches], f"trl {'|'.join(trl.TRAINERS)}, or a script of TRL")
    _, trainer, words, options = next(item for item in launches if item[0] is started)
    values, places = _flags(words)
    run = Arguments(trainer)
    if isinstance(config := values.pop("config", None), str):
        file = path.parent / config if (path.parent / config).is_file() else Path(config)
        source = read_source(file, str(file))
        values = dict(source.data) | values
        places = {name: source.locate((name,), key=True) for name in source.data} | places
    named = next((text.partition("=")[2] for text in options if text.startswith("--config_file=")), "")
    named = str(values.pop("accelerate_config", named) or "")
    accelerate = dict(ACCELERATE_CONFIGS.get(named, {}))
    if named and not accelerate:
        read_accelerate(run, path.parent / named if (path.parent / named).is_file() else Path(named))
        accelerate = run.values["accelerate"]
    count = re.compile(r"--(?:num_processes|nproc[_-]per[_-]node)=(\d+)")
    counted = [match[1] for text in options if (match := count.fullmatch(text))]
    processes = values.pop("num_processes", int(counted[0]) if counted else None)
    if processes or accelerate:
        run.set("accelerate", accelerate | ({"num_processes": processes} if processes else {}), started.where)
    _flat(run, values, places)
    return run


def _flags(words: Sequence[Word]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of flags, and their places."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        match = _FLAG.fullmatch(word.text)
        if match is None:
            raise _wrong(word.where, "", f"{word.text} is the value of no flag")
        name = match[1].replace("-", "_")
        texts = [] if match[2] is None else [word.value(name, match[2])]
        while match[2] is None and i < len(words) and not words[i].text.startswith("--"):
            texts.append(words[i].value(name, words[i].text))
            i += 1
        items = [_scalar(text) for text in texts]
        value = items if name in LISTS and len(items) != 1 else items[0] if items else True
        if not items and name.startswith("no_"):
            name, value = name.removeprefix("no_"), False
        values[name], places[name] = value, word.where
    return values, places


def _scalar(text: str) -> Any:
    if _NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.startswith(("{", "[")):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def accelerate_beside(path: Path) -> Path | None:
    """The one config of accelerate in the directory of a file."""
    files = [file for file in sorted(path.parent.glob("*.y*ml")) if file != path and _is_accelerates(file)]
    return files[0] if len(files) == 1 else None


def _is_accelerates(file: Path) -> bool:
    try:
        return re.search(r"^distributed_type:", file.read_text(encoding="utf-8"), re.MULTILINE) is not None
    except (OSError, UnicodeDecodeError):
        return False


def read_accelerate(run: Arguments, file: Path) -> None:
    """Add a config of accelerate."""
    source = read_source(file, str(file))
    run.set("accelerate", dict(source.data), str(file))
    for section, value in source.data.items():
        run.places[f"accelerate.{section}"] = source.locate((section,), key=True)
        for name in value if isinstance(value, dict) else ():
            run.places[f"accelerate.{section}.{name}"] = source.locate((section, name), key=True)


def _wrong(where: str, name: str, message: str) -> ConfigError:
    return ConfigError([ConfigProblem(where, name, message, code="ROLL-C013")])
