"""Converts a launch of OpenRLHF to roll-core's config, and reports the outcome for each of its flags.

The file is a shell script that starts `openrlhf.cli.train_ppo_ray`, `train_sft`, `train_dpo` or `train_rm`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_core.errors import ConfigError, ConfigProblem, UnsupportedError
from roll_migrate import openrlhf_flags as launch
from roll_migrate import openrlhf_keys as rlhf
from roll_migrate.conversion import Conversion, did_you_mean
from roll_migrate.rules import Outcome, convert_single, dotted
from roll_migrate.scripts import read_script
from roll_migrate.shared_rules import refuse_audio

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from roll_core.config.source import KeyPath
    from roll_core.plugins.registry import Registry
    from roll_migrate.conversion import ImportedConfig
    from roll_migrate.rules import Table
    from roll_migrate.shell_reader import Word

_MODULE = re.compile(r"(?:.*/)?openrlhf[./]cli[./](\w+?)(?:\.py)?")
_FLAG = re.compile(r"--([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)
_GPUS = re.compile(r"--(?:num_gpus|nproc[_-]per[_-]node)=([1-9]\d*)")


def import_openrlhf(path: Path, registry: Registry, variables: Mapping[str, str] | None = None) -> ImportedConfig:
    """Convert the script at `path`, with `variables` from elsewhere and its arguments by number.

    Raises `ConfigError` if it cannot be read, or a flag has no value or a wrong one. Raises `UnsupportedError` unless
    it starts one trainer that is supported.
    """
    trainer, words, gpus = _launch(path, variables or {})
    flags = {name: (value, where) for name, value, where in _flags(trainer, words)}
    models = ("actor.model_name_or_path", "model.model_name_or_path", "pretrain")
    refuse_audio({flags[name][1]: flags[name][0] for name in models if name in flags})
    source: dict[str, Any] = {launch.TRAINER: trainer, **({launch.GPUS: gpus} if gpus else {})}
    for name, (value, _) in flags.items():
        aliases = launch.ALIASES[trainer].get(name, (name,))
        source |= dict.fromkeys(aliases, value)
        source[launch.FLAT] = bool(source.get(launch.FLAT)) or ("." not in name and "." in aliases[0])
    conversion = _OpenRLHFConversion(
        source=source,
        pipeline=launch.PIPELINES[trainer],
        table=rlhf.TABLES[trainer],
        defaults=rlhf.DEFAULTS[trainer],
        default_note="OpenRLHF's default",
        registry=registry,
        where=lambda key: flags[key[0]][1] if key and key[0] in flags else str(path),
        flags={name: value for name, (value, _) in flags.items()},
    )
    return conversion.run(conversion.pipeline)


def _launch(path: Path, variables: Mapping[str, str]) -> tuple[str, tuple[Word, ...], int]:
    """The trainer, the words after it, and the launcher's number of GPUs (0 if it is not written)."""
    script, expected = read_script(path, variables), " or ".join(launch.TRAINERS)
    started = script.one([launch for launch in script.launches() if _MODULE.fullmatch(launch.program)], expected)
    trainer = _MODULE.sub(r"\1", started.program)
    if trainer not in launch.TRAINERS:
        raise UnsupportedError(f"{started.where}: the script starts {trainer}: expected {expected}")
    gpus = [match[1] for text in started.options() if (match := _GPUS.fullmatch(text))]
    return trainer, started.words, int(gpus[0]) if gpus else 0


def _flags(trainer: str, words: Sequence[Word]) -> Iterator[tuple[str, Any, str]]:
    """Yield name, value and position of each flag. Raises `ConfigError` for a word that belongs to none."""
    table, i = rlhf.TABLES[trainer], 0
    while i < len(words):
        word = words[i]
        i += 1
        flag = _FLAG.fullmatch(word.value("", word.text) if not word.text.startswith("--") else word.text)
        if flag is None:
            raise _wrong(word, "", f"{word.text} is the value of no flag", "ROLL-C013")
        name, known = flag[1], flag[1] in table
        meaning = launch.ALIASES[trainer].get(name, (name,))[0]
        texts = [] if flag[2] is None else [word.value(name, flag[2])]
        limit = launch.LISTS.get(meaning, 1) if known else 0
        takes = flag[2] is None and not (known and meaning in launch.SWITCHES)
        while takes and i < len(words) and not words[i].text.startswith("--") and (not limit or len(texts) < limit):
            text = words[i].text
            texts.append("given" if meaning in launch.SECRETS else words[i].value(name, text))
            i += 1
        yield name, _value(name, meaning, texts, word) if known else " ".join(texts) or True, word.where


def _value(name: str, meaning: str, texts: list[str], word: Word) -> Any:
    """The value of a flag from its words. Raises `ConfigError` if their number or type is wrong."""
    if meaning in launch.SWITCHES:
        if texts:
            raise _wrong(word, name, f"found {texts[0]}, but the flag is a switch without a value", "ROLL-C013")
        return True
    expected = launch.LISTS.get(meaning, 1)
    if not texts or (expected and len(texts) != expected):
        raise _wrong(word, name, f"found {len(texts)} values, expected {expected or 'at least one'}", "ROLL-C011")
    values: list[Any] = texts if meaning in launch.TEXTS else [_number(text, word, name) for text in texts]
    return values if meaning in launch.LISTS else values[0]


def _number(text: str, word: Word, name: str) -> int | float:
    try:
        value = float(text)
        if math.isfinite(value):
            return int(text) if re.fullmatch(r"[+-]?\d+", text) else value
        if name in ("ckpt.max_mem", "max_ckpt_mem"):
            return value
    except ValueError:
        pass
    raise _wrong(word, name, f"found {text}, expected a number", "ROLL-C013")


def _wrong(word: Word, name: str, message: str, code: str) -> ConfigError:
    return ConfigError([ConfigProblem(word.where, name, message, "OpenRLHF refuses it too", code)])


# -- conversion --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _OpenRLHFConversion(Conversion):
    """Conversion of the flags of one launch."""

    flags: dict[str, Any]
    """Flags as they are written."""

    def _keys(self) -> dict[str, Any]:
        return self.flags

    def _new_role(self, path: KeyPath) -> str:
        return launch.POLICY[self.source[launch.TRAINER]]

    def _roles(self) -> Iterable[KeyPath]:
        return map(dotted, launch.placement(self.source))

    def _unknown(self, table: Table, path: KeyPath, value: Any) -> None:
        hint = did_you_mean(path, table, ())
        note = f"not a flag of OpenRLHF 0.7 to 0.11{hint}; left in the config, which `check` rejects"
        self._record(path, value, Outcome("unknown", ((path, value),), note))

    def _defaults(self) -> list[tuple[KeyPath, object, str]]:
        """OpenRLHF's default behaviour where roll-core's differs."""
        source = self.source
        for name, default in rlhf.IMPLIED[source[launch.TRAINER]].items():
            outcome = convert_single(rlhf.TABLES[source[launch.TRAINER]][name], default, self._key((name,), default))
            if name not in source and outcome.status != "not needed":
                self._record((name,), default, outcome)
        added: list[tuple[KeyPath, object, str]] = [
            (("track_with",), self._installed(launch.trackers(source)), self.default_note),
            *Conversion._defaults(self),
        ]
        note = "follows from OpenRLHF's flags and defaults"
        if source[launch.TRAINER] != launch.PPO and launch.GPUS not in source:
            note += "; the launcher uses all GPUs of the host, taken to be 8"
        return added + [(dotted(key), value, note) for key, value in launch.computed(source).items()]
