"""Load a run's tokenizer from the model, or train it on the run's data if the config has `tokenizer`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.data.encode import tokenizer_texts
from roll_core.data.processor import save_processor
from roll_core.data.rows import are_chats
from roll_core.data.templates import chat_template_of, control_tokens
from roll_core.data.tokenizers import has_tokenizer, make_tokenizer
from roll_core.errors import ConfigError, ConfigProblem, ModelError, one_line
from roll_core.spec.config import RewardConfig
from roll_core.spec.model import is_hub_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll_core.runtime.run.active_run import DatasetCache
    from roll_core.spec.config import RunConfig

log = logging.getLogger(__name__)


def prepare_tokenizer(config: RunConfig, data: DatasetCache, directory: Path) -> PreTrainedTokenizerBase:
    """Train or load the tokenizer and write it into `directory`. Every worker and each export loads it from there.

    If the training data, or the policy in environments, name a chat template, it becomes the tokenizer's chat template,
    so that an export renders chats as in training. `plain` prompts without roles are not chats and leave the model's
    template unchanged.

    Raises `ConfigError` if the config names neither a tokenizer nor a model. Raises `ModelError` if the model's
    directory does not exist or contains no tokenizer.
    """
    sources = [worker.data_args for worker in config.roles().values()]
    if (validation := getattr(config, "validation", None)) is not None:
        sources.append(validation.data_args)
    policy = config.roles()[config.policy_role] if config.policy_role else next(iter(config.roles().values()))
    in_turns = bool(getattr(config, "multi_turn", False))  # conversations with environments, which are no rows
    sources = [source for source in sources if source.file_name]
    trained = policy.data_args if in_turns or policy.data_args.file_name else next(iter(sources), None)
    if config.tokenizer is not None:
        templates = [source.template for source in (trained, *sources) if source is not None]
        control = [token for template in templates for token in control_tokens(template)]
        texts = (text for source in sources for text in tokenizer_texts(data.rows(source), source))
        tokenizer = make_tokenizer(config.tokenizer, texts, directory, control_tokens=control)
    else:
        path = _model_path(config)
        models = [worker.model_args for worker in config.roles().values()]
        trusted = [model.trust_remote_code for model in models if (model.model_name_or_path or config.pretrain) == path]
        tokenizer = load_tokenizer(path, trust_remote_code=any(trusted))
    if trained and trained.template != "native" and (trained.template != "plain" or in_turns or are_chats(trained)):
        template = chat_template_of(trained.template, tokenizer)
        if tokenizer.chat_template not in (None, template):
            log.info("data_args.template %s replaces the chat template of the model's tokenizer", trained.template)
        tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    if config.tokenizer is None:
        save_processor(path, directory)
    return tokenizer


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model at a directory or hub id. Raises `ModelError`."""
    remedy = "set tokenizer.kind, or name the directory or hub id of a model with a tokenizer"
    if Path(path).is_dir():
        if not has_tokenizer(path):  # transformers would make an empty one
            raise ModelError(f"{path} has no files of a tokenizer; {remedy}")
    elif not is_hub_id(path):
        raise ModelError(f"directory {path} does not exist: correct the path, or first run the run that writes it")
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        hint = "" if trust_remote_code else "set model_args.trust_remote_code if it has code of its own, or "
        raise ModelError(f"cannot load a tokenizer from {path}: {one_line(error)}; {hint}{remedy}") from error
    return tokenizer


def _model_path(config: RunConfig) -> str:
    """Path or hub id of the run's first model, or else `pretrain`. Raises `ConfigError` if there is none.

    Reward models do not count: they may have other tokenizers.
    """
    for worker in config.roles().values():
        if worker.model_args.model_name_or_path and not isinstance(worker, RewardConfig):
            return worker.model_args.model_name_or_path
    if config.pretrain is None:
        raise ConfigError(
            [
                ConfigProblem(
                    where=config.exp_name,
                    key="tokenizer",
                    message="is missing, and the run loads no model that has one",
                    hint="set tokenizer.kind (char, byte or bpe), or pretrain",
                    code="ROLL-C011",
                )
            ]
        )
    return config.pretrain
