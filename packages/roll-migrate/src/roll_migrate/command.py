"""`roll-core import NAME FILE`: converts another framework's config, and reports the outcome for each of its keys."""

from __future__ import annotations

import inspect
import json
import re
import sys
import tempfile
import textwrap
from collections import Counter
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from roll_core.cli.arguments import command_parser
from roll_core.cli.run import summary, warnings_of
from roll_core.config import load
from roll_core.config.dump import Dumper, escape
from roll_core.config.schema import members
from roll_core.errors import ConfigError, ConfigProblem, PluginError, RunDirectoryError, UnsupportedError
from roll_core.plugins.targets import load_target, schema_of
from roll_core.spec.config import RunConfig
from roll_core.spec.providers import ImporterProvider, PipelineProvider
from roll_migrate.conversion import Verbatim
from roll_migrate.rules import IMPORT_STATUSES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import BaseModel

    from roll_core.plugins.registry import Registry
    from roll_core.spec.providers import Importer
    from roll_migrate.conversion import ImportedConfig, ImportedKey

HEADINGS = {
    "kept": "kept",
    "differs": "kept, but the result differs",
    "renamed": "renamed",
    "changed": "changed",
    "added": "added: defaults that differ here",
    "not needed": "not needed here",
    "dead": "without effect in the other framework",
    "unsupported": "not supported here",
    "unknown": "unknown in both",
}
BY_NAME = ("kept", "not needed")
"""Statuses whose keys are listed only by name, unless `verbose` is set."""


def command(words: Sequence[str], registry: Registry) -> int:
    """`roll-core import`. The exit code is 1 if `roll-core check` would refuse the new config."""
    parser = command_parser(
        "import",
        "Convert another framework's config, and report the result for each key. The exit code is 1 if roll-core check"
        " finds mistakes in the new config.",
    )
    parser.add_argument("name", metavar="NAME", help="importer: roll for alibaba/ROLL, verl, openrlhf or trl")
    parser.add_argument("file", metavar="FILE", type=Path, help="config or script of the other framework")
    parser.add_argument("-o", "--out", metavar="OUT", type=Path, help="file to write (default: stdout)")
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="variable that a shell script takes from elsewhere, or its argument NAME: 1, 2, …; of other files of TRL,"
        " trainer or accelerate; may be repeated",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="also list keys that are kept or not needed")
    parser.add_argument("--json", action="store_true", help="print report and config as JSON")
    options = parser.parse_args(words)
    variables = _variables(options.set)
    return import_config(
        options.name,
        options.file,
        options.out,
        registry,
        variables=variables,
        as_json=options.json,
        verbose=options.verbose,
    )


def _variables(words: list[str]) -> dict[str, str]:
    """Variables of `--set`. Raises `ConfigError` for a word without a name."""
    variables: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*|[1-9]\d?", name):
            message = f"found {word}, expected NAME=VALUE with the name of a variable or the number of an argument"
            raise ConfigError([ConfigProblem("command line", "--set", message, code="ROLL-C013")])
        variables[name] = value
    return variables


def import_config(
    name: str,
    file: Path,
    out: Path | None,
    registry: Registry,
    *,
    as_json: bool,
    verbose: bool,
    variables: Mapping[str, str] | None = None,
) -> int:
    """Convert `file` with the importer `name`, and write the new config to `out`, or to stdout if `out` is None.

    `variables` are those that a shell script takes from elsewhere, and its arguments by number.

    The report goes to stdout, or to stderr if stdout has the config. With `as_json`, stdout gets both as one object.
    Returns the exit code: 1 if `roll-core check` would refuse the new config. Raises `RunDirectoryError` if `out`
    exists.
    """
    if out is not None and out.exists():
        raise RunDirectoryError(f"{out} exists: give --out another file")
    record = registry.find(ImporterProvider, name)
    importer: Importer = load_target(record.target, owner=registry.owner(record))
    if variables and "variables" not in inspect.signature(importer).parameters:
        raise UnsupportedError(f"--set: the importer {name} reads no shell scripts")
    imported = importer(file, registry, **({"variables": variables} if variables else {}))
    provider = registry.find(PipelineProvider, imported.pipeline)
    schema = schema_of(provider, RunConfig, owner=registry.owner(provider))
    text = written(imported.config, schema, heading=f"Imported from {file.name} by roll-core import {name}.")
    check = _checked(text, out or Path("imported.yaml"), registry)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    if as_json:
        report: dict[str, object] = {
            "input": str(file),
            "output": str(out) if out is not None else None,
            "pipeline": imported.pipeline,
            "ok": not check.problems,
            "check": check.verdict or check.problems,
            "warnings": check.warnings,
            "keys": [asdict(entry) for entry in imported.keys],
            "config": text,
        }
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        if out is None:
            sys.stdout.write(text)
        (sys.stdout if out is not None else sys.stderr).write(_report(file, out, imported, check, verbose=verbose))
    return 1 if check.problems else 0


class _Check(NamedTuple):
    """Result of `roll-core check`: a summary, empty for an invalid config, with its mistakes and its warnings."""

    verdict: str
    problems: list[str]
    warnings: list[str]


