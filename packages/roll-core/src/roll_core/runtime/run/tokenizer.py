"""Load a run's tokenizer from the model, or train it on the run's data if the config has `tokenizer`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.data.encode import tokenizer_texts
from roll_core.data.rows import are_chats
from roll_core.data.templates import chat_template_of, control_tokens
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import ConfigError, ConfigProblem, ModelError
from roll_core.spec.model import is_hub_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

    from roll_core.runtime.run.data import RunData
    from roll_core.spec.config import DataArguments, RunConfig

log = logging.getLogger(__name__)


def prepare_tokenizer(config: RunConfig, data: RunData, directory: Path) -> PreTrainedTokenizerBase:
    """Train or load the tokenizer and write it into `directory`. Every worker and each export loads it from there.

    If the training data name a chat template, it becomes the tokenizer's chat template.

    Raises `ConfigError` if the config names neither a tokenizer nor a model. Raises `ModelError` if the model's
    directory does not exist or contains no tokenizer.
    """
    sources = _data_of(config)
    if config.tokenizer is not None:
        control = [token for source in sources for token in control_tokens(source.template)]
        tokenizer = make_tokenizer(config.tokenizer, _texts(data, sources), directory, control_tokens=control)
    else:
        tokenizer = _load(config)
    if sources:
        _adopt_template(tokenizer, sources[0])
    tokenizer.save_pretrained(directory)
    return tokenizer


def _load(config: RunConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the run's first model with a path."""
    path = _model_path(config)
    if not Path(path).is_dir() and not is_hub_id(path):
        raise ModelError(f"there is no directory {path}: mend the path, or let the run that writes it come first")
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{path} has no tokenizer that can be loaded: {first_line};"
            " give tokenizer.kind, or a directory or hub id of a model with its tokenizer"
        ) from error
    return tokenizer


def _adopt_template(tokenizer: PreTrainedTokenizerBase, trained: DataArguments) -> None:
    """Set the tokenizer's chat template to that of the training data, so that an export renders chats as in training.

    `plain` prompts without roles are not chats and leave the model's template unchanged.
    """
    if trained.template == "native" or (trained.template == "plain" and not are_chats(trained)):
        return
    template = chat_template_of(trained.template, tokenizer)
    if tokenizer.chat_template not in (None, template):
        log.info("data_args.template %s replaces the chat template of the model's tokenizer", trained.template)
    tokenizer.chat_template = template


def _model_path(config: RunConfig) -> str:
    """Path or hub id of the run's first model, or else `pretrain`. Raises `ConfigError` if there is none."""
    for worker in config.roles().values():
        if worker.model_args.model_name_or_path:
            return worker.model_args.model_name_or_path
    if config.pretrain is None:
        raise ConfigError(
            [
                ConfigProblem(
                    where=config.exp_name,
                    key="tokenizer",
                    message="is missing, and no model is loaded that would bring one",
                    hint="give tokenizer.kind (char, byte or bpe), or pretrain",
                    code="ROLL-C011",
                )
            ]
        )
    return config.pretrain


def _data_of(config: RunConfig) -> list[DataArguments]:
    """Every `data_args` of the run that names files."""
    validation = getattr(config, "validation", None)
    found = [worker.data_args for worker in config.roles().values()]
    if validation is not None:
        found.append(validation.data_args)
    return [data for data in found if data.file_name]


def _texts(data: RunData, sources: list[DataArguments]) -> Iterator[str]:
    """All texts that the run encodes; a tokenizer is trained on them."""
    for source in sources:
        yield from tokenizer_texts(data.rows(source), source)
