"""Converts a config of verl's PPO or SFT trainer to roll-core's, and reports the outcome for each of its keys.

A YAML file may have only overrides, or be the whole composed config. Any other file is a shell script that starts a
trainer with Hydra overrides: `data.train_batch_size=64`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import yaml

from roll_core.config.compose import compose
from roll_core.config.positions import FileLayer, Positions
from roll_core.config.source import Loader, read_source
from roll_core.errors import ConfigError, ConfigProblem, UnsupportedError
from roll_core.plugins.targets import schema_of
from roll_core.spec.config import RunConfig
from roll_core.spec.providers import PipelineProvider
from roll_migrate import verl_keys as verl
from roll_migrate import verl_sft as sft
from roll_migrate.conversion import (
    Conversion,
    ImportedConfig,
    did_you_mean,
    leaf_paths,
    put,
    table_paths,
    with_environment,
)
from roll_migrate.rules import Outcome, value_at
from roll_migrate.scripts import read_script
from roll_migrate.shared_rules import refuse_audio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from roll_core.config.source import KeyPath
    from roll_core.plugins.registry import Registry
    from roll_migrate.rules import Table
    from roll_migrate.scripts import Launch

OWN_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "_self_")
"""Entries of `defaults` whose values are verl's defaults."""


def import_verl(path: Path, registry: Registry, variables: Mapping[str, str] | None = None) -> ImportedConfig:
    """Convert the file at `path`; `variables` are those that a script takes from elsewhere, and its arguments.

    Raises `ConfigError` if it cannot be read or composed, and `UnsupportedError` if it is not of a trainer that has an
    equivalent.
    """
    if path.suffix in (".yaml", ".yml"):
        if variables:
            raise UnsupportedError(f"{path} is no shell script: --set has no effect")
        data, where, unneeded = _composed(path, registry)
        trains = "rlvr" if any(name in data for name in (verl.ROLE, "algorithm")) else "sft" if "optim" in data else ""
    else:
        trains, data, where = _script(path, variables or {})
        unneeded = ()
    models = ((verl.ROLE, "model", "path"), ("model", "path"), ("model", "partial_pretrain"))
    refuse_audio({where(model): value_at(data, model) for model in models})
    if not trains:
        raise UnsupportedError(
            f"{path} is no config of verl's PPO or SFT trainer: it has neither actor_rollout_ref nor optim"
        )
    is_sft = trains == "sft"
    conversion = (_VerlSftConversion if is_sft else _VerlConversion)(
        source=data,
        pipeline=trains,
        table=sft.SFT if is_sft else verl.VERL,
        defaults=sft.DEFAULTS if is_sft else verl.DEFAULTS,
        default_note="verl's default",
        registry=registry,
        where=where,
    )
    return conversion.convert(unneeded)


def _composed(path: Path, registry: Registry) -> tuple[dict[str, Any], Callable[[KeyPath], str], tuple[KeyPath, ...]]:
    """Values and positions of a YAML file. verl's own files in `defaults` are not read: the rules know their values."""
    source = read_source(path, str(path))
    positions = Positions(str(path), [FileLayer((), source)])
    unneeded = tuple(
        path for name in ("defaults", "hydra") if name in source.data for path in leaf_paths(source.data[name], (name,))
    )
    listed = source.data.get("defaults", [])
    if isinstance(listed, list) and all(name in OWN_CONFIGS for name in listed):
        written = {key: value for key, value in source.data.items() if key != "defaults"}
        composed = compose(_with_null(written), (), registry)
        data = with_environment(composed)
        if "ppo_megatron_trainer" in listed:
            data.setdefault("model_engine", "megatron")
    else:
        composed = compose(path, (), registry)
        data, positions = with_environment(composed), composed.positions
    return data, lambda key: str(positions.key(key)), unneeded


def _with_null(value: Any) -> Any:
    """With null for values that verl leaves open (`???`): its composed config has them in sections without effect."""
    if isinstance(value, dict):
        return {name: _with_null(inner) for name, inner in value.items()}
    return None if value == "???" else value


# -- scripts -----------------------------------------------------------------------------------------------------------

