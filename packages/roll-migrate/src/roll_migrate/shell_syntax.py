"""Parses shell scripts: the commands of bash that scripts with hyperparameters have, as a syntax tree.

Process substitutions are read as words, and redirections are skipped. A construct outside of this grammar is a
`ShellSyntaxError` with its place.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field

MAX_DEPTH = 60
"""Levels of nested commands and expansions."""


class ShellSyntaxError(Exception):
    """A text that is not one of the grammar. `line` counts from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Text:
    """Literal characters."""

    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """`$name` or `${name…}`."""

    name: str
    index: str
    """`@`, `*` or the subscript of an array; otherwise empty."""
    prefix: str
    """`#` for a length, `!` for an indirect name; otherwise empty."""
    operator: str
    argument: Token | None
    source: str
    """The expansion as written."""
    quoted: bool


@dataclass(frozen=True, slots=True)
class Substitution:
    """`$(…)` or backticks."""

    body: Block
    source: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`$((…))`."""

    expression: Token
    source: str
    quoted: bool


Part = Text | Parameter | Substitution | Arithmetic


@dataclass(frozen=True, slots=True)
class Token:
    """One word, before expansion."""

    parts: tuple[Part, ...]
    line: int
    column: int

    @property
    def plain(self) -> str | None:
        """The text of an unquoted word without expansions; otherwise None."""
        if not all(isinstance(part, Text) and not part.quoted for part in self.parts):
            return None
        return "".join(part.text for part in self.parts if isinstance(part, Text))


@dataclass(frozen=True, slots=True)
class Assignment:
    """`name=value`, `name+=value`, `name=(…)` or `name[index]=value`."""

    name: str
    index: str
    appends: bool
    value: Token | tuple[Token, ...]


@dataclass(slots=True)
class Document:
    """A here-document. Its lines are read after the line that names it."""

    delimiter: str
    expands: bool
    strips: bool
    lines: list[str] = field(default_factory=list)
    line: int = 0


@dataclass(frozen=True, slots=True)
class Simple:
    """A simple command; `[[ … ]]` too."""

    assignments: tuple[Assignment, ...]
    words: tuple[Token | Assignment, ...]
    """Words after the first one may be assignments: those of `export`, `local` and `declare`."""
    document: Document | None
    line: int


@dataclass(frozen=True, slots=True)
class Calculation:
    """`((…))`."""

    expression: Token
    line: int


@dataclass(frozen=True, slots=True)
class If:
    """`if`, with a pair of condition and body for each branch; the condition of `else` is None."""

    branches: tuple[tuple[Block | None, Block], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Case:
    """`case`, with patterns and body of each branch."""

    word: Token
    branches: tuple[tuple[tuple[Token, ...], Block], ...]
    line: int


@dataclass(frozen=True, slots=True)
class For:
    """`for name in words`; `words` is None for the positional parameters."""

    name: str
    words: tuple[Token, ...] | None
    body: Block
    line: int


@dataclass(frozen=True, slots=True)
class While:
    """`while`, or `until` if `negated`."""

    condition: Block
    body: Block
    negated: bool
    line: int


@dataclass(frozen=True, slots=True)
class Function:
    """Definition of a function."""

    name: str
    body: Node


@dataclass(frozen=True, slots=True)
class Group:
    """`{ … }`, or `( … )` in a subshell."""

    body: Block
    subshell: bool


Node = Simple | Calculation | If | Case | For | While | Function | Group


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands joined by `|`."""

    commands: tuple[Node, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class Chain:
    """Pipelines joined by `&&` and `||`: the operator before each pipeline, empty for the first."""

    pipelines: tuple[tuple[str, Pipeline], ...]
    line: int


Block = tuple[Chain, ...]

_BLANK = re.compile(r"(?:[ \t]|\\(?:\n|\Z))*")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]\n]*)\])?(\+?)=")
_RESERVED = re.compile(
    r"(?:if|then|elif|else|fi|case|esac|for|while|until|do|done|function|in|\{|\}|!|\[\[)(?=[\s;&|()]|$)"
)
_FUNCTION = re.compile(r"([A-Za-z_][\w-]*)[ \t]*\([ \t]*\)")
_REDIRECTION = re.compile(r"(?:\d+|&)?(?:<<<|<<-?|<>|>>|>\||<&|>&|<|>)")
_PROCESS = re.compile(r"[<>]\(")
_END = re.compile(r"[\n)]|;;")
_SEPARATOR = re.compile(r";(?!;)|&(?!&)")
_PARAMETER = re.compile(r"\w+|[@*#?$!-]")
_OPERATOR = re.compile(r":?[-=+?]|##?|%%?|//?[#%]?|\^\^?|,,?|:|@")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b", "0": "\0"}
DECLARES = ("export", "local", "declare", "typeset", "readonly")
"""Commands whose words may be assignments."""


