"""Checks that the models, rows and reward code that a config names exist, before anything heavy is imported.

check, run ─► load(config, extra_check=FileCheck) ─► model directories   config.json
                                              ├► data files          the columns and messages of the first rows
                                              └► rewards             their columns; their code, in separate processes
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from roll_core.config.explain import Finding
from roll_core.config.schema import sections
from roll_core.config.strategies import named_media, unread_media
from roll_core.data.rows import (
    Rows,
    are_chats,
    file_names,
    first_rows,
    has_media,
    is_hub_name,
    messages_of,
    need_column,
)
from roll_core.data.templates import NAMED, trained_replies
from roll_core.data.tokenizers import CHAT_HINT, chat_problem
from roll_core.errors import DataError, MissingRequirementError, ModelError
from roll_core.spec.config import DataArguments, RewardConfig, RewardKeys, WorkerConfig
from roll_core.spec.model import REWARD_MODEL_HINT, is_hub_id, model_keys, reward_model_problem
from roll_core.spec.rollout import IMAGE, MEDIA_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from roll_core.config.source import KeyPath
    from roll_core.data.rows import Row
    from roll_core.plugins.registry import Registry
    from roll_core.spec.config import RunConfig
    from roll_core.types import MediaKind

FIRST_ROWS = 100
"""Number of rows that are checked in each data file."""
FIRST_IMAGES = 10
"""Number of rows whose images are read."""
TIMEOUT_S = 30
"""Time limit in seconds for importing reward code; the rewards are imported in parallel."""


class FileCheck:
    """Finds missing models, rows and reward code in the configs of one command.

    Configs are checked in order, because a later run may read files that an earlier run writes.
    """

    def __init__(self) -> None:
        self._unchecked: list[str] = []
        self._tokenizers: dict[str, Any] = {}
        self._written: list[Path] = []
        """Experiment directories of the earlier configs."""

    def __call__(
        self, schema: type[RunConfig], data: Mapping[Any, Any], config: RunConfig | None, registry: Registry
    ) -> list[Finding]:
        """Return the mistakes in the values given for `schema`; values that are invalid themselves are skipped."""
        findings = list(self._models(schema, data))
        for key, message in config.file_problems().items() if config is not None else ():
            findings.append(Finding(tuple(key.split(".")), message, code="ROLL-C040"))
        made = data.get("tokenizer")
        template = made.get("chat_template") if isinstance(made, dict) else None
        if isinstance(template, str) and not os.path.isfile(os.path.expanduser(template)):
            message = f"there is no file {template}"
            findings.append(Finding(("tokenizer", "chat_template"), message, _run_from(template), code="ROLL-C040"))
        rows: dict[KeyPath, list[Rows]] = {}
        for path, arguments in _data_arguments(schema, data):
            findings += self._rows(path, arguments, schema, data, rows)
        for kind in MEDIA_KINDS:
            where = named_media(kind, schema, data)
            if not where and (where := _row_with_media(kind, schema, data, rows)):
                findings += unread_media(kind, where, schema, data, registry)
            if where:
                findings += self._media(kind, where, schema, data)
                findings += _named_templates(kind, schema, data, rows)
        findings += self._rewards(schema, data, rows)
        output, name = (data.get(key, schema.model_fields[key].default) for key in ("output_dir", "exp_name"))
        if isinstance(output, str) and isinstance(name, str):
            self._written.append(_absolute(output) / name)
        return findings

    def take_unchecked(self) -> list[str]:
        """Return and clear the checks that timed out since the last call, each with its reason."""
        unchecked, self._unchecked = self._unchecked, []
        return unchecked

    def _models(self, schema: type[RunConfig], data: Mapping[Any, Any]) -> Iterator[Finding]:
        sources: dict[KeyPath, str] = {}
        chats: dict[KeyPath, KeyPath] = {}
        scores: dict[KeyPath, KeyPath] = {}
        rewards = {path: reward for path, reward in _rewards(data).items() if reward.kind != "reward"}
        models: dict[KeyPath, Any] = {path: reward.model_args.model_dump() for path, reward in rewards.items()}
        for path, worker, role in sections(schema, dict(data), WorkerConfig):
            if worker.kind != "reward":
                models[path] = role.get("model_args")
        for path, raw in models.items():
            model_args = raw if isinstance(raw, dict) else {}
            if model_args.get("random_init") is not None:
                continue
            key_path: KeyPath = (*path, "model_args", "model_name_or_path")
            source = model_args.get("model_name_or_path")
            if source is None:
                key_path, source = ("pretrain",), data.get("pretrain")
            if isinstance(source, str):
                sources[key_path] = source
                if path in rewards:
                    (chats if rewards[path].kind == "generate" else scores)[key_path] = path
        for key_path, source in sources.items():
            folder = os.path.expanduser(source)
            if self._is_written(source):
                continue
            if is_hub_id(source) and not os.path.exists(folder):
                from roll_core.data.modelscope import lacks_modelscope, selects_modelscope

                if selects_modelscope(_variables(data)) and (lacks := lacks_modelscope()):
                    message = f"is the id {source}, which is read from ModelScope (MODEL_DOWNLOAD_TYPE): {lacks}"
                    yield Finding(key_path, message, code="ROLL-C040")
                continue
            if not os.path.isdir(folder):
                hint = "correct the path, or name the config of the run that writes it before this one"
                hint = _run_from(folder) or hint
                yield Finding(key_path, f"there is no directory {source}", hint, code="ROLL-C040")
            elif not any(os.path.isfile(os.path.join(folder, name)) for name in ("config.json", "model_index.json")):
                hint = "name a directory that save_pretrained or an export wrote"
                yield Finding(key_path, f"{source} has no config.json", hint, code="ROLL-C040")
            elif key_path in chats and (lacks := chat_problem(Path(folder))):
                message = f"{source} has {lacks}, which the messages of {'.'.join(chats[key_path])} need"
                yield Finding(key_path, message, CHAT_HINT, code="ROLL-C041")
            elif key_path in scores and (why := reward_model_problem(model_keys({}, folder))):
                yield Finding(key_path, f"{source} is not a reward model: {why}", REWARD_MODEL_HINT, code="ROLL-C041")

    def _rows(
        self,
        path: KeyPath,
        data: DataArguments,
        schema: type[RunConfig],
        values: Mapping[Any, Any],
        rows_by_path: dict[KeyPath, list[Rows]],
    ) -> Iterator[Finding]:
        at_name = (*path, "file_name")
        for position, name in enumerate(file_names(data)):
            key_path = (*at_name, str(position)) if isinstance(data.file_name, list) else at_name
            if self._is_written(name):
                continue
            try:
                rows = first_rows(name, data, FIRST_ROWS)
            except (DataError, OSError) as error:
                yield Finding(key_path, str(error), _run_from(name), code=getattr(error, "code", "ROLL-C040"))
                continue
            if rows is None:
                continue
            rows_by_path.setdefault(path, []).append(rows)
            needed = schema.row_keys.get(path[0], ()) if len(path) == 2 else ()
            missing = list(_missing_columns(path, data, rows, needed))
            yield from missing
            try:
                for index, row in enumerate(rows if needed and not missing else ()):
                    messages = messages_of(row, data, rows, response="response" in needed)
                    if index < FIRST_IMAGES and data.broken_images == "error":
                        _load_images(messages, row, data)
                if len(path) == 2:
                    schema.check_rows(path[0], rows, data, values)
                if len(path) == 2 and data.template == "native" and not missing and _have_roles(rows, data):
                    yield from self._without_template(path, schema, values, rows)
                if needed and not missing:
                    yield from self._too_long(name, rows, data, schema, values, response="response" in needed)
            except (DataError, MissingRequirementError) as error:
                yield Finding(key_path, str(error), code=getattr(error, "code", "ROLL-C040"))

    def _without_template(
        self, path: KeyPath, schema: type[RunConfig], values: Mapping[Any, Any], rows: Rows
    ) -> Iterator[Finding]:
        """Yield the mistake of chats whose tokenizer has no chat template."""
        if any(arguments.template != "native" for _, arguments in _data_arguments(schema, values)):
            return  # the run's tokenizer gets this template
        source = self._tokenizer_source(schema, values)
        made = values.get("tokenizer")
        if isinstance(made, dict) and made.get("chat_template") is not None:
            return
        if made is not None:
            lacks = "the run makes a tokenizer without a chat template"
        elif source is not None and os.path.isdir(source) and chat_problem(Path(source)) == "no chat template":
            lacks = f"the tokenizer of {source} has no chat template"
        else:
            return
        message = f"is native, but {rows[0].where} is a chat, and {lacks}"
        names = ", ".join(name for name in NAMED if name != "plain")
        hint = f"name the template that the model was trained with ({names}), or plain, which joins the contents"
        yield Finding((*path, "template"), message, hint, code="ROLL-C040")

    def _tokenizer_source(self, schema: type[RunConfig], values: Mapping[Any, Any]) -> str | None:
        """Directory or hub id of the model that has the run's tokenizer, if an earlier run does not write it."""
        source = values.get("pretrain")
        for _, worker, role in sections(schema, dict(values), WorkerConfig):
            model = role.get("model_args")
            model_path = model.get("model_name_or_path") if isinstance(model, dict) else None
            if worker.kind != "reward" and model_path is not None:
                source = model_path
                break
        return os.path.expanduser(source) if isinstance(source, str) and not self._is_written(source) else None

    def _too_long(
        self,
        name: str,
        rows: Rows,
        data: DataArguments,
        schema: type[RunConfig],
        values: Mapping[Any, Any],
        *,
        response: bool,
    ) -> Iterator[Finding]:
        """Yield the mistake of a length under which every row of a file is dropped. `rows` are its first rows.

        If all of these are too long, the other rows are read, unless a server has them.
        """
        keys = ("prompt_length", "response_length") if response else ("prompt_length",)
        limits = {key: values.get(key, schema.model_fields[key].default) for key in keys}
        count = self._token_counter(schema, values)
        if count is None or values.get("overlong", "drop") != "drop" or not _are_integers(limits.values()):
            return
        is_overlong = partial(_overlong, data=data, rows=rows, limits=limits, count=count, response=response)
        read = rows[: data.max_samples]
        if not all(map(is_overlong, read)):
            return
        if len(read) == FIRST_ROWS and data.max_samples != FIRST_ROWS:
            if is_hub_name(name):
                return
            read = first_rows(name, data, data.max_samples or sys.maxsize) or read
        if all(map(is_overlong, read)) and (overlong := is_overlong(read[0])):
            key, length = overlong
            message = f"is {limits[key]}, but {read[0].where} has at least {length} tokens, and no row of the file fits"
            yield Finding((key,), message, "increase it: longer rows are dropped", code="ROLL-C040")

    def _token_counter(self, schema: type[RunConfig], values: Mapping[Any, Any]) -> Callable[[str], int] | None:
        """Counts the tokens of a text; None if that requires the run's data, or a file that is missing."""
        made = values.get("tokenizer")
        if made is not None:
            kind = made.get("kind") if isinstance(made, dict) else None
            return {"char": len, "byte": lambda text: len(text.encode())}.get(str(kind))
        file = os.path.join(self._tokenizer_source(schema, values) or "", "tokenizer.json")
        if not os.path.isfile(file):
            return None

        def count(text: str) -> int:
            if file not in self._tokenizers:
                from tokenizers import Tokenizer

                self._tokenizers[file] = Tokenizer.from_file(file)
            return len(self._tokenizers[file].encode(text, add_special_tokens=False).ids)

        return count

    def _media(
        self, kind: MediaKind, where: str, schema: type[RunConfig], data: Mapping[Any, Any]
    ) -> Iterator[Finding]:
        """Yield a mistake for a model without a processor of images or videos."""
        from roll_core.data.processor import has_processor, reads_videos

        source = self._tokenizer_source(schema, data)
        if data.get("tokenizer") is not None:
            message = (
                f"makes a tokenizer, but {where}, which only the processor beside a model's own tokenizer can read"
            )
            yield Finding(("tokenizer",), message, f"remove it, and name a model with {kind}s", code="ROLL-C040")
        elif source is not None and os.path.isdir(source):
            try:
                lacks = "" if has_processor(source) else "has no processor (preprocessor_config.json): it reads text"
                if kind == "video" and not lacks and not reads_videos(source):
                    lacks = "has a processor that reads no videos"
            except ModelError as error:
                lacks = str(error)
            if lacks:
                message = f"{where}, but {source} {lacks}"
                hint = f"name a model with {kind}s and its processor"
                yield Finding(("pretrain",), message, hint, code="ROLL-C040")

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
        by_tag = len(rewards) > 1 and issubclass(schema, RewardKeys)
        findings = list(_unscored(rewards, scored)) if by_tag else []
        if data.get("replay_rollouts") is not None:
            return findings
        with ThreadPoolExecutor(max(len(rewards), 1)) as pool:
            checks = []
            for path, reward in rewards.items():
                tags = {path[-1], *reward.tag_included}
                by_file = [
                    [row for row in file_rows if len(rewards) == 1 or row.tag in tags]
                    for files in scored.values()
                    for file_rows in files
                ]
                by_file = [mine for mine in by_file if mine]
                columns = [{column for row in mine for column in row.values} for mine in by_file]
                findings += _missing_of_reward(path, reward, by_file, columns)
                findings += _unusable(path, reward, [row for mine in by_file for row in mine])
                if _runs_here(reward, data):
                    common = set.intersection(*columns) if columns else None
                    checks.append(pool.submit(self._code, path, reward, common))
            return findings + [finding for check in checks for finding in check.result()]

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


