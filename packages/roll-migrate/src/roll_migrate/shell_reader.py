"""Follows the commands of a shell script, without running a program.

Assignments, arrays, arithmetic, branches, loops, functions and `source` are followed. What a program prints or how it
ends is unknown. Text that depends on it, or on a variable from elsewhere, is unknown as well: a `Word` with such text
is an error as soon as its value is needed.

The variables of the caller's environment are not read. `--set NAME=VALUE` sets them.
"""

from __future__ import annotations

import fnmatch
import operator
import os
import posixpath
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.errors import ConfigError, ConfigProblem
from roll_migrate.arithmetic import evaluate
from roll_migrate.shell_syntax import (
    DECLARES,
    Arithmetic,
    Assignment,
    Calculation,
    Case,
    For,
    Function,
    Group,
    If,
    Parameter,
    ShellSyntaxError,
    Simple,
    Substitution,
    Text,
    Token,
    While,
    parse,
    parse_line,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_migrate.shell_syntax import Block, Chain, Document, Node, Part, Pipeline

MAX_STEPS = 20_000
"""Commands that are followed, so that no loop runs forever."""
MAX_TEXT = 200_000
"""Characters of a value."""
MAX_FILE = 1_000_000
"""Bytes of a file that `source` names."""
MAX_CALLS = 40
"""Depth of function calls."""

_UNKNOWN = re.compile("\0(\\d+)\0")
_DATE = re.compile(r"\+(?:[^%]|%[aAbBcdDeFgGhHIjklmMnpPrRSTuUVwWxXyYzZ%]){0,40}")
_BRACES = re.compile(r"([^{}]*)\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}([^{}]*)")
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why a text is unknown."""

    message: str
    where: str = ""
    """`file:line` of a branch; empty for an expansion in the word itself."""
    name: str = ""
    """Variable that would make it known."""

    def error(self, where: str, key: str) -> ConfigError:
        """The error for a word at `where` that needs the text as the value of `key`."""
        hint = f"add --set {self.name}=VALUE, or set it in the script" if self.name else "write the value in the script"
        return ConfigError([ConfigProblem(self.where or where, key, self.message, hint, "ROLL-C024")])


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command, after expansion."""

    text: str
    """The text. Unknown parts are numbers between two null characters."""
    where: str
    """`file:line:column`."""
    reasons: Sequence[Unknown] = field(default=(), repr=False)
    """Why parts are unknown, by number."""

    def value(self, key: str, text: str) -> str:
        """Return `text`, a part of this word that is the value of `key`. Raises `ConfigError` if it is unknown."""
        if match := _UNKNOWN.search(text):
            raise self.reasons[int(match[1])].error(self.where, key)
        return text


@dataclass(frozen=True, slots=True)
class Command:
    """One program that the script starts."""

    words: tuple[Word, ...]
    branch: Unknown | None = None
    """Why it is unknown whether the script starts it; otherwise None."""


class Leave(Exception):
    """`exit`, `return`, `break` or `continue`."""

    def __init__(self, kind: str, where: str, status: bool | None = None) -> None:
        super().__init__(kind)
        self.kind = kind
        self.where = where
        self.status = status


@dataclass(frozen=True, slots=True)
class _Item:
    """An item of an array, or a field of a word."""

    text: str
    where: str


class _Lines(str):
    """Text of a here-document, and its words with their places."""

    __slots__ = ("words",)
    words: tuple[_Item, ...]


_Value = str | tuple[_Item, ...]
_Follow = Callable[[], bool | None]
"""Follows commands, and returns their status."""


class ShellReader:
    """Follows the commands of a script. The status of a command is None if it is unknown."""

    def __init__(self, path: Path, presets: Mapping[str, str]) -> None:
        self.path = str(path)
        self.script = str(path)
        self.presets = presets
        self.variables: dict[str, _Value] = {"HOME": os.path.expanduser("~"), "PWD": os.getcwd()}
        self.variables |= {name: value for name, value in presets.items() if not name.isdigit()}
        count = max((int(name) for name in presets if name.isdigit()), default=0)
        self.arguments = [presets.get(str(number), "") for number in range(1, count + 1)]
        self.used: set[str] = set()
        self.unread = set(presets)
        """Given variables that the script has not set before it reads them."""
        self.functions: dict[str, Node] = {}
        self.commands: list[Command] = []
        self.unknowns: list[Unknown] = []
        self.branch: Unknown | None = None
        """Why it is unknown whether the commands that are followed are run."""
        self.blame: Unknown | None = None
        """Why the last condition is unknown."""
        self.elsewhere = ""
        """`source FILE` of a file that is not here: it may set any variable."""
        self.output: list[str] | None = None
        """Output of the command substitution that is followed; None outside of one."""
        self.steps = 0
        self.calls = 0

    # -- commands ------------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> bool | None:
        """Follow commands one after the other. Returns the status of the last."""
        status: bool | None = True
        for chain in block:
            status = self._chain(chain)
        return status

    def _chain(self, chain: Chain) -> bool | None:
        status: bool | None = True
        for operator_, pipeline in chain.pipelines:
            if (operator_ == "&&" and status is False) or (operator_ == "||" and status is True):
                continue
            if operator_ and status is None:
                self._either([partial(self._pipeline, pipeline), None], chain.line)
            else:
                status = self._pipeline(pipeline)
        return status

    def _pipeline(self, pipeline: Pipeline) -> bool | None:
        if len(pipeline.commands) == 1:
            status = self._node(pipeline.commands[0])
            return (not status if status is not None else None) if pipeline.negated else status
        outside = self.output
        if outside is not None:  # what the last program makes of the others' output is unknown
            outside.append(self._unknown("a pipeline"))
            self.output = []
        for command in pipeline.commands:
            self._apart(partial(self._node, command))
        self.output, self.blame = outside, None
        return None

    def _node(self, node: Node) -> bool | None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise ShellSyntaxError("expected a script without endless loops", getattr(node, "line", 1))
        if isinstance(node, Simple):
            return self._simple(node)
        if isinstance(node, Group):
            return self._apart(lambda: self.block(node.body)) if node.subshell else self.block(node.body)
        if isinstance(node, Function):
            self.functions[node.name] = node.body
            return True
        if isinstance(node, If):
            return self._if_(node, 0)
        if isinstance(node, Case):
            return self._case(node)
        if isinstance(node, For):
            return self._for_(node)
        if isinstance(node, While):
            return self._while_(node)
        return self._calculation(node)

    def _if_(self, node: If, index: int) -> bool | None:
        """Follow the branches of an `if` from `index` on."""
        if index == len(node.branches):
            return True
        condition, body = node.branches[index]
        self.blame = None
        status = True if condition is None else self.block(condition)
        if status is None:
            return self._either([lambda: self.block(body), lambda: self._if_(node, index + 1)], node.line)
        return self.block(body) if status else self._if_(node, index + 1)

    def _case(self, node: Case) -> bool | None:
        word = self._text(node.word)
        self.blame = self._reason(word)
        bodies: list[_Follow | None] = [partial(self.block, body) for _, body in node.branches]
        if self.blame is not None:
            always = any(pattern.plain == "*" for patterns, _ in node.branches for pattern in patterns)
            return self._either(bodies if always else [*bodies, None], node.line)
        for patterns, body in node.branches:
            for pattern in patterns:
                glob = self._pattern(pattern)
                if self._reason(glob) is not None:
                    self.blame = self._reason(glob)
                    return self._either([*bodies, None], node.line)
                if fnmatch.fnmatchcase(word, glob):
                    return self.block(body)
        return True

    def _for_(self, node: For) -> bool | None:
        if node.words is None:
            items = [_Item(argument, "") for argument in self.arguments]
            self.used |= {name for name in self.presets if name.isdigit()}
        else:
            items = [item for token in node.words for item in self._expanded(token)]
        status: bool | None = True
        for item in items:
            self.blame = self._reason(item.text)
            self._assign(node.name, item.text)
            if self.blame is not None or ("*" in item.text and node.words is not None):  # any number of values
                self._assign(node.name, self._unknown(f"${node.name}"))
                self._either([lambda: self.block(node.body), None], node.line)
                continue
            try:
                status = self.block(node.body)
            except Leave as leave:
                if leave.kind == "break":
                    break
                if leave.kind != "continue":
                    raise
        return status

    def _while_(self, node: While) -> bool | None:
        while True:
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise ShellSyntaxError("expected a script without endless loops", node.line)
            self.blame = None
            status = self.block(node.condition)
            if status is None:
                return self._either([lambda: self.block(node.body), None], node.line)
            if status is node.negated:
                return True
            try:
                self.block(node.body)
            except Leave as leave:
                if leave.kind == "break":
                    return True
                if leave.kind != "continue":
                    raise

    def _calculation(self, node: Calculation) -> bool | None:
        result = self._calculate(self._text(node.expression))
        self.blame = self._reason(result)
        return None if self.blame is not None else int(result) != 0

    def _apart(self, follow: _Follow) -> bool | None:
        """Follow commands in a subshell, whose variables are lost."""
        variables, arguments = dict(self.variables), list(self.arguments)
        try:
            return follow()
        except Leave as leave:
            if leave.kind not in ("exit", "return"):
                raise
            return None
        finally:
            self.variables, self.arguments = variables, arguments

    def _either(self, branches: Sequence[_Follow | None], line: int) -> bool | None:
        """Follow each of several branches from the same state, since it is unknown which one the script runs.

        Variables that they leave with different values are unknown afterwards, or have the given value. A branch that
        ends the script counts only if all do. Returns None, since the status is unknown.
        """
        blame = self.blame or Unknown("its condition is unknown")
        name, where = blame.name, blame.where or f"{self.path}:{line}"
        message = blame.message if blame.where else f"it depends on a branch that cannot be followed: {blame.message}"
        reason = Unknown(message, where, name)
        before, arguments, outside, output = self.variables, self.arguments, self.branch, self.output
        self.branch = outside or reason
        ends: list[tuple[dict[str, _Value], list[str]]] = []
        leaves: list[Leave] = []
        for follow in branches:
            self.variables, self.arguments = dict(before), list(arguments)
            self.output = None if output is None else []
            try:
                if follow is not None:
                    follow()
            except Leave as leave:
                leaves.append(leave)
            else:
                ends.append((self.variables, self.arguments))
        self.branch, self.output = outside, output
        if output is not None:
            output.append(self._mark(reason))
        if not ends:
            self.variables, self.arguments = before, arguments
            raise leaves[0]
        first, self.arguments = ends[0]
        names = {name for variables, _ in ends for name in variables}
        self.variables = dict(first)
        for variable in names:
            if len({_texts(variables.get(variable)) for variables, _ in ends}) > 1:
                unknown = self._mark(Unknown(reason.message, where, name or variable))
                self.variables[variable] = self.presets.get(variable, unknown)
                self.used |= {variable} & self.presets.keys()
        self.blame = reason
        return None

    # -- simple commands -----------------------------------------------------------------------------------------------

    def _simple(self, node: Simple) -> bool | None:
        self.blame = None
        if not node.words:
            status: bool | None = True
            for assignment in node.assignments:
                status = self._assigned(assignment)
            return status
        fields: list[_Item] = []
        for word in node.words:
            fields += [self._declared(word)] if isinstance(word, Assignment) else self._expanded(word)
        if not fields:
            return True
        name, arguments = fields[0].text, [word.text for word in fields[1:]]
        if name in self.functions:
            return self._call(name, arguments)
        if name == "read" and node.document is not None and arguments:
            self.variables[arguments[-1]] = self._document(node.document)
            return None
        if name in ("[", "test", "[["):
            tokens = [word for word in node.words[1:] if isinstance(word, Token)]
            return self._test(name, tokens)
        if name in ("exit", "return", "break", "continue"):
            status = int(arguments[0]) == 0 if arguments and arguments[0].isdigit() else None
            raise Leave(name, f"{self.path}:{node.line}", status if name == "return" else None)
        if (text := self._printed(name, arguments)) is not None:
            if self.output is not None:
                self.output.append(text)
            return True
        builtin = getattr(self, f"_do_{'source' if name == '.' else name}", None)
        if builtin is not None:
            result: bool | None = builtin(arguments, node.line)
            return result
        if name in (":", "true", "false", *DECLARES):
            return name != "false"
        self.blame = None
        if self.output is not None:
            self.output.append(self._unknown(f"$({name} …)"))
        else:
            self._start(fields, node.line)
        return None

    def _start(self, fields: list[_Item], line: int) -> None:
        """Record a program that the script starts, or follow the script that a shell is given as text."""
        texts = [word.text for word in fields]
        for shell in ("bash", "sh"):
            if shell in texts[:-1] and re.fullmatch("-[a-z]*c", texts[texts.index(shell) + 1]):
                index = texts.index(shell) + 2
                if index < len(texts) and self._reason(texts[index]) is None:
                    try:
                        body = parse(texts[index])
                    except ShellSyntaxError as error:
                        raise ShellSyntaxError(str(error), line) from error
                    self._apart(partial(self.block, body))
                    return
        words = tuple(Word(word.text, word.where, self.unknowns) for word in fields)
        self.commands.append(Command(words, self.branch))

    def _document(self, document: Document) -> _Lines:
        """Text of a here-document. Its words keep their places, also in a variable."""
        words: list[_Item] = []
        texts: list[str] = []
        for number, line in enumerate(document.lines, document.line):
            continues = document.expands and line.endswith("\\")
            text = line[:-1] if continues else line
            text = self._text(parse_line(text, number)) if document.expands else text
            for match in re.finditer(r"\S+", text):
                column = line.find(match[0]) + 1
                words.append(_Item(match[0], f"{self.path}:{number}:{column or 1}"))
            texts += [text] if continues else [text, "\n"]
        result = _Lines("".join(texts))
        result.words = tuple(words)
        return result

    def _call(self, name: str, arguments: list[str]) -> bool | None:
        """Call a function."""
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise ShellSyntaxError(f"the function {name} calls itself without an end", 1)
        outside, self.arguments = self.arguments, arguments
        try:
            return self._node(self.functions[name])
        except Leave as leave:
            if leave.kind != "return":
                raise
            return leave.status
        finally:
            self.arguments = outside
            self.calls -= 1

    def _do_cd(self, arguments: list[str], line: int) -> bool | None:
        target = next((word for word in arguments if not word.startswith("-")), "~")
        directory = self.variables.get("HOME") if target == "~" else target
        current = self.variables.get("PWD")
        if not isinstance(directory, str) or not isinstance(current, str):
            return None
        known = self._reason(current) is None or directory.startswith("/")
        self.variables["PWD"] = posixpath.normpath(posixpath.join(current, directory)) if known else current
        return True

    def _do_shift(self, arguments: list[str], line: int) -> bool | None:
        count = int(arguments[0]) if arguments and arguments[0].isdigit() else 1
        if count > len(self.arguments):
            return False
        self.arguments = self.arguments[count:]
        return True

    def _do_set(self, arguments: list[str], line: int) -> bool | None:
        if "--" in arguments:
            self.arguments = arguments[arguments.index("--") + 1 :]
        return True

    def _do_unset(self, arguments: list[str], line: int) -> bool | None:
        for name in arguments:
            self.variables.pop(name, None)
        return True

    def _do_read(self, arguments: list[str], line: int) -> bool | None:
        for name in arguments:
            if name.isidentifier():
                self._assign(name, self._unknown(f"${name}"))
        return None

    def _do_getopts(self, arguments: list[str], line: int) -> bool | None:
        return None if self.arguments else False

    def _do_eval(self, arguments: list[str], line: int) -> bool | None:
        text = " ".join(arguments)
        if (reason := self._reason(text)) is not None:
            raise reason.error(f"{self.path}:{line}", "")
        return self.block(parse(text))

    def _do_source(self, arguments: list[str], line: int) -> bool | None:
        """Follow a file of the script's project. An absolute path is the machine's environment, which is not read."""
        name = arguments[0] if arguments else ""
        current, home = (_text_of(self.variables.get(key, "")) for key in ("PWD", "HOME"))
        here = name.startswith((f"{current}/", f"{posixpath.dirname(self.script)}/")) or not name.startswith("/")
        if not here or name.endswith("/activate") or name.startswith((f"{home}/.", "~")):
            return None
        for path in (Path(current, name), Path(self.script).parent / name):
            if self._reason(name) is None and path.is_file() and path.stat().st_size <= MAX_FILE:
                outside, self.path = self.path, str(path)
                self.calls += 1
                if self.calls > MAX_CALLS:
                    raise ShellSyntaxError(f"{name} reads itself without an end", line)
                result = self.block(parse(path.read_text(encoding="utf-8", errors="replace")))
                self.path = outside
                self.calls -= 1
                return result
        self.elsewhere = f"source {_UNKNOWN.sub('…', name)} ({self.path}:{line})"
        return None

    def _printed(self, name: str, arguments: list[str]) -> str | None:
        """What a program prints that need not be run for that; None for another program."""
        current = _text_of(self.variables.get("PWD", ""))
        paths = [word for word in arguments if not word.startswith("-")]
        if name == "pwd":
            return current
        if name == "echo":
            while arguments and arguments[0] in ("-n", "-e", "-ne", "-en"):
                arguments = arguments[1:]
            return " ".join(arguments)
        if name == "printf":
            if len(arguments) == 2 and arguments[0] in ("%s", "%s\\n"):
                return arguments[1]
            return arguments[0] if len(arguments) == 1 and "%" not in arguments[0] else self._unknown("printf")
        if name == "date":
            formats = [word for word in arguments if word not in ("-u", "--utc")]
            text = formats[0] if len(formats) == 1 else "+%c" if not formats else ""
            if not _DATE.fullmatch(text):
                return self._unknown(f"$(date {' '.join(arguments)})")
            return time.strftime(text[1:], time.localtime() if len(formats) == len(arguments) else time.gmtime())
        if name == "dirname":
            return posixpath.dirname(arguments[-1].rstrip("/")) or "." if arguments else ""
        if name == "basename":
            path, ending = (*arguments, "", "")[:2]
            return posixpath.basename(path.rstrip("/")).removesuffix(ending)
        if name in ("realpath", "readlink"):
            return posixpath.normpath(posixpath.join(current, paths[-1])) if paths else ""
        return None

    # -- conditions ----------------------------------------------------------------------------------------------------

    def _test(self, name: str, tokens: list[Token]) -> bool | None:
        """Status of `[ … ]` or `[[ … ]]`."""
        words: list[tuple[str, str | None]] = []
        """Text of each word, and its pattern if it is one of `[[ … ]]`."""
        for token in tokens[:-1] if name != "test" else tokens:
            if name == "[[":
                words.append((self._text(token), self._pattern(token)))
            else:
                words += [(field.text, None) for field in self._fields(token)]
        self.blame = None
        status, index = self._any_of(words, 0)
        return status if index == len(words) else None

    def _any_of(
        self, words: list[tuple[str, str | None]], index: int, *, of_all: bool = False
    ) -> tuple[bool | None, int]:
        """Status of comparisons joined by `||`, or with `of_all` of those joined by `&&`; and the place after them."""
        follow, decided = self._single if of_all else partial(self._any_of, of_all=True), not of_all
        status, index = follow(words, index)
        while index < len(words) and words[index][0] in (("&&", "-a") if of_all else ("||", "-o")):
            other, index = follow(words, index + 1)
            status = decided if decided in (status, other) else None if None in (status, other) else of_all
        return status, index

    def _single(self, words: list[tuple[str, str | None]], index: int) -> tuple[bool | None, int]:
        """Status of one comparison, and the place after it."""
        texts = [text for text, _ in words[index : index + 3]]
        if len(texts) == 3 and (texts[1] in _COMPARISONS or texts[1] in ("=", "==", "!=", "=~", "<", ">")):
            return self._compared(texts, words[index + 2][1]), index + 3
        if texts and texts[0] == "!":
            status, end = self._single(words, index + 1)
            return (None if status is None else not status), end
        if texts and texts[0] == "(":
            status, end = self._any_of(words, index + 1)
            return status, end + 1
        if len(texts) >= 2 and re.fullmatch("-[a-zA-Z]", texts[0]):
            return self._unary(texts[0], texts[1]), index + 2
        if not texts:
            return False, index
        self.blame = self._reason(texts[0]) or self.blame
        return (texts[0] != "" if self._reason(texts[0]) is None else None), index + 1

    def _unary(self, name: str, text: str) -> bool | None:
        if name == "-v":
            return True if self._variable(text) is not None else None
        reason = self._reason(text)
        if name not in ("-n", "-z") or (reason is not None and _UNKNOWN.sub("", text) == ""):
            self.blame = reason or self.blame
            return None
        return (text != "") is (name == "-n")

    def _compared(self, texts: list[str], pattern: str | None) -> bool | None:
        left, name, right = texts
        reason = self._reason(left) or self._reason(right)
        if reason is not None:
            self.blame = reason
            return None
        if name in _COMPARISONS:
            numbers = [self._calculate(side) for side in (left, right)]
            if any(self._reason(number) is not None for number in numbers):
                return None
            return _COMPARISONS[name](int(numbers[0]), int(numbers[1]))
        if name in ("<", ">"):
            return left < right if name == "<" else left > right
        if name == "=~":  # a regular expression of the script might run forever
            return None
        equal = left == right if pattern is None else fnmatch.fnmatchcase(left, pattern)
        return equal is (name != "!=")

    # -- variables -----------------------------------------------------------------------------------------------------

    def _assigned(self, assignment: Assignment) -> bool | None:
        """Set a variable. Returns the status of a command substitution in its value."""
        self.blame = None
        old = self.variables.get(assignment.name)
        if isinstance(assignment.value, tuple):
            items = tuple(item for token in assignment.value for item in self._fields(token))
            self.unread.discard(assignment.name)
            before = old if isinstance(old, tuple) else (_Item(old, ""),) if old else ()
            self.variables[assignment.name] = (*before, *items) if assignment.appends else items
            return True
        text = self._text(assignment.value, tilde=True)
        if assignment.index:
            index = self._calculate(_subscript(assignment.index))
            items = old if isinstance(old, tuple) else ()
            if index.isdigit() and int(index) <= len(items):
                self.variables[assignment.name] = (*items[: int(index)], _Item(text, ""), *items[int(index) + 1 :])
            else:
                self.variables[assignment.name] = self._unknown(f"{assignment.name}[{assignment.index}]")
            return True
        if assignment.appends and isinstance(old, tuple):
            self.variables[assignment.name] = (_Item(old[0].text + text, old[0].where), *old[1:]) if old else text
        else:
            self._assign(assignment.name, f"{old}{text}" if assignment.appends and old is not None else text)
        return True

    def _declared(self, assignment: Assignment) -> _Item:
        self._assigned(assignment)
        return _Item(assignment.name, "")

    def _assign(self, name: str, text: str) -> None:
        """Set a variable. A given one keeps its value if the script's is unknown."""
        if name in self.presets and self._reason(text) is not None:
            self.used.add(name)
            return
        self.unread.discard(name)
        self.variables[name] = self._named(text, name)

    def _variable(self, name: str) -> _Value | None:
        """Value of a variable; None if it is not set here."""
        if name in self.unread or name.isdigit():
            self.used.add(name)
        if name.isdigit():
            index = int(name)
            return self.script if index == 0 else self.arguments[index - 1] if index <= len(self.arguments) else None
        if name == "#":
            return str(len(self.arguments))
        if name in ("@", "*"):
            self.used |= {name for name in self.presets if name.isdigit()}
            return tuple(_Item(argument, "") for argument in self.arguments)
        if name == "BASH_SOURCE":
            return self.path
        return self.variables.get(name)

    # -- expansion -----------------------------------------------------------------------------------------------------

    def _expanded(self, token: Token) -> list[_Item]:
        """Fields of a word of a command, with those of a pattern such as `{1..4}`."""
        if match := _BRACES.fullmatch(token.plain or ""):
            before, first, last, names, after = match.groups()
            inner = names.split(",") if names else map(str, range(int(first), min(int(last), int(first) + 999) + 1))
            return [_Item(f"{before}{name}{after}", self._place(token)) for name in inner]
        return self._fields(token)

    def _place(self, token: Token) -> str:
        return f"{self.path}:{token.line}:{token.column}"

    def _text(self, token: Token, *, tilde: bool = False, is_pattern: bool = False) -> str:
        """Text of a word without splitting, such as the value of an assignment.

        With `is_pattern`, it is a pattern, in which quoted characters stand for themselves.
        """
        texts = []
        for part in token.parts:
            text = part.text if isinstance(part, Text) else self._joined(part, self._value(part))
            texts.append(re.sub(r"([*?\[])", r"[\1]", text) if is_pattern and part.quoted else text)
        text = "".join(texts)
        if tilde and token.parts and _is_tilde(token.parts[0]) and text.startswith("~") and text[1:2] in ("", "/"):
            text = _text_of(self.variables.get("HOME", "")) + text[1:]
        return self._limited(text)

    def _pattern(self, token: Token) -> str:
        return self._text(token, is_pattern=True)

    def _fields(self, token: Token) -> list[_Item]:
        """Fields of a word: unquoted values are split at blanks, and arrays at their items."""
        where = self._place(token)
        done: list[_Item] = []
        current, exists, source = "", False, where
        for index, part in enumerate(token.parts):
            if isinstance(part, Text):
                tilde = index == 0 and _is_tilde(part) and _starts_path(token)
                current += _text_of(self.variables.get("HOME", "")) if tilde else part.text
                exists = True
                continue
            value = self._value(part)
            if isinstance(value, str) and (part.quoted or self._is_quoted_default(part)):
                current, exists = current + value, True
                continue
            if isinstance(value, str):
                words = value.words if isinstance(value, _Lines) else None
                pieces = list(words) if words is not None else [_Item(text, where) for text in self._split(value)]
                separators = self._separators()
                starts = value[:1].isspace() and value[:1] in separators
                ends = bool(value) and value[-1] in separators
            elif part.quoted and isinstance(part, Parameter) and "*" in (part.index, part.name):
                current, exists = current + self._joined(part, value), True
                continue
            else:
                pieces = (
                    list(value)
                    if part.quoted
                    else [_Item(text, item.where) for item in value for text in self._split(item.text)]
                )
                starts = ends = False
            if starts and exists:
                done.append(_Item(current, source))
                current, exists, source = "", False, where
            for number, piece in enumerate(pieces):
                if number:
                    done.append(_Item(current, source))
                    current, exists, source = "", False, where
                source = source if exists else piece.where or where
                current, exists = current + piece.text, True
            if ends and exists:
                done.append(_Item(current, source))
                current, exists, source = "", False, where
        if exists:
            done.append(_Item(current, source))
        for item in done:
            self._limited(item.text)
        return done

    def _separators(self) -> str:
        """Characters of `IFS`, at which unquoted values are split."""
        return _text_of(self.variables.get("IFS", " \t\n"))

    def _split(self, text: str) -> list[str]:
        """Fields of an unquoted value."""
        separators = self._separators()
        if self._reason(separators) is not None:
            return [separators]
        blanks = re.escape("".join(char for char in separators if char.isspace()))
        others = re.escape("".join(char for char in separators if not char.isspace()))
        blank = f"[{blanks}]" if blanks else "(?!)"
        text = re.sub(rf"\A{blank}+|{blank}+\Z", "", text)
        ends = rf"{blank}*[{others}]{blank}*|{blank}+" if others else rf"{blank}+"
        fields = re.split(ends, text)
        return fields[:-1] if not fields[-1] else fields

    def _joined(self, part: Parameter | Substitution | Arithmetic, value: _Value) -> str:
        """A value as one text: `*` joins items by the first character of `IFS`."""
        if isinstance(value, str):
            return value
        star = isinstance(part, Parameter) and "*" in (part.index, part.name)
        return (self._separators()[:1] if star else " ").join(item.text for item in value)

    def _is_quoted_default(self, part: Part) -> bool:
        """True for `${name:-"…"}` of a variable without a value, which is not split."""
        if not isinstance(part, Parameter) or part.argument is None or part.operator not in (":-", "-", ":+", "+"):
            return False
        parts = part.argument.parts
        return bool(parts) and all(inner.quoted for inner in parts) and self._variable(part.name) in (None, "")

    def _value(self, part: Parameter | Substitution | Arithmetic) -> _Value:
        """Value of an expansion."""
        if isinstance(part, Parameter):
            return self._parameter(part)
        if isinstance(part, Arithmetic):
            result = self._calculate(self._text(part.expression))
            return result
        outside, self.output = self.output, []
        branch, self.branch = self.branch, None
        before = len(self.commands)
        self._apart(lambda: self.block(part.body))
        lines, self.output, self.branch = self.output, outside, branch
        del self.commands[before:]
        text = "\n".join(lines).rstrip("\n")
        reason = self._reason(text)
        if reason is not None:
            return self._mark(Unknown(f"the value of {part.source} is unknown", "", reason.name))
        return text

    def _parameter(self, part: Parameter) -> _Value:
        value = self._variable(part.name)
        if part.prefix == "!" and part.index in ("@", "*"):
            return tuple(_Item(str(number), "") for number in range(len(value if isinstance(value, tuple) else ())))
        if part.prefix == "!" and isinstance(value, str) and self._reason(value) is None:
            value = self._variable(value)
        elif part.prefix == "#" and value is not None:
            known = self._reason(_text_of(value)) is None
            length = len(value) if part.index in ("@", "*") else len(_text_of(value))
            return str(length) if known else self._unknown(part.source)
        if isinstance(value, tuple) and part.index not in ("@", "*") and part.name not in ("@", "*"):
            index = self._calculate(_subscript(part.index) or "0")
            inside = index.isdigit() and int(index) < len(value)
            value = (
                value[int(index)].text if inside else None if part.index in ("", "0") else self._unknown(part.source)
            )
        empty = value is None or value in ("", ())
        if part.argument is not None and part.operator in (":-", "-", ":=", "=", ":+", "+", ":?", "?"):
            absent = empty if part.operator[0] == ":" else value in (None, ())
            kind = part.operator[-1]
            if kind == "+":
                return "" if absent else self._text(part.argument)
            if not absent and value is not None:
                return value
            if kind == "?":
                return self._unknown(part.source, part.name)
            if value is None and self.elsewhere and part.name not in self.presets:
                return self._mark(Unknown(f"the value of {part.source} is unknown: {self.elsewhere}", "", part.name))
            default = self._text(part.argument)
            if kind == "=":
                self._assign(part.name, default)
            return self._named(default, part.name)
        if value is None and part.name in ("@", "*"):
            return ()
        if value is None:
            return self._unknown(part.source, part.name)
        return self._edited(value, part) if part.operator else value

    def _named(self, text: str, name: str) -> str:
        """An unknown text that is known if the variable `name` is given: its default, or what it is set to."""
        reason = self._reason(text)
        if reason is None or reason.name or not _UNKNOWN.fullmatch(text):
            return text
        return self._mark(Unknown(reason.message, reason.where, name))

    def _edited(self, value: _Value, part: Parameter) -> _Value:
        """Value of `${name#…}`, `${name/…/…}` and other operators that change a text."""
        argument = part.argument
        if isinstance(value, tuple):
            bounds = self._text(argument).split(":") if argument is not None and part.operator == ":" else []
            if bounds and all(bound.strip().isdigit() for bound in bounds):
                start = int(bounds[0]) - (1 if part.name in ("@", "*") and int(bounds[0]) else 0)
                return value[start : start + int(bounds[1])] if len(bounds) > 1 else value[start:]
            return self._unknown(part.source)
        if self._reason(value) is not None or len(value) > 4096 or argument is None:
            return value if self._reason(value) is not None else self._unknown(part.source)
        if part.operator in ("^^", ",,"):
            return value.upper() if part.operator == "^^" else value.lower()
        if part.operator in ("^", ","):
            return (value[:1].upper() if part.operator == "^" else value[:1].lower()) + value[1:]
        glob = self._pattern(argument)
        if self._reason(glob) is not None:
            return glob
        if part.operator in ("#", "##"):
            ends = range(len(value) + 1) if part.operator == "#" else range(len(value), -1, -1)
            return next((value[end:] for end in ends if fnmatch.fnmatchcase(value[:end], glob)), value)
        if part.operator in ("%", "%%"):
            starts = range(len(value), -1, -1) if part.operator == "%" else range(len(value) + 1)
            return next((value[:start] for start in starts if fnmatch.fnmatchcase(value[start:], glob)), value)
        old, _, new = self._text(argument).partition("/")
        if part.operator in ("/", "//") and old and not re.search(r"[*?\[]", old):
            return value.replace(old, new) if part.operator == "//" else value.replace(old, new, 1)
        if part.operator == ":" and re.fullmatch(r"\s*\d+(?::\d+)?", self._text(argument)):
            first, _, length = self._text(argument).partition(":")
            return value[int(first) :][: int(length)] if length else value[int(first) :]
        return self._unknown(part.source)

    def _calculate(self, text: str) -> str:
        """Result of an arithmetic expression of integers, with its assignments."""
        expression = text.strip()
        if (reason := self._reason(expression)) is not None:
            return self._mark(reason)
        if steps := re.fullmatch(r"([A-Za-z_]\w*)(\+\+|--)|(\+\+|--)([A-Za-z_]\w*)", expression):
            name, sign = steps[1] or steps[4], (steps[2] or steps[3])[0]
            old, result = self._calculate(name), self._calculate(f"{name} {sign} 1")
            self._assign(name, result)
            return old if steps[1] else result
        if match := re.fullmatch(r"([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", expression, re.DOTALL):
            result = self._calculate(f"{match[1]} {match[2]} ({match[3]})" if match[2] else match[3])
            self._assign(match[1], result)
            return result
        try:
            return str(evaluate(expression, self._number))
        except _NotKnown as error:
            return self._mark(error.reason)
        except ValueError:
            return self._unknown(f"$(({text}))")

    def _number(self, name: str) -> int:
        """Integer in a variable, whose value may be an expression. Raises `_NotKnown` or `ValueError`."""
        value = self._variable(name)
        text = self._unknown(f"${name}", name) if value is None else _text_of(value)
        if self._reason(text) is None and not re.fullmatch(r"\s*-?\d+\s*", text):
            text = self._calculate(text)
        if (reason := self._reason(text)) is not None:
            raise _NotKnown(reason)
        return int(text)

    # -- unknown texts -------------------------------------------------------------------------------------------------

    def _unknown(self, source: str, name: str = "") -> str:
        """Text of an expansion whose value is unknown."""
        return self._mark(Unknown(f"the value of {source} is unknown", "", name))

    def _mark(self, reason: Unknown) -> str:
        """Text that stands for an unknown one."""
        if reason not in self.unknowns:
            self.unknowns.append(reason)
        return f"\0{self.unknowns.index(reason)}\0"

    def _reason(self, text: str) -> Unknown | None:
        """Why a part of a text is unknown; None if all of it is known."""
        match = _UNKNOWN.search(text)
        return self.unknowns[int(match[1])] if match else None

    def _limited(self, text: str) -> str:
        if len(text) > MAX_TEXT:
            raise ShellSyntaxError(f"expected values of at most {MAX_TEXT} characters", 1)
        return text


class _NotKnown(Exception):
    """An arithmetic expression with a variable that is unknown."""

    def __init__(self, reason: Unknown) -> None:
        super().__init__(reason.message)
        self.reason = reason


def _text_of(value: _Value) -> str:
    return value if isinstance(value, str) else value[0].text if value else ""


def _texts(value: _Value | None) -> object:
    return tuple(item.text for item in value) if isinstance(value, tuple) else value


def _subscript(index: str) -> str:
    """Subscript of an array as an arithmetic expression, in which names need no dollar sign."""
    return re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", index)


def _is_tilde(part: object) -> bool:
    return isinstance(part, Text) and part.text == "~" and not part.quoted


def _starts_path(token: Token) -> bool:
    """True if a tilde at the beginning is alone, or a slash follows it."""
    after = token.parts[1] if len(token.parts) > 1 else None
    return after is None or (isinstance(after, Text) and after.text.startswith("/"))
