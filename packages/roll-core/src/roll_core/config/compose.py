"""Composes one config from a file, the fragments of its `defaults:` list, overrides and interpolations.

Hydra composes and OmegaConf resolves. Both are imported only for files that need them: reading a plain file takes a
third of the time without. Source positions are recorded, see `written`.
"""

from __future__ import annotations

import os
import re
import warnings
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.config.fragments import PluginFragments
from roll_core.config.source import read_source
from roll_core.config.written import FileLayer, Interpolation, OverrideLayer, Written
from roll_core.errors import ConfigError, ConfigProblem, ProviderConflictError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omegaconf import DictConfig

    from roll_core.config.overrides import Override
    from roll_core.config.source import KeyPath, Source
    from roll_core.plugins.registry import Registry

_HEADER = re.compile(r"^\s*#\s*@package\b", re.MULTILINE)
_REFERENCE = re.compile(r"\$\{\s*(\.*)([\w/@-]+(?:[.\[\]][\w/@-]*)*)\s*\}")
_HYDRA_RESOLVER = re.compile(r"\$\{\s*(now|hydra|hydra_version|python_version)\s*:")
MISSING = "???"
_BROKEN = object()
"""Placeholder for interpolations that failed."""


@dataclass(frozen=True, slots=True)
class Composed:
    """Plain values, with their source positions."""

    data: dict[Any, Any]
    written: Written
    files: tuple[Path, ...]
    """All files that were read; the requested file is first."""
    problems: tuple[ConfigProblem, ...]
    """Overrides and interpolations that cannot be applied. The rest can still be validated."""
    broken: frozenset[KeyPath]
    """Keys that have no value because of these problems."""
    blocks: frozenset[str] = frozenset()
    """Top-level keys that a fragment adds under its own name. If no schema has them, they only serve as targets of
    interpolations."""
    referred: frozenset[str] = frozenset()
    """Top-level keys that some `${…}` in a file or an override refers to."""


def compose(path: Path, overrides: Sequence[str] = (), registry: Registry | None = None) -> Composed:
    """Compose the config at `path` from its own files and those of plugins in `registry`.

    Leaves Hydra's global state unchanged and creates no folders. Raises `ConfigError` if nothing is left to validate: a
    file cannot be read, or a fragment is missing.
    """
    name = str(path)
    source = read_source(path, name)
    written = Written(name, [FileLayer((), source)])
    problems: list[ConfigProblem] = []
    files = [path]
    blocks: frozenset[str] = frozenset()
    if "defaults" in source.data or _HEADER.search(_head(path)):
        composition = _Composition(path, source, written, PluginFragments.of(registry) if registry else None)
        cfg, parsed = composition.run(overrides, problems)
        files += composition.fragments
        blocks = composition.blocks
    elif overrides or _has_interpolation(source.data):
        from omegaconf import OmegaConf

        cfg = _create(source, problems)
        if _uses_hydra(source.data):
            _register_hydra_resolvers()
        parsed = _parse_overrides(overrides, (), problems)[0]
        OmegaConf.set_struct(cfg, False)
    else:
        data = deepcopy(source.data)
        data.pop("hydra", None)
        return _finish(data, written, problems, files, blocks)
    if "hydra" in cfg:
        cfg.pop("hydra")
    for override in parsed:
        _apply(cfg, override, written, problems)
    return _finish(_resolve(cfg, written, problems), written, problems, files, blocks)


def _finish(
    data: Any, written: Written, problems: list[ConfigProblem], files: list[Path], blocks: frozenset[str]
) -> Composed:
    broken: set[KeyPath] = set()
    _report_missing(data, (), written, problems, broken)
    referred = _referred(written) if blocks else frozenset[str]()
    return Composed(data, written, tuple(files), tuple(problems), frozenset(broken), blocks, referred)