def _load_images(messages: Iterable[Mapping[str, Any]], row: Row, data: DataArguments) -> None:
    """Raise `DataError` for an image that a run could not read. Images that a run drops for their size pass."""
    items = [item for message in messages for item in message.get("media", ())]
    images = [item for item in items if getattr(item, "kind", "") != "video"]
    if not images:
        return
    from roll_core.data.media import OversizedImageError, load_image

    for image in images:
        with suppress(OversizedImageError):
            load_image(image, row.where, data, row.folder)


def _row_with_media(
    kind: MediaKind, schema: type[RunConfig], values: Mapping[Any, Any], rows: Mapping[KeyPath, list[Rows]]
) -> str:
    """Which row has images or videos, though no key names a column of them; empty if none."""
    for path, data in _data_arguments(schema, values):
        if row := _with_media(kind, data, rows.get(path, ())):
            return f"{row.where} has {'an image' if kind == 'image' else 'a video'}"
    return ""


def _with_media(kind: MediaKind, data: DataArguments, files: Iterable[Rows]) -> Row | None:
    return next((row for file_rows in files for row in file_rows if has_media(row, data, kind)), None)


def _named_templates(
    kind: MediaKind, schema: type[RunConfig], values: Mapping[Any, Any], rows: Mapping[KeyPath, list[Rows]]
) -> Iterator[Finding]:
    """Yield a mistake for each named template of rows with images or videos."""
    for path, data in _data_arguments(schema, values):
        if data.template != "native" and (row := _with_media(kind, data, rows.get(path, ()))):
            message = f"is {data.template}, which has no placeholder for {kind}s, but {row.where} has one"
            hint = f"set it to native, with a model whose own chat template renders {kind}s"
            yield Finding((*path, "template"), message, hint, code="ROLL-C040")


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


