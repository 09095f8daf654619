"""Conversion of another framework's config by a table of rules, and the report on its keys.

map each key by the table -> add the framework's defaults that differ -> remove keys that a strategy refuses
    -> replace parallelism that reads no images

A subclass belongs to one framework. It supplies the table and the defaults.
"""

from __future__ import annotations

import math
import re
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from roll_core.config.explain import show
from roll_core.config.parts import evaluation_values
from roll_core.config.unknown_keys import suggest_key
from roll_core.errors import ConfigError, PluginError
from roll_core.plugins.targets import schema_of
from roll_core.spec.config import StrategyConfig
from roll_core.spec.providers import InferProvider, TrackerProvider, TrainProvider
from roll_migrate.rules import AnyName, Default, Key, Outcome, convert_single, dotted, value_at
from roll_migrate.strategies import refusals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from roll_core.config.compose import ComposedConfig
    from roll_core.config.source import KeyPath, Source
    from roll_core.plugins.registry import Registry
    from roll_migrate.rules import Convert, ImportStatus, Table

GENERATES = "actor_infer"
NULL_MEANS_SOMETHING = ("track_with",)
"""Keys for which null and a missing key mean different things."""

FOR_IMAGES = {f"{engine}_{does}": f"fsdp2_{does}" for engine in ("megatron", "fsdp2") for does in ("train", "infer")}
"""Strategies that read no images, or none with context parallelism, and those that do."""
SPLITTING = ("tensor_model_parallel_size", "ulysses_size", "ring_size")
"""Keys of FSDP2 that are removed."""
UNCACHED = ("disable_mm_preprocessor_cache", "mm_processor_cache_gb", "mm_processor_cache_type")
"""Keys of vLLM's cache of processed images, which affect no result."""
AUXILIARY_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff")
"""Keys of Megatron's `strategy_config` that change gradients, and that FSDP2 has for fewer models."""

_ENVIRONMENT = re.compile(r"\$\{oc\.(?:env:[^${}]*|decode:\s*\$\{oc\.env:[^${}]*\})\}")