def _referred(written: Written) -> frozenset[str]:
    """Top-level keys that interpolations refer to. Reads all layers, since an override may have replaced a
    reference."""
    texts = (str(layer.source.data if isinstance(layer, FileLayer) else layer.value) for layer in written.layers)
    return frozenset(re.split(r"[.\[]", found[2])[0] for text in texts for found in _REFERENCE.finditer(text))


def _head(path: Path) -> str:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return file.read(512)


def _has_interpolation(data: Any) -> bool:
    if isinstance(data, dict):
        return any(_has_interpolation(each) for each in data.values())
    if isinstance(data, list):
        return any(_has_interpolation(each) for each in data)
    return isinstance(data, str) and "${" in data


def _uses_hydra(data: Any) -> bool:
    return _HYDRA_RESOLVER.search(str(data)) is not None


def _register_hydra_resolvers() -> None:
    from hydra.core.utils import setup_globals

    setup_globals()


def _create(source: Source, problems: list[ConfigProblem]) -> DictConfig:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        cfg: DictConfig = OmegaConf.create(source.data)
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        located = _malformed(source) or [ConfigProblem(source.name, "", _first_line(error), code="ROLL-C023")]
        raise ConfigError([*problems, *located]) from error
    return cfg


def _malformed(source: Source) -> list[ConfigProblem]:
    """Every `${…}` that is not valid in OmegaConf's grammar, with its position."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    found: list[ConfigProblem] = []

    def visit(data: Any, path: KeyPath) -> None:
        if isinstance(data, dict):
            for key, each in data.items():
                visit(each, (*path, str(key)))
        elif isinstance(data, list):
            for at, each in enumerate(data):
                visit(each, (*path, str(at)))
        elif isinstance(data, str) and "${" in data:
            try:
                OmegaConf.create({"value": data})
            except OmegaConfBaseException:
                mark = source.value_mark(path)
                where = source.name if mark is None else f"{source.name}:{mark.line}:{mark.column}"
                hint = "a reference is written ${seed}; text in which ${ is meant as it stands, \\${"
                found.append(
                    ConfigProblem(where, ".".join(path), f"{data!r} is not an interpolation", hint, code="ROLL-C024")
                )

    visit(source.data, ())
    return found


def _parse_overrides(
    overrides: Sequence[str], choices: Sequence[str], problems: list[ConfigProblem]
) -> tuple[list[Override], list[str]]:
    if not overrides:
        return [], []
    from roll_core.config.overrides import parse_overrides

    return parse_overrides(overrides, choices, problems)


# -- fragments ---------------------------------------------------------------------------------------------------------


class _Composition:
    """Hydra determines which files are merged, where and in which order; OmegaConf merges them.

    The second half of Hydra's own `compose` would read every file again, as well as Hydra's configuration of itself,
    which is not needed here. It costs as much as everything else.
    """

    def __init__(self, path: Path, source: Source, written: Written, brought: PluginFragments | None) -> None:
        self.path = path
        self.source = source
        self.written = written
        self.brought = brought
        self.fragments: list[Path] = []
        self.blocks: frozenset[str] = frozenset()
        self.sources: dict[Path, Source] = {path.resolve(): source}

    def run(self, overrides: Sequence[str], problems: list[ConfigProblem]) -> tuple[DictConfig, list[Override]]:
        from hydra import initialize_config_dir
        from hydra.core.global_hydra import GlobalHydra
        from hydra.types import RunMode

        if self.path.suffix != ".yaml":
            raise ConfigError([self._problem("fragments are composed from files that end in .yaml; rename this one")])
        try:
            folder = str(self.path.parent.resolve())
            with _untouched_hydra(), initialize_config_dir(folder, job_name="roll", version_base="1.3"):
                loader = GlobalHydra.instance().config_loader()
                search = self._search_path()
                defaults = loader.compute_defaults_list(self.path.name, search, RunMode.RUN).defaults
                choices = [each.override_key for each in defaults if each.override_key]
                values, chosen = _parse_overrides(overrides, choices, problems)
                if chosen:
                    defaults = loader.compute_defaults_list(self.path.name, [*search, *chosen], RunMode.RUN).defaults
                folders = [
                    Path(each.path.removeprefix("file://"))
                    for each in loader.get_search_path().get_path()
                    if each.path.startswith("file://") or "://" not in each.path
                ] + (self.brought.folders if self.brought else [])
            layers = self._layers(defaults, folders)
            cfg = _merge(layers)
        except ConfigError:
            raise
        except Exception as error:  # Hydra raises all kinds of exceptions for a malformed defaults list
            raise self._explain(error) from error
        self.written.layers[:] = layers
        return cfg, values

    def _search_path(self) -> list[str]:
        """Hydra override that adds search folders after the config's own: those named in the config, then those of
        plugins."""
        if self.brought is None or not self.brought.folders:
            return []
        stanza = self.source.data.get("hydra")
        named = stanza.get("searchpath") if isinstance(stanza, dict) else None
        folders = [*(named if isinstance(named, list) else []), *(f"file://{each}" for each in self.brought.folders)]
        return [f"hydra.searchpath={[str(each) for each in folders]}"]

    def _layers(self, defaults: Sequence[Any], folders: list[Path]) -> list[FileLayer]:
        """One layer per file, in the order of merging."""
        layers: list[FileLayer] = []
        problems: list[ConfigProblem] = []
        for each in defaults:
            package = each.package or ""
            if each.config_path is None or package.split(".")[0] == "hydra" or each.config_path.startswith("hydra/"):
                continue
            file = _find(each.config_path, folders)
            if file is None:
                problems.append(self._problem(f"fragment {each.config_path!r} is no file; fragments are files"))
                continue
            if file not in self.sources:
                shown = Path(os.path.relpath(file))
                self.fragments.append(shown)
                try:
                    self.sources[file] = read_source(file, str(shown), fragment=True)
                except ConfigError as error:
                    problems += error.problems
                    continue
            package_path = tuple(step for step in package.split(".") if step)
            block = (file.stem,) if list(self.sources[file].data) == [file.stem] else ()
            if block and not package_path:
                self.blocks |= {file.stem}
            # A plugin's fragment in a role's package contributes the content of its block.
            inside = block if self._is_brought(file) and package_path else ()
            layers.append(FileLayer(package_path, self.sources[file], inside))
        if problems:
            raise ConfigError(problems)
        return layers

    def _is_brought(self, file: Path) -> bool:
        """True if the file is a plugin's fragment. Raises `ConfigError` if several plugins offer it."""
        try:
            return self.brought is not None and bool(self.brought.name_of(file))
        except ProviderConflictError as error:
            raise ConfigError([self._problem(str(error))]) from error

    def _explain(self, error: Exception) -> ConfigError:
        import yaml

        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            file = Path(error.problem_mark.name)
            if file.is_file():
                try:
                    read_source(file, os.path.relpath(file))
                except ConfigError as located:
                    return located
        malformed = [problem for source in self.sources.values() for problem in _malformed(source)]
        if malformed:
            return ConfigError(malformed)
        missing = getattr(error, "missing_cfg_file", None)
        if missing is not None:
            return ConfigError([self._missing(str(missing))])
        if isinstance(error, RecursionError):
            return ConfigError([self._problem("its fragments include each other without end")])
        lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
        message = (lines[0] if lines else type(error).__name__).removeprefix(f"In '{self.path.name}': ")
        return ConfigError([self._problem(f"cannot be composed: {message}", hint="\n    ".join(lines[1:6]))])

    def _missing(self, name: str) -> ConfigProblem:
        """Problem located at the item in `defaults:` that names the fragment, or at `defaults:` if another fragment
        names it."""
        import difflib

        folder = (self.path.parent / name).parent
        files = sorted(each.stem for each in folder.glob("*.yaml")) if folder.is_dir() else []
        files += self.brought.files if self.brought else ()
        close = difflib.get_close_matches(Path(name).stem, files, 1)
        why = self.brought.why_not(name) if self.brought else ""
        hint = why or (f"did you mean {Path(name).with_name(close[0])}?" if close else f"there is no {name}.yaml")
        items = self.source.data.get("defaults")
        at: KeyPath = ()
        for position, item in enumerate(items if isinstance(items, list) else []):
            text = "/".join(map(str, *item.items())) if isinstance(item, dict) and len(item) == 1 else str(item)
            if text.partition("@")[0] == name:
                at = (str(position),)
        return self._problem(f"there is no fragment {name!r}", at, hint)

    def _problem(self, message: str, at: KeyPath = (), hint: str = "") -> ConfigProblem:
        path = ("defaults", *at)
        mark = self.source.value_mark(path) if at else self.source.key_mark(path)
        where = self.source.name if mark is None else f"{self.source.name}:{mark.line}:{mark.column}"
        return ConfigProblem(where, "defaults", message, hint, code="ROLL-C023")


