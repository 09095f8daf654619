"""Checks that the models, rows and reward code that a config names exist, before anything heavy is imported.

check, run ─► load(config, extra_check=FileCheck) ─► model directories   config.json
                                              ├► data files          the columns and messages of the first rows
                                              └► rewards             their columns; their code, in separate processes
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from roll_core.config.explain import Finding
from roll_core.config.schema import sections
from roll_core.data.rows import Rows, file_names, first_rows, messages_of, need_column
from roll_core.data.tokenizers import CHAT_HINT, chat_problem
from roll_core.errors import DataError
from roll_core.spec.config import DataArguments, RewardConfig, RewardRunConfig, WorkerConfig
from roll_core.spec.model import REWARD_MODEL_HINT, is_hub_id, model_keys, reward_model_problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from roll_core.config.source import KeyPath
    from roll_core.data.rows import Row
    from roll_core.spec.config import RunConfig

FIRST_ROWS = 100
"""Number of rows that are checked in each data file."""
TIMEOUT_S = 30
"""Time limit in seconds for importing reward code; the rewards are imported in parallel."""


class FileCheck:
    """Finds missing models, rows and reward code in the configs of one command.

    Configs are checked in order, because a later run may read files that an earlier run writes.
    """

    def __init__(self) -> None:
        self._unchecked: list[str] = []
        self._written: list[Path] = []
        """Experiment directories of the earlier configs."""

    def __call__(self, schema: type[RunConfig], data: Mapping[Any, Any]) -> list[Finding]:
        """Return the mistakes in the values given for `schema`; values that are invalid themselves are skipped."""
        found = list(self._models(schema, data))
        rows: dict[KeyPath, list[Rows]] = {}
        for path, arguments in _data_arguments(schema, data):
            found += self._rows(path, arguments, schema, data, rows)
        found += self._rewards(schema, data, rows)
        output, name = (data.get(key, schema.model_fields[key].default) for key in ("output_dir", "exp_name"))
        if isinstance(output, str) and isinstance(name, str):
            self._written.append(_absolute(output) / name)
        return found

    def take_unchecked(self) -> list[str]:
        """Return and clear the checks that timed out since the last call, each with its reason."""
        unchecked, self._unchecked = self._unchecked, []
        return unchecked

    def _models(self, schema: type[RunConfig], data: Mapping[Any, Any]) -> Iterator[Finding]:
        sources: dict[KeyPath, str] = {}
        chats: dict[KeyPath, KeyPath] = {}
        scores: dict[KeyPath, KeyPath] = {}
        rewards = {path: each for path, each in _rewards(data).items() if each.kind != "reward"}
        models: dict[KeyPath, Any] = {path: each.model_args.model_dump() for path, each in rewards.items()}
        for path, worker, role in sections(schema, dict(data), WorkerConfig):
            if worker.kind != "reward":
                models[path] = role.get("model_args")
        for path, raw in models.items():
            given = raw if isinstance(raw, dict) else {}
            if given.get("random_init") is not None:
                continue
            at: KeyPath = (*path, "model_args", "model_name_or_path")
            source = given.get("model_name_or_path")
            if source is None:
                at, source = ("pretrain",), data.get("pretrain")
            if isinstance(source, str):
                sources[at] = source
                if path in rewards:
                    (chats if rewards[path].kind == "generate" else scores)[at] = path
        for at, source in sources.items():
            folder = os.path.expanduser(source)
            if self._is_written(source) or (is_hub_id(source) and not os.path.exists(folder)):
                continue
            if not os.path.isdir(folder):
                hint = "correct the path, or name the config of the run that writes it before this one"
                hint = _run_from(folder) or hint
                yield Finding(at, f"there is no directory {source}", hint, code="ROLL-C040")
            elif not any(os.path.isfile(os.path.join(folder, name)) for name in ("config.json", "model_index.json")):
                hint = "name a directory that save_pretrained or an export wrote"
                yield Finding(at, f"{source} has no config.json", hint, code="ROLL-C040")
            elif at in chats and (lacks := chat_problem(Path(folder))):
                message = f"{source} has {lacks}, which the messages of {'.'.join(chats[at])} need"
                yield Finding(at, message, CHAT_HINT, code="ROLL-C041")
            elif at in scores and (why := reward_model_problem(model_keys({}, folder))):
                yield Finding(at, f"{source} is not a reward model: {why}", REWARD_MODEL_HINT, code="ROLL-C041")

    def _rows(
        self,
        path: KeyPath,
        data: DataArguments,
        schema: type[RunConfig],
        values: Mapping[Any, Any],
        found: dict[KeyPath, list[Rows]],
    ) -> Iterator[Finding]:
        at_name = (*path, "file_name")
        for position, name in enumerate(file_names(data)):
            at = (*at_name, str(position)) if isinstance(data.file_name, list) else at_name
            if self._is_written(name):
                continue
            try:
                rows = first_rows(name, data, FIRST_ROWS)
            except (DataError, OSError) as error:
                yield Finding(at, str(error), _run_from(name), code=getattr(error, "code", "ROLL-C040"))
                continue
            if rows is None:
                continue
            found.setdefault(path, []).append(rows)
            needed = schema.row_keys.get(path[0], ()) if len(path) == 2 else ()
            missing = list(_missing_columns(path, data, rows, needed))
            yield from missing
            try:
                for row in rows if needed and not missing else ():
                    messages_of(row, data, rows, response="response" in needed)
                if len(path) == 2:
                    schema.check_rows(path[0], rows, data, values)
            except DataError as error:
                yield Finding(at, str(error), code=getattr(error, "code", "ROLL-C040"))

    def _rewards(
        self, schema: type[RunConfig], data: Mapping[Any, Any], rows: Mapping[KeyPath, list[Rows]]
    ) -> list[Finding]:
        rewards = _rewards(data)
        prompts: set[KeyPath] = {
            (name, "data_args")
            for name, keys in {"validation": (), **schema.row_keys}.items()
            if "response" not in keys
        }
        scored: dict[KeyPath, list[Rows]] = {path: files for path, files in rows.items() if path in prompts}
        by_tag = len(rewards) > 1 and issubclass(schema, RewardRunConfig)
        found = list(_unscored(rewards, scored)) if by_tag else []
        if data.get("replay_rollouts") is not None:
            return found
        with ThreadPoolExecutor(max(len(rewards), 1)) as pool:
            checks = []
            for path, reward in rewards.items():
                tags = {path[-1], *reward.tag_included}
                all_rows = (row for files in scored.values() for each in files for row in each)
                mine = [row for row in all_rows if len(rewards) == 1 or row.tag in tags]
                columns = {column for row in mine for column in row.values}
                for key, column in reward.columns().items() if columns else ():
                    if not any(column in row.values for row in mine):
                        message = f"the rows have no column {column!r}: they have {', '.join(sorted(columns))}"
                        found.append(Finding((*path, key), message, code="ROLL-C041"))
                found += _unusable(path, reward, mine)
                if _runs_here(reward, data):
                    checks.append(pool.submit(self._code, path, reward, columns or None))
            return found + [each for check in checks for each in check.result()]

    def _code(self, path: KeyPath, reward: RewardConfig, columns: set[str] | None) -> list[Finding]:
        hint = f"code is imported with the working directory {Path.cwd()} first on the module path"
        module = getattr(reward, "function", None)
        if isinstance(module, str):
            hint = _run_from(f"{module.partition(':')[0].replace('.', '/')}.py") or hint
        try:
            mistakes = reward.check_code(columns, TIMEOUT_S)
        except TimeoutError as error:
            self._unchecked.append(f"{'.'.join(path)}: {error}")
            return []
        return [
            Finding((*path, key), message, hint if key.endswith("function") else "", code="ROLL-C041")
            for key, message in mistakes.items()
        ]

    def _is_written(self, name: str) -> bool:
        """True if an earlier run of the same command may write this path."""
        return any(_absolute(name).is_relative_to(folder) for folder in self._written)


def _rewards(data: Mapping[Any, Any]) -> dict[KeyPath, RewardConfig]:
    """The valid rewards by their path."""
    return {
        (name, str(domain)): reward
        for name, group in data.items()
        for domain, reward in (group.items() if isinstance(group, dict) else ())
        if isinstance(reward, RewardConfig) and reward.reward
    }


def _data_arguments(schema: type[RunConfig], data: Mapping[Any, Any]) -> Iterator[tuple[KeyPath, DataArguments]]:
    """Yield path and value of every valid `data_args` and `val_data_args`."""
    for path, _, raw in sections(schema, dict(data), DataArguments):
        try:
            yield path, DataArguments.model_validate(raw)
        except ValidationError:  # the validation of the whole config reports it
            continue


def _missing_columns(path: KeyPath, data: DataArguments, rows: Rows, needed: tuple[str, ...]) -> Iterator[Finding]:
    if needed and data.messages is not None:
        needed = ("messages",)
    elif "prompt" in needed and data.query is not None:
        needed = (*needed, "query")
    for key in (*needed, "system") if needed and data.system is not None else needed:
        try:
            need_column(getattr(data, key), rows)
        except DataError as error:
            yield Finding((*path, key), str(error), code=error.code)


def _unscored(rewards: Mapping[KeyPath, RewardConfig], scored: Mapping[KeyPath, list[Rows]]) -> Iterator[Finding]:
    """Yield the first row of each `data_args` whose tag no reward scores."""
    known = {tag for path, reward in rewards.items() for tag in (path[-1], *reward.tag_included)}
    for path, files in scored.items():
        wrong = next((row for each in files for row in each if row.tag not in known), None)
        if wrong is not None:
            message = f"{wrong.where} has tag {wrong.tag!r}, but rewards score {', '.join(sorted(known))}"
            yield Finding((*path, "tag"), message, "see rewards.<domain>.tag_included", code="ROLL-C041")


def _unusable(path: KeyPath, reward: RewardConfig, rows: list[Row]) -> Iterator[Finding]:
    """Yield, for each key of a reward, the first row whose column the reward cannot use."""
    reported: set[str] = set()
    for row in rows:
        for key, message in reward.check_row(row.values).items():
            if key not in reported:
                reported.add(key)
                yield Finding((*path, key), f"{row.where}: {message}", code="ROLL-C041")


def _runs_here(reward: RewardConfig, data: Mapping[Any, Any]) -> bool:
    """True if the reward's workers import the same code as this process would."""
    variables = data.get("system_envs")
    elsewhere = {*reward.system_envs, *(variables if isinstance(variables, dict) else ())}
    return reward.environment is None and "PYTHONPATH" not in elsewhere


def _run_from(name: str) -> str:
    """Hint to start the command in the nearest parent directory from which the missing path `name` exists."""
    here = Path.cwd()
    if not name or os.path.isabs(name) or os.path.exists(name):
        return ""
    parent = next((each for each in here.parents if os.path.exists(each / name)), None)
    return f"paths are relative to the working directory {here}; {name} is in {parent}: cd {parent}" if parent else ""


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))
