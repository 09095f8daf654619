"""Composes one config from a file, the fragments of its `defaults:` list, overrides and interpolations.

Hydra determines which files are merged, where and in which order; OmegaConf merges and resolves them. Hydra's own
`compose` would read every file again, without positions, and Hydra's configuration of itself; that doubles the time of
`roll-core check`. Both libraries are imported only for files that need them.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any

from roll_core.config.overrides import apply_override, first_line, parse_overrides
from roll_core.config.positions import REFERENCE, FileLayer, Interpolation, Positions
from roll_core.config.source import mapping_source, read_source
from roll_core.errors import ConfigError, ConfigProblem, PluginError, PluginLoadError, closest
from roll_core.plugins.targets import data_file
from roll_core.spec.providers import FragmentProvider

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omegaconf import DictConfig

    from roll_core.config.overrides import Override, Overrides
    from roll_core.config.source import KeyPath, Source
    from roll_core.plugins.registry import Registry

_HEADER = re.compile(r"^\s*#\s*@package\b", re.MULTILINE)
_HYDRA_RESOLVER = re.compile(r"\$\{\s*(now|hydra|hydra_version|python_version)\s*:")
MISSING = "???"
_BROKEN = object()
"""Placeholder for interpolations that failed."""
MAX_INTERPOLATIONS = 2_000
"""Interpolations that one config may resolve, those inside of referred values included. Eight lines of ten references
each would resolve 100 million, at a millisecond each. 1,000 characters of a text, or 100 values of a mapping or list,
count as one more."""
_COUNTING = RLock()
"""Held while OmegaConf's method is replaced: two threads would restore each other's."""


@dataclass(frozen=True, slots=True)
class ComposedConfig:
    """Plain values, with their source positions."""

    data: dict[Any, Any]
    positions: Positions
    files: tuple[Path, ...]
    """All files that were read; the requested file is first. Empty if values without fragments were given."""
    problems: tuple[ConfigProblem, ...]
    """Overrides and interpolations that cannot be applied. The rest can still be validated."""
    broken: frozenset[KeyPath]
    """Keys that have no value because of these problems."""
    blocks: frozenset[str] = frozenset()
    """Top-level keys that a fragment adds under its own name. If no schema has them, they only serve as targets of
    interpolations."""
    referred: frozenset[str] = frozenset()
    """Top-level keys that some `${…}` in a file or an override refers to."""


def compose(source: Path | Mapping[str, Any], overrides: Overrides, registry: Registry) -> ComposedConfig:
    """Compose a config from its own files, or values without a file, and the files of plugins in `registry`.

    Leaves Hydra's global state unchanged and creates no folders. Raises `ConfigError` if nothing is left to validate: a
    file cannot be read, or a fragment is missing.
    """
    return _Composition(source, PluginFragments.of(registry)).run(overrides)


class _Composition:
    """One call of `compose`."""

    def __init__(self, source: Path | Mapping[str, Any], plugin_fragments: PluginFragments) -> None:
        self.path = Path() if isinstance(source, Mapping) else source
        self.plugin_fragments = plugin_fragments
        if isinstance(source, Mapping):
            self.source = mapping_source(source)
            self.files: list[Path] = []
        else:
            self.source = read_source(source, str(source))
            self.files = [source]
        self.sources: dict[Path, Source] = {path.resolve(): self.source for path in self.files}
        self.positions = Positions(self.source.name, [FileLayer((), self.source)])
        self.problems: list[ConfigProblem] = []
        self.blocks: set[str] = set()
        self.num_resolved = 0

    def run(self, overrides: Overrides) -> ComposedConfig:
        source = self.source
        if "defaults" in source.data or _HEADER.search(source.text[:512]):
            cfg, parsed = self._with_fragments(overrides)
        elif overrides or any(isinstance(leaf, str) and "${" in leaf for _, leaf in _leaves(source.data)):
            cfg, parsed = self._create(), parse_overrides(overrides, (), self.problems)[0]
        else:
            return self._finish(deepcopy(_without_hydra(source.data)))
        from omegaconf import OmegaConf

        with self._counted_interpolations():
            for override in parsed:
                try:
                    apply_override(cfg, override, self.positions)
                except ConfigError as error:
                    self.problems += error.problems
            data = self._resolved(OmegaConf.to_container(cfg, resolve=False), cfg, ())
        return self._finish(data)

    def _finish(self, data: Any) -> ComposedConfig:
        broken = {path for path, value in _leaves(data) if value is _BROKEN or value == MISSING}
        for path, value in _leaves(data):
            if value == MISSING:
                message = "found ???, expected a value"
                where = str(self.positions.value(path))
                self.problems.append(ConfigProblem(where, ".".join(path), message, code="ROLL-C011"))
        # All layers are searched, since an override may have replaced a reference.
        layers = self.positions.layers if self.blocks else []
        texts = (str(layer.source.data if isinstance(layer, FileLayer) else layer.value) for layer in layers)
        referred = {re.split(r"[.\[]", reference[2])[0] for text in texts for reference in REFERENCE.finditer(text)}
        return ComposedConfig(
            data,
            self.positions,
            tuple(self.files),
            tuple(self.problems),
            frozenset(broken),
            frozenset(self.blocks),
            frozenset(referred),
        )

    def _create(self) -> DictConfig:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            cfg: DictConfig = OmegaConf.create(_without_hydra(self.source.data))
        except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
            problem = ConfigProblem(self.source.name, "", first_line(error), code="ROLL-C023")
            raise ConfigError(_malformed(self.source) or [problem]) from error
        if _HYDRA_RESOLVER.search(str(self.source.data)):
            from hydra.core.utils import setup_globals

            setup_globals()
        return cfg

    # -- fragments -----------------------------------------------------------------------------------------------------

    def _with_fragments(self, overrides: Overrides) -> tuple[DictConfig, list[Override]]:
        from hydra import initialize_config_dir
        from hydra.core.global_hydra import GlobalHydra
        from hydra.types import RunMode

        if not self.files:
            raise ConfigError([self._problem("fragments are composed from a file; write this config to a .yaml file")])
        if self.path.suffix != ".yaml":
            raise ConfigError([self._problem("fragments are composed from files that end in .yaml; rename this one")])
        try:
            folder = str(self.path.parent.resolve())
            with _untouched_hydra(), initialize_config_dir(folder, job_name="roll", version_base="1.3"):
                loader = GlobalHydra.instance().config_loader()
                search = self._search_path()
                defaults = loader.compute_defaults_list(self.path.name, search, RunMode.RUN).defaults
                choices = [default.override_key for default in defaults if default.override_key]
                values, chosen = parse_overrides(overrides, choices, self.problems)
                if chosen:
                    defaults = loader.compute_defaults_list(self.path.name, [*search, *chosen], RunMode.RUN).defaults
                paths = [entry.path for entry in loader.get_search_path().get_path()]
            folders = [
                Path(folder.removeprefix("file://")) for folder in paths if "://" not in folder.removeprefix("file://")
            ]
            layers = self._layers(defaults, folders + self.plugin_fragments.folders)
            cfg = _merge(layers)
        except ConfigError:
            raise
        except Exception as error:  # Hydra raises all kinds of exceptions for a malformed defaults list
            raise self._explain(error) from error
        self.positions.layers[:] = layers
        return cfg, values

    def _search_path(self) -> list[str]:
        """Hydra override that adds search folders after the config's own: those named in the config, then those of
        plugins."""
        if not self.plugin_fragments.folders:
            return []
        stanza = self.source.data.get("hydra")
        named = stanza.get("searchpath") if isinstance(stanza, dict) else None
        folders = [str(folder) for folder in named] if isinstance(named, list) else []
        return [f"hydra.searchpath={[*folders, *(f'file://{folder}' for folder in self.plugin_fragments.folders)]}"]

    def _layers(self, defaults: Sequence[Any], folders: list[Path]) -> list[FileLayer]:
        """One layer per file, in the order of merging."""
        layers: list[FileLayer] = []
        problems: list[ConfigProblem] = []
        for default in defaults:
            package = tuple(step for step in (default.package or "").split(".") if step)
            if default.config_path is None or package[:1] == ("hydra",) or default.config_path.startswith("hydra/"):
                continue
            name = default.config_path if default.config_path.endswith(".yaml") else f"{default.config_path}.yaml"
            candidates = (Path(os.path.normpath(folder / name)) for folder in folders)
            file = next((candidate.resolve() for candidate in candidates if candidate.is_file()), None)
            if file is None:
                problems.append(self._problem(f"fragment {default.config_path!r} is no file; fragments are files"))
                continue
            if file not in self.sources:
                shown = Path(os.path.relpath(file))
                self.files.append(shown)
                try:
                    self.sources[file] = read_source(file, str(shown), fragment=True)
                except ConfigError as error:
                    problems += error.problems
                    continue
            block = (file.stem,) if list(self.sources[file].data) == [file.stem] else ()
            if block and not package:
                self.blocks.add(file.stem)
            # A plugin's fragment in a role's package contributes the content of its block.
            inside = block if self.plugin_fragments.offer(file) and package else ()
            layers.append(FileLayer(package, self.sources[file], inside))
        if problems:
            raise ConfigError(problems)
        return layers

    def _explain(self, error: Exception) -> ConfigError:
        import yaml

        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            file = Path(error.problem_mark.name)
            if file.is_file():
                try:
                    read_source(file, os.path.relpath(file))
                except ConfigError as located:
                    return located
        try:
            self._read_named(self.source, (self.path.resolve(),))
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

    def _read_named(self, source: Source, including: tuple[Path, ...]) -> None:
        """Read the fragments that `source` names and those that they name, as far as their names are paths.

        Hydra's errors do not name the file. `including` are the files that lead to `source`, which is the last one.
        Raises `ConfigError` if one cannot be read or includes itself.
        """
        for position, name in _fragments(source):
            folder = including[0 if name.startswith("/") else -1].parent
            file = (folder / f"{name.strip('/').removesuffix('.yaml')}.yaml").resolve()
            if file in including:
                where = source.locate(("defaults", str(position)))
                message = f"{name} includes this file, directly or through others"
                raise ConfigError([ConfigProblem(where, "defaults", message, "remove one of them", code="ROLL-C023")])
            if file.is_file() and file not in self.sources:
                self.sources[file] = read_source(file, os.path.relpath(file), fragment=True)
                self._read_named(self.sources[file], (*including, file))

    def _missing(self, name: str) -> ConfigProblem:
        """Problem located at the item in `defaults:` that names the fragment, or at `defaults:` if another fragment
        names it."""
        folder = (self.path.parent / name).parent
        files = sorted(file.stem for file in folder.glob("*.yaml")) if folder.is_dir() else []
        files += self.plugin_fragments.files
        close = closest(Path(name).stem, files)
        hint = f"did you mean {Path(name).with_name(close)}?" if close else f"there is no {name}.yaml"
        item_path: KeyPath = next(
            ((str(position),) for position, fragment in _fragments(self.source) if fragment == name), ()
        )
        return self._problem(f"there is no fragment {name!r}", item_path, self.plugin_fragments.why_not(name) or hint)

    def _problem(self, message: str, item_path: KeyPath = (), hint: str = "") -> ConfigProblem:
        where = self.source.locate(("defaults", *item_path), key=not item_path)
        return ConfigProblem(where, "defaults", message, hint, code="ROLL-C023")

    # -- interpolations ------------------------------------------------------------------------------------------------

    def _resolved(self, raw: Any, node: Any, path: KeyPath) -> Any:
        """`raw` with the interpolations of its values replaced. Each failed interpolation is one problem."""
        if isinstance(raw, dict):
            return {key: self._item(value, node, key, (*path, str(key))) for key, value in raw.items()}
        return [self._item(value, node, i, (*path, str(i))) for i, value in enumerate(raw)]

    def _item(self, raw: Any, parent: Any, key: Any, path: KeyPath) -> Any:
        from omegaconf import Container, OmegaConf

        if isinstance(raw, (dict, list)):
            return self._resolved(raw, parent[key], path)
        if not isinstance(raw, str) or "${" not in raw:
            return raw
        self.positions.interpolations[path] = Interpolation.of(raw, path)
        if self.num_resolved > MAX_INTERPOLATIONS:
            return _BROKEN  # as the problem says
        try:
            value = parent[key]
            plain = OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value
            if self.num_resolved > MAX_INTERPOLATIONS:
                raise ValueError("too many interpolations")
            return plain
        except Exception as error:  # whatever a resolver raises; RecursionError for a cycle
            self.problems.append(self._unresolved(error, raw, path))
            return _BROKEN

    @contextmanager
    def _counted_interpolations(self) -> Iterator[None]:
        """Count what OmegaConf resolves, and refuse more than `MAX_INTERPOLATIONS`. It has no limit of its own, and
        resolves a value again for each reference to it."""
        from omegaconf.base import Container

        omegaconf: Any = Container
        thread = get_ident()
        with _COUNTING:
            resolve = omegaconf.resolve_parse_tree

            def counted(container: Any, *args: Any, **kwargs: Any) -> Any:
                if get_ident() != thread:  # other code of this process uses OmegaConf, too
                    return resolve(container, *args, **kwargs)
                if self.num_resolved > MAX_INTERPOLATIONS:
                    raise ValueError("too many interpolations")
                value = resolve(container, *args, **kwargs)
                self.num_resolved += 1 + (len(value) // 1_000 if isinstance(value, str) else _num_values(value) // 100)
                return value

            omegaconf.resolve_parse_tree = counted
            try:
                yield
            finally:
                omegaconf.resolve_parse_tree = resolve

    def _unresolved(self, error: Exception, raw: str, path: KeyPath) -> ConfigProblem:
        if self.num_resolved > MAX_INTERPOLATIONS:
            text = raw if len(raw) <= 60 else f"{raw[:57]}..."
            message = f"{text}: this config resolves more than {MAX_INTERPOLATIONS} interpolations"
            hint = "refer to values that refer to few others, or write the value"
            return ConfigProblem(str(self.positions.value(path)), ".".join(path), message, hint, code="ROLL-C024")
        reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", first_line(error)).strip('"')
        message, hint = f"{raw}: {reason}", ""
        if isinstance(error, RecursionError) or re.search("Recursive interpolation|maximum recursion", str(error)):
            message = f"{raw} refers to itself"
        elif "Interpolation key" in reason and "not found" in reason:
            message = f"{raw}: refers to a key that is not in this config"
            hint = "write the key from the top, ${actor_train.infer_batch_size}, or from here, ${.infer_batch_size}"
        return ConfigProblem(str(self.positions.value(path)), ".".join(path), message, hint, code="ROLL-C024")


@dataclass(frozen=True, slots=True)
class PluginFragments:
    """Fragment files of all plugins, by name.

    A config's own folder takes precedence: a user's file replaces a plugin's file of the same name.
    """

    registry: Registry
    files: dict[str, Path]
    absent: dict[str, PluginLoadError]
    """Errors of fragments whose files are missing. Raised only for a config that names the fragment."""

    @classmethod
    def of(cls, registry: Registry) -> PluginFragments:
        """Collect the fragments of all plugins in `registry`. If several offer the same name, the first is used."""
        files: dict[str, Path] = {}
        absent: dict[str, PluginLoadError] = {}
        for record in registry.providers(FragmentProvider):
            try:
                files.setdefault(record.name, data_file(record.target, owner=registry.owner(record)))
            except PluginLoadError as error:
                absent[record.name] = error
        return cls(registry, files, absent)

    @property
    def folders(self) -> list[Path]:
        """Folders with fragments, without duplicates."""
        return list(dict.fromkeys(file.parent for file in self.files.values()))

    def offer(self, file: Path) -> bool:
        """True if `file` is a plugin's. Raises `ProviderConflictError` if several packages offer its name."""
        if self.files.get(file.stem) != file:
            return False
        self.registry.find(FragmentProvider, file.stem)
        return True

    def why_not(self, name: str) -> str:
        """Why there is no fragment `name`, if the reason involves plugins; otherwise empty."""
        bare = name.rpartition("/")[2]
        if bare in self.absent:
            return str(self.absent[bare])
        if bare in self.files:
            return f"{bare} is a fragment of a plugin: write it without a folder"
        try:
            self.registry.find(FragmentProvider, bare)
        except PluginError as error:
            return next((line.strip() for line in str(error).splitlines() if "pip install" in line), "")
        return ""


