"""Overrides: `key=value` texts in Hydra's grammar, or values by key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from roll_core.config.explain import show
from roll_core.config.positions import COMMAND_LINE, Interpolation, OverrideLayer
from roll_core.config.source import plain_value
from roll_core.errors import ConfigError, ConfigProblem

if TYPE_CHECKING:
    from collections.abc import Collection

    from omegaconf import DictConfig

    from roll_core.config.positions import Positions
    from roll_core.config.source import KeyPath

Overrides = Sequence[str] | Mapping[str, Any]
"""Changes to a config: `key=value` texts in Hydra's grammar, or values by dotted key."""

Action = Literal["set", "add", "delete"]


@dataclass(frozen=True, slots=True)
class Override:
    """One override. `set` may also add a key that the file does not have; the schema decides which keys exist."""

    text: str
    key: str
    action: Action
    value: Any

    @property
    def path(self) -> KeyPath:
        """The key as a path."""
        return tuple(step for step in re.split(r"[.\[\]]+", self.key) if step)


def parse_overrides(
    overrides: Overrides, choices: Collection[str], problems: list[ConfigProblem]
) -> tuple[list[Override], list[str]]:
    """Parse overrides into values to set and selections of fragments. Hydra handles the selections.

    `choices` are the keys of the config's defaults list. Unreadable overrides are added to `problems`.
    """
    values: list[Override] = []
    fragments: list[str] = []

    def add(text: str, key: str, action: Action, value: Any) -> None:
        new_problems: list[ConfigProblem] = []
        plain = plain_value(value, tuple(key.split(".")), COMMAND_LINE, new_problems)
        problems.extend(new_problems)
        if not new_problems:
            values.append(Override(text, key, action, plain))

    if isinstance(overrides, str):
        problems.append(_problem(overrides, "found text, expected a list", f"write [{overrides!r}]"))
        return values, fragments
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            if key in choices and not isinstance(value, Mapping):
                fragments.append(f"{key}={value}")
            elif not isinstance(key, str) or not all(key.split(".")):
                problems.append(_problem(str(key), f"found {key!r}, expected a dotted key", "write {'seed': 1}"))
            else:
                add(key, key, "set", value)
        return values, fragments
    for text in overrides:
        if not isinstance(text, str):
            problems.append(_problem(str(text), f"found {type(text).__name__}, expected text", "write 'seed=1'"))
            continue
        try:
            parsed = _parse(text)
        except ConfigError as error:
            problems += error.problems
            continue
        value, chooses = parsed.value(), parsed.get_key_element().lstrip("+~") in choices
        if chooses and not isinstance(value, dict):
            fragments.append(text)
        elif parsed.package is not None or "/" in parsed.key_or_group:
            expected = "found a mapping, expected the name of a fragment"
            missing = f"{parsed.key_or_group!r} is not in the file's defaults list"
            problems.append(_problem(text, expected if chooses else missing))
        else:
            action: Action = "delete" if parsed.is_delete() else "add" if parsed.is_add() else "set"
            add(text, parsed.key_or_group, action, value)
    return values, fragments


def _parse(text: str) -> Any:
    """Hydra's parsed override. Raises `ConfigError` if it cannot be read."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, value = text.partition("=")
    expected = "an override is written key=value"
    if not equals and not text.startswith("~"):
        raise ConfigError([_problem(text, "is not an override", expected)])
    if not key.strip("+~ "):
        raise ConfigError([_problem(text, "has no key", expected)])
    candidates = [text]
    if key.endswith("device_mapping"):
        # Hydra's grammar reads list(range(0,8)) as a call and range(0,8) as a sweep; our parser reads the text.
        quoted = value.replace("\\", "\\\\").replace("'", "\\'")
        candidates.append(f"{key}='{quoted}'")
    message = hint = ""
    for candidate in candidates:
        try:
            parsed = OverridesParser.create().parse_override(candidate)
            if not parsed.is_sweep_override():
                parsed.value()
                return parsed
            message, hint = "found several values, expected one", _several(key, value)
        except (HydraException, ValueError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            message = f"cannot be read: {lines[0] if lines else type(error).__name__}"
            hint = _spelling(key, value)
    raise ConfigError([_problem(text, message, hint)])


def swept_values(text: str, problems: list[ConfigProblem]) -> tuple[str, list[str]]:
    """The key of an override, and its values if it has several (`key=a,b`); otherwise none.

    Adds an override that cannot be listed to `problems`. Other mistakes are left to `parse_overrides`.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key = text.partition("=")[0].lstrip("+~")
    if key.endswith("device_mapping"):  # see `_parse`
        return key, []
    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException:
        return key, []
    if not parsed.is_sweep_override():
        return key, []
    try:
        return key, list(parsed.sweep_string_iterator())
    except HydraException:
        problems.append(_problem(text, "has no list of values", f"write {key}=a,b"))
        return key, []


