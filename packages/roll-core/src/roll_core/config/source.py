"""Reads one YAML file into plain values and finds the position of each key and value.

PyYAML's nodes have positions. Files are untrusted input: nesting, size and tags are limited. All mistakes are
collected; reading stops early only if it cannot continue.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from roll_core.errors import ConfigError, ConfigProblem, closest

if TYPE_CHECKING:
    from pathlib import Path

KeyPath = tuple[str, ...]
"""Path of a value in a config: keys and list indices, all as text."""

MAX_DEPTH = 64
MAX_NODES = 200_000
MAX_BYTES = 4_000_000
MAX_INT_BITS = 4096
"""Python does not convert integers of thousands of digits to text."""

_YAML = "tag:yaml.org,2002:"
_PLAIN_TAGS = {f"{_YAML}{name}" for name in ("null", "bool", "int", "float", "str")}
FLOAT = re.compile(
    r"""^(?:[-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
    |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
"""Matches floats such as 1e-6, which YAML 1.1 reads as text. Same rules as OmegaConf."""


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the C loader if available
    """YAML as OmegaConf reads it: 1e-6 is a number and a date is text."""


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(f"{_YAML}float", FLOAT, list("-+0123456789."))


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
    text: str = ""
    data: Any = None
    root: yaml.Node | None = None
    children: dict[int, dict[str, tuple[yaml.Node | None, yaml.Node]]] = field(default_factory=dict)
    """Nodes of keys and values, by the `id` of the mapping's or list's node and the key or index. Items of lists have
    no key. Aliases share nodes."""

    def mark(self, path: KeyPath, *, key: bool = False) -> Mark | None:
        """Position of the value of `path`, or of its key; None if the file does not have the path."""
        key_node: yaml.Node | None = None
        value_node = self.root
        for step in path:
            key_node, value_node = self.children.get(id(value_node), {}).get(step, (None, None))
        node = key_node if key else value_node
        return None if node is None else _mark(node)

    def locate(self, path: KeyPath, *, key: bool = False) -> str:
        """The same as `file:line:column`; the file's name if it does not have the path."""
        mark = self.mark(path, key=key)
        return self.name if mark is None else f"{self.name}:{mark.line}:{mark.column}"


def read_source(path: Path, name: str, *, fragment: bool = False) -> Source:
    """Read a file whose top level is a mapping; a `fragment` may also be empty. Raises `ConfigError` with every
    mistake."""
    source = Source(name)
    problem, hint = "", ""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        problem, hint = "there is no such file", _similar_file(path)
    except IsADirectoryError:
        problem = "found a folder, expected a YAML file"
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    else:
        if len(content) > MAX_BYTES:
            problem = f"found more than {MAX_BYTES} bytes"
    if problem:
        raise ConfigError([ConfigProblem(name, "", problem, hint, code="ROLL-C020")])
    reader = _Reader(source)
    reader.read(content, may_be_empty=fragment)
    if reader.problems:
        raise ConfigError(reader.problems)
    return source


def mapping_source(values: Mapping[Any, Any]) -> Source:
    """Values without a file: problems have the position `config`. Raises `ConfigError` with every value that YAML
    could not hold."""
    problems: list[ConfigProblem] = []
    source = Source("config", data=plain_value(values, (), "config", problems))
    if problems:
        raise ConfigError(problems)
    return source


def plain_value(value: Any, path: KeyPath, where: str, problems: list[ConfigProblem]) -> Any:
    """Copy a value as plain values: mappings, lists, text, numbers, booleans and None. Paths become text and tuples
    become lists. Adds everything else to `problems`."""
    if len(path) > MAX_DEPTH:
        message = f"nested deeper than {MAX_DEPTH} levels, or a value contains itself"
        problems.append(ConfigProblem(where, ".".join(path[:3]), message, code="ROLL-C021"))
        return None
    if isinstance(value, Mapping):
        return {key: plain_value(entry, (*path, str(key)), where, problems) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item, (*path, str(i)), where, problems) for i, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if type(value) is int and value.bit_length() > MAX_INT_BITS:
        message = f"found an integer of {value.bit_length()} bits, expected at most {MAX_INT_BITS}"
    elif type(value) is str and _has_surrogates(value):
        message = f"found {value!r}, expected text that UTF-8 can encode"
    elif value is None or type(value) in (str, int, float, bool):
        return value
    else:
        expected = "text, a number, true, false, null, a list or a mapping"
        message = f"found {type(value).__name__}, expected {expected}"
    problems.append(ConfigProblem(where, ".".join(path), message, code="ROLL-C013"))
    return None


def _has_surrogates(text: str) -> bool:
    """True if `text` is no Unicode text: bytes of another encoding on the command line become lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _similar_file(path: Path) -> str:
    try:
        siblings = [sibling.name for sibling in path.parent.iterdir() if sibling.suffix in (".yaml", ".yml")]
    except OSError:
        return f"there is no folder {path.parent} either" if not path.parent.is_dir() else ""
    close = closest(path.name, siblings)
    return f"did you mean {path.with_name(close)}?" if close else ""


class _Stop(Exception):
    """Reading cannot continue; the problem is already recorded."""


class _Reader:
    """Reads one document."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.problems: list[ConfigProblem] = []
        self.num_nodes = 0

    def read(self, content: bytes, *, may_be_empty: bool) -> None:
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            column = error.start - content.rfind(b"\n", 0, error.start)
            self._problem(Mark(line, column), (), f"byte 0x{content[error.start]:02x} is not UTF-8")
            return
        self.source.text = text
        try:
            self._check_depth(text)
            self.loader = Loader(text)
            self.source.root = self.loader.get_single_node()
            data = None if self.source.root is None else self._value(self.source.root, ())
        except _Stop:
            return
        except yaml.reader.ReaderError as error:
            offset = int(error.position)
            mark = Mark(text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset))
            self._problem(mark, (), f"character {error.character!r} is not allowed in YAML")
            return
        except yaml.MarkedYAMLError as error:
            self._syntax(error, text)
            return
        self.source.data = {} if data is None else data
        if data is None and not may_be_empty and not self.problems:
            self._problem(Mark(1, 1), (), "the file is empty, expected a mapping that begins with pipeline:")
        elif not isinstance(self.source.data, dict):
            kind = "a list" if isinstance(data, list) else "a single value"
            self._problem(self.source.root, (), f"the file is {kind}, expected keys and values")

    def _check_depth(self, text: str) -> None:
        """Stop at deep nesting. The C loader builds nodes recursively and would crash."""
        depth = 0
        for event in yaml.parse(text, Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                self._too_deep(event)

    def _too_deep(self, place: Any) -> None:
        self._problem(place, (), f"nested deeper than {MAX_DEPTH} levels, or an alias is inside of its own anchor")
        raise _Stop

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        """Plain value of a node. An alias counts as a copy of its anchor."""
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            self._problem(node, (), f"the file expands to more than {MAX_NODES} values")
            raise _Stop
        if len(path) > MAX_DEPTH:
            self._too_deep(node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if node.tag not in (f"{_YAML}map", f"{_YAML}seq"):
            self._problem(node, path, f"tag {_short(node.tag)} is not allowed in a config")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        self.source.children[id(node)] = {str(i): (None, item) for i, item in enumerate(node.value)}
        return [self._value(item, (*path, str(i))) for i, item in enumerate(node.value)]

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        if node.tag in (f"{_YAML}merge", f"{_YAML}value"):
            return node.value
        if node.tag not in _PLAIN_TAGS:
            self._problem(node, path, f"tag {_short(node.tag)} is not allowed in a config")
            return None
        with suppress(ValueError, LookupError, OverflowError):
            value = self.loader.construct_object(node)
            if not isinstance(value, int) or value.bit_length() <= MAX_INT_BITS:
                return value
        shown = node.value if len(node.value) <= 40 else node.value[:37] + "..."
        self._problem(node, path, f"{shown!r} cannot be read as {node.tag.removeprefix(_YAML)}")
        return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        children: dict[str, tuple[yaml.Node | None, yaml.Node]] = {}
        key_nodes: dict[Any, yaml.Node] = {}
        merged: list[tuple[yaml.Node, dict[Any, Any]]] = []
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, path, "found a list or a mapping as a key, expected text")
            elif key_node.tag == f"{_YAML}merge":
                merged += self._merged(key_node, value_node, path)
            else:
                key = self._scalar(key_node, path)
                child = (*path, str(key))
                if key is None:
                    self._problem(key_node, path, "found an empty key or null, expected text")
                elif key in key_nodes:
                    line = _mark(key_nodes[key]).line
                    self._problem(key_node, child, f"this key was given before, at line {line}", code="ROLL-C022")
                value = self._value(value_node, child)
                if key not in key_nodes:
                    key_nodes[key] = key_node
                    values[key], children[str(key)] = value, (key_node, value_node)
        for origin, mapping in merged:
            for key, value in mapping.items():
                if key not in values:
                    values[key], children[str(key)] = value, self.source.children[id(origin)][str(key)]
        self.source.children[id(node)] = children
        return values

    def _merged(
        self, key_node: yaml.Node, value_node: yaml.Node, path: KeyPath
    ) -> list[tuple[yaml.Node, dict[Any, Any]]]:
        """Mappings that `<<` merges, each with its node."""
        nodes = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
        if all(isinstance(node, yaml.MappingNode) for node in nodes):
            return [(node, self._value(node, (*path, "<<"))) for node in nodes]
        self._problem(key_node, path, "<< merges a mapping or a list of mappings")
        return []

    def _syntax(self, error: yaml.MarkedYAMLError, text: str) -> None:
        start = error.problem_mark or error.context_mark
        problem = " ".join((error.problem or str(error)).split())
        context = f" ({' '.join(error.context.split())})" if error.context else ""
        hint = ""
        if start is not None and "".join(text.split("\n")[start.line : start.line + 1])[start.column :].startswith(
            "\t"
        ):
            hint = "indent with spaces, YAML does not allow tabs"
        elif "mapping values are not allowed" in problem:
            hint = "put quotes around text that contains ': ', and check the indentation"
        elif "alias" in problem or "alias" in (error.context or ""):
            hint = "text that begins with * or & needs quotes"
        mark = Mark(1, 1) if start is None else Mark(start.line + 1, start.column + 1)
        self._problem(mark, (), f"not valid YAML: {problem}{context}", hint)

    def _problem(self, place: Any, path: KeyPath, message: str, hint: str = "", code: str = "ROLL-C021") -> None:
        """Record a problem at a `Mark`, a node or an event."""
        mark = place if isinstance(place, Mark) else _mark(place)
        where = f"{self.source.name}:{mark.line}:{mark.column}"
        self.problems.append(ConfigProblem(where, ".".join(path), message, hint, code=code))


def _mark(node: Any) -> Mark:
    """Position of a node or an event."""
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)


def _short(tag: str) -> str:
    """A YAML tag in its short form, `!!name`."""
    return f"!!{tag.removeprefix(_YAML)}" if tag.startswith(_YAML) else tag
