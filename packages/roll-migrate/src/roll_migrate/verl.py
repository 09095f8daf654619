"""Converts a config of verl's PPO trainer to roll-core's, and reports the outcome for each of its keys.

A YAML file may have only overrides, or be the whole composed config. Any other file is read as a shell script whose
words are Hydra overrides: `data.train_batch_size=64`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from roll_core.config.compose import compose
from roll_core.config.positions import FileLayer, Positions
from roll_core.config.source import Loader, read_source
from roll_core.config.unknown_keys import suggest_key
from roll_core.errors import UnsupportedError
from roll_core.spec.providers import TrackerProvider
from roll_migrate import verl_keys as verl
from roll_migrate.conversion import Conversion, ImportedConfig, ImportedKey, has, keys, paths, put, with_environment
from roll_migrate.rules import Outcome, value_at
from roll_migrate.scripts import words_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from roll_core.config.source import KeyPath
    from roll_core.plugins.registry import Registry
    from roll_migrate.rules import Table

OWN = ("ppo_trainer", "ppo_megatron_trainer", "_self_")
"""Entries of `defaults` whose values are verl's defaults."""


def import_verl(path: Path, registry: Registry) -> ImportedConfig:
    """Convert the file at `path`.

    Raises `ConfigError` if it cannot be read or composed, and `UnsupportedError` if no key is one of verl's trainer.
    """
    if path.suffix in (".yaml", ".yml"):
        data, where, unneeded = _composed(path, registry)
    else:
        (data, where), unneeded = _script(path), ()
    if not any(name in data for name in (verl.ROLE, "algorithm", "data")):
        raise UnsupportedError(f"{path} is not a config of verl's PPO trainer: it has no actor_rollout_ref")
    return _VerlConversion(source=data, pipeline="rlvr", registry=registry, where=where).run(unneeded)


def _composed(path: Path, registry: Registry) -> tuple[dict[str, Any], Callable[[KeyPath], str], tuple[KeyPath, ...]]:
    """Values and positions of a YAML file. verl's own files in `defaults` are not read: the rules know their values."""
    source = read_source(path, str(path))
    positions = Positions(str(path), [FileLayer((), source)])
    unneeded = tuple(
        path for name in ("defaults", "hydra") if name in source.data for path in keys(source.data[name], (name,))
    )
    listed = source.data.get("defaults", [])
    if isinstance(listed, list) and all(each in OWN for each in listed):
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
        return {key: _with_null(each) for key, each in value.items()}
    return None if value == "???" else value


# -- scripts -----------------------------------------------------------------------------------------------------------

_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+|model_engine)=(.*)", re.DOTALL)


def _script(path: Path) -> tuple[dict[str, Any], Callable[[KeyPath], str]]:
    """Values and positions of the Hydra overrides in a script. Raises `UnsupportedError` if it starts several runs."""
    data: dict[str, Any] = {}
    found: dict[KeyPath, str] = {}
    commands: dict[KeyPath, int] = {}
    before = ""
    for word in words_of(path):
        text = word.text
        if before in ("--config-name", "-cn") or text.startswith(("--config-name=", "-cn=")):
            if "megatron" in text:
                data.setdefault("model_engine", "megatron")
        elif override := _OVERRIDE.fullmatch(text):
            steps = tuple(override[1].split("."))
            value = _value(word.value(override[1], override[2]))
            if commands.get(steps, word.command) != word.command and value_at(data, steps) != value:
                raise UnsupportedError(
                    f"{word.where}: {override[1]} has another value in the command at {found[steps]}: the script starts"
                    " several runs, expected one"
                )
            found[steps], commands[steps] = word.where, word.command
            put(data, steps, value)
        elif re.fullmatch(r"~\w+(\.\w+)+(=.*)?", text):
            raise UnsupportedError(
                f"{word.where}: {text} deletes a key of verl's defaults, which has no equivalent here: remove the word,"
                " and check in the imported config what it stood for"
            )
        before = text
    return data, lambda key: next((found[key[:end]] for end in range(len(key), 0, -1) if key[:end] in found), str(path))