def _checked(text: str, name: Path, registry: Registry) -> _Check:
    """Check the new config."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name.name
        file.write_text(text, encoding="utf-8")
        try:
            loaded = load(file, (), registry)
        except ConfigError as error:
            return _Check("", [str(problem).replace(str(file), str(name)) for problem in error.problems], [])
        except PluginError as error:
            return _Check("", [str(error)], [])
        return _Check(summary(loaded), [], [warning.replace(str(file), str(name)) for warning in warnings_of(loaded)])


def _report(file: Path, out: Path | None, imported: ImportedConfig, check: _Check, *, verbose: bool) -> str:
    counts = Counter(entry.status for entry in imported.keys)
    counted = ", ".join(f"{counts[status]} {status}" for status in IMPORT_STATUSES if counts[status])
    lines = [f"{file}: {imported.pipeline}, {counted}"]
    for status in ("unsupported", "unknown", "differs", "changed", "renamed", "added", "dead", "not needed", "kept"):
        entries = [entry for entry in imported.keys if entry.status == status]
        if not entries:
            continue
        lines += ["", f"{HEADINGS[status]} ({len(entries)})"]
        if status in BY_NAME and not verbose:
            lines += _wrapped(sorted({_short(entry.key) for entry in entries}))
        else:
            lines += _told(entries)
    name = out if out is not None else "the new config"
    lines.append("")
    if check.problems:
        lines += [f"{name} is refused by roll-core check:", *(f"  {problem}" for problem in check.problems)]
    else:
        lines += [*check.warnings, f"{name}: ok: {check.verdict}"]
    return "\n".join(lines) + "\n"


def _told(entries: list[ImportedKey]) -> list[str]:
    """Format report lines; neighbouring keys of one mapping with the same note share an entry."""
    lines: list[str] = []
    for (_, note, _), group in groupby(entries, key=lambda entry: (_place(entry), entry.note, entry.to)):
        alike = list(group)
        first = alike[0]
        to = " and ".join(first.to)
        if len(alike) == 1:
            name = f"{first.key} → {to}" if first.key and to and to != first.key else first.key or to
        else:
            name = f"{_place(first)}: {', '.join(entry.key.removeprefix(f'{_place(entry)}.') for entry in alike)}"
        lines.append(f"  {first.where}: {name}" if first.where else f"  {name}")
        if note:
            lines.append(f"      {note}")
    return lines


def _place(entry: ImportedKey) -> str:
    """Role or top-level mapping that a key belongs to."""
    steps = entry.key.split(".")
    return ".".join(steps[: 2 if steps[0] == "rewards" else 1]) if len(steps) > 1 else entry.key


def _short(key: str) -> str:
    """Last component of a dotted key, which suffices for a key without a note."""
    return key.rpartition(".")[2]


def _wrapped(words: list[str], width: int = 116) -> list[str]:
    return textwrap.wrap(", ".join(words), width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


# -- the new file, in the order of the schemas -------------------------------------------------------------------------


def written(config: dict[str, Any], schema: type[BaseModel], *, heading: str) -> str:
    """Format `config` as YAML below a comment: the run's keys, the algorithm's keys, then each mapping of mappings.

    These mappings are sorted by `RANKS`: roles come before rewards and data.
    """
    ordered = _ordered(config, schema)
    plain = {name: value for name, value in ordered.items() if not _is_block(value)}
    nested = sorted((name for name in ordered if name not in plain), key=lambda name: RANKS[_declared(name, schema)])
    blocks = [
        {name: value for name, value in plain.items() if _declared(name, schema) == "run"},
        {name: value for name, value in plain.items() if _declared(name, schema) != "run"},
        *({name: ordered[name]} for name in nested),
    ]
    return "\n".join([f"# {heading}\n", *(_to_yaml(block) for block in blocks if block)])


class _CompactDumper(Dumper):
    """Writes lists and mappings of scalars on one line, except at the top level."""

    def serialize(self, node: yaml.Node) -> None:
        if isinstance(node, yaml.CollectionNode):
            node.flow_style = False
        super().serialize(node)


def _to_yaml(block: dict[str, Any]) -> str:
    text: str = yaml.dump(
        _escaped(block), Dumper=_CompactDumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None
    )
    return text


def _escaped(value: Any) -> Any:
    """`value` with `${` read literally, except in interpolations."""
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escaped(item) for item in value]
    if isinstance(value, Verbatim):
        return str(value)
    return escape(value) if isinstance(value, str) else value


RANKS = {"run": 0, "pipeline": 1, "shared": 2, "": 3}


def _declared(name: str, schema: type[BaseModel]) -> str:
    """Schema that declares a key: `run`, `pipeline` (the pipeline's own) or `shared` (its bases); otherwise empty."""
    if name in RunConfig.model_fields:
        return "run"
    if name not in schema.model_fields:
        return ""
    return "pipeline" if name in schema.__annotations__ else "shared"


def _is_block(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values())


def _ordered(data: dict[str, Any], schema: type[BaseModel] | None) -> dict[str, Any]:
    """Sort keys, also in nested mappings, by their order in the schema; undeclared keys come last."""
    fields = list(schema.model_fields) if schema is not None else []
    names = sorted(data, key=lambda name: fields.index(name) if name in fields else len(fields))
    ordered = {}
    for name in names:
        value = data[name]
        if isinstance(value, dict):
            inner, is_mapping = None, False
            if schema is not None and name in fields:
                inner, is_mapping = next(members(schema.model_fields[name].annotation), (None, False))
            if is_mapping:
                value = {key: _ordered(item, inner) if isinstance(item, dict) else item for key, item in value.items()}
            else:
                value = _ordered(value, inner)
        ordered[name] = value
    return ordered
