"""Finds the programs that a shell script starts, with their words: values of variables are filled in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_core.errors import ConfigError, ConfigProblem, UnsupportedError
from roll_migrate.shell_reader import Leave, ShellReader
from roll_migrate.shell_syntax import ShellSyntaxError, parse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from roll_migrate.shell_reader import Command, Unknown, Word

_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Modules that start the program that is named after them."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A program of Python, or another script, that a script starts."""

    program: str
    """Module, or path of a file; empty if the words of the command name none."""
    before: tuple[str, ...]
    """Texts before the program: the launcher and its options."""
    words: tuple[Word, ...]
    """Words after the program."""
    where: str
    branch: Unknown | None = None

    def options(self) -> tuple[str, ...]:
        """Options of the launcher, those of two words as `name=value` too."""
        pairs = (f"{name}={text}" for name, text in zip(("", *self.before), self.before, strict=False))
        return (*pairs, *self.before)

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts of the words."""
        return tuple(word.text for word in self.words)


@dataclass(frozen=True, slots=True)
class Script:
    """The programs that a script starts, in their order."""

    path: str
    commands: tuple[Command, ...]
    end: str
    """`file:line` of the `exit` that ends the script; otherwise empty."""

    def launches(self) -> list[Launch]:
        """The commands as launches of programs."""
        return [_launch(command) for command in self.commands]

    def one(self, launches: list[Launch], expected: str) -> Launch:
        """The launch to convert, if `launches` are repetitions of one.

        Raises `ConfigError` or `UnsupportedError` if there is none, or if they differ.
        """
        if not launches and self.end:
            hint = "give the script's arguments: --set 1=VALUE --set 2=VALUE"
            message = f"the script ends here before it starts {expected}"
            raise ConfigError([ConfigProblem(self.end, "", message, hint, "ROLL-C024")])
        if not launches:
            raise UnsupportedError(f"{self.path} starts no program that is imported: expected {expected}")
        first = launches[0]
        for other in launches[1:]:
            if (other.program, other.texts) == (first.program, first.texts):
                continue
            for launch in (other, first):
                if launch.branch is not None:
                    raise launch.branch.error(launch.where, "")
            raise UnsupportedError(
                f"{other.where}: {other.program or 'the command'} differs from the command at {first.where}: the script"
                " starts several runs, expected one"
            )
        return first


def _launch(command: Command) -> Launch:
    texts = [word.text for word in command.words]
    for i, text in enumerate(texts):
        is_module = i > 0 and texts[i - 1] in ("-m", "--module") and re.fullmatch(r"[A-Za-z_][\w.]*", text)
        is_file = text.endswith((".py", ".sh")) and "=" not in text and not (i and texts[i - 1].startswith("--"))
        if (is_module or is_file) and text not in _LAUNCHERS:
            return Launch(text, tuple(texts[:i]), command.words[i + 1 :], command.words[i].where, command.branch)
    return Launch("", (), command.words, command.words[0].where, command.branch)


def read_script(path: Path, variables: Mapping[str, str]) -> Script:
    """Follow the script at `path`. `variables` are those from elsewhere, and the script's arguments by number.

    Raises `ConfigError` if it cannot be read, or reads one of `variables` nowhere.
    """
    reader = ShellReader(path, variables)
    end = ""
    try:
        reader.block(parse(path.read_text(encoding="utf-8", errors="replace")))
    except OSError as error:
        raise _refused(str(path), f"cannot be read: {error.strerror}") from error
    except ShellSyntaxError as error:
        raise _refused(f"{reader.path}:{error.line}", f"the shell script is not understood: {error}") from error
    except RecursionError as error:
        raise _refused(str(path), "the shell script has too many nested commands") from error
    except Leave as leave:
        end = leave.where
    if unused := [name for name in variables if name not in reader.used]:
        message = f"the script reads no variable {', '.join(unused)} before it sets it"
        hint = "--set is for variables from elsewhere: edit the script to change its own"
        raise ConfigError([ConfigProblem("command line", "--set", message, hint, "ROLL-C015")])
    return Script(str(path), tuple(reader.commands), end)


def _refused(where: str, message: str) -> ConfigError:
    return ConfigError([ConfigProblem(where, "", message, code="ROLL-C020")])