def _value(text: str) -> Any:
    try:
        return Loader(text).get_single_data()
    except yaml.YAMLError:
        return text


# -- conversion --------------------------------------------------------------------------------------------------------


class _VerlConversion(Conversion):
    """Conversion of one config of verl."""

    __slots__ = ()

    def run(self, unneeded: tuple[KeyPath, ...]) -> ImportedConfig:
        self.config["pipeline"] = "rlvr"
        for path in unneeded:
            note = "verl's own files are known, and Hydra's settings have no effect"
            self.entries[path] = ImportedKey(self.where(path), ".".join(path), "not needed", note=note)
        source = self.source
        unused = {} if verl.has_critic(source) else {"critic": "only adv_estimator: gae has a critic"}
        self._mapping(verl.VERL, source, (), unused)
        added = self._put_added(self._defaults())
        for role in ("actor_train", "actor_infer", "reference", "critic"):
            if isinstance(value_at(self.config, (role, "strategy_args", "strategy_name")), str):
                self._strategy((role,))
        kept = [each for each in added if has(self.config, tuple(each.to[0].split(".")))]
        # Without a line of its own: `model_engine`, which `defaults` or `--config-name` selects.
        file = self.where(())
        entries = (each for each in self.entries.values() if each.where != file)
        return ImportedConfig("rlvr", self.config, (*entries, *kept))

    def _unknown(self, table: Table, path: KeyPath, value: Any) -> None:
        if path[-1] == "_target_":
            self._record(path, value, Outcome("not needed", (), "verl's class"))
            return
        hint = suggest_key(path, sorted(table), list(paths(verl.VERL)))[0]
        self._record(path, value, Outcome("unknown", (), f"not a key of verl 0.9.1{f'; {hint}' if hint else ''}"))

    def _defaults(self) -> list[tuple[KeyPath, object, str]]:
        """verl's default behaviour where roll-core's differs."""
        source = self.source
        values: dict[str, object] = {
            "rollout_batch_size": 1024,
            "num_return_sequences_in_group": 1,
            "prompt_length": 512,
            "response_length": 512,
            "adv_estimator": "gae",
            "loss_agg_mode": "token-mean",
            "shuffle": False,
            "save_steps": 0,
            "eval_steps": 0,
            "resume_from_checkpoint": "auto",
            "track_with": [each for each in verl.loggers(source) if each in self.registry.names(TrackerProvider)],
        }
        if verl.loss_mode(source) == "vanilla":
            values["dual_clip_loss"] = True
        if bounds := verl.BOUNDS.get(verl.loss_mode(source)):
            low, high = verl.clip_range(source)
            values |= {f"pg_options.{bounds}_low": low, f"pg_options.{bounds}_high": high}
            values |= {"pg_options.ratio_high": 3.0} if bounds == "delta" else {}
        estimator = verl.given(source, ("algorithm", "adv_estimator"), "gae")
        if estimator == "gae":
            values |= {"lambd": 1.0, "whiten_advantages": True}
        if value_at(source, ("algorithm", "use_kl_in_reward")):
            values["init_kl_coef"] = 0.001
            if value_at(source, ("algorithm", "kl_ctrl", "type")) == "adaptive":
                values["target_kl"] = 0.1
        added: list[tuple[KeyPath, object, str]] = [
            (tuple(path.split(".")), value, "verl's default") for path, value in values.items()
        ]
        added += self._trained("actor_train", verl.ACTOR, 1e-6, 16384)
        if value_at(source, (verl.ROLE, "model", "lora_rank")):
            added += self._in("actor_train.model_args", {"lora_alpha": 16, "lora_target": "all-linear"})
        added += self._in("actor_train.data_args", {"messages": "prompt"})
        added += self._generates()
        if verl.has_reference(source):
            added += self._scored()
        if verl.has_critic(source):
            mode = verl.given(source, (*verl.ACTOR, "loss_agg_mode"), "token-mean")
            added += [
                ((name,), each, "verl's default") for name, each in (("value_clip", 0.5), ("value_loss_agg_mode", mode))
            ]
            added += self._trained("critic", ("critic",), 1e-5, 32768)
        if "validation" in self.config:
            added += self._in("validation.data_args", {"messages": "prompt"})
            added += self._in("validation.generating_args", {"temperature": 0.0})
        note = "verl selects its rule by data_source: choose the reward of your data, see docs/rewards.md"
        if not has(self.config, ("rewards", verl.REWARD, "reward")):
            added.append((("rewards", verl.REWARD, "reward"), "math_rule", note))
        return added

    def _in(self, parent: str, values: Mapping[str, object], note: str = "verl's default") -> list[Any]:
        return [((*parent.split("."), name), value, note) for name, value in values.items()]

    def _placed(self, role: str, strategy: str) -> list[Any]:
        slots = f"list(range(0,{verl.num_gpus(self.source)}))"
        return [
            ((role, "strategy_args", "strategy_name"), strategy, "the strategy of verl's engine"),
            ((role, "device_mapping"), slots, "verl's pool of n_gpus_per_node × nnodes GPUs, which roles use in turn"),
        ]

    def _trained(self, role: str, path: KeyPath, rate: float, tokens: int) -> list[Any]:
        source = self.source
        steps, how = verl.accumulation(source, path)
        schedule = "constant_with_warmup" if verl.warms_up(source, (*path, "optim")) else "constant"
        values = {"learning_rate": rate, "weight_decay": 0.01, "lr_scheduler_type": schedule}
        added = self._in(f"{role}.training_args", values)
        added += self._in(f"{role}.training_args", {"per_device_train_batch_size": verl.micro_batch(source, path)}, how)
        added += self._in(f"{role}.training_args", {"gradient_accumulation_steps": steps}, how)
        if verl.dynamic(source, path):
            limit = tokens * verl.ulysses(source, path)
            for name in ("train", "infer"):
                values = {f"use_dynamic_batching_in_{name}": True, f"max_tokens_per_microbatch_in_{name}": limit}
                given = value_at(self.config, (role, "max_tokens_per_microbatch_in_train"))
                if name == "infer" and given is not None:
                    values[f"max_tokens_per_microbatch_in_{name}"] = given
                added += self._in(role, values)
        return added + self._placed(
            role, "megatron_train" if verl.backend(source, path) == "megatron" else "fsdp2_train"
        )

    def _scored(self) -> list[Any]:
        """The reference: its parallel sizes and micro-batches are by default the policy's."""
        source, note = self.source, "by default the policy's, as in verl"
        megatron = verl.backend(source, verl.REF) == "megatron"
        added = self._placed("reference", "megatron_infer" if megatron else "fsdp2_infer")
        policy = value_at(self.config, ("actor_train", "strategy_args", "strategy_config")) or {}
        names = verl.PARALLEL.split() if megatron else ["ulysses_size"]
        added += self._in(
            "reference.strategy_args.strategy_config", {name: policy[name] for name in names if name in policy}, note
        )
        names = ["use_dynamic_batching_in_infer", "max_tokens_per_microbatch_in_infer"]
        if verl.dynamic(source, verl.ACTOR):
            limit = value_at(self.config, ("actor_train", "max_tokens_per_microbatch_in_train")) or 16384
            added += self._in("reference", dict(zip(names, (True, limit), strict=True)), note)
        return added

    def _generates(self) -> list[Any]:
        name = str(value_at(self.source, (*verl.ROLLOUT, "name")))
        memory, size = {"sglang": ("mem_fraction_static", "tp_size")}.get(
            name, ("gpu_memory_utilization", "tensor_parallel_size")
        )
        added = self._placed("actor_infer", "vllm")
        if name in ("vllm", "sglang", "None"):
            added += self._in("actor_infer.strategy_args.strategy_config", {size: 2, memory: 0.5})
        return added
