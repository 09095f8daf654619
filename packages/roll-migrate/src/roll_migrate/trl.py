"""Converts a run of TRL to roll-core's config, and reports the outcome for each of its arguments.

The file is a Python script with one trainer, which is read and never run, a YAML file of TRL's command line, or a shell
script that starts `trl` or one of TRL's scripts. A config of accelerate beside a Python script or YAML file, or named
on the command line, has the number of processes and the strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import UnsupportedError
from roll_migrate import trl_keys as trl
from roll_migrate.conversion import Conversion, did_you_mean
from roll_migrate.python_reader import computed_in
from roll_migrate.rules import KeyRule, Outcome, dotted
from roll_migrate.shared_rules import first_row, refuse_audio
from roll_migrate.trl_arguments import accelerate_beside, read_accelerate, read_python, read_shell, read_yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from roll_core.config.source import KeyPath
    from roll_core.plugins.registry import Registry
    from roll_migrate.conversion import ImportedConfig
    from roll_migrate.rules import Convert, ImportStatus, Table, Writes
    from roll_migrate.trl_arguments import Arguments


def import_trl(path: Path, registry: Registry, variables: Mapping[str, str] | None = None) -> ImportedConfig:
    """Convert the file at `path`.

    `variables` are those of a shell script. Of other files, `trainer` names the trainer and `accelerate` a config of
    accelerate. Raises `ConfigError` if the file cannot be read, and `UnsupportedError` unless it starts one trainer
    that has an equivalent.
    """
    settings = dict(variables or {})
    accelerate, trainer = (settings.pop(name, "") for name in ("accelerate", "trainer"))
    if path.suffix == ".py":
        run = read_python(path)
    elif path.suffix in (".yaml", ".yml"):
        run = read_yaml(path, trainer)
    else:
        run, settings = read_shell(path, settings), {}
    if settings:
        raise UnsupportedError(f"{path} is no shell script: --set is only for trainer and accelerate")
    if (
        "accelerate" not in run.values
        and (config := Path(accelerate) if accelerate else accelerate_beside(path)) is not None
    ):
        read_accelerate(run, config)
    _columns(run)
    refuse_audio({run.places.get("model_name_or_path", str(path)): run.values.get("model_name_or_path")})
    conversion = _TrlConversion(
        source={trl.TRAINER: run.trainer, **run.values},
        pipeline=trl.PIPELINES[run.trainer],
        table=trl.TABLES[run.trainer],
        defaults=trl.DEFAULTS,
        default_note="TRL's default",
        registry=registry,
        where=lambda key: run.places.get(".".join(key)) or run.places.get(key[0] if key else "", str(path)),
        notes=run.notes,
    )
    return conversion.run(conversion.pipeline)


# -- rows --------------------------------------------------------------------------------------------------------------


def _columns(run: Arguments) -> None:
    """Columns by the first row of a file that is here; rows of the hub are assumed to be chats."""
    row = first_row(run.values.get("train_dataset"))
    names: dict[str, Any] = {}
    if run.trainer in (trl.GRPO, trl.RLOO):
        is_text = row is not None and isinstance(row.get("prompt"), str)
        names = {"template": "plain"} if is_text else {"messages": "prompt"}
    elif run.trainer == trl.SFT:
        is_text = row is not None and isinstance(row.get("completion"), str)
        names = {"response": "completion", "template": "plain"} if is_text else {"messages": "messages"}
        if is_text:
            run.values.setdefault("completion_only_loss", True)
    else:
        response = "completion" if run.trainer == trl.KTO else "chosen"
        names = {"response": "completion"} if run.trainer == trl.KTO else {}
        if row is not None and isinstance(row.get(response), str):
            names["template"] = "plain"
    assumed = "assumed: the data set was not read"
    if run.trainer == trl.SFT:
        assumed += "; if it has prompts, set data_args.prompt and response instead, and train_on_prompt: false"
    run.notes["columns"] = "of the first row" if row is not None else assumed
    run.values[ROWS] = names


MISSING = "???"
"""A value that `check` requires."""
ROWS = "rows"
"""Entry of a run with keys of `data_args` that follow from its rows; not an argument."""


# -- conversion --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _TrlConversion(Conversion):
    """Conversion of the arguments of one run."""

    notes: Mapping[str, str]

    def _keys(self) -> dict[str, Any]:
        return {name: value for name, value in self.source.items() if name not in (trl.TRAINER, ROWS)}

    def _new_role(self, path: KeyPath) -> str:
        return trl.policy(self.source)

    def _roles(self) -> Iterable[KeyPath]:
        return [(role,) for role in trl.roles(self.source)]

    def _unknown(self, table: Table, path: KeyPath, value: Any) -> None:
        hint = did_you_mean(path, table, ())
        shown = MISSING if next(computed_in(value), None) else value
        note = f"not an argument of TRL 1.16{hint}; left in the config, which `check` rejects"
        self._record(path, shown, Outcome("unknown", ((path, shown),), note))

    def _apply(self, rule: Convert, path: KeyPath, value: Any) -> None:
        unknown = next(computed_in(value), None)
        if path == ("reward_funcs",) and isinstance(value, dict):
            note = self.notes.get("reward_funcs", "with TRL's signature, where they are")
            status: ImportStatus = "unsupported" if "reward_funcs" in self.notes else "changed"
            rewards: Writes = tuple(((name,), item) for name, item in value.items())
            self._record(path, "", Outcome(status, rewards, note))
        elif unknown is None or (isinstance(rule, KeyRule) and rule.says.startswith("not needed")):
            try:
                Conversion._apply(self, rule, path, value)
            except (TypeError, ValueError, ArithmeticError, AttributeError):
                note = f"found {type(value).__name__}, which TRL refuses too; left in the config, which `check` rejects"
                self._record(path, value, Outcome("unsupported", ((path, value),), note))
        elif path[-1] in trl.HARMLESS:
            self._record(path, None, Outcome("not needed", (), f"{unknown.why} ({unknown.where}): it is not read"))
        else:
            writes = self._missing(rule, path)
            note = f"{unknown.why} ({unknown.where}), and the script is not run: set it here"
            self._record(path, None, Outcome("unsupported", writes, note))

    def _missing(self, rule: Convert, path: KeyPath) -> Writes:
        """`???` at the keys that `rule` writes, or under the argument's own name if it needs to know the value."""
        try:
            writes = rule(MISSING, self._key(path, MISSING)).writes
        except (TypeError, ValueError, ArithmeticError, AttributeError):
            writes = ()
        return writes if writes and all(value == MISSING for _, value in writes) else ((path, MISSING),)

    def _defaults(self) -> list[tuple[KeyPath, object, str]]:
        """TRL's default behaviour where roll-core's differs."""
        source = self.source
        added: list[tuple[KeyPath, object, str]] = []
        if "num_train_epochs" not in source and trl.has_rollouts(source) and trl.number(source, "max_steps", -1) <= 0:
            outcome = trl.TABLES[source[trl.TRAINER]]["num_train_epochs"](3, self._key(("num_train_epochs",), 3))
            self._record(("num_train_epochs",), 3, outcome)
        for role in trl.data_roles(source):
            added += [
                (dotted(f"{role}.{name}"), item, f"rows are {self.notes['columns']}")
                for name, item in source[ROWS].items()
            ]
        if not source.get("report_to"):
            added.append((("track_with",), [], "TRL's default: none"))
        note = "follows from TRL's arguments and defaults"
        if "accelerate" not in source:
            note += "; one process, because no config of accelerate is here"
        added += [(dotted(key), value, note) for key, value in trl.computed(source).items()]
        return [*added, *Conversion._defaults(self)]
