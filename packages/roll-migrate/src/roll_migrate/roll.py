"""Converts a config of alibaba/ROLL to roll-core's, and reports the outcome for each of its keys.

compose (fragments, interpolations) -> recognise the pipeline -> convert each key by `roll_keys`
-> remove keys that a strategy refuses -> add defaults that differ
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from roll_core.config.compose import compose
from roll_core.config.positions import FileLayer
from roll_core.config.unknown_keys import suggest_key
from roll_core.spec.devices import parse_device_mapping
from roll_core.spec.providers import TrackerProvider
from roll_migrate.conversion import (
    GENERATES,
    Conversion,
    ImportedConfig,
    ImportedKey,
    keys,
    paths,
    put,
    with_environment,
)
from roll_migrate.roll_keys import (
    AGENTIC,
    DEFAULTS,
    DIFFERS,
    DISTILL,
    ON_POLICY_DISTILL,
    PREFERENCE,
    REWARD_FLOW,
    RLVR,
    SFT,
    STRATEGIES,
    TEACHER,
    TRANSFORMERS_DEFAULTS,
)
from roll_migrate.roll_pipelines import ON_POLICY, recognise
from roll_migrate.roll_values import MAX_RUNNING, is_pure
from roll_migrate.rules import Each, Key, KeyRule, Outcome, value_at

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from roll_core.config.compose import ComposedConfig
    from roll_core.config.source import KeyPath
    from roll_core.plugins.registry import Registry
    from roll_migrate.rules import Table

TABLES: dict[str, Table] = {
    "rlvr": RLVR,
    "agentic": AGENTIC,
    "sft": SFT,
    "preference": PREFERENCE,
    "distill": DISTILL,
    ON_POLICY: ON_POLICY_DISTILL,
    "reward_flow": REWARD_FLOW,
}
TRAINED = {"sft": "sft_train"}
"""Trained role by pipeline; otherwise `actor_train`."""
ROLLOUTS = ("rlvr", "agentic", ON_POLICY)
"""Pipelines that train on rollouts of an engine."""
RENAMED: dict[str, dict[str, KeyPath]] = {
    "distill": {"student": ("actor_train",), "teacher": ("teachers", "main")},
    ON_POLICY: {"student_train": ("actor_train",), "student_infer": ("actor_infer",), "teacher": ("teachers", "main")},
}
"""Roles that have other names here, by pipeline."""
ROLE_KEYS = ("model_args", "strategy_args", "device_mapping")
"""Keys of a role. A mapping without them has one role per key."""
STRATEGY_CONFIG = ("strategy_args", "strategy_config")
SPLITS_MODEL = ("tensor_model", "pipeline_model", "context")
"""Kinds of Megatron's parallelism within a replica, whose size is that of a key of `strategy_config`."""


def import_roll(path: Path, registry: Registry) -> ImportedConfig:
    """Convert the config at `path`.

    Raises `ConfigError` if it cannot be read or composed, and `UnsupportedError` if roll-core has no equivalent of its
    pipeline.
    """
    composed = compose(path, (), registry)
    data = with_environment(composed)
    pipeline = recognise(data, composed.positions)
    return _RollConversion(
        source=data,
        pipeline=pipeline,
        registry=registry,
        where=lambda key: str(composed.positions.key(key)),
        composed=composed,
        name=str(path),
    ).run()


