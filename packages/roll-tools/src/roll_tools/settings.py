"""Settings of commands: `key=value` words for something other than a whole config. Light: imports no config schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_core.errors import ConfigError, ConfigProblem

if TYPE_CHECKING:
    from collections.abc import Sequence


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """Values of `key=value` words by key, read as YAML. Raises `ConfigError` with every word that cannot be read."""
    values: dict[str, Any] = {}
    problems: list[ConfigProblem] = []
    for word in words:
        key, equals, value = word.partition("=")
        message = hint = ""
        if key and equals:
            import yaml  # most commands get no settings

            try:
                values[key] = yaml.safe_load(value)
            except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
                first_line = str(error).partition("\n")[0]
                message = f"cannot be read: {first_line}"
        else:
            message, hint = "is not a setting", "a setting is written key=value"
        if message:
            problems.append(ConfigProblem("command line", word, message, hint, code="ROLL-C025"))
    if problems:
        raise ConfigError(problems)
    return values
