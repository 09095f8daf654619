"""`roll-core`: commands, error output and exit codes. Each command imports its dependencies when it is called."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

from roll_core import __version__
from roll_core.cli.arguments import add_disable_plugin, command_parser, parse_configs
from roll_core.errors import RollError, RunInterruptedError, RunPreemptedError, UnknownProviderError, closest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import NoReturn

    from roll_core.plugins.registry import Registry
    from roll_core.spec.providers import Command

USAGE = """roll-core [--version] [--help] [--traceback] COMMAND ...

Post-train language models: reinforcement learning and supervised fine-tuning.

commands:
  run CONFIG... [key=value ...]     run one config after the other
  run CONFIG --multirun key=a,b     run each combination of values, and compare the runs
  check CONFIG... [key=value ...]   report all mistakes in configs, without starting a run
  plugins [--json | -v] [--check]   list installed plugins, what they provide, and their errors
  plugins test NAME                 run the conformance tests of an installed plugin
  new KIND NAME [--dir DIR]         write a plugin package whose tests pass

commands of roll-tools, which `pip install 'roll-core[train]'` brings:
  init [KIND] [DIR]                 write a first run: config, data and reward to edit
  plan CONFIG [key=value ...]       show the placement and memory of each role, and whether the run fits
  doctor [CONFIG] [--json]          check this machine and its software, and suggest fixes
  doctor mismatch CONFIG | RUN      name the cause why trainer and engine disagree
  eval MODEL... CONFIG [key=value]  score models on held-out prompts, side by side
  filter MODEL CONFIG -o FILE       write the training rows that a model solves sometimes
  audit CONFIG|DATA [key=value ...] check rows, tokenizer and chat template, and show which tokens are trained
  checkpoint list | verify RUN...   list checkpoints, or compare their files with the recorded digests
  checkpoint convert RUN OUT        write a checkpoint's model as a directory for transformers
  checkpoint merge ADAPTER OUT      write a model with its adapter merged
  runs [DIR] [--json]               list runs with state, step, score, config hash and age
  watch RUN                         follow a run in the terminal until it ends
  report RUN...                     write report.html of a run again, or a page that compares several runs
  push RUN OWNER/NAME               upload the model of a run to the Hugging Face Hub, with a model card
  envs list | play | test NAME      list environments, play an episode of one, or test one

command of roll-migrate:
  import NAME FILE [-o OUT]         convert another framework's config, and report the result for each key

Other plugins may offer more commands: roll-core plugins lists them.
--traceback prints the traceback of an error in a plugin's code. For options, run roll-core COMMAND --help."""


GC_THRESHOLDS = (50_000, 10, 10)
"""Thresholds for `gc.set_threshold`. With Python's 700, collections often scan half a million library objects."""


def command_line() -> NoReturn:
    """Run `main` as a process: the entry point of `roll-core` and `python -m roll_core`.

    Before Python 3.14 a daemon thread that returns from native code during interpreter shutdown aborts the process
    (`terminate called without an active exception`, exit code -6). Worker threads are daemons, and an interrupted run
    does not wait for a long torch operation. Python also replaces exit code 130 with death by SIGINT if Ctrl-C
    interrupted an `exec`. `os._exit` skips the shutdown and avoids both.
    """
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        code = main()
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    if code == RunInterruptedError.exit_code or any(thread.daemon for thread in threading.enumerate()):
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: done. 1: failed. 2: user error. 75: stopped by SIGTERM or SIGHUP with everything saved. 130: interrupted.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names of runs and drivers, and rows, may be in any script
    words = list(sys.argv[1:] if arguments is None else arguments)
    if show_traceback := words[:1] == ["--traceback"]:
        del words[0]
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(f"usage: {USAGE}\n")
        return 0 if words else 2
    if words[0] == "--version":
        sys.stdout.write(f"roll-core {__version__}\n")
        return 0
    try:
        code = COMMANDS.get(words[0], partial(_plugin_command, words[0]))(words[1:])
        sys.stdout.flush()
    except RollError as error:
        _print_error(error.described())
        return error.exit_code
    except KeyboardInterrupt as error:
        _print_error(str(error) or "interrupted")
        return getattr(error, "exit_code", 130)
    except BrokenPipeError:
        # The reader of stdout closed the pipe (`| head`); the interpreter's final flush must not fail on it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        source = _plugin_that_raised(error, words)
        if not source or show_traceback:
            raise
        import shlex

        message = f"{type(error).__name__}: {error}".rstrip(": ")
        _print_error(f"{message}\nraised by {source}; roll-core --traceback {shlex.join(words)} shows the traceback")
        return 1
    return code


def _plugin_that_raised(error: Exception, words: Sequence[str]) -> str:
    """Plugin part and package whose code raised `error`; empty if no plugin's code did."""
    from roll_core.plugins.attribution import raised_by

    registry, _ = _registry(words)
    return raised_by(error, registry.plugins)


def _registry(words: Sequence[str]) -> tuple[Registry, list[str]]:
    """Plugins without those of `--disable-plugin` in `words`, and the other words."""
    from roll_core.plugins.registry import load_registry

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_disable_plugin(parser)
    options, rest = parser.parse_known_args(words)
    return load_registry(options.disable_plugin), rest