def _fragments(source: Source) -> Iterator[tuple[int, str]]:
    """Position and name of each fragment in the `defaults:` list of a file."""
    items = source.data.get("defaults")
    for position, item in enumerate(items if isinstance(items, list) else ()):
        text = "/".join(map(str, *item.items())) if isinstance(item, dict) and len(item) == 1 else str(item)
        yield position, text.partition("@")[0]


def _leaves(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Path and value of everything that is no mapping or list."""
    if isinstance(data, (dict, list)):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _leaves(value, (*path, str(key)))
    else:
        yield path, data


def _num_values(node: Any) -> int:
    """Number of values in what an interpolation refers to, without resolving any."""
    from omegaconf import Container

    content = node._content if isinstance(node, Container) else node
    if not isinstance(content, (dict, list)):
        return 1
    return sum(map(_num_values, content.values() if isinstance(content, dict) else content))


def _malformed(source: Source) -> list[ConfigProblem]:
    """Every `${…}` that is not valid in OmegaConf's grammar, with its position."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    problems: list[ConfigProblem] = []
    for path, text in _leaves(source.data):
        if isinstance(text, str) and "${" in text:
            try:
                OmegaConf.create({"value": text})
            except OmegaConfBaseException:
                message = f"found {text!r}, expected an interpolation"
                hint = "a reference is written ${seed}; text with a literal ${ is written \\${"
                problems.append(ConfigProblem(source.locate(path), ".".join(path), message, hint, code="ROLL-C024"))
    return problems


def _without_hydra(data: Mapping[str, Any]) -> dict[str, Any]:
    """The config without Hydra's own settings."""
    return {key: value for key, value in data.items() if key != "hydra"}


def _merge(layers: Sequence[FileLayer]) -> DictConfig:
    """Merge the files, each under its package, without `defaults:` and `hydra:`."""
    from omegaconf import OmegaConf

    merged: DictConfig = OmegaConf.create({})
    for layer in layers:
        data = {key: value for key, value in _without_hydra(layer.data).items() if key != "defaults"}
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