def _merge(layers: Sequence[FileLayer]) -> DictConfig:
    """Merge the files, each under its package, without `defaults:` and `hydra:`."""
    from omegaconf import OmegaConf

    merged: DictConfig = OmegaConf.create({})
    for layer in layers:
        data = {key: each for key, each in layer.data.items() if key not in ("defaults", "hydra")}
        part: DictConfig = OmegaConf.create(data)
        if layer.package:
            outer: DictConfig = OmegaConf.create({})
            OmegaConf.update(outer, ".".join(layer.package), part, merge=False)
            part = outer
        merged.merge_with(part)
    return merged


@contextmanager
def _untouched_hydra() -> Iterator[None]:
    """Clear Hydra's global state, and restore it afterwards: the caller may be a Hydra application itself."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.version import VersionBase

    running, version = GlobalHydra.instance().hydra, VersionBase.instance().version_base
    GlobalHydra.instance().clear()
    try:
        with warnings.catch_warnings():
            # ROLL's files omit `_self_` in their lists. It then comes last: the file overrides its fragments.
            warnings.filterwarnings("ignore", message=r"(?s).*Defaults list is missing `_self_`")
            yield
    finally:
        GlobalHydra.instance().hydra = running
        VersionBase.instance().version_base = version


def _find(config_path: str, folders: list[Path]) -> Path | None:
    name = config_path if config_path.endswith(".yaml") else f"{config_path}.yaml"
    for folder in folders:
        file = Path(os.path.normpath(folder / name))
        if file.is_file():
            return file.resolve()
    return None


# -- overrides ---------------------------------------------------------------------------------------------------------


def _apply(cfg: DictConfig, override: Override, written: Written, problems: list[ConfigProblem]) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        present = OmegaConf.select(cfg, override.key, throw_on_missing=False, throw_on_resolution_failure=False)
        if override.action == "delete":
            _delete(cfg, override, problems)
            return
        if override.action == "add" and present is not None and not isinstance(override.value, (dict, list)):
            problems.append(
                ConfigProblem(
                    "command line",
                    override.text,
                    "adds a key that is there already",
                    f"write {override.text[1:]}",
                    code="ROLL-C025",
                )
            )
            return
        _unfold(cfg, override.path[:-1], written)
        OmegaConf.update(cfg, override.key, override.value, merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError, AttributeError, IndexError, AssertionError) as error:
        problems.append(
            ConfigProblem("command line", override.text, f"cannot be applied: {_first_line(error)}", code="ROLL-C025")
        )
    else:
        written.layers.append(OverrideLayer(override.path, override.value))


def _unfold(cfg: DictConfig, path: KeyPath, written: Written) -> None:
    """Replace interpolations on the way to an overridden key by their values. Otherwise OmegaConf would keep only that
    key."""
    from omegaconf import OmegaConf

    node: Any = cfg
    for length, step in enumerate(path, 1):
        if not OmegaConf.is_dict(node) or step not in node:
            return
        if OmegaConf.is_interpolation(node, step) and OmegaConf.is_dict(node[step]):
            raw = OmegaConf.to_container(node, resolve=False)
            if isinstance(raw, dict):
                written.interpolations[path[:length]] = _interpolation(str(raw[step]), path[:length])
            node[step] = OmegaConf.to_container(node[step], resolve=True)
        node = node[step]


def _delete(cfg: DictConfig, override: Override, problems: list[ConfigProblem]) -> None:
    from omegaconf import OmegaConf

    parent_key, _, last = override.key.rpartition(".")
    parent: Any = OmegaConf.select(cfg, parent_key) if parent_key else cfg
    if not OmegaConf.is_dict(parent) or last not in parent:
        problems.append(
            ConfigProblem("command line", override.text, f"there is no key {override.key} to remove", code="ROLL-C025")
        )
    else:
        del parent[last]


# -- interpolations ----------------------------------------------------------------------------------------------------


def _resolve(cfg: DictConfig, written: Written, problems: list[ConfigProblem]) -> Any:
    from omegaconf import OmegaConf

    return _resolve_node(OmegaConf.to_container(cfg, resolve=False), cfg, (), written, problems)


def _resolve_node(raw: Any, node: Any, path: KeyPath, written: Written, problems: list[ConfigProblem]) -> Any:
    """`raw` with its interpolations replaced. Each failed interpolation is one problem."""
    if isinstance(raw, dict):
        return {key: _resolve_item(each, node, key, path, written, problems) for key, each in raw.items()}
    if isinstance(raw, list):
        return [_resolve_item(each, node, at, path, written, problems) for at, each in enumerate(raw)]
    return raw


def _resolve_item(
    raw: Any, parent: Any, key: Any, path: KeyPath, written: Written, problems: list[ConfigProblem]
) -> Any:
    from omegaconf import Container, OmegaConf

    here = (*path, str(key))
    if isinstance(raw, (dict, list)):
        return _resolve_node(raw, parent[key], here, written, problems)
    if not isinstance(raw, str) or "${" not in raw:
        return raw
    written.interpolations[here] = _interpolation(raw, here)
    try:
        value = parent[key]
        return OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value
    except Exception as error:  # whatever a resolver raises; RecursionError for a cycle
        problems.append(_unresolved(error, raw, here, written))
        return _BROKEN


def _interpolation(raw: str, here: KeyPath) -> Interpolation:
    found = _REFERENCE.search(raw)
    target: KeyPath | None = None
    if found is not None:
        dots, reference = found[1], found[2]
        steps = tuple(step for step in re.split(r"[.\[\]]+", reference) if step)
        target = (here[: len(here) - len(dots)] if dots else ()) + steps
    return Interpolation(raw, target, "oc.env" in raw or "oc.decode" in raw)


def _unresolved(error: Exception, raw: str, here: KeyPath, written: Written) -> ConfigProblem:
    where, key = str(written.value(here)), ".".join(here)
    if isinstance(error, RecursionError) or "Recursive interpolation" in str(error):
        return ConfigProblem(where, key, f"{raw} refers to itself", code="ROLL-C024")
    reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", _first_line(error)).strip('"')
    hint = ""
    if "Interpolation key" in reason and "not found" in reason:
        reason = "refers to a key that is not in this config"
        hint = (
            "a reference is written from the top, ${actor_train.infer_batch_size}, or from here, ${.infer_batch_size}"
        )
    return ConfigProblem(where, key, f"{raw}: {reason}", hint, code="ROLL-C024")


def _first_line(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it contains itself"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _report_missing(
    data: Any, path: KeyPath, written: Written, problems: list[ConfigProblem], broken: set[KeyPath]
) -> None:
    if isinstance(data, dict):
        for key, each in data.items():
            _report_missing(each, (*path, str(key)), written, problems, broken)
    elif isinstance(data, list):
        for at, each in enumerate(data):
            _report_missing(each, (*path, str(at)), written, problems, broken)
    elif data is _BROKEN:
        broken.add(path)
    elif data == MISSING:
        broken.add(path)
        where = str(written.value(path))
        problems.append(ConfigProblem(where, ".".join(path), "has to be given: it is written as ???", code="ROLL-C011"))
