"""Converts a config of alibaba/ROLL to roll-core's, and reports the outcome for each of its keys.

compose (fragments, interpolations) -> recognise the pipeline -> convert each key by `roll_keys`
-> remove keys that a strategy refuses -> add defaults that differ
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_core.config.compose import compose
from roll_core.config.positions import FileLayer
from roll_core.spec.providers import TrackerProvider
from roll_migrate.conversion import (
    GENERATES,
    Conversion,
    ImportedConfig,
    did_you_mean,
    leaf_paths,
    put,
    table_paths,
    with_environment,
)
from roll_migrate.roll_keys import (
    AGENTIC,
    DEFAULTS,
    DISTILL,
    GROUND_TRUTH,
    OF_IMAGE_ROWS,
    ON_POLICY_DISTILL,
    PREFERENCE,
    REWARD_FLOW,
    RLVR,
    SFT,
    STRATEGIES,
    TEACHER,
)
from roll_migrate.roll_pipelines import ON_POLICY, has_images, only_evaluates, recognise
from roll_migrate.roll_values import is_pure
from roll_migrate.rules import AnyName, Key, KeyRule, Outcome, value_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
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
ROLLOUTS = ("rlvr", "agentic", ON_POLICY)
"""Pipelines that train on rollouts of an engine."""
RENAMED: dict[str, dict[str, KeyPath]] = {
    "distill": {"student": ("actor_train",), "teacher": ("teachers", "main")},
    ON_POLICY: {"student_train": ("actor_train",), "student_infer": ("actor_infer",), "teacher": ("teachers", "main")},
}
"""Roles that have other names here, by pipeline."""
ROLE_KEYS = ("model_args", "strategy_args", "device_mapping")
"""Keys of a role. A mapping without them has one role per key."""


def import_roll(path: Path, registry: Registry) -> ImportedConfig:
    """Convert the config at `path`.

    Raises `ConfigError` if it cannot be read or composed, and `UnsupportedError` if roll-core has no equivalent of its
    pipeline.
    """
    composed = compose(path, (), registry)
    data = with_environment(composed)
    pipeline = recognise(data, composed.positions)
    conversion = _RollConversion(
        source=data,
        pipeline=pipeline,
        table=TABLES[pipeline],
        defaults=DEFAULTS[pipeline],
        default_note="ROLL's default",
        registry=registry,
        where=lambda key: str(composed.positions.key(key)),
        composed=composed,
        name=str(path),
    )
    return conversion.convert()


@dataclass(slots=True, kw_only=True)
class _RollConversion(Conversion):
    """Conversion of one config of ROLL."""

    composed: ComposedConfig
    name: str

    def convert(self) -> ImportedConfig:
        """Convert the config."""
        for layer in self.composed.positions.layers:
            if isinstance(layer, FileLayer) and layer.source.name == self.name:
                for key, note in (("defaults", "the new file contains its fragments"), ("hydra", "it has no effect")):
                    if key in layer.source.data:
                        self._skip(leaf_paths(layer.source.data[key], (key,)), note, layer.source)
        if self._several_teachers:
            self.table = {**self.table, "teacher": AnyName(TEACHER)}
        imported = self.run("distill" if self.pipeline == ON_POLICY else self.pipeline, self._unused_roles())
        return self.evaluation(imported) if self.pipeline == "rlvr" and only_evaluates(self.source) else imported

    def _roles(self) -> Iterable[KeyPath]:
        teachers = (("teachers", name) for name in self.config.get("teachers", ()) if self._several_teachers)
        return (*map(self._renamed, ((name,) for name in self.table)), *teachers)

    def _key(self, path: KeyPath, value: Any) -> Key:
        """The key as rules see it: that of ROLL's on-policy distillation as a key of rlvr with our names of roles."""
        trackers = self.registry.names(TrackerProvider)
        if self.pipeline != ON_POLICY:
            return Key(path, self.source, self.pipeline, trackers, value=value)
        source: dict[str, Any] = deepcopy(self.source)
        for name in RENAMED[ON_POLICY]:
            if name in source:
                put(source, self._renamed((name,)), source[name])
        return Key(self._renamed(path), source, "rlvr", trackers, value=value)

    @property
    def _several_teachers(self) -> bool:
        """True if `teacher` is a mapping of teachers by name."""
        teacher = self.source.get("teacher")
        return self.pipeline == ON_POLICY and isinstance(teacher, dict) and not any(key in teacher for key in ROLE_KEYS)

    def _table(self, path: KeyPath, table: Table, value: Mapping[str, Any]) -> Table:
        if path[-1] != "strategy_args":
            return table
        return {**table, "strategy_config": _strategy_table(value)}

    def _unknown(self, table: Table, path: KeyPath, value: Any) -> None:
        targets = (link.target for link in self.composed.positions.interpolations.values() if link.target)
        if len(path) == 1 and path[0] in self.composed.blocks:
            outcome = Outcome("not needed", (), "a fragment's block; the new file has it where it is referenced")
        elif len(path) == 1 and any(target[0] == path[0] for target in targets):
            outcome = Outcome("not needed", (), "it is only referenced; the new file has its value there")
        else:
            hint = did_you_mean(path, table, table_paths(TABLES[self.pipeline]))
            outcome = Outcome("unknown", (), f"ROLL ignores it silently{hint}")
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

    def _defaults(self) -> Iterable[tuple[KeyPath, object, str]]:
        roles = (GENERATES, "actor_train", "sft_train", "critic", "validation", "val_env_manager")
        added = Conversion._defaults(self)
        yield from (default for default in added if default[0][0] not in roles or default[0][0] in self.config)
        if self.pipeline == "rlvr" and has_images(self.source):
            rewards = self.config.get("rewards")
            computes = value_at(self.config, ("actor_train", "data_args", "columns", "ground_truth"))
            for domain in rewards if isinstance(rewards, dict) and not computes else ():
                if value_at(rewards, (domain, "reward")) == "math_rule":
                    yield ("rewards", domain, "ground_truth"), GROUND_TRUTH, OF_IMAGE_ROWS

    def _late_defaults(self) -> Iterator[tuple[KeyPath, object, str]]:
        """Disable a correction that roll-core has by default."""
        is_off_policy = self.config.get("async_generation_ratio") or self.config.get("is_use_additional_prompts")
        if self.pipeline in ROLLOUTS and (is_off_policy or self.quantized):
            note = "as in ROLL, off-policy tokens have no importance weights; remove it to weight them"
            yield (("train_infer_correction", "is_weight", "enabled"), False, note)


def _strategy_table(arguments: Mapping[str, Any]) -> Table:
    """Rules for `strategy_config`: those in `STRATEGIES`; other keys are kept until the schema checks them."""
    keys = arguments.get("strategy_config")
    table = STRATEGIES.get(str(arguments.get("strategy_name")).partition("_")[0], {})
    keep = KeyRule("kept if the strategy has it", lambda value, key: key.unchanged())
    return {**{str(key): keep for key in (keys if isinstance(keys, dict) else ())}, **table}