# -- commands ----------------------------------------------------------------------------------------------------------


def _run(words: list[str]) -> int:
    parser = command_parser(
        "run", "Run one config after the other. A later run may start from the model of an earlier one."
    )
    parser.add_argument(
        "--multirun",
        action="store_true",
        help="run a config with each combination of values (key=a,b other=c,d), and compare the runs",
    )
    configs, overrides, disabled, files, options = _configs(parser, words)
    if options.multirun and len(configs) > 1:
        parser.error("--multirun runs one config")
    with stop_signals():
        if options.multirun:
            from roll_core.cli.sweep import run_sweep

            return run_sweep(configs[0], overrides, disabled, partial(_plugin_command, "report"), files=files)
        from roll_core.cli.run import run_configs

        return run_configs(configs, overrides, disabled, files=files)


def _check(words: list[str]) -> int:
    parser = command_parser(
        "check",
        "Report all mistakes in configs: keys, values, and the models, rows and reward functions that they name. Takes"
        " about a second, and starts no run.",
    )
    configs, overrides, disabled, files, _ = _configs(parser, words)
    from roll_core.cli.run import check_configs

    return check_configs(configs, overrides, disabled, files=files)


def _plugins(words: list[str]) -> int:
    if words[:1] == ["test"]:
        return _test_plugin(words[1:])
    parser = command_parser(
        "plugins",
        "List the installed plugins, what they provide, and why they failed to load. `roll-core plugins test NAME` runs"
        " the conformance tests of a plugin.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="also print summaries, hooks and import times")
    parser.add_argument(
        "--check", action="store_true", help="also import every part, by roll-testing; exit code 2 if one is broken"
    )
    options = parser.parse_args(words)
    from roll_core.cli.plugins import show_plugins

    return show_plugins(
        options.disable_plugin, as_json=options.json, verbose=options.verbose, check_parts=options.check
    )


def _test_plugin(words: list[str]) -> int:
    parser = command_parser(
        "plugins test",
        "Run the conformance tests of each part of an installed plugin, in a child process. The exit code is 1 if a"
        " test fails.",
    )
    parser.add_argument("name", metavar="NAME", help="distribution of the plugin, such as roll-infer-hf")
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="select tests, as pytest does")
    options = parser.parse_args(words)
    from roll_core.cli.plugins import test_plugin

    return test_plugin(options.name, options.disable_plugin, options.k)


def _new(words: list[str]) -> int:
    from roll_core.cli.plugins import from_roll_testing

    code: int = from_roll_testing("roll_testing.new:new")(words)
    return code


def _plugin_command(name: str, words: list[str]) -> int:
    """Run a command that a plugin offers. Raises `UnknownProviderError` if no plugin does."""
    from roll_core.plugins.targets import load_target
    from roll_core.spec.providers import CommandProvider

    registry, rest = _registry(words)
    try:
        record = registry.find(CommandProvider, name)
    except UnknownProviderError as error:
        close = closest(name, COMMANDS)
        hint = f"did you mean {close}?" if close else f"roll-core has {', '.join(COMMANDS)}"
        raise UnknownProviderError(f"unknown command {name!r}; {hint}\n    {error}") from error.__cause__
    command: Command = load_target(record.target, owner=registry.owner(record))
    return command(rest, registry)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "check": _check,
    "plugins": _plugins,
    "new": _new,
}


class _TerminatedError(KeyboardInterrupt):
    """A stop signal arrived before the run handles it. Not an `Exception`, so that no imported module swallows it."""

    exit_code = RunPreemptedError.exit_code


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """End the command with the exit code of a stopped run if SIGTERM or SIGHUP arrives before a run handles them."""
    previous = {signal.SIGTERM: signal.signal(signal.SIGTERM, _on_stop_signal)}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, _on_stop_signal)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _on_stop_signal(number: int, frame: object) -> None:
    if number == signal.SIGHUP:
        from roll_core.runtime.records.console import detach_closed_output

        detach_closed_output()
    raise _TerminatedError(f"stopped by {signal.Signals(number).name} before the run started: nothing was saved")


def _configs(
    parser: argparse.ArgumentParser, words: list[str]
) -> tuple[list[Path], list[str], list[str], bool, argparse.Namespace]:
    """Parse configs (at least one), overrides, disabled plugins, True if files named in configs are checked, and all
    options."""
    parser.epilog = f"example: {parser.prog} grpo.yaml max_steps=20 actor_train.training_args.learning_rate=1e-6"
    parser.add_argument("--no-files", action="store_true", help="do not check models, rows and reward functions")
    configs, overrides, options = parse_configs(parser, words)
    if not configs:
        parser.error("expected at least one config file")
    return configs, overrides, options.disable_plugin, not options.no_files, options


def _print_error(message: str) -> None:
    """Write an error to stderr with secrets redacted: in colour on a terminal, otherwise as plain text."""
    from roll_core.config.secrets import Redactor

    message = Redactor.of(os.environ).text(message)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True, soft_wrap=True).print(Text("error: ", style="bold red").append(message, style="default"))
    else:
        sys.stderr.write(f"error: {message}\n")