def _several(key: str, value: str) -> str:
    """How to write an override with several values."""
    return f'for a list, write "{key}=[{value}]". --multirun runs each value'


def _spelling(key: str, value: str) -> str:
    """How to write an override that Hydra's grammar does not accept."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(f"{key}=null")
    except HydraException:
        dotted = re.sub(r"\[(\w+)\]", r".\1", key)
        return f"write {dotted}={value}" if dotted != key else "set this key in the file"
    return f"put quotes around the value: \"{key}='…'\""


def apply_override(cfg: DictConfig, override: Override, positions: Positions) -> None:
    """Change `cfg` and record the position. Raises `ConfigError` if the override cannot be applied."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    text, key = override.text, override.key
    try:
        present = OmegaConf.select(cfg, key, throw_on_missing=False, throw_on_resolution_failure=False)
        if override.action == "delete":
            _delete(cfg, override, present)
            return
        if override.action == "add" and present is not None and not isinstance(override.value, (dict, list)):
            raise ConfigError([_problem(text, "adds a key that exists already", f"write {text[1:]}")])
        _unfold(cfg, override.path[:-1], positions)
        OmegaConf.update(cfg, key, override.value, merge=True, force_add=True)
    except ConfigError:
        raise
    except (OmegaConfBaseException, ValueError, TypeError, AttributeError, IndexError, AssertionError) as error:
        raise ConfigError([_problem(text, f"cannot be applied: {first_line(error)}")]) from error
    positions.layers.append(OverrideLayer(override.path, override.value))


def _unfold(cfg: DictConfig, path: KeyPath, positions: Positions) -> None:
    """Replace interpolations on the way to an overridden key by their values. Otherwise OmegaConf would keep only that
    key."""
    from omegaconf import OmegaConf

    node: Any = cfg
    for length, step in enumerate(path, 1):
        if not OmegaConf.is_dict(node) or step not in node:
            return
        if OmegaConf.is_interpolation(node, step) and OmegaConf.is_dict(node[step]):
            raw: Any = OmegaConf.to_container(node, resolve=False)
            positions.interpolations[path[:length]] = Interpolation.of(str(raw[step]), path[:length])
            node[step] = OmegaConf.to_container(node[step], resolve=True)
        node = node[step]


def _delete(cfg: DictConfig, override: Override, present: Any) -> None:
    from omegaconf import OmegaConf

    above, _, last = override.key.rpartition(".")
    parent: Any = OmegaConf.select(cfg, above) if above else cfg
    if not OmegaConf.is_dict(parent) or last not in parent:
        raise ConfigError([_problem(override.text, f"there is no key {override.key} to remove")])
    if override.value is not None and override.value != present:
        message = f"{override.key} is not {show(override.value, last)}"
        raise ConfigError([_problem(override.text, message, f"to remove it whatever it is, write ~{override.key}")])
    del parent[last]


def first_line(error: BaseException) -> str:
    """First line of an error's message, which may be the name of its class."""
    if isinstance(error, RecursionError):
        return "it contains itself"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _problem(text: str, message: str, hint: str = "") -> ConfigProblem:
    return ConfigProblem(COMMAND_LINE, text, message, hint, code="ROLL-C025")
