"""Reads one YAML file into plain values and records the position of each key and value.

Uses the parser's events, because only these have positions. Files are untrusted input: nesting, size and tags are
limited. Mistakes are collected; reading stops early only if it cannot continue.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from roll_core.errors import ConfigError, ConfigProblem

if TYPE_CHECKING:
    from pathlib import Path

KeyPath = tuple[str, ...]
"""Path of a value in a config: keys and list indices, all as text."""

MAX_DEPTH = 64
MAX_NODES = 200_000
MAX_BYTES = 4_000_000

_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str")}
_MERGE_TAG = "tag:yaml.org,2002:merge"
_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
    |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
"""Matches floats such as 1e-6, which YAML 1.1 reads as text. Same rules as OmegaConf."""


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """Position in a file; line and column start at 1."""

    line: int
    column: int


@dataclass(slots=True)
class Source:
    """Content of one file, with the positions of its keys and values."""

    name: str
    """File name for messages: the path that the user gave, or one relative to the working directory."""
    data: Any = None
    keys: dict[KeyPath, Mark] = field(default_factory=dict)
    values: dict[KeyPath, Mark] = field(default_factory=dict)
    aliases: dict[KeyPath, KeyPath] = field(default_factory=dict)
    """Paths of `*alias` or `<<` -> path at which their content was written."""

    def key_mark(self, path: KeyPath) -> Mark | None:
        """Position of the key of `path`."""
        return self._find(self.keys, path)

    def value_mark(self, path: KeyPath) -> Mark | None:
        """Position of the value of `path`."""
        return self._find(self.values, path)

    def _find(self, marks: dict[KeyPath, Mark], path: KeyPath) -> Mark | None:
        for _ in range(MAX_DEPTH):
            if path in marks:
                return marks[path]
            for length in range(len(path), 0, -1):
                origin = self.aliases.get(path[:length])
                if origin is not None:
                    path = origin + path[length:]
                    break
            else:
                return None
        return None


def read_source(path: Path, name: str, *, fragment: bool = False) -> Source:
    """Read a file whose top level is a mapping; a `fragment` may also be empty. Raises `ConfigError` with every
    mistake."""
    source = Source(name)
    problems: list[ConfigProblem] = []
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        problems.append(ConfigProblem(name, "", "there is no such file", _similar_file(path), code="ROLL-C020"))
    except IsADirectoryError:
        problems.append(ConfigProblem(name, "", "this is a folder, expected a YAML file", code="ROLL-C020"))
    except (OSError, ValueError) as error:
        problems.append(
            ConfigProblem(name, "", f"cannot be read: {getattr(error, 'strerror', None) or error}", code="ROLL-C020")
        )
    else:
        if len(content) > MAX_BYTES:
            problems.append(
                ConfigProblem(name, "", f"has {len(content)} bytes; a config has at most {MAX_BYTES}", code="ROLL-C020")
            )
        else:
            _Reader(source, problems, fragment=fragment).read(content)
    if problems:
        raise ConfigError(problems)
    return source


def _similar_file(path: Path) -> str:
    import difflib

    try:
        siblings = [each.name for each in path.parent.iterdir() if each.suffix in (".yaml", ".yml")]
    except OSError:
        return f"there is no folder {path.parent} either" if not path.parent.is_dir() else ""
    close = difflib.get_close_matches(path.name, siblings, 1)
    return f"did you mean {path.with_name(close[0])}?" if close else ""


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the C loader if available
    """YAML as OmegaConf reads it: 1e-6 is a number and a date is text."""


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


class _Stop(Exception):
    """Reading cannot continue; the problem is already recorded."""


class _Reader:
    """Reads one document event by event."""

    def __init__(self, source: Source, problems: list[ConfigProblem], *, fragment: bool) -> None:
        self.may_be_empty = fragment
        self.source = source
        self.problems = problems
        self.anchors: dict[str, tuple[Any, KeyPath, int]] = {}
        self.open_anchors: set[str] = set()
        self.num_nodes = 0

    def read(self, content: bytes) -> None:
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            column = error.start - (content.rfind(b"\n", 0, error.start) + 1) + 1
            self._problem(Mark(line, column), "", f"byte 0x{content[error.start]:02x} is not UTF-8")
            return
        try:
            self.text = text
            self.loader = Loader(text)
            self._document()
        except _Stop:
            return
        except yaml.reader.ReaderError as error:
            at = int(error.position)
            mark = Mark(text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at))
            self._problem(mark, "", f"character {error.character!r} is not allowed in YAML")
        except yaml.MarkedYAMLError as error:
            self._syntax(error)
        except yaml.YAMLError as error:
            self._problem(Mark(1, 1), "", " ".join(str(error).split()))

    def _document(self) -> None:
        loader = self.loader
        loader.get_event()  # stream start
        if loader.check_event(yaml.StreamEndEvent):
            self._empty()
            return
        start = loader.get_event()
        first = loader.peek_event()
        self.source.data = self._node((), 0)
        if self.source.data is None and not self.problems:
            self._empty()
        elif not isinstance(self.source.data, dict):
            mark = _mark(first if first is not None else start)
            found = "a list" if isinstance(self.source.data, list) else "a single value"
            self._problem(mark, "", f"the file holds {found}, expected keys and values")
        loader.get_event()  # document end
        if not loader.check_event(yaml.StreamEndEvent):
            self._problem(_mark(loader.get_event()), "", "a second document begins here; a config is one document")

    def _empty(self) -> None:
        self.source.data = {}
        if not self.may_be_empty:
            self._problem(Mark(1, 1), "", "the file is empty, expected a mapping that begins with pipeline:")

    def _node(self, path: KeyPath, depth: int) -> Any:
        event = self.loader.get_event()
        mark = _mark(event)
        self._count(1, mark)
        if depth > MAX_DEPTH:
            self._problem(mark, _dotted(path[:3]), f"nested deeper than {MAX_DEPTH} levels")
            raise _Stop
        if isinstance(event, yaml.AliasEvent):
            return self._alias(str(event.anchor), path, mark)
        before = self.num_nodes
        if event.anchor is not None:
            self.open_anchors.add(event.anchor)
        self.source.values[path] = mark
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event, path, mark)
        else:
            if event.tag not in (None, "!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
                self._problem(mark, _dotted(path), f"tag {_short(event.tag)} is not allowed in a config")
            sequence = isinstance(event, yaml.SequenceStartEvent)
            value = self._sequence(path, depth) if sequence else self._mapping(path, depth)
        if event.anchor is not None:
            self.open_anchors.discard(event.anchor)
            self.anchors[event.anchor] = (value, path, self.num_nodes - before + 1)
        return value

    def _alias(self, anchor: str, path: KeyPath, mark: Mark) -> Any:
        if anchor in self.open_anchors:
            self._problem(mark, _dotted(path), f"alias *{anchor} stands inside of what it refers to")
            raise _Stop
        if anchor not in self.anchors:
            self._problem(mark, _dotted(path), f"alias *{anchor} refers to nothing that was named &{anchor} before")
            return None
        value, origin, size = self.anchors[anchor]
        self._count(size, mark)
        self.source.aliases[path] = origin
        return value

    def _scalar(self, event: Any, path: KeyPath, mark: Mark) -> Any:
        tag = event.tag
        if tag is None or tag == "!":
            tag = self.loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        if tag == _MERGE_TAG or tag == "tag:yaml.org,2002:value":
            tag = "tag:yaml.org,2002:str"
        if tag not in _PLAIN_TAGS:
            self._problem(mark, _dotted(path), f"tag {_short(tag)} is not allowed in a config")
            return None
        try:
            return self.loader.construct_object(yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark))
        except (ValueError, LookupError, OverflowError):
            shown = event.value if len(event.value) <= 40 else event.value[:37] + "..."
            self._problem(mark, _dotted(path), f"{shown!r} cannot be read as {tag.rpartition(':')[2]}")
            return None

    def _sequence(self, path: KeyPath, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self.loader.check_event(yaml.SequenceEndEvent):
            items.append(self._node((*path, str(len(items))), depth + 1))
        self.loader.get_event()
        return items

    def _mapping(self, path: KeyPath, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        given: dict[Any, Mark] = {}
        merged: list[tuple[dict[Any, Any], KeyPath]] = []
        while not self.loader.check_event(yaml.MappingEndEvent):
            event = self.loader.peek_event()
            mark = _mark(event)
            if not isinstance(event, yaml.ScalarEvent):
                self._problem(mark, _dotted(path), "a key is text, not a list, a mapping or an alias")
                raise _Stop
            self.loader.get_event()
            if event.value == "<<" and event.implicit[0]:
                self._merge((*path, "<<"), depth, mark, merged)
                continue
            key = self._scalar(event, path, mark)
            child = (*path, str(key))
            if key is None:
                self._problem(mark, _dotted(path), "a key is text, but here it is empty or null")
            elif key in found:
                self._problem(
                    mark, _dotted(child), f"this key was given before, at line {given[key].line}", code="ROLL-C022"
                )
                child = (*child, "again")
            else:
                self.source.keys[child] = given[key] = mark
            value = self._node(child, depth + 1)
            found.setdefault(key, value)
        self.loader.get_event()
        for mapping, origin in merged:
            for key, value in mapping.items():
                if key not in found:
                    found[key] = value
                    self.source.aliases[(*path, str(key))] = (*origin, str(key))
        return found

    def _merge(self, path: KeyPath, depth: int, mark: Mark, merged: list[tuple[dict[Any, Any], KeyPath]]) -> None:
        value = self._node(path, depth + 1)
        if isinstance(value, dict):
            merged.append((value, path))
        elif isinstance(value, list) and all(isinstance(each, dict) for each in value):
            merged += [(each, (*path, str(at))) for at, each in enumerate(value)]
        else:
            self._problem(mark, _dotted(path[:-1]), "<< merges a mapping or a list of mappings")

    def _count(self, nodes: int, mark: Mark) -> None:
        self.num_nodes += nodes
        if self.num_nodes > MAX_NODES:
            self._problem(mark, "", f"the file expands to more than {MAX_NODES} values")
            raise _Stop

    def _syntax(self, error: yaml.MarkedYAMLError) -> None:
        at = error.problem_mark or error.context_mark
        mark = Mark(at.line + 1, at.column + 1) if at is not None else Mark(1, 1)
        problem = " ".join((error.problem or str(error)).split())
        context = f" ({' '.join(error.context.split())})" if error.context else ""
        hint = ""
        if at is not None and self._character(at.line, at.column) == "\t":
            hint = "indent with spaces, YAML does not allow tabs"
        elif "mapping values are not allowed" in problem:
            hint = "put quotes around text that contains ': ', and check the indentation"
        elif "undefined alias" in problem or "alias" in (error.context or ""):
            hint = "text that begins with * or & needs quotes"
        self._problem(mark, "", f"not valid YAML: {problem}{context}", hint)

    def _character(self, line: int, column: int) -> str:
        lines = self.text.split("\n")
        return lines[line][column : column + 1] if line < len(lines) else ""

    def _problem(self, mark: Mark, key: str, message: str, hint: str = "", code: str = "ROLL-C021") -> None:
        self.problems.append(
            ConfigProblem(f"{self.source.name}:{mark.line}:{mark.column}", key, message, hint, code=code)
        )


def _mark(event: Any) -> Mark:
    return Mark(event.start_mark.line + 1, event.start_mark.column + 1)


def _short(tag: str) -> str:
    """A YAML tag in its short form, `!!name`."""
    return f"!!{tag.removeprefix('tag:yaml.org,2002:')}" if tag.startswith("tag:yaml.org,2002:") else tag


def _dotted(path: KeyPath) -> str:
    return ".".join(path)