def _have_roles(rows: Rows, data: DataArguments) -> bool:
    """True if rows are chats by their keys, or because columns have lists of messages."""
    columns = (data.prompt, data.response, data.chosen, data.rejected)
    return are_chats(data) or any(isinstance(rows[0].values.get(column), list) for column in columns)


def _are_integers(values: Iterable[object]) -> bool:
    return all(isinstance(value, int) for value in values)


def _overlong(
    row: Row,
    data: DataArguments,
    rows: Rows,
    limits: Mapping[str, int],
    count: Callable[[str], int],
    *,
    response: bool,
) -> tuple[str, int] | None:
    """Key of the length that the texts of a row exceed, and their tokens without those of a chat template."""
    messages = messages_of(row, data, rows, response=response)
    begin = trained_replies(messages)[0] if response and trained_replies(messages) else len(messages)
    for key, part in (("prompt_length", messages[:begin]), ("response_length", messages[begin:])):
        text = "".join(message["content"].replace(IMAGE, "") for message in part)
        # Texts of few bytes have few tokens, and need no tokenizer.
        if key in limits and len(text.encode()) > limits[key] and (length := count(text)) > limits[key]:
            return key, length
    return None


def _unscored(rewards: Mapping[KeyPath, RewardConfig], scored: Mapping[KeyPath, list[Rows]]) -> Iterator[Finding]:
    """Yield the first row of each `data_args` whose tag no reward scores."""
    known = {tag for path, reward in rewards.items() for tag in (path[-1], *reward.tag_included)}
    for path, files in scored.items():
        wrong = next((row for file_rows in files for row in file_rows if row.tag not in known), None)
        if wrong is not None:
            message = f"{wrong.where} has tag {wrong.tag!r}, but rewards score {', '.join(sorted(known))}"
            yield Finding((*path, "tag"), message, "see rewards.<domain>.tag_included", code="ROLL-C041")


