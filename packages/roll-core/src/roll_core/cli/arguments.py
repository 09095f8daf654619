"""Arguments of commands, those of roll-core and those that its plugins offer."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def command_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Parser of `roll-core COMMAND` with the option `--disable-plugin`, which every command has.

    roll-core removes that option from the words of a plugin's command: its registry lacks these plugins already.
    """
    parser = argparse.ArgumentParser(prog=f"roll-core {command}", description=description, allow_abbrev=False)
    add_disable_plugin(parser)
    return parser


def add_disable_plugin(parser: argparse.ArgumentParser) -> None:
    """Add the option `--disable-plugin`."""
    parser.add_argument(
        "--disable-plugin",
        metavar="NAME",
        action="append",
        default=[],
        help="do not import this plugin (a distribution); may be repeated",
    )


def parse_configs(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[list[Path], list[str], argparse.Namespace]:
    """Parse configs, overrides and options. Files are configs. Other words with `=` or a leading `~` are overrides."""
    parser.add_argument("words", metavar="CONFIG | key=value", nargs="*", help="configs, and overrides of their keys")
    options = parser.parse_intermixed_args(words)
    others = [word for word in options.words if not os.path.isfile(word)]
    overrides = [word for word in others if "=" in word or word.startswith("~")]
    configs = [Path(word) for word in options.words if word not in overrides]
    for config in configs:
        if not config.suffix and not os.path.exists(config):
            parser.error(f"{config} does not exist; to set a key, write {config}=VALUE")
    return configs, overrides, options