@dataclass(slots=True, kw_only=True)
class _RollConversion(Conversion):
    """Conversion of one config of ROLL."""

    composed: ComposedConfig
    name: str

    def run(self) -> ImportedConfig:
        ours = "distill" if self.pipeline == ON_POLICY else self.pipeline
        self.config["pipeline"] = ours
        self._composition()
        table = dict(TABLES[self.pipeline])
        if self._several_teachers:
            table["teacher"] = Each(TEACHER)
        self._mapping(table, self.source, (), self._unused_roles())
        teachers = (("teachers", name) for name in self.config.get("teachers", ()) if self._several_teachers)
        for role in (*map(self._renamed, ((name,) for name in table)), *teachers):
            if isinstance(value_at(self.config, (*role, "strategy_args", "strategy_name")), str):
                self._strategy(role)
        added = self._add()
        return ImportedConfig(ours, self.config, (*self.entries.values(), *added))

    # -- key by key ----------------------------------------------------------------------------------------------------

    def _composition(self) -> None:
        """Record `defaults` and `hydra`, which have no effect once the files are composed."""
        for layer in self.composed.positions.layers:
            if isinstance(layer, FileLayer) and layer.source.name == self.name:
                for key, note in (("defaults", "the new file contains its fragments"), ("hydra", "it has no effect")):
                    for path in keys(layer.source.data[key], (key,)) if key in layer.source.data else ():
                        where = layer.source.locate(path, key=True)
                        self.entries[path] = ImportedKey(where, ".".join(path), "not needed", note=note)

    def _key(self, path: KeyPath) -> Key:
        """The key as rules see it: that of ROLL's on-policy distillation as a key of rlvr with our names of roles."""
        trackers = self.registry.names(TrackerProvider)
        if self.pipeline != ON_POLICY:
            return Key(path, self.source, self.pipeline, trackers)
        source: dict[str, Any] = deepcopy(self.source)
        for name in RENAMED[ON_POLICY]:
            if name in source:
                put(source, self._renamed((name,)), source[name])
        return Key(self._renamed(path), source, "rlvr", trackers)

    @property
    def _several_teachers(self) -> bool:
        """True if `teacher` is a mapping of teachers by name."""
        teacher = self.source.get("teacher")
        return self.pipeline == ON_POLICY and isinstance(teacher, dict) and not any(key in teacher for key in ROLE_KEYS)

    def _table(self, path: KeyPath, table: Table, value: Mapping[str, Any]) -> Table:
        if path[-1] != "strategy_args":
            return table
        return {**table, "strategy_config": _own_keys(value)}

    def _unknown(self, table: Table, path: KeyPath, value: Any) -> None:
        if len(path) == 1 and path[0] in self.composed.blocks:
            outcome = Outcome("not needed", (), "a fragment's block; the new file has it where it is referenced")
        elif len(path) == 1 and any(
            each.target and each.target[0] == path[0] for each in self.composed.positions.interpolations.values()
        ):
            outcome = Outcome("not needed", (), "it is only referenced; the new file has its value there")
        else:
            hint = suggest_key(path, sorted(table), list(paths(TABLES[self.pipeline])))[0]
            outcome = Outcome("unknown", (), f"ROLL ignores it silently{f'; {hint}' if hint else ''}")
        self._record(path, value, outcome)

    def _renamed(self, path: KeyPath) -> KeyPath:
        """The path in the new config: roles may have other names."""
        renamed = RENAMED.get(self.pipeline, {}).get(path[0])
        if renamed is not None and path[0] == "teacher" and self._several_teachers:
            renamed = ("teachers",)
        return path if renamed is None else (*renamed, *path[1:])

    def _unused_roles(self) -> dict[str, str]:
        """Roles that ROLL starts or accepts without any effect on training results, each with the reason."""
        if self.pipeline not in ROLLOUTS:
            return {}
        source = self.source
        if self.pipeline == ON_POLICY and is_pure(source):
            return dict.fromkeys(("reference", "critic"), "pure distillation uses no other models")
        unused = {}
        if value_at(source, ("actor_train", "model_args", "lora_target")) is not None:
            unused["reference"] = "with LoRA the base model is the reference, as in ROLL"
        elif not (source.get("use_kl_loss") or source.get("add_token_level_kl")):
            unused["reference"] = "no KL penalty uses it: use_kl_loss and add_token_level_kl are off"
        if source.get("adv_estimator", "gae") != "gae":
            unused["critic"] = "only adv_estimator: gae reads values"
        return unused

    # -- defaults ------------------------------------------------------------------------------------------------------

    def _add(self) -> list[ImportedKey]:
        """Add ROLL's default behaviour where roll-core's differs, and return an entry for each added key."""
        added: list[tuple[KeyPath, object, str]] = [
            (path, value, f"ROLL's default{f'; {DIFFERS[path]}' if path in DIFFERS else ''}")
            for path, value in DEFAULTS[self.pipeline].items()
        ]
        trained = TRAINED.get(self.pipeline, "actor_train")
        source = self.source
        if self.pipeline in ROLLOUTS:
            added += self._weights_and_epochs()
        if self.pipeline == ON_POLICY and not is_pure(source):
            added.append((("adv_estimator",), "gae", "ROLL's default"))
        elif self.pipeline == "distill":
            added += self._batch(trained)
        if not source.get("use_kl_loss"):
            added = [each for each in added if each[0] != ("kl_loss_coef",)]
        if (
            self.pipeline == "rlvr"
            and source.get("async_generation_ratio")
            and source.get("num_return_sequences_in_group", 1) != 1
            and "max_running_requests" not in source
        ):
            added.append((("max_running_requests",), MAX_RUNNING, "ROLL's default; responses are separate requests"))
        for name in ("template", "messages", "prompt", "query", "response", "system", "tag", "chosen", "rejected"):
            column = (trained, "data_args", name)
            value = value_at(self.config, column) or DEFAULTS[self.pipeline].get(column)
            if value is not None:
                added.append((("validation", "data_args", name), value, f"ROLL reads every row as {trained}'s"))
        roles = (GENERATES, trained, "validation", "val_env_manager")
        return self._put_added(each for each in added if each[0][0] not in roles or each[0][0] in self.config)

    def _batch(self, trained: str) -> list[tuple[KeyPath, object, str]]:
        """Rows of a batch, which ROLL's distill has for each optimizer step."""
        role = self.config.get(trained, {})
        arguments, keys = (value_at(role, path) or {} for path in (("training_args",), STRATEGY_CONFIG))
        try:
            number = len(parse_device_mapping(role.get("device_mapping")))
            number //= prod(int(keys.get(f"{name}_parallel_size", 1)) for name in SPLITS_MODEL)
            for name, default in (("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1)):
                number *= int(arguments.get(name, default))
        except (TypeError, ValueError, AttributeError):
            return []
        return [(("rollout_batch_size",), number, "the rows of an optimizer step")]

    def _weights_and_epochs(self) -> list[tuple[KeyPath, object, str]]:
        """Settings that disable what roll-core does by default in rlvr and ROLL does not do."""
        added: list[tuple[KeyPath, object, str]] = []
        config = self.config
        if "critic" in config:
            added += [(("critic", *path[1:]), value, "ROLL's default") for path, value in TRANSFORMERS_DEFAULTS.items()]
        if config.get("async_generation_ratio") or config.get("is_use_additional_prompts") or self.quantized:
            note = "as in ROLL, off-policy tokens have no importance weights; remove it to weight them"
            added.append((("train_infer_correction", "is_weight", "enabled"), False, note))
        if "critic" in config and self.source.get("ppo_epochs", 1) != 1:
            added.append((("critic_epochs",), 1, "ROLL's critic passes once over a batch for any ppo_epochs"))
        return added


def _own_keys(arguments: Mapping[str, Any]) -> Table:
    """Rules for `strategy_config`: those in `STRATEGIES`; other keys are kept until the schema checks them."""
    keys = arguments.get("strategy_config")
    table = STRATEGIES.get(str(arguments.get("strategy_name")).partition("_")[0], {})
    keep = KeyRule("kept if the strategy has it", lambda value, key: key.keep(value))
    return {**{str(key): keep for key in (keys if isinstance(keys, dict) else ())}, **table}
