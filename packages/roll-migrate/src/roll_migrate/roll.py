"""Converts a config of alibaba/ROLL to roll-core's, and reports the outcome for each of its keys.

compose (fragments, interpolations) -> recognise the pipeline -> convert each key by `roll_keys`
-> remove keys that a strategy refuses -> add defaults that differ
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

from roll_core.config.compose import compose
from roll_core.config.dump import Verbatim
from roll_core.config.explain import show
from roll_core.config.positions import FileLayer
from roll_core.config.unknown_keys import suggest_key
from roll_core.errors import ConfigError, PluginError
from roll_core.plugins.targets import schema_of
from roll_core.spec.config import StrategyConfig
from roll_core.spec.devices import parse_device_mapping
from roll_core.spec.importing import ImportedConfig, ImportedKey
from roll_core.spec.providers import InferProvider, TrackerProvider, TrainProvider
from roll_migrate.roll_keys import (
    AGENTIC,
    DEFAULTS,
    DIFFERS,
    DISTILL,
    NULL_MEANS_SOMETHING,
    ON_POLICY_DISTILL,
    PREFERENCE,
    REWARD_FLOW,
    RLVR,
    SFT,
    STRATEGIES,
    TEACHER,
)
from roll_migrate.roll_pipelines import ON_POLICY, recognise
from roll_migrate.roll_values import is_pure
from roll_migrate.rules import Each, Key, KeyRule, Outcome, value_at
from roll_migrate.strategies import refusals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from roll_core.config.compose import ComposedConfig
    from roll_core.config.source import KeyPath
    from roll_core.plugins.registry import Registry
    from roll_core.spec.importing import ImportStatus
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
GENERATES = "actor_infer"
STRATEGY_CONFIG = ("strategy_args", "strategy_config")
SPLITS_MODEL = ("tensor_model", "pipeline_model", "context")
"""Kinds of Megatron's parallelism within a replica, whose size is that of a key of `strategy_config`."""
_ENVIRONMENT = re.compile(r"\$\{oc\.(?:env:[^${}]*|decode:\s*\$\{oc\.env:[^${}]*\})\}")


def import_roll(path: Path, registry: Registry) -> ImportedConfig:
    """Convert the config at `path`.

    Raises `ConfigError` if it cannot be read or composed, and `UnsupportedError` if roll-core has no equivalent of its
    pipeline.
    """
    composed = compose(path, (), registry)
    data = _with_environment(composed)
    return _Import(composed, data, recognise(data, composed.positions), registry, str(path)).run()


def _with_environment(composed: ComposedConfig) -> dict[str, Any]:
    """Return the composed values, with interpolations of environment variables left as they are written.

    Their values may be secrets, and the variables need not be set here. Raises `ConfigError` if another interpolation
    cannot be resolved.
    """
    data: dict[str, Any] = deepcopy(composed.data)
    from_environment = {path: text for path in _leaves(data) if (text := _environment_text(path, composed))}
    problems = [each for each in composed.problems if tuple(each.key.split(".")) not in from_environment]
    if problems:
        raise ConfigError(problems)
    for path, text in from_environment.items():
        parent: Any = data
        for step in path[:-1]:
            parent = parent[int(step)] if isinstance(parent, list) else parent[step]
        parent[int(path[-1]) if isinstance(parent, list) else path[-1]] = Verbatim(text)
    return data


def _environment_text(path: KeyPath, composed: ComposedConfig) -> str:
    """Text of the interpolation if `path` comes only from the environment; otherwise empty."""
    found = composed.positions.interpolations.get(path)
    for _ in range(len(composed.positions.interpolations)):
        if found is None or found.from_environment or found.target is None:
            break
        found = composed.positions.interpolations.get(found.target)
    if found is None or not found.from_environment or "${" in _ENVIRONMENT.sub("", found.text):
        return ""
    return found.text


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of all values, including items of lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from _leaves(each, (*path, str(key)))
    if not items and path:
        yield path