_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.[\w-]+)*)=(.*)", re.DOTALL)
_DELETION = re.compile(r"~\w+(?:\.[\w-]+)*(?:=.*)?", re.DOTALL)
_TRAINERS = {
    "rlvr": re.compile(r"(?:.*\.)?(?:verl\.trainer\.main_ppo(?:_sync|_tq|_v0)?|dapo\.(?:src\.)?main_dapo)"),
    "sft": re.compile(r"(?:.*\.)?verl\.trainer\.(?:fsdp_)?sft_trainer(?:_ray)?"),
}
"""Programs by the pipeline that has their equivalent."""
_EXPECTED = "verl.trainer.main_ppo, recipe.dapo.main_dapo or verl.trainer.sft_trainer"
_OTHERS = {
    "generation": "generation without training has no pipeline here",
    "eval": "scoring of generated responses has no pipeline here",
    "gkd": "distillation is the pipeline distill, see docs/distillation.md",
    "opd": "distillation is the pipeline distill, see docs/distillation.md",
    "distill": "distillation is the pipeline distill, see docs/distillation.md",
    "one_step_off": "set async_generation_ratio of rlvr instead, see docs/async-training.md",
    "async": "set async_generation_ratio of rlvr instead, see docs/async-training.md",
    "diffusion": "diffusion models are the pipeline reward_flow",
    "dance": "diffusion models are the pipeline reward_flow",
}
"""What to do about a program with this text in its name."""
_CONFIGS = re.compile(r"(?:ppo|ppo_megatron|dapo|dapo_megatron|sft)_trainer(?:_engine)?(?:\.ya?ml)?")
"""Config files of verl itself, whose values are verl's defaults."""
_GROUPS = {"model_engine": "model_engine", "engine": "model_engine", "optim": "", "model": ""}
"""Keys of one step that select verl's own files, and the key that has the engine's name; empty for the others."""
_RANKS = re.compile(r"--(nproc[_-]per[_-]node|nnodes)=([1-9]\d*)")


def _script(path: Path, variables: Mapping[str, str]) -> tuple[str, dict[str, Any], Callable[[KeyPath], str]]:
    """Pipeline, values and positions of the Hydra overrides in a script."""
    script = read_script(path, variables)
    launches = [launch for launch in script.launches() if _starts_run(launch)]
    for launch in launches:
        if not launch.program and not _OVERRIDE.fullmatch(launch.texts[0]):
            started = [word.value("", word.text) for word in launch.words]  # a variable may have the program
            raise UnsupportedError(
                f"{launch.where}: the script starts {started[0]}, which cannot be imported. Expected {_EXPECTED}"
            )
    programs = [launch for launch in launches if launch.program]
    if programs:
        stray = next((launch for launch in launches if not launch.program), None)
        if stray is not None:
            text = stray.words[0].value("", stray.texts[0])
            message = f"{text} belongs to no program: the line before does not end with a backslash"
            hint = "a comment or a blank after a backslash ends the command too"
            raise ConfigError([ConfigProblem(stray.where, "", message, hint, "ROLL-C024")])
        launch = script.one(programs, _EXPECTED)
        name = launch.program.removesuffix(".py").replace("/", ".").lstrip(".")
        trains = next((pipeline for pipeline, names in _TRAINERS.items() if names.fullmatch(name)), "")
        if not trains:
            hint = next((f": {hint}" for text, hint in _OTHERS.items() if text in name), "")
            raise UnsupportedError(
                f"{launch.where}: the script starts {launch.program}, which cannot be imported{hint}. Expected"
                f" {_EXPECTED}"
            )
        words = launch.words
    else:
        trains, words = "rlvr", tuple(word for launch in launches for word in launch.words)
        if not words:
            script.one([], _EXPECTED)
    data: dict[str, Any] = {}
    positions: dict[KeyPath, str] = {}
    before = ""
    for word in words:
        text = word.text
        option, _, value = text.partition("=") if text.startswith("-") else (before, "", text)
        override = _OVERRIDE.fullmatch(text)
        if option in ("--config-name", "-cn") and value:
            _select(word.value(option, value), data, word.where)
        elif option.startswith("-"):  # --config-path and others of Hydra; a value is the next word
            pass
        elif override:
            steps = tuple(_GROUPS.get(override[1], override[1]).split("."))
            positions[steps] = word.where
            if steps != ("",) and not put(data, steps, _value(word.value(override[1], override[2]))):
                message = f"{override[1]} is a key of a value, not of a mapping"
                raise ConfigError([ConfigProblem(word.where, override[1], message, code="ROLL-C013")])
        elif _DELETION.fullmatch(text):
            raise UnsupportedError(
                f"{word.where}: {text} deletes a key of verl's defaults, which has no equivalent here: remove the word,"
                " and check in the imported config what it stood for"
            )
        else:
            message = f"{word.value('', text)} is no override of Hydra"
            raise ConfigError([ConfigProblem(word.where, "", message, "expected key=value", "ROLL-C013")])
        before = text if text.startswith("-") and "=" not in text else ""
    if trains == "sft" and (gpus := _gpus(launch)):
        data[sft.GPUS] = gpus
    return (
        trains,
        data,
        lambda key: next((positions[key[:end]] for end in range(len(key), 0, -1) if key[:end] in positions), str(path)),
    )