def _missing_of_reward(
    path: KeyPath, reward: RewardConfig, by_file: list[list[Row]], columns: list[set[str]]
) -> Iterator[Finding]:
    """Yield, for each key of a reward, the first file whose scored rows lack the key's column."""
    for key, column in reward.columns().items():
        for rows, names in zip(by_file, columns, strict=True):
            if not any(column in row.values for row in rows):
                name = rows[0].where.rsplit(" row ", 1)[0]
                message = f"the rows of {name} have no column {column!r}: they have {', '.join(sorted(names))}"
                yield Finding((*path, key), message, code="ROLL-C041")
                break


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
    elsewhere = {*reward.system_envs, *_variables(data)}
    return reward.environment is None and "PYTHONPATH" not in elsewhere


def _variables(data: Mapping[Any, Any]) -> Mapping[str, Any]:
    """The raw `system_envs` of a config."""
    variables = data.get("system_envs")
    return variables if isinstance(variables, dict) else {}


def _run_from(name: str) -> str:
    """Hint to start the command in the nearest parent directory from which the missing path `name` exists."""
    here = Path.cwd()
    if not name or os.path.isabs(name) or os.path.exists(name):
        return ""
    parent = next((folder for folder in here.parents if os.path.exists(folder / name)), None)
    return f"paths are relative to the working directory {here}; {name} is in {parent}: cd {parent}" if parent else ""


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))