def _keys(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yield the paths of all keys without further keys below them."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _keys(each, (*path, str(key)))
    else:
        yield path


@dataclass(slots=True)
class _Import:
    composed: ComposedConfig
    source: dict[str, Any]
    pipeline: str
    registry: Registry
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    entries: dict[KeyPath, ImportedKey] = field(default_factory=dict)
    quantized: bool = False
    """True if the engine receives weights in a format other than their dtype, such as fp8."""

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
                    for path in _keys(layer.source.data[key], (key,)) if key in layer.source.data else ():
                        where = layer.source.locate(path, key=True)
                        self.entries[path] = ImportedKey(where, ".".join(path), "not needed", note=note)

    def _mapping(self, table: Table, value: dict[str, Any], path: KeyPath, unused: Mapping[str, str]) -> None:
        for name, each in value.items():
            here = (*path, str(name))
            rule = table.get(str(name))
            if not path and name in unused:
                self._record(here, each, Outcome("not needed", (), unused[name]))
            elif rule is None:
                self._unknown(table, here, each)
            elif isinstance(rule, KeyRule):
                self._apply(rule, here, each)
            elif each is None or each == {}:
                self._record(here, each, Outcome("not needed", (), "it is empty"))
            elif not isinstance(each, dict):
                self._record(here, each, Outcome("unsupported", ((here, each),), "expected a mapping"))
            elif isinstance(rule, Each):
                self._mapping(dict.fromkeys(map(str, each), rule.rule), each, here, {})
            elif str(name) == "strategy_args":
                self._mapping({**rule, "strategy_config": _own_keys(each)}, each, here, {})
            else:
                self._mapping(rule, each, here, {})

    def _apply(self, rule: KeyRule, path: KeyPath, value: Any) -> None:
        if value is None and path[-1] not in NULL_MEANS_SOMETHING:
            self._record(path, value, Outcome("not needed", (), "null has no effect"))
            return
        key = self._key(path)
        outcome = rule(value, key)
        if isinstance(value, Verbatim) and any(written != value for _, written in outcome.writes):
            writes = tuple((target, value) for target, _ in outcome.writes)
            outcome = Outcome("kept", writes, "its value comes from the environment and was not converted")
        self._record(path, value, outcome)

    def _key(self, path: KeyPath) -> Key:
        """The key as rules see it: that of ROLL's on-policy distillation as a key of rlvr with our names of roles."""
        trackers = self.registry.names(TrackerProvider)
        if self.pipeline != ON_POLICY:
            return Key(path, self.source, self.pipeline, trackers)
        source: dict[str, Any] = deepcopy(self.source)
        for name in RENAMED[ON_POLICY]:
            if name in source:
                _put(source, self._renamed((name,)), source[name])
        return Key(self._renamed(path), source, "rlvr", trackers)

    @property
    def _several_teachers(self) -> bool:
        """True if `teacher` is a mapping of teachers by name."""
        teacher = self.source.get("teacher")
        return self.pipeline == ON_POLICY and isinstance(teacher, dict) and not any(key in teacher for key in ROLE_KEYS)

    def _unknown(self, table: Table, path: KeyPath, value: Any) -> None:
        if len(path) == 1 and path[0] in self.composed.blocks:
            outcome = Outcome("not needed", (), "a fragment's block; the new file has it where it is referenced")
        elif len(path) == 1 and any(
            each.target and each.target[0] == path[0] for each in self.composed.positions.interpolations.values()
        ):
            outcome = Outcome("not needed", (), "it is only referenced; the new file has its value there")
        else:
            hint = suggest_key(path, sorted(table), list(_paths(TABLES[self.pipeline])))[0]
            outcome = Outcome("unknown", (), f"ROLL ignores it silently{f'; {hint}' if hint else ''}")
        self._record(path, value, outcome)

    def _record(self, path: KeyPath, value: Any, outcome: Outcome) -> None:
        """Write the outcome's values to the new config, and record an entry for every key of `value`."""
        outcome = replace(outcome, writes=tuple((self._renamed(to), written) for to, written in outcome.writes))
        for target, written in outcome.writes:
            _put(self.config, target, deepcopy(written))
        outcome = _with_values(path, value, outcome)
        for leaf in _keys(value, path):
            rest = leaf[len(path) :]
            to = tuple(
                ".".join((*target, *rest) if isinstance(written, dict) else target)
                for target, written in outcome.writes
                if not isinstance(written, dict) or _has(written, rest)
            )
            where = str(self.composed.positions.key(leaf))
            self.entries[leaf] = ImportedKey(where, ".".join(leaf), outcome.status, to, outcome.note)

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

    # -- strategies ----------------------------------------------------------------------------------------------------

    def _strategy(self, role: KeyPath) -> None:
        """Remove the keys of `strategy_config` that the strategy's schema refuses, and record the reasons."""
        arguments = value_at(self.config, role)["strategy_args"]
        generates, prefix = role == (GENERATES,), f"{'.'.join(role)}.strategy_args."
        kind: type[InferProvider] | type[TrainProvider] = InferProvider if generates else TrainProvider
        try:
            provider = self.registry.find(kind, arguments["strategy_name"])
        except PluginError:
            return  # `check` names the missing package; without its schema no key can be checked
        owner = self.registry.owner(provider)
        schema = schema_of(provider, StrategyConfig, owner=owner)
        keys = arguments.get("strategy_config") or {}
        if not isinstance(keys, dict):
            return
        stay = {
            entry.to[0].rpartition(".")[2]
            for entry in self.entries.values()
            if entry.status == "unsupported" and entry.to and entry.to[0].startswith(prefix)
        }
        refused = refusals(schema, {key: each for key, each in keys.items() if key not in stay})
        for path, reason in refused.items():
            self._withdraw((*role, "strategy_args", "strategy_config", *path), "unsupported", reason)
        taken = {key: each for key, each in keys.items() if key not in stay}
        self._slots(role, schema, taken)
        if generates:
            self.quantized = schema.model_construct(**taken).weight_format() != "dtype"

    def _slots(self, role: KeyPath, schema: type[StrategyConfig], keys: dict[str, Any]) -> None:
        given = value_at(self.config, role).get("num_gpus_per_worker")
        computed = schema.model_construct(**keys).slots_per_worker() if role == (GENERATES,) else 1
        if given is not None and computed is not None and given != computed:
            self._withdraw((*role, "num_gpus_per_worker"), "not needed", f"the strategy sets {computed} per worker")

    def _withdraw(self, target: KeyPath, status: ImportStatus, reason: str) -> None:
        """Remove a key from the new config, and change the entries of the keys that it came from."""
        _take(self.config, target)
        dotted = ".".join(target)
        for path, entry in self.entries.items():
            if any(each == dotted or each.startswith(f"{dotted}.") for each in entry.to):
                self.entries[path] = replace(entry, status=status, to=(), note=reason)

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
        if source.get("dual_clip_loss"):
            clip = source.get("pg_clip")
            clip = clip if isinstance(clip, (int, float)) else 0.2
            added.append((("dual_clip",), 1 + 2 * clip, f"ROLL's bound is 1 + 2 × pg_clip {clip:g}"))
        if (
            self.pipeline == "rlvr"
            and source.get("async_generation_ratio")
            and source.get("num_return_sequences_in_group", 1) != 1
        ):
            added.append((("is_num_return_sequences_expand",), True, "ROLL sets it in asynchronous training"))
        for name in ("template", "messages", "prompt", "query", "response", "system", "tag", "chosen", "rejected"):
            column = (trained, "data_args", name)
            value = value_at(self.config, column) or DEFAULTS[self.pipeline].get(column)
            if value is not None:
                added.append((("validation", "data_args", name), value, f"ROLL reads every row as {trained}'s"))
        entries = []
        for path, value, note in added:
            role_is_there = (
                path[0] not in (GENERATES, trained, "validation", "val_env_manager") or path[0] in self.config
            )
            if role_is_there and not _has(self.config, path) and _put(self.config, path, value):
                entries.append(ImportedKey("", "", "added", (".".join(path),), f"{show(value, path[-1])}: {note}"))
        return entries

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
        if config.get("async_generation_ratio") or config.get("is_use_additional_prompts") or self.quantized:
            note = "as in ROLL, off-policy tokens have no importance weights; remove it to weight them"
            added.append((("train_infer_correction", "is_weight", "enabled"), False, note))
        if "critic" in config and self.source.get("ppo_epochs", 1) != 1:
            added.append((("critic_epochs",), 1, "ROLL's critic passes once over a batch for any ppo_epochs"))
        return added


def _with_values(path: KeyPath, value: Any, outcome: Outcome) -> Outcome:
    """Prefix the note with the old and the new value, if these are single values and differ."""
    if len(outcome.writes) != 1 or outcome.status not in ("changed", "renamed"):
        return outcome
    written = outcome.writes[0][1]
    if written == value or any(isinstance(each, (dict, list)) for each in (value, written)):
        return outcome
    change = f"{show(value, path[-1])} → {show(written, path[-1])}"
    return replace(outcome, note=f"{change}: {outcome.note}" if outcome.note else change)


def _own_keys(arguments: Mapping[str, Any]) -> Table:
    """Rules for `strategy_config`: those in `STRATEGIES`; other keys are kept until the schema checks them."""
    keys = arguments.get("strategy_config")
    table = STRATEGIES.get(str(arguments.get("strategy_name")).partition("_")[0], {})
    keep = KeyRule("kept if the strategy has it", lambda value, key: key.keep(value))
    return {**{str(key): keep for key in (keys if isinstance(keys, dict) else ())}, **table}


def _paths(table: Table, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    for name, rule in table.items():
        yield (*prefix, name)
        if isinstance(rule, Each):
            yield from () if isinstance(rule.rule, KeyRule) else _paths(rule.rule, (*prefix, name, "*"))
        elif not isinstance(rule, KeyRule):
            yield from _paths(rule, (*prefix, name))


def _has(data: Any, path: KeyPath) -> bool:
    parent = value_at(data, path[:-1])
    return not path or (isinstance(parent, dict) and path[-1] in parent)


def _put(data: dict[str, Any], path: KeyPath, value: Any) -> bool:
    """Set the value at `path`, and create missing mappings on the way.

    Returns False if a value that is not a mapping is in the way; `roll-core check` refuses such a config.
    """
    for step in path[:-1]:
        data = data.setdefault(step, {})
        if not isinstance(data, dict):
            return False
    data[path[-1]] = value
    return True


def _take(data: dict[str, Any], path: KeyPath) -> None:
    """Remove the value at `path`, and mappings that become empty."""
    parent = value_at(data, path[:-1])
    parent.pop(path[-1], None)
    if not parent and len(path) > 1:
        _take(data, path[:-1])