@dataclass(frozen=True, slots=True)
class ImportedKey:
    """Result of importing one key."""

    where: str
    """`file:line:column`; empty for an added key."""
    key: str
    """Dotted key as in the imported file."""
    status: ImportStatus
    to: tuple[str, ...] = ()
    """Dotted keys of the new config that replace it."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class ImportedConfig:
    """The new config, and a report on every key of the old one: the result of an `Importer`."""

    pipeline: str
    config: dict[str, Any]
    keys: tuple[ImportedKey, ...]


class Verbatim(str):
    """Text that is written unchanged: an interpolation to be resolved when the config is loaded."""


@dataclass(slots=True, kw_only=True)
class Conversion:
    """Conversion of one config."""

    source: dict[str, Any]
    """The other framework's config, with interpolations resolved."""
    pipeline: str
    """Name of roll-core's pipeline, or of the framework's table for it."""
    table: Table
    defaults: tuple[Default, ...] = ()
    default_note: str = ""
    """Note on a default without one of its own."""
    registry: Registry
    where: Callable[[KeyPath], str]
    """Returns `file:line:column` of a key."""
    config: dict[str, Any] = field(default_factory=dict)
    """The new config."""
    entries: dict[KeyPath, ImportedKey] = field(default_factory=dict)
    quantized: bool = False
    """True if the engine receives weights in a format other than their dtype, such as fp8."""

    def run(self, pipeline: str, unused: Mapping[str, str] | None = None) -> ImportedConfig:
        """Convert to a config of `pipeline`. `unused` has reasons for top-level keys that are not needed."""
        self.config["pipeline"] = pipeline
        self._mapping(self.table, self._keys(), (), unused or {})
        added = self._put_added(self._defaults())
        for role in self._roles():
            if isinstance(value_at(self.config, (*role, "strategy_args", "strategy_name")), str):
                self._strategy(role)
                added = self._reading_images(role, added)
        added += self._put_added(self._late_defaults())
        remaining = [entry for entry in added if has(self.config, dotted(entry.to[0]))]
        return ImportedConfig(pipeline, self.config, (*self.entries.values(), *remaining))

    def evaluation(self, imported: ImportedConfig) -> ImportedConfig:
        """The part of a training run's new config that an evaluation of its models has as well."""
        config = evaluation_values(imported.config, imported.pipeline, self.registry)
        keys = []
        for entry in imported.keys:
            if not entry.to or any(has(config, dotted(key)) for key in entry.to):
                keys.append(entry)
            elif entry.status != "added":
                keys.append(replace(entry, status="not needed", to=(), note="an evaluation trains nothing"))
        return ImportedConfig(str(config["pipeline"]), config, tuple(keys))

    # -- a framework's part --------------------------------------------------------------------------------------------

    def _keys(self) -> dict[str, Any]:
        """Values by name that the report covers."""
        return self.source

    def _roles(self) -> Iterable[KeyPath]:
        """Paths of roles in the new config."""
        return ()

    def _defaults(self) -> Iterable[tuple[KeyPath, object, str]]:
        """Values, with a note each, where the new config has none. Each is added before the next is computed."""
        for default in self.defaults:
            yield from default.added(self.source, self.config, self.default_note)

    def _late_defaults(self) -> Iterable[tuple[KeyPath, object, str]]:
        """Values that depend on what the strategies' schemas accepted."""
        return ()

    def _key(self, path: KeyPath, value: Any) -> Key:
        """The key as rules see it."""
        trackers = self.registry.names(TrackerProvider)
        return Key(path, self.source, self.pipeline, trackers, self._new_role(path), value)

    def _installed(self, trackers: Iterable[str]) -> list[str]:
        """The trackers that are installed here."""
        return [name for name in trackers if name in self.registry.names(TrackerProvider)]

    def _new_role(self, path: KeyPath) -> str:
        """Dotted name of the role in the new config that gets settings of a key's role."""
        return ""

    def _renamed(self, path: KeyPath) -> KeyPath:
        """The path in the new config: roles may have other names."""
        return path

    def _table(self, path: KeyPath, table: Table, value: Mapping[str, Any]) -> Table:
        """Rules for the keys of the mapping at `path`."""
        return table

    def _unknown(self, table: Table, path: KeyPath, value: Any) -> None:
        """Record a key that `table` does not have."""
        raise NotImplementedError

    # -- key by key ----------------------------------------------------------------------------------------------------

    def _mapping(self, table: Table, values: Mapping[str, Any], path: KeyPath, unused: Mapping[str, str]) -> None:
        for name, value in values.items():
            key = (*path, str(name))
            rule = table.get(str(name))
            if not path and name in unused:
                self._record(key, value, Outcome("not needed", (), unused[name]))
            elif rule is None:
                self._unknown(table, key, value)
            elif callable(rule):
                self._apply(rule, key, value)
            elif value is None or value == {}:
                self._record(key, value, Outcome("not needed", (), "it is empty"))
            elif not isinstance(value, dict):
                self._record(key, value, Outcome("unsupported", ((key, value),), "expected a mapping"))
            elif isinstance(rule, AnyName):
                self._mapping(dict.fromkeys(map(str, value), rule.rule), value, key, {})
            else:
                self._mapping(self._table(key, rule, value), value, key, {})

    def _apply(self, rule: Convert, path: KeyPath, value: Any) -> None:
        if value is None and path[-1] not in NULL_MEANS_SOMETHING:
            self._record(path, value, Outcome("not needed", (), "null has no effect"))
            return
        outcome = convert_single(rule, value, self._key(path, value))
        if isinstance(value, Verbatim) and any(written != value for _, written in outcome.writes):
            writes = tuple((target, value) for target, _ in outcome.writes)
            outcome = Outcome("kept", writes, "its value comes from the environment and was not converted")
        self._record(path, value, outcome)

    def _record(self, path: KeyPath, value: Any, outcome: Outcome) -> None:
        """Write the outcome's values to the new config, and record an entry for every key of `value`."""
        outcome = replace(outcome, writes=tuple((self._renamed(to), written) for to, written in outcome.writes))
        for target, written in outcome.writes:
            put(self.config, target, deepcopy(written))
        outcome = _with_values(path, value, outcome)
        for leaf in leaf_paths(value, path):
            rest = leaf[len(path) :]
            to = tuple(
                ".".join((*target, *rest) if isinstance(written, dict) else target)
                for target, written in outcome.writes
                if not isinstance(written, dict) or has(written, rest)
            )
            self.entries[leaf] = ImportedKey(self.where(leaf), ".".join(leaf), outcome.status, to, outcome.note)

    def _skip(self, paths: Iterable[KeyPath], note: str, source: Source | None = None) -> None:
        """Record keys that composed the config, with their places in `source`."""
        for path in paths:
            where = self.where(path) if source is None else source.locate(path, key=True)
            self.entries[path] = ImportedKey(where, ".".join(path), "not needed", note=note)

    def _put_added(self, added: Iterable[tuple[KeyPath, object, str]]) -> list[ImportedKey]:
        """Add values where the new config has none, and return an entry for each added key."""
        entries = []
        for path, value, note in added:
            if not has(self.config, path) and put(self.config, path, value):
                entries.append(ImportedKey("", "", "added", (".".join(path),), f"{show(value, path[-1])}: {note}"))
        return entries

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
        schema = schema_of(provider, StrategyConfig, owner=self.registry.owner(provider))
        options = arguments.get("strategy_config") or {}
        if not isinstance(options, dict):
            return
        rejected = {
            entry.to[0].rpartition(".")[2]
            for entry in self.entries.values()
            if entry.status == "unsupported" and entry.to and entry.to[0].startswith(prefix)
        }
        checked = {name: value for name, value in options.items() if name not in rejected}
        for path, reason in refusals(schema, checked).items():
            status: ImportStatus = "not needed" if generates and path[0] in UNCACHED else "unsupported"
            note = reason if status == "unsupported" else "vLLM has no cache of processed images here"
            self._withdraw((*role, "strategy_args", "strategy_config", *path), status, note)
        accepted = {name: value for name, value in options.items() if name not in rejected}
        self._slots(role, schema, accepted)
        if generates:
            self.quantized = schema.model_construct(**accepted).weight_format() != "dtype"

    def _reading_images(self, role: KeyPath, added: list[ImportedKey]) -> list[ImportedKey]:
        """Replace Megatron, and context parallelism, by plain FSDP2 in a run with images, also in `added` entries.

        FSDP2 shards the model over all ranks: those that computed a sequence together get sequences of their own, and
        accumulate fewer, so that an optimizer step has as many as before. If their number does not divide those of a
        step, or a router has an auxiliary loss, the strategy stays, and `check` rejects it.
        """
        settings = value_at(self.config, role)
        arguments = settings["strategy_args"]
        name, options = arguments["strategy_name"], arguments.get("strategy_config") or {}
        if name not in FOR_IMAGES or not isinstance(options, dict) or not self._has_images():
            return added
        if name in FOR_IMAGES.values() and not any(options.get(key, 1) != 1 for key in SPLITTING[1:]):
            return added
        try:
            providers = [self.registry.find(TrainProvider, strategy) for strategy in (name, FOR_IMAGES[name])]
        except PluginError:
            return added  # `check` names the missing package
        before, after = (
            schema_of(provider, StrategyConfig, owner=self.registry.owner(provider)) for provider in providers
        )
        accepted = {key: value for key, value in options.items() if key in before.model_fields}
        sizes = before.model_construct(**accepted).parallel_sizes()
        together = [sizes.get(kind, 1) for kind in ("tensor_parallel", "pipeline_parallel", "context_parallel")]
        training = settings.get("training_args") or {}
        batch = _accumulating_less(training, together) if name.endswith("_train") else {}
        if batch is None or any(accepted.get(key) for key in AUXILIARY_LOSSES):
            return added
        why = "FSDP2 shards the model over all ranks"
        for key in accepted:
            if key not in after.model_fields or key in SPLITTING:
                self._withdraw((*role, "strategy_args", "strategy_config", key), "not needed", why)
        if name != FOR_IMAGES[name]:
            target = (*role, "strategy_args", "strategy_name")
            added = self._rewrite(target, FOR_IMAGES[name], f"{name} reads no images; {why}", added)
        if isinstance(together[-1], int) and together[-1] > 1:
            added = self._splitting_no_sequence(role, together[-1], added)
        for key, value in batch.items():
            reason = f"FSDP2 has {math.prod(together)} times as many ranks with samples of their own"
            added = self._rewrite((*role, "training_args", key), value, reason, added)
        return added

    def _splitting_no_sequence(self, role: KeyPath, ranks: int, added: list[ImportedKey]) -> list[ImportedKey]:
        """Reduce the tokens per micro-batch, which `ranks` shared, to those of one rank, but not below a sequence."""
        lengths = [self.config.get(name) for name in ("prompt_length", "response_length")]
        longest = sum(length for length in lengths if isinstance(length, int))
        for name in ("max_tokens_per_microbatch_in_train", "max_tokens_per_microbatch_in_infer"):
            limit = value_at(self.config, (*role, name))
            if isinstance(limit, int) and limit > (tokens := max(limit // ranks, min(limit, longest))):
                reason = f"one rank computes a sequence, not {ranks}"
                added = self._rewrite((*role, name), tokens, reason, added)
                for path, entry in self.entries.items():
                    if ".".join((*role, name)) in entry.to and value_at(self.source, path) == tokens:
                        self.entries[path] = replace(entry, status="renamed", note="")
        return added

    def _has_images(self) -> bool:
        """True if the new config names a column of images or videos, or an environment that shows images."""
        rows = [value_at(self.config, (str(name), "data_args")) for name in self.config]
        tags = value_at(self.config, ("custom_envs",)) or {}
        shown = [value_at(self.config, ("custom_envs", str(tag), "env_config", "observation")) for tag in tags]
        named = any(isinstance(row, dict) and (row.get("images") or row.get("videos")) for row in rows)
        return named or "image" in shown

    def _rewrite(self, target: KeyPath, value: Any, reason: str, added: list[ImportedKey]) -> list[ImportedKey]:
        """Change a value of the new config, and its entries."""
        old, name = value_at(self.config, target), ".".join(target)
        put(self.config, target, value)
        shown = show(value, target[-1])
        for path, entry in self.entries.items():
            if name in entry.to:
                note = f"{show(old, target[-1])} → {shown}: {reason}"
                self.entries[path] = replace(entry, status="changed", note=note)
        return [replace(entry, note=f"{shown}: {reason}") if name in entry.to else entry for entry in added]

    def _slots(self, role: KeyPath, schema: type[StrategyConfig], options: dict[str, Any]) -> None:
        slots = value_at(self.config, role).get("num_gpus_per_worker")
        computed = schema.model_construct(**options).slots_per_worker() if role == (GENERATES,) else 1
        if slots is not None and computed is not None and slots != computed:
            self._withdraw((*role, "num_gpus_per_worker"), "not needed", f"the strategy sets {computed} per worker")

    def _withdraw(self, target: KeyPath, status: ImportStatus, reason: str) -> None:
        """Remove a key from the new config, and change the entries of the keys that it came from."""
        _remove(self.config, target)
        name = ".".join(target)
        for path, entry in self.entries.items():
            if any(to == name or to.startswith(f"{name}.") for to in entry.to):
                self.entries[path] = replace(entry, status=status, to=(), note=reason)


def _accumulating_less(training: Mapping[str, Any], together: Sequence[Any]) -> dict[str, int] | None:
    """Keys of `training_args` that change for as many samples per optimizer step on more data-parallel ranks.

    The product of `together` is the number of such ranks for one before. None if it does not divide the samples.
    """
    names = ("gradient_accumulation_steps", "per_device_train_batch_size")
    old = [training.get(name, 1) for name in names]
    if not all(isinstance(value, int) for value in (*old, *together)):
        return None
    more = math.prod(together)
    fewer = math.gcd(old[0], more)
    if old[1] * fewer % more:
        return None
    new = (old[0] // fewer, old[1] * fewer // more)
    return {name: value for name, value, before in zip(names, new, old, strict=True) if value != before}


def leaf_paths(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yield the paths of all keys without further keys below them."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaf_paths(inner, (*path, str(name)))
    else:
        yield path


def _with_values(path: KeyPath, value: Any, outcome: Outcome) -> Outcome:
    """Prefix the note with the old and the new value, if these are single values and differ."""
    if len(outcome.writes) != 1 or outcome.status not in ("changed", "renamed"):
        return outcome
    written = outcome.writes[0][1]
    if written == value or isinstance(value, (dict, list)) or isinstance(written, (dict, list)):
        return outcome
    change = f"{show(value, path[-1])} → {show(written, path[-1])}"
    return replace(outcome, note=f"{change}: {outcome.note}" if outcome.note else change)


def did_you_mean(path: KeyPath, table: Table, paths: Iterable[KeyPath]) -> str:
    """`; did you mean …` with the nearest key of `table` or of `paths`; empty without one."""
    hint = suggest_key(path, sorted(table), list(paths))[0]
    return f"; {hint}" if hint else ""


def table_paths(table: Table, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of all keys of a table."""
    for name, rule in table.items():
        yield (*prefix, name)
        if isinstance(rule, AnyName):
            yield from () if callable(rule.rule) else table_paths(rule.rule, (*prefix, name, "*"))
        elif not callable(rule):
            yield from table_paths(rule, (*prefix, name))


def has(data: Any, path: KeyPath) -> bool:
    """True if `data` has a key at `path`."""
    parent = value_at(data, path[:-1])
    return not path or (isinstance(parent, dict) and path[-1] in parent)


def put(data: dict[str, Any], path: KeyPath, value: Any) -> bool:
    """Set the value at `path`, and create missing mappings on the way.

    Returns False if a value that is not a mapping is in the way; `roll-core check` refuses such a config.
    """
    for step in path[:-1]:
        data = data.setdefault(step, {})
        if not isinstance(data, dict):
            return False
    data[path[-1]] = value
    return True


def _remove(data: dict[str, Any], path: KeyPath) -> None:
    """Remove the value at `path`, and mappings that become empty."""
    parent = value_at(data, path[:-1])
    parent.pop(path[-1], None)
    if not parent and len(path) > 1:
        _remove(data, path[:-1])


def with_environment(composed: ComposedConfig) -> dict[str, Any]:
    """Return the composed values, with interpolations of environment variables left as they are written.

    Their values may be secrets, and the variables need not be set here. Raises `ConfigError` if another interpolation
    cannot be resolved.
    """
    data: dict[str, Any] = deepcopy(composed.data)
    from_environment = {path: text for path in _item_paths(data) if (text := _environment_text(path, composed))}
    problems = [problem for problem in composed.problems if dotted(problem.key) not in from_environment]
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
    interpolation = composed.positions.interpolations.get(path)
    for _ in range(len(composed.positions.interpolations)):
        if interpolation is None or interpolation.from_environment or interpolation.target is None:
            break
        interpolation = composed.positions.interpolations.get(interpolation.target)
    if interpolation is None or not interpolation.from_environment or "${" in _ENVIRONMENT.sub("", interpolation.text):
        return ""
    return interpolation.text


def _item_paths(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of all values, including items of lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from _item_paths(inner, (*path, str(name)))
    if not items and path:
        yield path