def _starts_run(launch: Launch) -> bool:
    """True for a program of verl, and for one that gets overrides of verl's keys."""
    name = launch.program.removesuffix(".py").replace("/", ".")
    if any(names.fullmatch(name.lstrip(".")) for names in _TRAINERS.values()):
        return True
    roots = (*verl.VERL, *sft.SFT)
    overrides = (_OVERRIDE.fullmatch(text) for text in launch.texts)
    return any(match is not None and "." in match[1] and match[1].split(".")[0] in roots for match in overrides)


def _gpus(launch: Launch) -> int:
    """GPUs that `torchrun` uses; 0 if it is not written."""
    sizes = {match[1][:5]: int(match[2]) for text in launch.options() if (match := _RANKS.fullmatch(text))}
    return sizes["nproc"] * sizes.get("nnode", 1) if "nproc" in sizes else 0


def _select(name: str, data: dict[str, Any], where: str) -> None:
    """Take over what a file of verl's own sets."""
    if not _CONFIGS.fullmatch(name):
        raise UnsupportedError(
            f"{where}: --config-name {name} is no file of verl itself, so its values are unknown here: add `--cfg job`"
            " to the command, and import the YAML that it prints"
        )
    if "megatron" in name:
        data.setdefault("model_engine", "megatron")


def _value(text: str) -> Any:
    try:
        return Loader(text).get_single_data()
    except yaml.YAMLError:
        return text


# -- conversion --------------------------------------------------------------------------------------------------------


class _VerlConversion(Conversion):
    """Conversion of one config of verl's PPO trainer."""

    __slots__ = ()

    def convert(self, unneeded: tuple[KeyPath, ...]) -> ImportedConfig:
        """Convert the config; `unneeded` are keys that composed it."""
        self._skip(unneeded, "verl's own files are known, and Hydra's settings have no effect")
        unused = {} if verl.has_critic(self.source) else {"critic": "only adv_estimator: gae has a critic"}
        imported = self.run("rlvr", unused)
        # Without a line of its own: `model_engine`, which `defaults` or `--config-name` selects.
        file = self.where(())
        imported = replace(imported, keys=tuple(key for key in imported.keys if key.where != file))
        return self.evaluation(imported) if verl.only_evaluates(self.source) else imported

    def _new_role(self, path: KeyPath) -> str:
        return "critic" if path[0] == "critic" else "reference" if path[1:2] == ("ref",) else "actor_train"

    def _roles(self) -> Iterable[KeyPath]:
        return [(role,) for role in ("actor_train", "actor_infer", "reference", "critic")]

    def _unknown(self, table: Table, path: KeyPath, value: Any) -> None:
        if path[-1] == "_target_":
            self._record(path, value, Outcome("not needed", (), "verl's class"))
            return
        hint = did_you_mean(path, table, table_paths(self.table))
        note = f"not a key of verl 0.9.1{hint}; left in the config, which `check` rejects"
        # A key of the same name may exist here: below `verl` there is none.
        provider = self.registry.find(PipelineProvider, self.pipeline)
        schema = schema_of(provider, RunConfig, owner=self.registry.owner(provider))
        target = ("verl", *path) if path[0] in schema.model_fields else path
        self._record(path, value, Outcome("unknown", ((target, value),), note))

    def _defaults(self) -> Iterable[tuple[KeyPath, object, str]]:
        trackers = self._installed(verl.loggers(self.source))
        return [(("track_with",), trackers, self.default_note), *super()._defaults()]


class _VerlSftConversion(_VerlConversion):
    """Conversion of one config of verl's SFT trainer."""

    __slots__ = ()

    def convert(self, unneeded: tuple[KeyPath, ...]) -> ImportedConfig:
        """Convert the config; `unneeded` are keys that composed it."""
        self._skip(unneeded, "it has no effect")
        return self.run("sft")

    def _new_role(self, path: KeyPath) -> str:
        return sft.ROLE

    def _keys(self) -> dict[str, Any]:
        return {name: value for name, value in self.source.items() if name != sft.GPUS}

    def _roles(self) -> Iterable[KeyPath]:
        return [(sft.ROLE,)]