def parse(text: str) -> Block:
    """Parse a script. Raises `ShellSyntaxError`."""
    parser = _Parser(text.replace("\r\n", "\n").replace("\0", ""))
    try:
        block = parser.block()
    except RecursionError:
        raise ShellSyntaxError("expected fewer nested commands", parser.line()) from None
    if parser.position < len(parser.text):
        raise parser.error(f"unexpected {parser.text[parser.position : parser.position + 10].split()[0]}")
    return block


def parse_line(text: str, line: int) -> Token:
    """Parse a line of a here-document. Raises `ShellSyntaxError`."""
    token = _Parser(text).token(ends="\0", quoted=True)
    return Token(token.parts, line, 1)


class _Parser:
    """Reads a text from its beginning; `position` is that of the next character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0
        self.starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self.others: set[int] = set()
        """Places after two brackets that begin no arithmetic expression."""
        self.documents: list[Document] = []
        """Here-documents whose lines begin after the next newline."""

    def line(self, position: int | None = None) -> int:
        """Number of the line at a place."""
        return bisect_right(self.starts, self.position if position is None else position)

    def error(self, message: str) -> ShellSyntaxError:
        return ShellSyntaxError(message, self.line())

    def starts_with(self, text: str) -> bool:
        return self.text.startswith(text, self.position)

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return pattern.match(self.text, self.position)

    def blank(self) -> None:
        """Skip blanks, and a comment after them."""
        match = self.match(_BLANK)
        self.position = match.end() if match else self.position
        if self.starts_with("#") and (self.position == 0 or self.text[self.position - 1] in " \t\n;&|()"):
            end = self.text.find("\n", self.position)
            self.position = len(self.text) if end < 0 else end

    def newline(self) -> None:
        """Skip a newline, and read the here-documents that begin after it."""
        self.position += 1
        for document in self.documents:
            document.line = self.line()
            while self.position < len(self.text):
                end = self.text.find("\n", self.position)
                end = len(self.text) if end < 0 else end
                line, self.position = self.text[self.position : end], min(end + 1, len(self.text))
                line = line.lstrip("\t") if document.strips else line
                if line == document.delimiter:
                    break
                document.lines.append(line)
        self.documents.clear()

    def lines(self) -> None:
        """Skip blanks, comments and newlines."""
        self.blank()
        while self.starts_with("\n"):
            self.newline()
            self.blank()

    def reserved(self) -> str:
        match = self.match(_RESERVED)
        return match[0] if match else ""

    def expect(self, text: str) -> None:
        self.lines()
        if not self.starts_with(text) or (text[0].isalpha() and self.reserved() != text):
            raise self.error(f"expected {text}")
        self.position += len(text)

    # -- commands ------------------------------------------------------------------------------------------------------

    def block(self, *, ends: tuple[str, ...] = ()) -> Block:
        """Commands up to a reserved word of `ends`, or to a bracket or `;;` that closes something else."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error("expected fewer nested commands")
        chains: list[Chain] = []
        while True:
            self.lines()
            if self.position >= len(self.text) or self.text[self.position] == ")" or self.starts_with(";;"):
                break
            if self.reserved() in ends and ends:
                break
            chains.append(self.chain())
            self.blank()
            if self.match(_SEPARATOR):
                self.position += 1
            elif self.position < len(self.text) and not self.match(_END):
                raise self.error(f"unexpected {self.text[self.position]}")
        self.depth -= 1
        return tuple(chains)

    def chain(self) -> Chain:
        line = self.line()
        pipelines = [("", self.pipeline())]
        while True:
            self.blank()
            operator = self.text[self.position : self.position + 2]
            if operator not in ("&&", "||"):
                return Chain(tuple(pipelines), line)
            self.position += 2
            self.lines()
            pipelines.append((operator, self.pipeline()))

    def pipeline(self) -> Pipeline:
        negated = self.reserved() == "!"
        if negated:
            self.position += 1
            self.blank()
        commands = [self.command()]
        while True:
            self.blank()
            if not self.starts_with("|") or self.starts_with("||"):
                return Pipeline(tuple(commands), negated)
            self.position += 2 if self.starts_with("|&") else 1
            self.lines()
            commands.append(self.command())

    def command(self) -> Node:
        line, word = self.line(), self.reserved()
        if self.starts_with("((") and (calculation := self.calculation(line)):
            return calculation
        if word in ("{", "(") or self.starts_with("("):
            node: Node = self.group(subshell=self.starts_with("("))
        elif word == "if":
            node = self.if_(line)
        elif word == "case":
            node = self.case(line)
        elif word == "for":
            node = self.for_(line)
        elif word in ("while", "until"):
            self.position += len(word)
            condition = self.block(ends=("do",))
            node = While(condition, self.loop(), word == "until", line)
        elif word == "function":
            self.position += len(word)
            self.blank()
            name = self.match(re.compile(r"[\w.:-]+"))
            if name is None:
                raise self.error("expected the name of a function")
            self.position = name.end()
            self.blank()
            if brackets := self.match(re.compile(r"\([ \t]*\)")):
                self.position = brackets.end()
            self.lines()
            return Function(name[0], self.command())
        elif not word and (head := self.match(_FUNCTION)):
            self.position = head.end()
            self.lines()
            return Function(head[1], self.command())
        elif word and word != "[[":
            raise self.error(f"unexpected {word}")
        else:
            return self.simple(line)
        self.redirections()
        return node

    def calculation(self, line: int) -> Calculation | None:
        """`((…))`; None if the brackets are two subshells."""
        start = self.position
        expression = self.arithmetic(start + 2)
        return None if expression is None else Calculation(expression, line)

    def arithmetic(self, position: int) -> Token | None:
        """The expression of `((…))` that begins at a place; None if the brackets are not those of one."""
        start, depth = self.position, self.depth
        if position in self.others:
            return None
        self.position = position
        try:
            expression = self.token(ends="))")
        except ShellSyntaxError:
            self.position, self.depth = start, depth
            self.others.add(position)  # once, since the brackets may be nested
            return None
        self.position += 2
        return expression

    def group(self, *, subshell: bool) -> Group:
        self.position += 1
        body = self.block() if subshell else self.block(ends=("}",))
        self.expect(")" if subshell else "}")
        return Group(body, subshell)

    def if_(self, line: int) -> If:
        branches: list[tuple[Block | None, Block]] = []
        word = "if"
        while word in ("if", "elif"):
            self.position += len(word)
            condition = self.block(ends=("then",))
            self.expect("then")
            branches.append((condition, self.block(ends=("elif", "else", "fi"))))
            word = self.reserved()
        if word == "else":
            self.position += len(word)
            branches.append((None, self.block(ends=("fi",))))
        self.expect("fi")
        return If(tuple(branches), line)

    def case(self, line: int) -> Case:
        self.position += len("case")
        self.blank()
        word = self.token()
        self.expect("in")
        branches: list[tuple[tuple[Token, ...], Block]] = []
        while True:
            self.lines()
            if self.reserved() == "esac":
                self.position += len("esac")
                return Case(word, tuple(branches), line)
            if self.starts_with("("):
                self.position += 1
            patterns = []
            while True:
                self.blank()
                patterns.append(self.token())
                self.blank()
                if not self.starts_with("|"):
                    break
                self.position += 1
            self.expect(")")
            branches.append((tuple(patterns), self.block(ends=("esac",))))
            if match := self.match(re.compile(r";;&?|;&")):
                if match[0] != ";;":
                    raise self.error(f"unexpected {match[0]}")
                self.position += 2

    def counted(self, line: int) -> Group:
        """`for ((first; condition; step))`, as a loop with a condition."""
        self.position += 2
        match = self.match(re.compile(r"([^;\n]*);([^;\n]*);([^;\n]*?)\)\)"))
        if match is None:
            raise self.error("expected ((first; condition; step))")
        self.position = match.end()
        first, condition, step = (
            (Chain((("", Pipeline((Calculation(parse_line(text.strip(), line), line),), negated=False)),), line),)
            for text in (match[1], match[2].strip() or "1", match[3])
        )
        self.blank()
        if self.starts_with(";"):
            self.position += 1
        self.lines()
        loop = While(condition, (*self.loop(), *step), negated=False, line=line)
        return Group((*first, Chain((("", Pipeline((loop,), negated=False)),), line)), subshell=False)

    def for_(self, line: int) -> For | Group:
        self.position += len("for")
        self.blank()
        if self.starts_with("(("):
            return self.counted(line)
        name = self.match(_NAME)
        if name is None:
            raise self.error("expected a loop over words")
        self.position = name.end()
        self.lines()
        words: list[Token] | None = None
        if self.reserved() == "in":
            self.position += len("in")
            words = []
            self.blank()
            while self.position < len(self.text) and self.text[self.position] not in ";\n":
                words.append(self.token())
                self.blank()
        self.blank()
        if self.starts_with(";"):
            self.position += 1
        self.lines()
        return For(name[0], None if words is None else tuple(words), self.loop(), line)

    def loop(self) -> Block:
        """`do … done`."""
        self.expect("do")
        body = self.block(ends=("done",))
        self.expect("done")
        return body

    def redirections(self) -> None:
        """Skip redirections."""
        self.blank()
        while (match := self.match(_REDIRECTION)) and not self.match(_PROCESS):
            self.redirection(match)
            self.blank()

    def redirection(self, match: re.Match[str]) -> Document | None:
        """Skip a redirection. Returns its here-document."""
        self.position = match.end()
        self.blank()
        target = self.token()
        if "<<" not in match[0] or "<<<" in match[0]:
            return None
        texts = [part for part in target.parts if isinstance(part, Text)]
        delimiter, expands = "".join(part.text for part in texts), not any(part.quoted for part in texts)
        self.documents.append(Document(delimiter, expands, match[0].endswith("-")))
        return self.documents[-1]

    def simple(self, line: int) -> Simple:
        assignments: list[Assignment] = []
        words: list[Token | Assignment] = []
        document: Document | None = None
        compares = self.reserved() == "[["
        while True:
            self.blank()
            if self.position >= len(self.text):
                break
            if compares:
                token = self.compared()
                words.append(token)
                if token.plain == "]]":
                    self.redirections()
                    break
                continue
            if self.text[self.position] in "\n;&|()" and not self.starts_with("&>"):
                break
            if (match := self.match(_REDIRECTION)) and not self.match(_PROCESS):
                document = self.redirection(match) or document
                continue
            first = words[0].plain if words and isinstance(words[0], Token) else None
            head = self.match(_ASSIGNMENT)
            if head and (not words or first in DECLARES):
                (words if words else assignments).append(self.assignment(head))
            else:
                words.append(self.token())
        if compares and not (words and isinstance(words[-1], Token) and words[-1].plain == "]]"):
            raise self.error("expected ]]")
        if not words and not assignments and self.position < len(self.text) and self.text[self.position] in ";&|()":
            raise self.error(f"unexpected {self.text[self.position]}")
        return Simple(tuple(assignments), tuple(words), document, line)

    def compared(self) -> Token:
        """A word of `[[ … ]]`, in which `&&`, `||`, `<`, `>` and brackets are words."""
        self.lines()
        if match := self.match(re.compile(r"&&|\|\||[<>()]|\]\](?=[\s;&|)]|$)")):
            column = self.position - self.starts[self.line() - 1] + 1
            token = Token((Text(match[0], quoted=False),), self.line(), column)
            self.position = match.end()
            return token
        return self.token(ends="[[")

    def assignment(self, head: re.Match[str]) -> Assignment:
        self.position = head.end()
        if not self.starts_with("("):
            at_end = self.position >= len(self.text) or self.text[self.position] in " \t\n;&|()"
            value: Token | tuple[Token, ...] = self.empty() if at_end else self.token()
            return Assignment(head[1], head[2] or "", bool(head[3]), value)
        self.position += 1
        tokens: list[Token] = []
        while True:
            self.lines()
            if self.position >= len(self.text):
                raise self.error(f"the list {head[1]} has no end")
            if self.starts_with(")"):
                self.position += 1
                return Assignment(head[1], head[2] or "", bool(head[3]), tuple(tokens))
            tokens.append(self.token())

    # -- words ---------------------------------------------------------------------------------------------------------

    def empty(self) -> Token:
        return Token((), self.line(), self.position - self.starts[self.line() - 1] + 1)

    def token(self, *, ends: str = "", quoted: bool = False) -> Token:
        """A word.

        It ends at a blank or an operator, or before `ends`: `"` for a quoted text, `}` and `))` for the insides of
        expansions, a null character for a whole line, `[[` for a word of a comparison, whose operators end no word.
        """
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error("expected fewer nested expansions")
        line = self.line()
        column = self.position - self.starts[line - 1] + 1
        parts: list[Part] = []
        brackets = 0
        stops = {"": " \t\n;&|()<>", "[[": " \t\n"}.get(ends, "")
        start = self.position
        while True:
            if self.position >= len(self.text):
                if ends not in ("", "[[", "\0"):
                    raise ShellSyntaxError(f"expected {ends}", line)
                break
            char = self.text[self.position]
            if ends == "))":
                brackets += (char == "(") - (char == ")")
                if char == ")" and brackets < 0:
                    if self.starts_with("))"):
                        break
                    raise self.error("expected ))")
            elif ends in ('"', "}") and char == ends:
                break
            if stops and char in stops:
                if self.match(_PROCESS) and not ends:
                    self.position += 2
                    body = self.block()
                    self.expect(")")
                    parts.append(Substitution(body, "<(…)", quoted=True))
                    continue
                break
            self.part(char, parts, ends, quoted=quoted)
        if self.position == start and not ends:
            raise self.error("expected a word")
        self.depth -= 1
        return Token(tuple(parts), line, column)

    def part(self, char: str, parts: list[Part], ends: str, *, quoted: bool) -> None:
        """Read one part of a word."""
        literal = quoted or ends == "))"
        if char == "\\":
            after = self.text[self.position + 1 : self.position + 2]
            self.position += 2
            if after not in ("", "\n"):  # the shell drops a backslash at the end of a file, too
                keeps = literal and after not in ('"', "\\", "$", "`", ends)
                parts.append(Text(f"\\{after}" if keeps else after, quoted=True))
        elif char == "$" and (part := self.expansion(quoted=literal)) is not None:
            parts.append(part)
        elif char == "`":
            parts.append(self.backticks(quoted=literal))
        elif char == '"' and ends != '"':
            self.position += 1
            inner = self.token(ends='"', quoted=True)
            self.position += 1
            parts.extend(inner.parts or (Text("", quoted=True),))
        elif char == "'" and not literal:
            end = self.text.find("'", self.position + 1)
            if end < 0:
                raise self.error("a quoted text has no end")
            parts.append(Text(self.text[self.position + 1 : end], quoted=True))
            self.position = end + 1
        elif self.starts_with("$'") and not literal:
            self.ansi(parts)
        elif self.starts_with('$"') and not literal:
            self.position += 1
        else:
            parts.append(Text(char, quoted=literal))
            self.position += 1

    def ansi(self, parts: list[Part]) -> None:
        """`$'…'`."""
        match = self.match(re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL))
        if match is None:
            raise self.error("a quoted text has no end")
        text = re.sub(r"\\(.)", lambda escape: _ESCAPED.get(escape[1], escape[1]), match[1], flags=re.DOTALL)
        parts.append(Text(text.replace("\0", ""), quoted=True))
        self.position = match.end()

    def expansion(self, *, quoted: bool) -> Parameter | Substitution | Arithmetic | None:
        """An expansion; None for a literal dollar sign."""
        start = self.position
        if self.starts_with("$((") and (expression := self.arithmetic(start + 3)) is not None:
            return Arithmetic(expression, self.text[start : self.position], quoted)
        if self.starts_with("$("):
            self.position += 2
            body = self.block()
            self.expect(")")
            return Substitution(body, self.text[start : self.position], quoted)
        if self.starts_with("${"):
            return self.braces(quoted=quoted)
        match = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])").match(self.text, self.position)
        if match is None:
            return None
        self.position = match.end()
        return Parameter(match[1], "", "", "", None, match[0], quoted)

    def braces(self, *, quoted: bool) -> Parameter:
        """`${…}`."""
        start = self.position
        self.position += 2
        prefix = ""
        if match := self.match(re.compile(r"[#!](?=[\w@*])")):
            prefix, self.position = match[0], match.end()
        name = self.match(_PARAMETER)
        if name is None:
            raise self.error("expected the name of a variable")
        self.position = name.end()
        index = ""
        if match := self.match(re.compile(r"\[([^\]\n]*)\]")):
            index, self.position = match[1], match.end()
        operator, argument = "", None
        if not self.starts_with("}"):
            match = self.match(_OPERATOR)
            if match is None:
                raise self.error("unknown expansion")
            operator, self.position = match[0], match.end()
            argument = self.token(ends="}", quoted=quoted)
        self.position += 1
        return Parameter(name[0], index, prefix, operator, argument, self.text[start : self.position], quoted)

    def backticks(self, *, quoted: bool) -> Substitution:
        end = self.text.find("`", self.position + 1)
        if end < 0:
            raise self.error("backticks have no end")
        source = self.text[self.position : end + 1]
        inner = _Parser(re.sub(r"\\([`$\\])", r"\1", source[1:-1]))
        inner.depth = self.depth
        body = inner.block()
        self.position = end + 1
        return Substitution(body, source, quoted)
